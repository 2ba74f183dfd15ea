"""How many threads a pass computes with: the more rows it has, the more of them may pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Threads:
    """``steps``: rows of a pass, from the fewest, and the threads from so many rows on."""

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for _, count in self.steps:
            if count < 1:
                raise ValueError(f"threads: {count}; at least 1 is needed")

    @classmethod
    def same(cls, count: int) -> Self:
        """So many for every pass."""
        return cls(((1, count),))

    @classmethod
    def rising(cls, found: Sequence[tuple[int, int]]) -> Self:
        """Of what was found, the steps to more threads: what pays for few rows pays for more."""
        kept = [found[0]]
        for rows, count in found[1:]:
            if count > kept[-1][1]:
                kept.append((rows, count))
        return cls(tuple(kept))

    @property
    def counts(self) -> tuple[int, ...]:
        """Every number of threads that there may be, rising."""
        return tuple(sorted({count for _, count in self.steps}))

    @property
    def most(self) -> int:
        """The largest of them."""
        return self.counts[-1]

    def at(self, rows: int) -> int:
        """For a pass of so many rows."""
        count = self.steps[0][1]
        for least, more in self.steps[1:]:
            if rows >= least:
                count = more
        return count

    def __str__(self) -> str:
        first, *rest = self.steps
        return ", ".join([str(first[1]), *(f"{count} from {rows} rows on" for rows, count in rest)])


def thread_counts(most: int) -> tuple[int, ...]:
    """The counts to choose from: the powers of two below ``most``, and ``most``."""
    return (*(1 << i for i in range((most - 1).bit_length())), most)
