"""Trajectories leave the reward model room for its tags."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx2

from search.context_limit import context_for
from search.spec import SearchSpec
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import question


def test_room_by_hand() -> None:
    """One tag per step where rewards are read, none where they are not."""
    capabilities = ScriptedEngine(context_tokens=100).capabilities
    assert context_for(SearchSpec(policy="rebase", max_depth=7), capabilities) == 93
    assert context_for(SearchSpec(policy="self_consistency", max_depth=7), capabilities) == 100
    spec = SearchSpec(policy="self_consistency", max_depth=7, vote="best_min")
    assert context_for(spec, capabilities) == 93
    assert context_for(SearchSpec(max_depth=200), capabilities) == 1


def test_a_reward_model_may_read_less_than_its_policy_writes() -> None:
    """Behind servers the two have contexts of their own: rewards end a trajectory at 60 tokens and
    7 tags, a policy with less room at its own context."""
    capabilities = ScriptedEngine(context_tokens=100).capabilities
    narrow = replace(capabilities, scored_tokens=67)
    assert context_for(SearchSpec(policy="rebase", max_depth=7), narrow) == 60
    assert context_for(SearchSpec(policy="self_consistency", max_depth=7), narrow) == 100
    assert context_for(SearchSpec(max_depth=7), replace(capabilities, scored_tokens=500)) == 100


async def test_no_path_with_its_tags_outgrows_the_context(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """A model that never ends: the longest scored path, with a tag per step, fits the context."""
    engine.context_tokens = 120
    engine.say = lambda branch: f"{len(branch.tokens)} on\n\n"
    body = {"model": "sprig", "messages": question(), "search": {"width": 2, "max_depth": 50}}
    async with asyncio.timeout(20):
        await http.post("/v1/chat/completions", json=body)
    prompt = len(engine.expanded[0][0].tokens)
    longest = max(
        prompt + sum(map(len, t.steps)) + len(t.steps) for call in engine.scored for t in call
    )
    assert longest <= engine.context_tokens
