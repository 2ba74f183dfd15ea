"""Everything that can be watched of a search, in the order in which it is decided.

A planned round is reported by ``selected`` and ``pruned``; once its results are whole and in the
tree, each child in id order by ``expanded``, ``scored`` (if it was), ``finished`` or ``pruned`` (if
it was born so). A round that a deadline drops has no children to report; nothing is taken back.

What became of the engine's KV is told by ``evicted`` and ``rehydrated``, and by one ``kv`` after
each round, where the engine says so. It follows from memory and company, not from the seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from search.tree import Finish, Tree


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; fields are flat and fit for JSON."""

    name: ClassVar[str] = "event"

    def to_dict(self) -> dict[str, object]:
        """The fields under their names, and the event's own under ``event``."""
        fields: dict[str, object] = {"event": self.name}
        for name in self.__match_args__:  # the fields, inherited ones too, listed once a class
            fields[name] = getattr(self, name)
        return fields


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The search begins. ``prompt``: token ids."""

    name: ClassVar[str] = "started"
    tree: str
    policy: str
    width: int
    seed: int
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Selected(Event):
    """The policy gives ``node`` that many ``children`` in this round (counted from 1)."""

    name: ClassVar[str] = "selected"
    round: int
    node: int
    children: int


@dataclass(frozen=True, slots=True)
class Pruned(Event):
    """``node`` will never be expanded: the policy's choice, or born ``empty`` or as a ``loop``."""

    name: ClassVar[str] = "pruned"
    round: int
    node: int
    reason: str


@dataclass(frozen=True, slots=True)
class Expanded(Event):
    """``node`` was drawn; fields as on ``search.tree.Node``."""

    name: ClassVar[str] = "expanded"
    round: int
    node: int
    parent: int
    child: int
    depth: int
    tokens: tuple[int, ...]
    text: str
    finish: str
    logprob: float | None
    entropy: float | None


@dataclass(frozen=True, slots=True)
class Scored(Event):
    """``node`` got its reward, rounded to 1e-4."""

    name: ClassVar[str] = "scored"
    round: int
    node: int
    reward: float


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    """Of the step of ``node`` the engine keeps the KV of ``kept`` tokens, fewer than before.

    ``reason``: ``room`` for others was needed, or the node is ``dead``: nobody may come back to it.
    """

    name: ClassVar[str] = "evicted"
    round: int
    node: int
    kept: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rehydrated(Event):
    """KV of the step of ``node`` that was evicted is there again: of ``kept`` tokens by now."""

    name: ClassVar[str] = "rehydrated"
    round: int
    node: int
    kept: int


@dataclass(frozen=True, slots=True)
class KvHeld(Event):
    """The engine's KV for this search after a round, in tokens of the policy model.

    ``active_tokens``: of the paths that the round grew from; ``inactive_tokens``: of all others.
    """

    name: ClassVar[str] = "kv"
    round: int
    active_tokens: int
    inactive_tokens: int
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """``node`` ended a trajectory of ``tokens`` generated tokens (``finish``: end or limit)."""

    name: ClassVar[str] = "finished"
    round: int
    node: int
    finish: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Answered(Event):
    """The vote is held: the last event. ``node``: the chosen trajectory, None without one."""

    name: ClassVar[str] = "answered"
    node: int | None
    answer: str | None
    text: str
    vote: str
    stop_reason: str
    tree_digest: str


def grow(tree: Tree, event: Event) -> None:
    """Do to a tree what the next event tells of."""
    match event:
        case Expanded():
            tree.add(
                event.parent,
                event.tokens,
                event.text,
                Finish(event.finish),
                logprob=event.logprob,
                entropy=event.entropy,
            )
        case Scored():
            tree[event.node].reward = event.reward
        case Pruned():
            tree.prune(event.node)
        case _:
            pass
