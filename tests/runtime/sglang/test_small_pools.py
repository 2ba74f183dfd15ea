"""Searches in a pool of SGLang's that does not hold their rounds, on the CPU: what they draw."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import pytest_asyncio

from loadtest.searches import steps_of
from runtime.sglang.launched_server import LaunchedServer
from runtime.sglang.round_gate import RoundGate
from runtime.sglang.sglang_engine import SglangEngine
from runtime.sglang.step_request import StepRequest
from search.engine import Branch
from search.outcome import Outcome
from tests.closing import closing
from tests.runtime.sglang.real_searches import grown, options
from tests.runtime.sglang.support import START_SECONDS, SharedServers, stock

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
]

POOL_TOKENS = 400
"""Room for two of the paths and for six steps at their limit, of the 16 that a round draws."""
QUESTIONS = ("Use 4 9 10 13 to make 24.", "Use 3 6 25 50 75 to make 431.")
"""Steps of 9 to 16 tokens: whatever length is asked for at first, some go on."""
POLICIES = ("rebase", "ets", "best_first")
SPEC = {"width": 16, "max_step_tokens": 48, "max_depth": 6}
"""No path is longer than fits the pool."""


@dataclass(slots=True)
class Asked:
    """What is asked for: how much of the steps of each round at first, and how many went on; how
    many rounds had to wait."""

    at_once: list[int] = field(default_factory=list)
    held_back: int = 0
    went_on: int = 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Counts from here on."""
    seen, at_once, body = Asked(), RoundGate.tokens_at_once, StepRequest.body
    enter = RoundGate.enter

    def look(gate: RoundGate, branches: list[Branch]) -> int:
        seen.at_once.append(at_once(gate, branches))
        return seen.at_once[-1]

    def count(request: StepRequest, note: Mapping[str, Any]) -> dict[str, Any]:
        seen.went_on += bool(request.tokens)
        return body(request, note)

    async def wait(gate: RoundGate, tree: str, need: int) -> None:
        entering = asyncio.create_task(enter(gate, tree, need))
        await asyncio.sleep(0)
        seen.held_back += not entering.done()
        await entering

    monkeypatch.setattr(RoundGate, "enter", wait)
    monkeypatch.setattr(RoundGate, "tokens_at_once", look)
    monkeypatch.setattr(StepRequest, "body", count)
    return seen


@pytest_asyncio.fixture(loop_scope="session")
async def small() -> AsyncIterator[LaunchedServer]:
    """A policy's server with hardly any KV."""
    server = LaunchedServer(
        replace(stock(), kv_tokens=POOL_TOKENS, seeds=True, kv_policy="arborkv")
    )
    try:
        server.start()
        await server.ready(START_SECONDS)
        yield server
    finally:
        await asyncio.to_thread(server.stop)


async def all_grown(engine: SglangEngine) -> list[Outcome]:
    """Each policy's search of each question, all at once."""
    searches = [
        grown(engine, question, f"{policy}/{number}", policy=policy, **SPEC)
        for policy in POLICIES
        for number, question in enumerate(QUESTIONS)
    ]
    return await asyncio.gather(*searches)


@pytest.mark.promise(
    "On SGLang a pool that does not hold the rounds of several searches grows the trees of one "
    "that does"
)
async def test_a_small_pool_grows_the_same_trees(
    yard: SharedServers, small: LaunchedServer, asked: Asked
) -> None:
    """Where rounds wait for room and steps are asked for in two requests, every step and answer is
    the one of a pool that holds all; there, none of this happens."""
    policy, reward = await yard.have("policy", "reward")
    async with closing(await SglangEngine.start(options([policy], [reward]))) as ample:
        known = await all_grown(ample)
    assert set(asked.at_once) == {SPEC["max_step_tokens"]}
    assert asked.went_on == asked.held_back == 0
    asked.at_once.clear()
    async with closing(await SglangEngine.start(options([small], [reward]))) as engine:
        found = await all_grown(engine)
    assert min(asked.at_once) < SPEC["max_step_tokens"]
    assert asked.went_on > 0
    assert asked.held_back > 0
    assert sum(one.stats.generated_tokens for one in known) > 5 * POOL_TOKENS
    for one, other in zip(found, known, strict=True):
        assert steps_of(one) == steps_of(other)
        assert one.answer == other.answer
