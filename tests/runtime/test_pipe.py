"""Log lines of the engine's process reach the server's log and never end the engine."""

from __future__ import annotations

import logging
from multiprocessing import Pipe

import pytest

from runtime.embedded.pipe import (
    Done,
    EngineEnd,
    Failed,
    LogLine,
    PipeLogHandler,
    next_message,
    seal,
)
from search.counters import Usage
from search.engine import CallFault
from tests.runtime.inline_engine_loop import Unreadable


@pytest.fixture
def log() -> logging.Logger:
    """A logger that nothing else listens to."""
    log = logging.Logger("engine.part", logging.INFO)
    log.propagate = False
    return log


def test_a_line_goes_over_with_its_traceback(log: logging.Logger) -> None:
    """A log line carries level, logger, formatted text and traceback."""
    ours, theirs = Pipe()
    log.addHandler(PipeLogHandler(EngineEnd(theirs)))
    log.info("%d threads", 2)
    try:
        raise ValueError("no count")
    except ValueError:
        log.exception("the counts are wrong")
    assert next_message(ours.recv_bytes) == LogLine(logging.INFO, "engine.part", "2 threads")
    line = next_message(ours.recv_bytes)
    assert isinstance(line, LogLine)
    assert (line.level, line.text.splitlines()[0]) == (logging.ERROR, "the counts are wrong")
    assert line.text.endswith("ValueError: no count")


def test_a_line_that_nobody_hears_is_dropped(log: logging.Logger) -> None:
    """A log line after the server is gone is dropped; the engine's next message raises."""
    ours, theirs = Pipe()
    end = EngineEnd(theirs)
    log.addHandler(PipeLogHandler(end))
    ours.close()
    log.info("still here")
    with pytest.raises(BrokenPipeError):
        end.send(LogLine(logging.INFO, "", ""))


def test_an_answer_that_cannot_be_read_is_its_calls_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An unreadable answer fails its call and is logged; an unreadable other message gives None."""
    ours, theirs = Pipe()
    for message in (Done(3, Unreadable(), Usage()), Done(4, None, Usage()), Unreadable()):  # type: ignore[arg-type]
        theirs.send_bytes(seal(message))  # type: ignore[arg-type]
    failed = next_message(ours.recv_bytes)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, CallFault)
    assert (failed.call, failed.usage) == (3, None)
    assert "call 3: what the engine sent cannot be read" in caplog.text
    assert next_message(ours.recv_bytes) == Done(4, None, Usage())
    assert next_message(ours.recv_bytes) is None
    theirs.close()
    assert next_message(ours.recv_bytes) is None
