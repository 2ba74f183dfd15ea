"""Turns: the order of timed calls, and ratios and rates from their times."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from loadtest.turns import Times, in_turns


class Bench:
    """Calls that take a stated time by the bench's own clock."""

    def __init__(self, **seconds: float) -> None:
        self.now = 0.0
        self.order: list[str] = []
        self.calls = {name: self._call(name, duration) for name, duration in seconds.items()}

    def _call(self, name: str, duration: float) -> Callable[[], Awaitable[None]]:
        async def call() -> None:
            self.order.append(name)
            self.now += duration

        return call


async def test_every_other_repeat_goes_backwards() -> None:
    """Calls run forwards and backwards in turn, so that drift of the machine hits all alike."""
    bench = Bench(a=1.0, b=2.0, c=4.0)
    times = await in_turns(bench.calls, 3, clock=lambda: bench.now)
    assert "".join(bench.order) == "abccbaabc"
    assert times.seconds == {"a": [1.0] * 3, "b": [2.0] * 3, "c": [4.0] * 3}
    assert times.ratio("c", "b") == 2.0


async def test_one_repeat_is_made_whatever_the_time() -> None:
    """The first repeat always runs, a further one only while ``another`` is true."""
    bench = Bench(a=1.0, b=1.0)
    await in_turns(bench.calls, 5, clock=lambda: bench.now, another=lambda: bench.now < 3)
    assert "".join(bench.order) == "abba"
    bench = Bench(a=1.0)
    await in_turns(bench.calls, 5, clock=lambda: bench.now, another=lambda: False)
    assert bench.order == ["a"]


async def test_calls_may_give_amounts() -> None:
    """A call that returns 4 after 2 s has rate 2, whether it is async or not."""
    ticks = iter(range(0, 100, 2))

    async def four() -> int:
        return 4

    times = await in_turns({"a": four, "b": lambda: 6}, 2, clock=lambda: float(next(ticks)))
    assert (times.rates("a"), times.rates("b")) == ([2.0, 2.0], [3.0, 3.0])


def test_a_ratio_is_of_pairs() -> None:
    """The ratio is the median of 2/1, 30/10 and 4/2: a slow repeat slows both sides."""
    times = Times({"a": [2.0, 30.0, 4.0], "b": [1.0, 10.0, 2.0]})
    assert times.median("a") == 4.0
    assert times.ratio("a", "b") == 2.0
