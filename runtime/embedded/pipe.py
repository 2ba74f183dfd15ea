"""The messages between the server's process and an engine's process, and the pipe between them.

On the server's side two threads read and write, so that the event loop never waits for the pipe,
however busy the engine's process is. The engine's log lines go through the pipe, too: the server's
process formats them and decides where they go.
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
"""Most branches, trajectories or steps in one message. The engine works between messages."""
MOST_TO_EXPAND = 1 << 20
"""Most tokens of all prefixes in one message; branches with the same tuple count once."""
MOST_TO_SCORE = 1 << 16
"""Most tokens of all steps in one message: many formats encode them again."""


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
    """A hint about a tree; it is not answered."""

    tree: str
    hint: Hint


@dataclass(frozen=True, slots=True)
class Release:
    """Stop and release a tree; answered with its cost once nothing of it remains."""

    call: int
    tree: str


@dataclass(frozen=True, slots=True)
class Ping:
    """A check that the process still answers; answered with None."""

    call: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The models are loaded; the first message of the engine's process, except for log lines."""

    capabilities: Capabilities
    usage: Usage


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The engine cannot start with these options; the last message of its process."""

    error: EngineError | ValueError | OSError


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to a call, the usage after it, and what happened to the KV of ``tree``."""

    call: int
    value: list[Step] | list[float] | list[Vector] | Counters | None
    usage: Usage
    tree: str = ""
    moved: KvMoved | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A call that failed, its error, and the usage after it if the engine sent this message."""

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
    """Cut ``items``, in order, into parts of at most ``MOST_AT_ONCE`` items and a total of ``most``
    by ``sizes``, unless a single item is larger. Returns at least one part, which may be empty.
    """
    parts: list[list[T]] = [[]]
    part_size = 0
    for item, size in zip(items, sizes, strict=True):
        if parts[-1] and (len(parts[-1]) == MOST_AT_ONCE or part_size + size > most):
            parts.append([])
            part_size = 0
        parts[-1].append(item)
        part_size += size
    return [tuple(part) for part in parts]


def rounds(branches: Sequence[Branch]) -> list[tuple[Branch, ...]]:
    """Cut a round's branches into the parts of its messages."""
    tokens = [branch.tokens for branch in branches]
    pairs = zip(tokens, [None, *tokens], strict=False)
    sizes = [0 if prefix is previous else len(prefix) for prefix, previous in pairs]
    return in_parts(branches, sizes, MOST_TO_EXPAND)


def readings(trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, ...]]:
    """Cut the trajectories to score into the parts of their messages."""
    return in_parts(trajectories, [tokens_of(t) for t in trajectories], MOST_TO_SCORE)


def tokens_of(trajectory: Trajectory) -> int:
    """The tokens of all its steps."""
    return sum(map(len, trajectory.steps))


STOP_SECONDS = 5.0
START_METHOD = "spawn"
"""The start method of ``multiprocessing`` for an engine's process: a new Python interpreter."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A received message. Its call id (None: no call) is known even if the rest cannot be read."""

    call: int | None
    _rest: Unpickler

    @classmethod
    def of(cls, message: bytes) -> Self:
        """Open the bytes that ``seal`` made, as far as the call id."""
        rest = Unpickler(io.BytesIO(message))
        return cls(rest.load(), rest)

    def open(self) -> Any:
        """The message itself. Raises whatever unpickling raises if it cannot be read."""
        return self._rest.load()


def seal(message: ToEngine | FromEngine) -> memoryview:
    """Pickle a message for the pipe: its call id, then the message itself."""
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dump(getattr(message, "call", None))
    pickler.dump(message)
    return buffer.getbuffer()


class EngineEnd:
    """The engine's end of the pipe: one thread reads it, and any thread may write to it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()

    def send(self, message: FromEngine) -> None:
        """Send a message. Raises OSError if the other end is closed."""
        message_bytes = seal(message)
        with self._sending:
            self._pipe.send_bytes(message_bytes)

    def recv(self) -> Envelope:
        """Wait for a message. Raises EOFError or OSError if none will come."""
        return Envelope.of(self._pipe.recv_bytes())

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether a message has arrived, waiting for up to ``seconds``."""
        return self._pipe.poll(seconds)


class PipeLogHandler(logging.Handler):
    """Sends this process's log lines to the server's process."""

    def __init__(self, pipe: EngineEnd) -> None:
        super().__init__()
        self.formatter = logging.Formatter()  # the message alone
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line, with its traceback if any; it is dropped if the other end is closed."""
        with contextlib.suppress(OSError):
            self._pipe.send(LogLine(record.levelno, record.name, self.format(record)))


class ClientEnd:
    """The server's end of the pipe, with the engine's process. ``receive`` is called in the event
    loop with every message, and once with None when the process is gone."""

    def __init__(
        self, work: Callable[[Connection], None], receive: Callable[[FromEngine | None], None]
    ) -> None:
        """Start the process, which calls ``work`` with its end of the pipe. Needs a running event
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
        self._waiting_since: float | None = None
        for target in (self._read, self._write):
            threading.Thread(target=target, name="hedgerow-engine-pipe", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        """Queue a message to be sent; never waits. Raises CallFault if it cannot be pickled."""
        try:
            message_bytes = seal(message)
        except (PicklingError, ArithmeticError, AttributeError, RecursionError, TypeError) as error:
            raise CallFault(f"{type(message).__name__}: cannot be sent: {error}") from error
        if self._waiting_since is None and not isinstance(message, TreeHint):
            self._waiting_since = time.monotonic()
        self._outbox.put(message_bytes)

    def quiet_seconds(self) -> float:
        """Seconds since the process last sent something while owing answers; 0 if it owes none."""
        start = self._waiting_since
        return 0.0 if start is None else time.monotonic() - start

    def expect_more(self, awaited: bool) -> None:
        """Note that a message came; ``awaited``: whether the process still owes an answer."""
        self._waiting_since = time.monotonic() if awaited else None

    def end(self) -> None:
        """Stop the process and wait for it; kill it if it does not end within STOP_SECONDS."""
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
        while (message := self._outbox.get()) is not None:
            try:
                self._pipe.send_bytes(message)
            except OSError:
                return  # the reader says that the process is gone


def next_message(recv_bytes: Callable[[], bytes]) -> FromEngine | None:
    """The engine's next message; None if none will come, or if one that belongs to no call cannot
    be read: the process is useless then. An unreadable answer becomes its call's error."""
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
