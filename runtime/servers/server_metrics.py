"""Counts from servers' ``/metrics``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

_LINE = re.compile(r"^(\w+:\w+)(?:\{[^}]*\})? ([-+.\deE]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Tokens and requests, now or in total since the servers' start; 0 if a server does not say.

    ``held``: in use by running requests, and with our plug-in by all searches in flight;
    ``cached``: evictable tokens besides; ``evicting``: seconds spent on eviction.
    """

    held: int = 0
    cached: int = 0
    capacity: int = 0
    evicted: int = 0
    running: int = 0
    waiting: int = 0
    prompt: int = 0
    generated: int = 0
    hit: int = 0
    evicting: float = 0

    @classmethod
    def sum_of(cls, metrics: Sequence[ServerMetrics]) -> Self:
        """The sums over several servers."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: sum(getattr(part, name) for part in metrics) for name in names})


def series_sums(text: str) -> defaultdict[str, float]:
    """The sum over all labels for each series of ``/metrics``; 0 for a missing series."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, value in _LINE.findall(text):
        sums[name] += float(value)
    return sums
