"""Two front ends, each with an engine of its own, behind a real nginx."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.front_ends import Nginx, outlive
from tests.server.test_process import Server, engine_pid


@pytest.fixture
def fronts() -> Iterator[list[Server]]:
    """Two servers."""
    running = [Server(), Server()]
    yield running
    for server in running:
        if server.process.poll() is None:
            server.process.kill()
        server.wait()


@pytest.fixture
def nginx(fronts: list[Server], tmp_path: Path) -> Iterator[Nginx]:
    """One before them."""
    running = Nginx(tmp_path, fronts)
    yield running
    running.close()


@contextmanager
def standing_still(front: Server) -> Iterator[None]:
    """Its engine draws nothing meanwhile; the front end answers as ever."""
    engine = engine_pid(front.process.pid)
    os.kill(engine, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine, signal.SIGCONT)


@pytest.mark.slow
def test_two_front_ends(nginx: Nginx, fronts: list[Server]) -> None:
    """A caller stays at one. One that is killed costs the other nothing, and what it had not begun
    to answer is answered by the other, with the same tree."""
    streamed, asked = outlive(nginx, fronts, standing_still)
    assert asked == streamed
