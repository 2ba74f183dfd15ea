"""Searches in a SGLang pool too small for their rounds draw the same trees, on the CPU."""

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
from tests.runtime.sglang.real_searches import grow, options
from tests.runtime.sglang.support import START_SECONDS, SharedServers, stock

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
]

POOL_TOKENS = 400
"""Room for two of the paths and six steps at their limit, where a round draws 16 steps."""
QUESTIONS = ("Use 4 9 10 13 to make 24.", "Use 3 6 25 50 75 to make 431.")
"""Their steps have 9 to 16 tokens, so some exceed any length that is requested first."""
POLICIES = ("rebase", "ets", "best_first")
SPEC = {"width": 16, "max_step_tokens": 48, "max_depth": 6}
"""Its paths all fit the pool."""


@dataclass(slots=True)
class RequestCounts:
    """Counts of requests: tokens requested at first in each round, rounds that had to wait, and
    steps that went on in a second request."""

    at_once: list[int] = field(default_factory=list)
    held_back: int = 0
    went_on: int = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> RequestCounts:
    """Counts requests from the start of the test."""
    totals, at_once, body = RequestCounts(), RoundGate.tokens_at_once, StepRequest.body
    enter = RoundGate.enter

    def look(gate: RoundGate, branches: list[Branch]) -> int:
        totals.at_once.append(at_once(gate, branches))
        return totals.at_once[-1]

    def count(request: StepRequest, note: Mapping[str, Any]) -> dict[str, Any]:
        totals.went_on += bool(request.tokens)
        return body(request, note)

    async def wait(gate: RoundGate, tree: str, need: int) -> None:
        entering = asyncio.create_task(enter(gate, tree, need))
        await asyncio.sleep(0)
        totals.held_back += not entering.done()
        await entering

    monkeypatch.setattr(RoundGate, "enter", wait)
    monkeypatch.setattr(RoundGate, "tokens_at_once", look)
    monkeypatch.setattr(StepRequest, "body", count)
    return totals


@pytest_asyncio.fixture(loop_scope="session")
async def small() -> AsyncIterator[LaunchedServer]:
    """A policy server with POOL_TOKENS tokens of KV."""
    server = LaunchedServer(
        replace(stock(), kv_tokens=POOL_TOKENS, seeds=True, kv_policy="arborkv")
    )
    try:
        server.start()
        await server.ready(START_SECONDS)
        yield server
    finally:
        await asyncio.to_thread(server.stop)


async def grow_all(engine: SglangEngine) -> list[Outcome]:
    """Run each policy's search of each question, all at once."""
    searches = [
        grow(engine, question, f"{policy}/{number}", policy=policy, **SPEC)
        for policy in POLICIES
        for number, question in enumerate(QUESTIONS)
    ]
    return await asyncio.gather(*searches)


@pytest.mark.promise(
    "Searches on SGLang grow the same trees in a pool too small for their rounds as in one that "
    "holds them all."
)
async def test_a_small_pool_grows_the_same_trees(
    yard: SharedServers, small: LaunchedServer, counts: RequestCounts
) -> None:
    """Rounds wait for room and steps take two requests, yet every step and answer equals that of a
    pool that holds all, where neither happens."""
    policy, reward = await yard.have("policy", "reward")
    async with closing(await SglangEngine.start(options([policy], [reward]))) as ample:
        expected = await grow_all(ample)
    assert set(counts.at_once) == {SPEC["max_step_tokens"]}
    assert counts.went_on == counts.held_back == 0
    counts.at_once.clear()
    async with closing(await SglangEngine.start(options([small], [reward]))) as engine:
        outcomes = await grow_all(engine)
    assert min(counts.at_once) < SPEC["max_step_tokens"]
    assert counts.went_on > 0
    assert counts.held_back > 0
    assert sum(outcome.stats.generated_tokens for outcome in expected) > 5 * POOL_TOKENS
    for outcome, reference in zip(outcomes, expected, strict=True):
        assert steps_of(outcome) == steps_of(reference)
        assert outcome.answer == reference.answer
