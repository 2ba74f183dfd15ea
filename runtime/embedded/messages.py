"""What the server's process and the engine's process say to each other. All of it is pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from search.counters import Counters
from search.engine import (
    Branch,
    Capabilities,
    EngineError,
    Hint,
    KvMoved,
    Sampling,
    Step,
    Trajectory,
    Usage,
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
    """Let go of a tree; answered with its cost."""

    call: int
    tree: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop and let go of a tree; answered with None when nothing of it is left."""

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


ToEngine = Expand | Score | Embed | TreeHint | Release | Abort | Ping | Stop
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
