"""Rounds wait for room in a server's pool until others shrink or end."""

from __future__ import annotations

import asyncio

import pytest

from runtime.servers.remote_server import ServerTimes
from runtime.sglang.replica import Replica
from runtime.sglang.round_gate import RoundGate, RoundGates
from search.engine import Branch, Step
from search.tree import Finish


def pool(capacity: int) -> RoundGate:
    """A gate for a pool of ``capacity`` tokens."""
    gate = RoundGate()
    gate.capacity = capacity
    return gate


def branch(path: tuple[int, ...], limit: int) -> Branch:
    """A branch after ``path`` of at most ``limit`` tokens."""
    return Branch(0, 0, path, 0, limit, 1)


async def waits(task: asyncio.Task[None]) -> bool:
    """Whether the task still waits after five turns of the event loop."""
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def test_the_oldest_search_goes_first() -> None:
    """Two searches of 200 tokens in a pool of 300: the younger one runs while the older one needs
    less after a round, waits when it needs more again, and runs when it is over."""
    gate = pool(300)
    await gate.enter("old", 200)
    young = asyncio.create_task(gate.enter("young", 200))
    assert await waits(young)
    gate.record("old", [branch(tuple(range(90)), 8)] * 2, [(91, 92), (91, 93)])
    assert not await waits(young)
    await gate.enter("old", 200)
    young = asyncio.create_task(gate.enter("young", 200))
    assert await waits(young)
    gate.leave("old")
    assert not await waits(young)


async def test_a_pool_that_is_unknown_or_fits_all_holds_nothing_back() -> None:
    """Rounds never wait if the pool's size is unknown (0) or fits all of them."""
    for capacity in (0, 3000):
        gate = pool(capacity)
        async with asyncio.timeout(5):
            await asyncio.gather(*(gate.enter(f"t{n}", 100) for n in range(30)))


async def test_a_search_that_gives_up_waiting_is_forgotten() -> None:
    """A cancelled waiter does not block searches that came later."""
    gate = pool(300)
    await gate.enter("old", 250)
    young = asyncio.create_task(gate.enter("young", 100))
    last = asyncio.create_task(gate.enter("last", 100))
    assert await waits(young)
    assert await waits(last)
    young.cancel()
    await asyncio.gather(young, return_exceptions=True)
    gate.leave("young")
    gate.record("old", [branch(tuple(range(199)), 8)], [(1,)])
    assert not await waits(last)


def test_a_round_needs_its_paths_and_its_steps() -> None:
    """Two branches with a path of two tokens and one of three that shares the first take four
    tokens. Steps are expected to be as long as earlier ones (the first: 64 tokens), up to their
    limits."""
    gate = pool(300)
    branches = [branch((1, 2), 256), branch((1, 2), 8), branch((1, 3, 4), 8)]
    assert gate.need(branches) == 4 + 64 + 8 + 8
    gate.record("any", branches[:2], [(5,) * 12, (5,) * 13])
    assert gate.need(branches) == 4 + 13 + 8 + 8


@pytest.mark.promise(
    "A draw on SGLang requests its limit if its whole round fits at it or the pool is unknown, or"
    " else the length of earlier steps."
)
def test_what_is_asked_for_at_once() -> None:
    """Draws ask for the length of earlier steps if not all fit at their limit; for the limit if all
    fit or the pool is unknown."""
    branches = [branch((1, 2), 32)] * 64
    for capacity, most in ((300, 12), (0, 32), (3000, 32)):
        gate = pool(capacity)
        assert gate.tokens_at_once(branches) == 32
        gate.record("any", branches[:2], [(5,) * 12] * 2)
        assert gate.tokens_at_once(branches) == most


async def test_a_search_stands_at_one_gate() -> None:
    """A search that moves to another server's gate frees its room at the first one."""
    here, there = (Replica(f"http://{n}", ServerTimes(1, 1, 1, 9)) for n in "ab")
    here.kv_tokens = there.kv_tokens = 300
    gates = RoundGates()
    await gates.of(here, "mover").enter("mover", 300)
    stays = asyncio.create_task(gates.of(here, "stays").enter("stays", 100))
    assert await waits(stays)
    await gates.of(there, "mover").enter("mover", 300)
    assert not await waits(stays)
    steps = [Step((1,), "a", Finish.STEP, 0.0, 0.0)]
    gates.record("mover", [branch((1, 2), 8)], steps)
    gates.record("nobody", [branch((1, 2), 8)], steps)
    gates.leave("mover")
    gates.leave("nobody")
