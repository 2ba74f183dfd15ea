"""Who goes first: searches in equal parts, and the branches of a round in the order of a switch.

The tree is the unit: a search with hundreds of branches gets no more places and rows of prefill
than one with four as long as both want more. Only when something is computed follows from this,
never what.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeVar

from runtime.embedded.choices import ScheduleOrder
from search.engine import Branch

T = TypeVar("T")


def fair_order(
    waiting: Sequence[T], tree_of: Callable[[T], str], running: Mapping[str, int]
) -> Sequence[T]:
    """The order in which to let in what is ``waiting``, which is given oldest first.

    Next is always the oldest of the tree that has the fewest places, those given here included;
    of equal ones the tree whose work is older. ``running``: places a tree has already.
    """
    queues: dict[str, deque[T]] = {}
    for work in waiting:
        queues.setdefault(tree_of(work), deque()).append(work)
    if len(queues) < 2:
        return waiting
    heap = [(running.get(tree, 0), age, tree) for age, tree in enumerate(queues)]
    heapify(heap)
    order = []
    while heap:
        places, age, tree = heappop(heap)
        order.append(queues[tree].popleft())
        if queues[tree]:
            heappush(heap, (places + 1, age, tree))
    return order


def prefill_budget(wanted: Sequence[tuple[str, int]], room: int) -> list[int]:
    """How many of ``room`` rows each of these gets: (tree, rows wanted), oldest first.

    Trees get equal parts, what one does not want going to the others; odd rows and, within a tree,
    all rows go to the older ones.
    """
    totals: dict[str, int] = {}
    for tree, rows in wanted:
        totals[tree] = totals.get(tree, 0) + rows
    left = _filled(totals, room)
    budgets = []
    for tree, rows in wanted:
        budgets.append(min(rows, left[tree]))
        left[tree] -= budgets[-1]
    return budgets


def _filled(totals: Mapping[str, int], room: int) -> dict[str, int]:
    """Equal parts of ``room``, none more than its total."""
    part = dict.fromkeys(totals, 0)
    unmet = [tree for tree in totals if totals[tree]]
    while unmet and room:
        each = max(1, room // len(unmet))
        for tree in unmet:
            more = min(totals[tree] - part[tree], each, room)
            part[tree] += more
            room -= more
        unmet = [tree for tree in unmet if part[tree] < totals[tree]]
    return part


def _in_order(branches: Sequence[Branch]) -> list[int]:
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
    "prefix": _in_order,
    "fcfs": _nth_child,
    "random": _by_seed,
}
"""A key for each branch, listed by rising parent and child; the least goes first, of equal ones the
one listed first. ``prefix``: siblings together, their parents as they came (FlashTTS, section 4.2):
the next path is one that shares most with the last. ``fcfs``: as a queue of copied beams gets them,
every beam's first child, then every second one."""


def ranks(branches: Sequence[Branch], order: ScheduleOrder) -> list[int]:
    """Each branch's place in the order, from 0."""
    keys = SCHEDULE_ORDERS[order](branches)
    places = [0] * len(branches)
    for rank, at in enumerate(sorted(range(len(branches)), key=keys.__getitem__)):
        places[at] = rank
    return places
