"""What the engine's process says to its log reaches the server's, and never ends the engine."""

from __future__ import annotations

import logging
from multiprocessing import Pipe

import pytest

from runtime.embedded.messages import Said
from runtime.embedded.pipe import EngineEnd, LogLines


@pytest.fixture
def log() -> logging.Logger:
    """A logger that nothing else listens to."""
    log = logging.Logger("engine.part", logging.INFO)
    log.propagate = False
    return log


def test_a_line_goes_over_with_its_traceback(log: logging.Logger) -> None:
    """Level, logger and text; arguments filled in."""
    ours, theirs = Pipe()
    log.addHandler(LogLines(EngineEnd(theirs)))
    log.info("%d threads", 2)
    try:
        raise ValueError("no book")
    except ValueError:
        log.exception("the books are wrong")
    assert ours.recv() == Said(logging.INFO, "engine.part", "2 threads")
    said = ours.recv()
    assert (said.level, said.text.splitlines()[0]) == (logging.ERROR, "the books are wrong")
    assert said.text.endswith("ValueError: no book")


def test_a_line_that_nobody_hears_is_dropped(log: logging.Logger) -> None:
    """The engine's loop learns from its own next word that the server is gone."""
    ours, theirs = Pipe()
    outlet = EngineEnd(theirs)
    log.addHandler(LogLines(outlet))
    ours.close()
    log.info("still here")
    with pytest.raises(BrokenPipeError):
        outlet.send(Said(logging.INFO, "", ""))
