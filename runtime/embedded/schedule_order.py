"""In which order the branches of a round are let in when they do not all fit at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from search.engine import Branch

ScheduleOrder = Literal["prefix", "fcfs", "random"]
"""``prefix``: siblings together, their parents as they came (FlashTTS, section 4.2): the next path
is one that shares most with the last. ``fcfs``: as a queue of copied beams gets them: every beam's
first child, then every second one. ``random``: by the branches' seeds."""


def ranks(branches: Sequence[Branch], visits: ScheduleOrder) -> list[int]:
    """Each branch's place in the order, from 0; given by rising parent and child."""
    if visits == "prefix":
        return list(range(len(branches)))
    nth: dict[int, int] = {}
    keys: list[tuple[int, int]] = []
    for at, branch in enumerate(branches):
        nth[branch.parent] = nth.get(branch.parent, -1) + 1
        keys.append((branch.seed if visits == "random" else nth[branch.parent], at))
    found = [0] * len(branches)
    for rank, (_, at) in enumerate(sorted(keys)):
        found[at] = rank
    return found
