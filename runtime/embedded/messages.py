"""What the server's process and the engine's process say to each other. All of it is pickled."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.embedded.scoring.embedder import Vector, Words
from search.engine import (
    Branch,
    Capabilities,
    EngineError,
    Hint,
    KvMoved,
    Sampling,
    Step,
    Trajectory,
    TreeCost,
    Usage,
)

MOST_AT_ONCE = 1024
"""Branches, trajectories or steps of one message: the engine goes on in between."""


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
    steps: tuple[Words, ...]


@dataclass(frozen=True, slots=True)
class Hinted:
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
class Report:
    """The engine's state: ``usage``, and counts that have no place there, by name."""

    usage: Usage
    counters: dict[str, int]


@dataclass(frozen=True, slots=True)
class Ready:
    """The models are loaded; the first word of the engine's process."""

    capabilities: Capabilities
    report: Report


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine cannot start with these options; the last word of its process."""

    error: EngineError | ValueError | OSError


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to a call, the state after it, and what the KV of ``tree`` went through."""

    call: int
    value: list[Step] | list[float] | list[Vector] | TreeCost | None
    report: Report
    tree: str = ""
    moved: KvMoved | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A call that cannot be answered, and why."""

    call: int
    error: EngineError
    report: Report


@dataclass(frozen=True, slots=True)
class Said:
    """A line for the log: its level, its logger's name, its text."""

    level: int
    logger: str
    text: str


ToEngine = Expand | Score | Embed | Hinted | Release | Abort | Ping | Stop
FromEngine = Ready | Refused | Done | Failed | Report | Said
