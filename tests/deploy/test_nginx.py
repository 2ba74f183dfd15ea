"""Two front ends, each with an engine of its own, behind a real nginx."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.front_ends import Nginx, front_ends, outlive
from tests.server.test_process import Server


@pytest.fixture
def fronts() -> Iterator[list[Server]]:
    """Two front ends, ``a`` and ``b``."""
    with front_ends({"front_end": "a"}, {"front_end": "b"}) as running:
        yield running


@pytest.fixture
def nginx(fronts: list[Server], tmp_path: Path) -> Iterator[Nginx]:
    """An nginx before the two front ends."""
    with Nginx(tmp_path, fronts) as running:
        yield running


@contextmanager
def paused_engine(front: Server) -> Iterator[None]:
    """Stop a front end's engine process meanwhile; the front end itself goes on answering."""
    engine = front.engine
    os.kill(engine, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine, signal.SIGCONT)


@pytest.mark.promise(
    "A front end that dies loses only its open streams; the other one answers what is left, with "
    "the same tree."
)
@pytest.mark.slow
def test_two_front_ends(nginx: Nginx, fronts: list[Server]) -> None:
    """A caller stays at one front end. When one is killed the other loses nothing, and answers the
    requests that the killed one had not started to answer, with the same tree."""
    streamed, plain = outlive(nginx, fronts, paused_engine)
    assert plain["tree_digest"] == streamed["tree_digest"]
