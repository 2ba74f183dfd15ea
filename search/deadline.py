"""The time that a caller gives, by the caller's own clock, and what ends when it is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Same = Callable[[str, str], bool]
"""Whether two answers that are spelled differently are equal."""

CLOSING_SECONDS = 0.1
"""After the deadline, for the engine to say what a tree cost, and for answers to be compared."""


class TooLate(Exception):
    """What was waited for was not there in time."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """``at``: a time by ``clock``, in seconds; None for no deadline."""

    clock: Callable[[], float]
    at: float | None

    def left(self, more: float = 0.0) -> float | None:
        """Seconds until then, at least 0, and ``more``; None without a deadline."""
        return None if self.at is None else max(0.0, self.at - self.clock()) + more

    def closing(self, most: float | None = None) -> float | None:
        """Seconds until nothing is waited for any more, but at most so many."""
        left = self.left(CLOSING_SECONDS)
        return most if left is None or (most is not None and most < left) else left

    def check(self) -> None:
        """Raises TooLate from the deadline on."""
        if self.at is not None and self.clock() >= self.at:
            raise TooLate

    def heed(self, same: Same | None) -> Same | None:
        """``same``, but TooLate once nobody waits for it: the thread that asks is free then."""
        at = self.at
        if at is None or same is None:
            return same

        def in_time(first: str, other: str) -> bool:
            if self.clock() >= at + CLOSING_SECONDS:
                raise TooLate
            return same(first, other)

        return in_time
