"""Servers that die, fail and stand still: searches go on, or end by their deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from loadtest.hostile.sglang_stub import MortalStub, Stub
from models.bundled import SPRIG_FOLDER
from runtime.servers import fleet
from runtime.servers.remote_server import ServerTimes
from runtime.sglang.replica import Replica
from runtime.sglang.sglang_engine import SglangEngine
from runtime.sglang.sglang_options import SglangOptions
from runtime.text import Text
from search.engine import EngineDown
from search.spec import StopReason
from server.api_errors import ApiError
from server.plain_completion import PlainCompletion, complete
from tests.runtime.mortal_pair import POLICY, MortalPair, mortal_pair


def pair(**more: Any) -> AbstractAsyncContextManager[MortalPair]:
    """Two stubs, with these options."""

    def start(policy: str, reward: str) -> Awaitable[SglangEngine]:
        prm = {"prm": SPRIG_FOLDER / "prm", "reward_urls": (reward,)}
        return SglangEngine.start(SglangOptions(POLICY, (policy,), **prm, **more))

    stub = Stub.of(Text(POLICY))
    return mortal_pair(stub, stub, start)


async def until_asked(server: MortalStub, more: int) -> None:
    """So many more requests for work have come."""
    seen = server.asked
    while server.asked < seen + more:
        await asyncio.sleep(0.001)


@pytest.mark.promise(
    "A search outlives its only SGLang server, a failing one and one that stands still, with the "
    "undisturbed tree; deadlines hold"
)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("who", ["policy", "reward"])
async def test_a_search_outlives_its_only_server(who: str) -> None:
    """Killed again and again: the tree is the undisturbed one."""
    async with pair() as servers:
        undisturbed = await servers.grown("calm")
        victim, growing = servers.victim(who), asyncio.create_task(servers.grown("oak"))
        for _ in range(3):
            await until_asked(victim, 1)
            await victim.kill()
            while servers.engine._policy.waiting + servers.engine._rewards.waiting == 0:
                await asyncio.sleep(0.001)
            with pytest.raises(EngineDown, match=f"no {who} server answers"):
                await servers.engine.health()
            await victim.start()
        outcome = await growing
        assert outcome.digest == undisturbed.digest
        assert (await servers.engine.usage()).totals.sent_again == servers.engine.sent_again
        await servers.engine.health()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("who", ["policy", "reward"])
async def test_a_server_at_fault_is_not_ready_and_its_searches_wait(who: str) -> None:
    """It generates, and answers what it is for with 500: it gets no work until it does that."""
    async with pair() as servers:
        undisturbed = await servers.grown("calm")
        victim = servers.victim(who)
        victim.faults = 10**9
        growing = asyncio.create_task(servers.grown("oak"))
        await until_asked(victim, 4)
        with pytest.raises(EngineDown, match=f"no {who} server answers"):
            await servers.engine.health()
        assert not growing.done()
        victim.faults = 0
        assert (await growing).digest == undisturbed.digest
        await servers.engine.health()


@pytest.mark.timeout(120)
async def test_a_request_that_is_answered_by_faults_alone_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By itself, where the server works otherwise."""
    async with pair() as servers:
        monkeypatch.setattr(fleet, "MOST_FAULTS", 0)
        servers.policy.faults = 1
        with pytest.raises(EngineDown, match=r"does not answer \(status 500\)"):
            await servers.grown("oak")
        assert (await servers.grown("elm")).answer


@pytest.mark.timeout(120)
async def test_who_waits_for_a_server_that_stands_still_goes_on() -> None:
    """What was asked of it is given up once it is known to stand still; it is asked again then."""
    async with pair(stall_seconds=0.3, probe_seconds=0.1) as servers:
        undisturbed = await servers.grown("calm")
        servers.policy.still = True
        growing = asyncio.create_task(servers.grown("oak"))
        while not servers.engine._policy.waiting:
            await asyncio.sleep(0.01)
        servers.policy.still = False
        assert (await growing).digest == undisturbed.digest


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["dead", "still", "at fault"])
@pytest.mark.parametrize("who", ["policy", "reward"])
async def test_a_deadline_is_kept_whatever_a_server_does(who: str, how: str) -> None:
    """And nothing of the search stays."""
    async with pair() as servers:
        victim = servers.victim(who)
        if how == "dead":
            await victim.kill()
        victim.still, victim.faults = how == "still", 10**9 if how == "at fault" else 0
        outcome = await servers.grown("oak", deadline=0.3)
        assert outcome.stop_reason is StopReason.DEADLINE
        assert not servers.engine._searches
        victim.still = False


@pytest.mark.timeout(120)
async def test_a_search_waits_no_longer_than_it_is_told_to() -> None:
    """Then it fails as one did that found no server."""
    async with pair(recovery_seconds=0.1) as servers:
        await servers.policy.kill()
        with pytest.raises(EngineDown, match="no policy server answers"):
            await servers.grown("oak")


@pytest.mark.timeout(120)
async def test_what_is_left_of_a_tree_is_seen_to_afterwards() -> None:
    """A reply does not wait for a server that says nothing, neither to a step nor to its abort."""
    heard: list[str] = []
    async with pair(probe_seconds=0.3) as servers:
        meddle = servers.policy._meddle

        async def noted(path: str) -> int:
            heard.append(path)
            return await meddle(path)

        servers.policy._meddle = noted  # type: ignore[method-assign]
        servers.policy.still = True
        outcome = await servers.grown("oak", deadline=0.2)
        assert (outcome.stop_reason, outcome.stats.cost_known) == (StopReason.DEADLINE, False)
        wanted = PlainCompletion((1, 2, 3), limit=8, piece=8, seed=1, seconds=0.1)
        with pytest.raises(ApiError, match="before any of the reply"):
            await complete(wanted, servers.engine, "elm", lambda _: None)
        while servers.engine._ending:
            await asyncio.sleep(0.01)
        assert "/abort_request" in heard
        servers.policy.still = False


@pytest.mark.timeout(120)
async def test_who_stands_still_is_noticed_and_who_is_busy_is_not() -> None:
    """Nobody asks for its health: a look is left unanswered until the time is over."""
    async with pair(stall_seconds=1.5, probe_seconds=0.1) as servers:
        (replica,) = servers.engine._policy.replicas
        servers.policy.still = True
        while not replica.silent_seconds():
            await asyncio.sleep(0.01)
        await servers.engine.health()
        servers.policy.still = False
        while replica.silent_seconds():
            await asyncio.sleep(0.01)
        assert replica.up
        servers.policy.still = True
        while replica.up:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDown, match="no policy server answers"):
            await servers.engine.health()
        servers.policy.still = False
        while not replica.up:
            await asyncio.sleep(0.01)
        await servers.engine.health()


async def test_nothing_asked_is_no_silence() -> None:
    """Of a server that nobody has asked anything nothing is awaited."""
    replica = Replica("http://nowhere", ServerTimes(connect=1, answer=1, probe=1, stall=0.0))
    assert replica.silent_seconds() == 0
    await replica.close()
