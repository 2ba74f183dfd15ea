"""The events of a search, in the order in which things are decided.

A planned round is reported by ``selected`` and ``pruned``; once all its steps are in the tree, each
child in id order by ``expanded``, ``scored`` (if it was), ``finished`` or ``pruned`` (if it died at
birth). A round that a deadline drops has no children to report; no event is taken back.

Changes of the engine's KV are reported by ``evicted`` and ``rehydrated``, and by one ``kv`` after
each round, if the engine reports it. They depend on memory and on other searches, not on the seed.
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
    """``node`` will never be expanded: pruned by the ``policy``, ``empty``, or a ``loop``."""

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
    """The engine now keeps the KV of ``kept`` tokens of the step of ``node``, fewer than before.

    ``reason``: ``room`` was needed for others, or the node is ``dead``: it is never used again.
    """

    name: ClassVar[str] = "evicted"
    round: int
    node: int
    kept: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rehydrated(Event):
    """Evicted KV of the step of ``node`` is back: the engine now keeps ``kept`` of its tokens."""

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
    """The vote is over: the last event. ``node``: the chosen trajectory, None if there is none."""

    name: ClassVar[str] = "answered"
    node: int | None
    answer: str | None
    text: str
    vote: str
    stop_reason: str
    tree_digest: str


def grow(tree: Tree, event: Event) -> None:
    """Apply the next event to a tree."""
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
