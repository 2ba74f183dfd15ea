"""Arrivals by chance, and waiting for them."""

from __future__ import annotations

import asyncio
import time

import pytest

from loadtest.arrivals import paced, poisson


def test_arrivals_are_the_same_each_time() -> None:
    """In order, in time, and about as many as asked for; another seed, other times."""
    times = poisson(2.0, 1000)
    assert times == poisson(2.0, 1000) != poisson(2.0, 1000, seed=1)
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 1000
    assert len(times) == pytest.approx(2000, rel=0.1)


def test_none_comes_before_its_time() -> None:
    """And one that is late comes at once, none is left out."""

    async def come() -> list[tuple[float, float]]:
        began = time.perf_counter()
        return [(at, time.perf_counter() - began) async for at in paced([0.0, 0.02, 0.02, -1.0])]

    found = asyncio.run(come())
    assert [at for at, _ in found] == [0.0, 0.02, 0.02, -1.0]
    assert all(when >= at for at, when in found)
