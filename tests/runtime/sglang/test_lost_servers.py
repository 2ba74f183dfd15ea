"""Servers that die, fail or freeze: searches go on, or end by their deadline."""

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
from runtime.sglang.round_gate import RoundGate
from runtime.sglang.sglang_engine import SglangEngine
from runtime.sglang.sglang_options import SglangOptions
from runtime.text import Text
from search.engine import Branch, EngineDown, EngineError, Sampling
from search.spec import StopReason
from search.tree import ROOT
from server.api_errors import ApiError
from server.plain_completion import PlainCompletion, complete
from tests.runtime.mortal_pair import POLICY, PROMPT, MortalPair, mortal_pair


def pair(**more: Any) -> AbstractAsyncContextManager[MortalPair]:
    """An engine over a policy stub and a reward stub, with these options."""

    def start(policy: str, reward: str) -> Awaitable[SglangEngine]:
        prm = {"prm": SPRIG_FOLDER / "prm", "reward_urls": (reward,)}
        return SglangEngine.start(SglangOptions(POLICY, (policy,), **prm, **more))

    stub = Stub.of(Text(POLICY))
    return mortal_pair(stub, stub, start)


async def wait_for_requests(server: MortalStub, more: int) -> None:
    """Wait until ``more`` further requests for work have arrived."""
    before = server.asked
    while server.asked < before + more:
        await asyncio.sleep(0.001)


@pytest.mark.promise(
    "A search on SGLang whose only server is killed repeatedly ends with the tree of an "
    "undisturbed search."
)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("who", ["policy", "reward"])
async def test_a_search_outlives_its_only_server(who: str) -> None:
    """A search whose server is killed repeatedly ends with the undisturbed tree."""
    async with pair() as servers:
        undisturbed = await servers.grow("calm")
        victim, growing = servers.victim(who), asyncio.create_task(servers.grow("oak"))
        for _ in range(3):
            await wait_for_requests(victim, 1)
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
    """A server that answers work with 500 gets none until it works again; searches wait."""
    async with pair() as servers:
        undisturbed = await servers.grow("calm")
        victim = servers.victim(who)
        victim.faults = 10**9
        growing = asyncio.create_task(servers.grow("oak"))
        await wait_for_requests(victim, 4)
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
    """A request that meets only faults fails alone; the server serves other searches."""
    async with pair() as servers:
        monkeypatch.setattr(fleet, "MOST_FAULTS", 0)
        servers.policy.faults = 1
        with pytest.raises(EngineDown, match=r"does not answer \(status 500\)"):
            await servers.grow("oak")
        assert (await servers.grow("elm")).answer


@pytest.mark.timeout(120)
async def test_a_request_that_is_never_answered_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that gets no answer in time is sent again a few times, then fails alone; one that
    is answered in the end leaves the tree as it is."""
    async with pair(answer_seconds=0.3) as servers:
        undisturbed = await servers.grow("calm")
        monkeypatch.setattr(fleet, "MOST_FAULTS", 2)
        monkeypatch.setattr(servers.engine._policy.replicas[0], "_trial", None)
        servers.policy.unanswered = 2
        assert (await servers.grow("oak")).digest == undisturbed.digest
        servers.policy.unanswered = 3
        with pytest.raises(EngineDown, match=r"does not answer \(no answer in time"):
            await servers.grow("elm")
        assert (await servers.grow("ash")).digest == undisturbed.digest


@pytest.mark.parametrize("turns", range(6))
async def test_a_tree_that_ends_while_a_round_begins_holds_no_room(turns: int) -> None:
    """An abort a few turns of the event loop after a call fails the call, and leaves nothing at the
    gate of the server's pool, where younger searches would wait for it."""
    async with pair() as servers:
        branch = Branch(ROOT, 0, PROMPT, 3, 64, 1)
        call = asyncio.create_task(servers.engine.expand("oak", [branch], Sampling()))
        for _ in range(turns + 1):
            await asyncio.sleep(0)
        await servers.engine.abort("oak")
        with pytest.raises(EngineError, match="tree 'oak' was aborted"):
            await call
        (gate,) = servers.engine._sampler.gates._gates.values() or [RoundGate()]
        assert not gate._needs
        assert not servers.engine._searches


@pytest.mark.timeout(120)
async def test_who_waits_for_a_server_that_stands_still_goes_on() -> None:
    """Requests to a frozen server are given up once that is noticed, and sent again later."""
    async with pair(stall_seconds=0.3, probe_seconds=0.1) as servers:
        undisturbed = await servers.grow("calm")
        servers.policy.still = True
        growing = asyncio.create_task(servers.grow("oak"))
        while not servers.engine._policy.waiting:
            await asyncio.sleep(0.01)
        servers.policy.still = False
        assert (await growing).digest == undisturbed.digest


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["dead", "still", "at fault"])
@pytest.mark.parametrize("who", ["policy", "reward"])
async def test_a_deadline_is_kept_whatever_a_server_does(who: str, how: str) -> None:
    """The search ends by its deadline and leaves nothing in the engine."""
    async with pair() as servers:
        victim = servers.victim(who)
        if how == "dead":
            await victim.kill()
        victim.still, victim.faults = how == "still", 10**9 if how == "at fault" else 0
        outcome = await servers.grow("oak", deadline=0.3)
        assert outcome.stop_reason is StopReason.DEADLINE
        assert not servers.engine._searches
        victim.still = False


@pytest.mark.timeout(120)
async def test_a_search_waits_no_longer_than_it_is_told_to() -> None:
    """After ``recovery_seconds`` a waiting search fails with EngineDown."""
    async with pair(recovery_seconds=0.1) as servers:
        await servers.policy.kill()
        with pytest.raises(EngineDown, match="no policy server answers"):
            await servers.grow("oak")


@pytest.mark.timeout(120)
async def test_what_is_left_of_a_tree_is_seen_to_afterwards() -> None:
    """A reply waits for neither a frozen server's step nor its abort; the abort is sent later."""
    paths: list[str] = []
    async with pair(probe_seconds=0.3) as servers:
        meddle = servers.policy._meddle

        async def note_path(path: str) -> int:
            paths.append(path)
            return await meddle(path)

        servers.policy._meddle = note_path  # type: ignore[method-assign]
        servers.policy.still = True
        outcome = await servers.grow("oak", deadline=0.2)
        assert (outcome.stop_reason, outcome.stats.cost_known) == (StopReason.DEADLINE, False)
        completion = PlainCompletion((1, 2, 3), limit=8, piece=8, seed=1, seconds=0.1)
        with pytest.raises(ApiError, match="before any of the reply"):
            await complete(completion, servers.engine, "elm", lambda _: None)
        while servers.engine._ending:
            await asyncio.sleep(0.01)
        assert "/abort_request" in paths
        servers.policy.still = False


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_who_stands_still_is_noticed_and_who_is_busy_is_not() -> None:
    """A frozen server is marked down after ``stall_seconds``; one that answers in time is not."""
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
    """A server without requests is not counted as silent."""
    replica = Replica("http://nowhere", ServerTimes(connect=1, answer=1, probe=1, stall=0.0))
    assert replica.silent_seconds() == 0
    await replica.close()
