"""When requests come that know nothing of each other: an open loop."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence


def poisson(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Times of arrivals within so many seconds, ``rate`` a second on average, ascending.

    Always the same for the same arguments.
    """
    noise, at, times = random.Random(seed), 0.0, []
    while (at := at + noise.expovariate(rate)) < seconds:
        times.append(at)
    return times


async def paced(times: Sequence[float]) -> AsyncIterator[float]:
    """Each of the times when it has come, in seconds from the first look; late ones at once."""
    began = time.perf_counter()
    for at in times:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        yield at
