"""Rounds that wait for room in a server's pool, and what lets them in."""

from __future__ import annotations

import asyncio

from runtime.servers.server import ServerTimes
from runtime.sglang.replica import Replica
from runtime.sglang.round_gate import RoundGate, RoundGates
from search.engine import Branch, Step
from search.tree import Finish


def pool(capacity: int) -> RoundGate:
    """A gate before a pool of so many tokens."""
    gate = RoundGate()
    gate.capacity = capacity
    return gate


async def waits(task: asyncio.Task[None]) -> bool:
    """Whether a round that was to begin has not."""
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def test_the_oldest_search_goes_first() -> None:
    """Two of 200 tokens in a pool of 300: the younger runs when the older one has shrunk, waits
    again when it has grown, and runs when it is over."""
    gate = pool(300)
    await gate.enter("old", 200)
    young = asyncio.create_task(gate.enter("young", 200))
    assert await waits(young)
    gate.hold("old", 100)
    assert not await waits(young)
    await gate.enter("old", 200)
    young = asyncio.create_task(gate.enter("young", 200))
    assert await waits(young)
    gate.leave("old")
    assert not await waits(young)


async def test_a_pool_that_is_unknown_or_fits_all_holds_nothing_back() -> None:
    """However many there are."""
    for capacity in (0, 3000):
        gate = pool(capacity)
        async with asyncio.timeout(5):
            await asyncio.gather(*(gate.enter(f"t{n}", 100) for n in range(30)))


async def test_a_search_that_gives_up_waiting_is_forgotten() -> None:
    """Others that came later go on."""
    gate = pool(300)
    await gate.enter("old", 250)
    young = asyncio.create_task(gate.enter("young", 100))
    last = asyncio.create_task(gate.enter("last", 100))
    assert await waits(young)
    assert await waits(last)
    young.cancel()
    await asyncio.gather(young, return_exceptions=True)
    gate.leave("young")
    gate.hold("old", 200)
    assert not await waits(last)


def test_steps_are_expected_to_be_as_long_as_those_before() -> None:
    """The first ones 64 tokens, and none longer than it may be."""
    gate = pool(300)
    branches = [Branch(0, n, (1, 2), n, limit, n + 1) for n, limit in enumerate((256, 8))]
    assert gate.expected(branches) == 64 + 8
    gate.add_steps(tokens=25, steps=2)
    assert gate.expected(branches) == 13 + 8


async def test_a_search_stands_at_one_gate() -> None:
    """On another server it leaves the first one's to others."""
    here, there = (Replica(f"http://{n}", ServerTimes(1, 1, 1, 9)) for n in "ab")
    here.kv_tokens = there.kv_tokens = 300
    gates = RoundGates()
    await gates.of(here, "mover").enter("mover", 300)
    stays = asyncio.create_task(gates.of(here, "stays").enter("stays", 100))
    assert await waits(stays)
    await gates.of(there, "mover").enter("mover", 300)
    assert not await waits(stays)
    gates.add_steps("mover", [Step((1,), "a", Finish.STEP, 0.0, 0.0)])
    gates.hold("mover", 10)
    gates.leave("mover")
    gates.leave("nobody")
