"""What the server's process and an engine's process say to each other, and the pipe between them.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError, Unpickler
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from search.counters import Counters, Usage
from search.engine import (
    Branch,
    CallFault,
    Capabilities,
    EngineError,
    Hint,
    KvMoved,
    Sampling,
    Step,
    Trajectory,
)

T = TypeVar("T")

MOST_AT_ONCE = 1024
"""Branches, trajectories or steps of one message. The engine goes on in between."""
MOST_TO_EXPAND = 1 << 20
"""Tokens of all prefixes in one message, those of one tuple counted once."""
MOST_TO_SCORE = 1 << 16
"""Tokens of all steps in one message: many formats spell them anew."""


Vector = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepWords:
    """A step to embed: its token ids and its text."""

    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Expand:
    """Draw a step for each branch; answered with a list of steps."""

    call: int
    tree: str
    branches: tuple[Branch, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Score:
    """Score trajectories; answered with a list of rewards."""

    call: int
    tree: str
    prompt: tuple[int, ...]
    question: str
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Embed:
    """Embed steps; answered with a list of vectors."""

    call: int
    tree: str
    steps: tuple[StepWords, ...]


@dataclass(frozen=True, slots=True)
class TreeHint:
    """A hint; not answered."""

    tree: str
    hint: Hint


@dataclass(frozen=True, slots=True)
class Release:
    """Stop and let go of a tree; answered with its cost when nothing of it is left."""

    call: int
    tree: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there; answered with None."""

    call: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The models are loaded; the first word of the engine's process."""

    capabilities: Capabilities
    usage: Usage


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The engine cannot start with these options; the last word of its process."""

    error: EngineError | ValueError | OSError


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to a call, the state after it, and what the KV of ``tree`` went through."""

    call: int
    value: list[Step] | list[float] | list[Vector] | Counters | None
    usage: Usage
    tree: str = ""
    moved: KvMoved | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A call that cannot be answered, why, and the state after it, where the engine says so."""

    call: int
    error: EngineError
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line for the log: its level, its logger's name, its text."""

    level: int
    logger: str
    text: str


ToEngine = Expand | Score | Embed | TreeHint | Release | Ping | Stop
FromEngine = Ready | StartFailed | Done | Failed | Usage | LogLine


def in_parts(items: Sequence[T], sizes: Sequence[int], most: int) -> list[tuple[T, ...]]:
    """``items`` as messages may hold them: in order, ``MOST_AT_ONCE`` at most in a part, and
    ``most`` by their ``sizes`` unless one alone is larger. At least one part, which may be empty.
    """
    parts: list[list[T]] = [[]]
    held = 0
    for item, size in zip(items, sizes, strict=True):
        if parts[-1] and (len(parts[-1]) == MOST_AT_ONCE or held + size > most):
            parts.append([])
            held = 0
        parts[-1].append(item)
        held += size
    return [tuple(part) for part in parts]


def rounds(branches: Sequence[Branch]) -> list[tuple[Branch, ...]]:
    """What of a round goes into each message."""
    tokens = [branch.tokens for branch in branches]
    above = [None, *tokens]
    sizes = [0 if own is last else len(own) for own, last in zip(tokens, above, strict=False)]
    return in_parts(branches, sizes, MOST_TO_EXPAND)


def readings(trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, ...]]:
    """What of the trajectories to score goes into each message."""
    return in_parts(trajectories, [tokens_of(t) for t in trajectories], MOST_TO_SCORE)


def tokens_of(trajectory: Trajectory) -> int:
    """Of all its steps."""
    return sum(map(len, trajectory.steps))


STOP_SECONDS = 5.0
START_METHOD = "spawn"
"""How an engine's process starts, as ``multiprocessing`` names it: with a Python of its own."""

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
        self.formatter = logging.Formatter()  # the message alone
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        """A line, with its traceback if it has one; dropped when nobody is left to hear."""
        with contextlib.suppress(OSError):
            self._pipe.send(LogLine(record.levelno, record.name, self.format(record)))


class ClientEnd:
    """A running engine process. ``receive`` is called in the event loop with every message, and
    with None once when the process is gone."""

    def __init__(
        self, work: Callable[[Connection], None], receive: Callable[[FromEngine | None], None]
    ) -> None:
        """Starts the process, which does ``work`` with its end. Must be made in a running event
        loop."""
        context = multiprocessing.get_context(START_METHOD)
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
