"""In which order the branches of a round are admitted when they do not all fit at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from search.engine import Branch

ScheduleOrder = Literal["prefix", "fcfs", "random"]
"""The names of ``SCHEDULE_ORDERS``."""


def _as_given(branches: Sequence[Branch]) -> list[int]:
    return [0] * len(branches)


def _nth_child(branches: Sequence[Branch]) -> list[int]:
    seen = Counter[int]()
    keys = []
    for branch in branches:
        keys.append(seen[branch.parent])
        seen[branch.parent] += 1
    return keys


def _by_seed(branches: Sequence[Branch]) -> list[int]:
    return [branch.seed for branch in branches]


SCHEDULE_ORDERS: Mapping[ScheduleOrder, Callable[[Sequence[Branch]], list[int]]] = {
    "prefix": _as_given,
    "fcfs": _nth_child,
    "random": _by_seed,
}
"""A key for each branch, given by rising parent and child; the least goes first, of equal ones the
one given first. ``prefix``: siblings together, their parents as they came (FlashTTS, section 4.2):
the next path is one that shares most with the last. ``fcfs``: as a queue of copied beams gets them,
every beam's first child, then every second one."""


def ranks(branches: Sequence[Branch], order: ScheduleOrder) -> list[int]:
    """Each branch's place in the order, from 0."""
    keys = SCHEDULE_ORDERS[order](branches)
    places = [0] * len(branches)
    for rank, at in enumerate(sorted(range(len(branches)), key=keys.__getitem__)):
        places[at] = rank
    return places
