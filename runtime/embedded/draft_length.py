"""How far to draft ahead: the length that pays most by measured times and measured acceptance.

With acceptance a, a pass over k proposals yields 1 + a + ... + a^k tokens on average (Leviathan et
al., equation 1) and costs k draft passes more; a here is the chance that a draft token is right and
does not end its step. This predicts a rate of tokens, which is corrected by the measured rates of
rounds with and without drafts. Where no length beats plain decoding, drafting pauses and is tried
again now and then. All of this changes time only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import mul

import numpy as np

LONGEST = 15
"""Most tokens to draft ahead: with the committed token they fill a tile of 16 rows."""
GAIN = 1.05
"""How many times the tokens per second of plain decoding drafting must promise."""
TRIAL_LENGTH, TRIAL_BRANCHES = 3, 4
"""Tokens and branches of a trial, in which drafting is measured."""
SHORTEST_PAUSE, LONGEST_PAUSE = 64, 4096
"""Rounds without drafts before the next trial; doubled each time that drafting does not pay."""
MIN_PASSES = 3
"""Passes of a model to measure before its times are used."""
PRIOR_ROUNDS = 4
"""Kept rounds that each promise starts with, before any is measured."""


class PassTime:
    """A line of a pass's seconds over its rows, fitted to measured passes; old ones count less."""

    FADE = 0.98
    OUTLIER = 3.0

    def __init__(self) -> None:
        self.passes = 0
        self._sums = np.zeros(5)
        """Faded weights, rows, seconds, rows squared, rows times seconds."""
        self._base = self._slope = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Add a pass of ``rows`` rows. One far above the line counts OUTLIER times the line."""
        if self.passes:
            seconds = min(seconds, self.OUTLIER * self.at(rows))
        else:  # a weak prior: most of a small pass's time does not depend on its rows
            self._sums = (_moments(0.0, 0.7 * seconds) + _moments(2.0 * rows, 1.3 * seconds)) / 2
        self.passes += 1
        self._sums = self.FADE * self._sums + _moments(rows, seconds)
        mean_x, mean_y, mean_xx, mean_xy = (self._sums[1:] / self._sums[0]).tolist()
        spread = mean_xx - mean_x**2
        slope = max(0.0, (mean_xy - mean_x * mean_y) / spread) if spread > 0 else 0.0
        self._slope = min(slope, mean_y / mean_x)
        self._base = mean_y - self._slope * mean_x

    def at(self, rows: float) -> float:
        """The expected seconds of a pass; never negative, and never falling with ``rows``."""
        return self._base + self._slope * rows


def _moments(x: float, y: float) -> np.ndarray:
    return np.array([1.0, x, y, x * x, x * y])


class FadingRatio:
    """A ratio of two sums that are multiplied by ``fade`` before each addition."""

    def __init__(self, fade: float, above: float, below: float) -> None:
        self._fade, self._above, self._below = fade, above, below

    @property
    def value(self) -> float:
        """The ratio of the two sums."""
        return self._above / self._below

    def add(self, above: float, below: float, times: int = 1) -> None:
        """Add to both sums; counts as ``times`` additions."""
        fade = self._fade**times
        self._above, self._below = fade * self._above + above, fade * self._below + below


class AcceptanceRate(FadingRatio):
    """The share of the tested draft tokens that were accepted."""

    def __init__(self) -> None:
        super().__init__(0.995, 8.0, 10.0)

    def test(self, tested: int, accepted: int) -> None:
        """Add ``tested`` draft tokens, of which ``accepted`` were accepted."""
        self.add(accepted, tested, tested)


class KeptPromise(FadingRatio):
    """The measured share of the promised tokens per second, each round counting the same. 1: as
    promised; 0.5: rounds took twice as long."""

    OUTLIER = 5.0

    def __init__(self) -> None:
        super().__init__(0.97, PRIOR_ROUNDS, PRIOR_ROUNDS)

    def hold(self, due: float, seconds: float) -> None:
        """Add a round that was promised to take ``due`` seconds and took ``seconds``, which counts
        as OUTLIER times ``due`` at most."""
        self.add(1.0, min(seconds / due, self.OUTLIER))


class DraftLength:
    """Chooses the draft length for each round.

    ``own``: how often a draft token is what the branch samples; ``followers``: how often a follower
    that shares the branch's sequence samples it, too.
    """

    def __init__(self, fixed: int = 0, k_config: Sequence[int] = ()) -> None:
        """``fixed``: always draft this many tokens; 0 adapts. ``k_config``: how many tokens to
        draft at each depth after each draft token before it; at deeper depths one."""
        self._k_config = k_config
        self.target, self.draft = PassTime(), PassTime()
        self.pauses = 0
        self._fixed = fixed
        self.own, self.followers = AcceptanceRate(), AcceptanceRate()
        self._going_on = AcceptanceRate()
        self._draft_promise, self._plain_promise = KeptPromise(), KeptPromise()
        self._round_promise: tuple[KeptPromise, float] | None = None
        self._pause = self._wait = self._wins = 0

    def widths(self, length: int) -> tuple[int, ...]:
        """How many tokens to draft at each depth."""
        return (*self._k_config[:length], *[1] * (length - len(self._k_config)))

    def plan(self, ready: int, at_once: int, plain: int, followers: float = 0.0) -> tuple[int, int]:
        """(tokens to draft, branches to draft for), or (0, 0) to decode without drafts. ``ready``:
        branches that could draft, of which ``at_once`` are verified together; ``plain``: branches
        of a pass without drafts; ``followers``: the mean number of followers of a branch."""
        self._round_promise = None
        if self._fixed:
            return self._fixed, ready
        if min(self.target.passes, self.draft.passes) < MIN_PASSES:
            return TRIAL_LENGTH, min(ready, TRIAL_BRANCHES)
        rate, length = self._fastest(at_once, followers)
        plain_rate = plain / self.target.at(plain)
        if rate * self._draft_promise.value > GAIN * plain_rate * self._plain_promise.value:
            self._wins += 1
            if self._wins >= self._pause:
                self._pause = 0
            self._round_promise = self._draft_promise, rate * (1 + followers)
            return length, ready
        self._round_promise = self._plain_promise, plain_rate * (1 + followers)
        return self._pause_or_try(ready)

    def note_verified(self, tokens: int, tested: int, accepted: int, *, at_end: bool) -> None:
        """Add a branch's ``tokens``, and its draft's tested and accepted ones, of one pass."""
        self.own.test(tested, accepted)
        self._going_on.test(tokens, tokens - at_end)

    def note_round(self, tokens: int, seconds: float) -> None:
        """Add the round that was planned last: the ``tokens`` of all branches, and its seconds."""
        if self._round_promise is not None and tokens:
            promise, rate = self._round_promise
            promise.hold(tokens / rate, seconds)

    def _pause_or_try(self, ready: int) -> tuple[int, int]:
        """No draft, or a trial at the end of a pause, which resets what drafting has promised."""
        if not self._wait:
            self.pauses += not self._pause
            self._pause = self._wait = min(2 * self._pause, LONGEST_PAUSE) or SHORTEST_PAUSE
        self._wait -= 1
        if self._wait:
            return 0, 0
        self._round_promise = None
        self._draft_promise, self._wins = KeptPromise(), 0
        return TRIAL_LENGTH, min(ready, TRIAL_BRANCHES)

    def _fastest(self, at_once: int, followers: float) -> tuple[float, int]:
        """The most tokens per second that a draft length promises, and the shortest such length."""
        yields, seconds = self.yields(followers), self._seconds(at_once)
        rate, length = max((yields[k] / seconds[k], -k) for k in range(1, LONGEST + 1))
        return at_once * rate, -length

    def yields(self, followers: float = 0.0) -> list[float]:
        """Mean tokens that a pass over 0, 1, 2, ... proposals gives a branch, over the branches
        that are drafted for and the ``followers`` of each."""
        drafted, following = (
            accumulate(
                accumulate(repeat(rate.value * self._going_on.value, LONGEST), mul, initial=1.0)
            )
            for rate in (self.own, self.followers)
        )
        pairs = zip(drafted, following, strict=True)
        return [(a + followers * b) / (1 + followers) for a, b in pairs]

    def _seconds(self, at_once: int) -> list[float]:
        """Seconds to draft 0, 1, 2, ... tokens deep and to verify them, ``at_once`` branches."""
        rows_at = list(accumulate(self.widths(LONGEST), mul, initial=1))
        draft_seconds = accumulate((self.draft.at(at_once * n) for n in rows_at[:-1]), initial=0.0)
        verify_rows = accumulate(rows_at)
        return [
            self.target.at(at_once * rows) + seconds
            for rows, seconds in zip(verify_rows, draft_seconds, strict=True)
        ]
