"""How far to draft ahead: from measured times and measured acceptance, the length that pays most.

With acceptance a, a pass over k proposals yields 1 + a + ... + a^k tokens on average (Leviathan et
al., equation 1) and costs k draft passes more; a here is the chance that a draft token is right and
does not end its step. That is a promise: what came of it, drafted and plain, is held against it.
Where no length beats plain decoding, drafting pauses and is tried again now and then. Only time
follows from any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import mul

import numpy as np

LONGEST = 15
"""Tokens to draft ahead at most: with the committed one a tile of 16 rows."""
GAIN = 1.05
"""Drafting must promise so many times the tokens a second of plain decoding."""
TRIAL_LENGTH, TRIAL_BRANCHES = 3, 4
"""What is drafted to measure: so many tokens for so many branches."""
SHORTEST_PAUSE, LONGEST_PAUSE = 64, 4096
"""Rounds without drafting before it is tried again; doubled each time it does not pay."""
TRIED = 3
"""Passes of a model to see before its times are believed."""
BELIEVED = 4
"""Rounds that a promise is believed to have been kept for before there were any."""


class PassTime:
    """Seconds of a pass by its rows: a line through what was measured, the old fading."""

    FADE = 0.98
    OUTLIER = 3.0

    def __init__(self) -> None:
        self.seen = 0
        self._sums = np.zeros(5)
        """Faded weights, rows, seconds, rows squared, rows times seconds."""
        self._base = self._slope = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """A pass of ``rows`` took so long. One far above the line counts as just above it."""
        if self.seen:
            seconds = min(seconds, self.OUTLIER * self.at(rows))
        else:  # a weak belief to begin with: most of a small pass does not depend on its rows
            self._sums = (_moments(0.0, 0.7 * seconds) + _moments(2.0 * rows, 1.3 * seconds)) / 2
        self.seen += 1
        self._sums = self.FADE * self._sums + _moments(rows, seconds)
        mean_x, mean_y, mean_xx, mean_xy = (self._sums[1:] / self._sums[0]).tolist()
        spread = mean_xx - mean_x**2
        slope = max(0.0, (mean_xy - mean_x * mean_y) / spread) if spread > 0 else 0.0
        self._slope = min(slope, mean_y / mean_x)
        self._base = mean_y - self._slope * mean_x

    def at(self, rows: float) -> float:
        """The expected seconds of a pass; a line never falls, and is never below its slope."""
        return self._base + self._slope * rows


def _moments(x: float, y: float) -> np.ndarray:
    return np.array([1.0, x, y, x * x, x * y])


class FadingRatio:
    """A ratio of two sums, the old fading: ``fade`` for each addition."""

    def __init__(self, fade: float, above: float, below: float) -> None:
        self._fade, self._above, self._below = fade, above, below

    @property
    def value(self) -> float:
        """The ratio."""
        return self._above / self._below

    def add(self, above: float, below: float, times: int = 1) -> None:
        """Add to both; it counts as so many additions."""
        fade = self._fade**times
        self._above, self._below = fade * self._above + above, fade * self._below + below


class AcceptanceRate(FadingRatio):
    """The share of accepted ones among the draft tokens that were tested."""

    def __init__(self) -> None:
        super().__init__(0.995, 8.0, 10.0)

    def test(self, tested: int, accepted: int) -> None:
        """So many were tested, and so many of them accepted."""
        self.add(accepted, tested, tested)


class KeptPromise(FadingRatio):
    """How much of the tokens a second that were promised came of it, rounds counting alike. 1: as
    promised; 0.5: it took twice as long."""

    OUTLIER = 5.0

    def __init__(self) -> None:
        super().__init__(0.97, BELIEVED, BELIEVED)

    def hold(self, due: float, seconds: float) -> None:
        """What was promised in ``due`` seconds took so many. A stray round counts as one that took
        OUTLIER times as long."""
        self.add(1.0, min(seconds / due, self.OUTLIER))


class DraftLength:
    """The draft length of the moment.

    ``own``: how often a draft token is what the branch samples; ``followers``: how often it is what
    one that shares the branch's sequence samples too.
    """

    def __init__(self, fixed: int = 0, k_config: Sequence[int] = ()) -> None:
        """``fixed``: always this length; 0 adapts. ``k_config``: how many tokens to draft at each
        depth after each one before it; deeper it is one."""
        self._k_config = k_config
        self.target, self.draft = PassTime(), PassTime()
        self.pauses = 0
        self._fixed = fixed
        self.own, self.followers = AcceptanceRate(), AcceptanceRate()
        self._going_on = AcceptanceRate()
        self._drafted, self._plain = KeptPromise(), KeptPromise()
        self._promise: tuple[KeptPromise, float] | None = None
        self._pause = self._wait = self._paid = 0

    def widths(self, length: int) -> tuple[int, ...]:
        """How many tokens to draft at each depth."""
        return (*self._k_config[:length], *[1] * (length - len(self._k_config)))

    def plan(self, ready: int, at_once: int, plain: int, followers: float = 0.0) -> tuple[int, int]:
        """(tokens to draft, branches to draft for) with ``ready`` branches, ``at_once`` of which
        are verified together; plain decoding would take ``plain`` at once. ``followers``: branches
        that follow each, on average. (0, 0): do not draft."""
        self._promise = None
        if self._fixed:
            return self._fixed, ready
        if min(self.target.seen, self.draft.seen) < TRIED:
            return TRIAL_LENGTH, min(ready, TRIAL_BRANCHES)
        rate, length = self._fastest(at_once, followers)
        plain_rate = plain / self.target.at(plain)
        if rate * self._drafted.value > GAIN * plain_rate * self._plain.value:
            self._paid += 1
            if self._paid >= self._pause:
                self._pause = 0
            self._promise = self._drafted, rate * (1 + followers)
            return length, ready
        self._promise = self._plain, plain_rate * (1 + followers)
        return self._pause_or_try(ready)

    def note_verified(self, tokens: int, tested: int, accepted: int, *, ended: bool) -> None:
        """A branch was given so many tokens, and of its draft so many were tested and accepted."""
        self.own.test(tested, accepted)
        self._going_on.test(tokens, tokens - ended)

    def note_round(self, tokens: int, seconds: float) -> None:
        """What the round planned last gave all branches, and how long it took."""
        if self._promise is not None and tokens:
            promise, rate = self._promise
            promise.hold(tokens / rate, seconds)

    def _pause_or_try(self, ready: int) -> tuple[int, int]:
        """No draft, or at the end of a pause a trial: then all is promised and believed anew."""
        if not self._wait:
            self.pauses += not self._pause
            self._pause = self._wait = min(2 * self._pause, LONGEST_PAUSE) or SHORTEST_PAUSE
        self._wait -= 1
        if self._wait:
            return 0, 0
        self._promise = None
        self._drafted, self._paid = KeptPromise(), 0
        return TRIAL_LENGTH, min(ready, TRIAL_BRANCHES)

    def _fastest(self, at_once: int, followers: float) -> tuple[float, int]:
        """The most tokens a second that a draft length promises, and the least such length."""
        yields, seconds = self.yields(followers), self._seconds(at_once)
        rate, length = max((yields[k] / seconds[k], -k) for k in range(1, LONGEST + 1))
        return at_once * rate, -length

    def yields(self, followers: float = 0.0) -> list[float]:
        """Tokens that a pass over so many proposals, from none, gives a branch on average, be it
        one that is drafted for or one of the ``followers`` that follow each of these."""
        own, followed = (
            accumulate(
                accumulate(repeat(rate.value * self._going_on.value, LONGEST), mul, initial=1.0)
            )
            for rate in (self.own, self.followers)
        )
        return [(a + followers * b) / (1 + followers) for a, b in zip(own, followed, strict=True)]

    def _seconds(self, at_once: int) -> list[float]:
        """Seconds to draft so many tokens, from none, and to check them."""
        drafted = list(accumulate(self.widths(LONGEST), mul, initial=1))
        drafting = accumulate((self.draft.at(at_once * rows) for rows in drafted[:-1]), initial=0.0)
        verified = accumulate(drafted)
        return [
            self.target.at(at_once * rows) + spent
            for rows, spent in zip(verified, drafting, strict=True)
        ]
