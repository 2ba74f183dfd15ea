"""The pipe between the server and one engine process, an end on each side.

On the server's side two threads read and write, so that the event loop never waits for the pipe,
however busy the process is. The process's log lines go through it too: how they are to look, and
where they go, the server's process knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError, Unpickler
from queue import SimpleQueue
from typing import Any, Self

from runtime.embedded.messages import Failed, FromEngine, LogLine, Stop, ToEngine, TreeHint
from search.engine import CallFault

STOP_SECONDS = 5.0

_FORM = logging.Formatter()
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message as it came: whose call it is (None: nobody's) is known although the message may not
    be readable."""

    call: int | None
    _rest: Unpickler

    @classmethod
    def of(cls, data: bytes) -> Self:
        """What ``seal`` made."""
        rest = Unpickler(io.BytesIO(data))
        return cls(rest.load(), rest)

    def open(self) -> Any:
        """The message. Raises whatever its parts raise where they cannot be read."""
        return self._rest.load()


def seal(message: ToEngine | FromEngine) -> memoryview:
    """A message to send: its call, then itself."""
    data = io.BytesIO()
    pickler = ForkingPickler(data)
    pickler.dump(getattr(message, "call", None))
    pickler.dump(message)
    return data.getbuffer()


class EngineEnd:
    """A pipe that one thread reads and any thread may write to."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()

    def send(self, message: FromEngine) -> None:
        """Raises OSError when nobody is left to hear."""
        data = seal(message)
        with self._sending:
            self._pipe.send_bytes(data)

    def recv(self) -> Envelope:
        """Waits for a message. Raises EOFError or OSError when none will come."""
        return Envelope.of(self._pipe.recv_bytes())

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether there is a message, after waiting so long for one."""
        return self._pipe.poll(seconds)


class PipeLogHandler(logging.Handler):
    """Hands this process's log lines to the server's."""

    def __init__(self, pipe: EngineEnd) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        """A line, with its traceback if it has one; dropped when nobody is left to hear."""
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + _FORM.formatException(record.exc_info)
        with contextlib.suppress(OSError):
            self._pipe.send(LogLine(record.levelno, record.name, text))


class ClientEnd:
    """A running engine process. ``receive`` is called in the event loop with every message, and
    with None once when the process is gone."""

    def __init__(
        self, work: Callable[[Connection], None], receive: Callable[[FromEngine | None], None]
    ) -> None:
        """Spawns the process, which does ``work`` with its end. Must be made in a running event
        loop."""
        context = multiprocessing.get_context("spawn")
        self._pipe, engine_end = context.Pipe()
        self.process = context.Process(
            target=work, args=(engine_end,), name="hedgerow-engine", daemon=True
        )
        self.process.start()
        engine_end.close()
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._outbox: SimpleQueue[memoryview | None] = SimpleQueue()
        self._asked_at: float | None = None
        for target in (self._read, self._write):
            threading.Thread(target=target, name="hedgerow-engine-pipe", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        """Put a message on its way; never waits. Raises CallFault for one that holds what cannot
        be sent."""
        try:
            data = seal(message)
        except (PicklingError, ArithmeticError, AttributeError, RecursionError, TypeError) as error:
            raise CallFault(f"{type(message).__name__}: cannot be sent: {error}") from error
        if self._asked_at is None and not isinstance(message, TreeHint):
            self._asked_at = time.monotonic()
        self._outbox.put(data)

    def quiet_seconds(self) -> float:
        """How long the process has said nothing although something was sent to it."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def expect_more(self, awaited: bool) -> None:
        """After a message was heard: whether the process still owes an answer."""
        self._asked_at = time.monotonic() if awaited else None

    def end(self) -> None:
        """Stop the process, by force if it does not go by itself. Waits."""
        self._outbox.put(seal(Stop()))
        self._outbox.put(None)
        self.process.join(STOP_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _read(self) -> None:
        while True:
            message = next_message(self._pipe.recv_bytes)
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                self._loop.call_soon_threadsafe(self._receive, message)
            if message is None:
                self._outbox.put(None)
                self._pipe.close()
                return

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._pipe.send_bytes(data)
            except OSError:
                return  # the reader says that the process is gone


def next_message(recv_bytes: Callable[[], bytes]) -> FromEngine | None:
    """The engine's next message; None when none will come, or what cannot be read is nobody's call:
    the process is of no use then. An answer that cannot be read is its own call's error."""
    try:
        envelope = Envelope.of(recv_bytes())
    except (EOFError, OSError):
        return None
    try:
        return envelope.open()
    except Exception as error:  # whatever the parts of an answer raise when they are made
        log.exception("call %s: what the engine sent cannot be read", envelope.call)
        fault = CallFault(f"the engine's answer cannot be read ({type(error).__name__})")
        return None if envelope.call is None else Failed(envelope.call, fault)
