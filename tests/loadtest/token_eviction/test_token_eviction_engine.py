"""Backtracking searches in budgets of any size: what is read, what is held, what is drawn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.token_allocation import Floors
from loadtest.token_eviction.token_eviction_engine import TokenEvictionEngine
from loadtest.token_eviction.token_eviction_policies import EXTRACTIVE, TOKEN_EVICTION
from search.counters import Counters
from search.engine import Branch, EngineError, Hint, PrefixTooLong, Sampling, Step, Trajectory
from search.tree import ROOT, Finish, node_seed
from tests.loadtest.token_eviction import support
from tests.loadtest.token_eviction.hash_reader import HashReader
from tests.runtime.hash_model import naive_step
from tests.runtime.tiny_models import make_checkpoint

LIMIT = 8
LONGEST = 60
PROMPT = tuple(range(1, 13))
STEPS = Sampling(temperature=0.9, top_p=0.95, max_step_tokens=LIMIT)
ENDLESS = Sampling(stop=(), max_step_tokens=LIMIT)
"""Steps have exactly ``limit`` tokens, unless the reply ends."""


def engine_in(kv_policy: str, kv_tokens: int, share: float = 1.0) -> TokenEvictionEngine:
    """An engine with a budget of ``kv_tokens``, on a hash model."""
    reader: Any = HashReader()
    others: Any = SimpleNamespace(hint=lambda *_: None)
    floors = Floors(0.05, 3, 2)
    return TokenEvictionEngine(
        reader, others, PROMPT, kv_policy, kv_tokens, share=share, floors=floors
    )


def draw_round(
    engine: TokenEvictionEngine, branches: Sequence[Branch], sampling: Sampling = ENDLESS
) -> list[Step]:
    """Draw a round and check the cache afterwards."""
    steps = asyncio.run(engine.expand("tree", branches, sampling))
    cache = engine.held
    assert cache.count <= engine.spent.kv_tokens_peak <= cache.capacity
    for name, block in cache.blocks.items():
        assert block.kv.shape[-2] == len(block.there)
        places = cache.path(name).places
        assert np.all(np.diff(places) > 0)
        assert len(places) == 0 or places[-1] < block.end
    return steps


@dataclass
class Searching:
    """A search that expands open nodes, two at a time, by random rewards; it backtracks often and
    prunes some nodes."""

    engine: TokenEvictionEngine
    draw: random.Random
    paths: dict[int, tuple[int, ...]] = field(default_factory=lambda: {ROOT: PROMPT})
    reward: dict[int, float] = field(default_factory=lambda: {ROOT: 0.5})
    open: set[int] = field(default_factory=lambda: {ROOT})
    history: list[tuple[Branch, Step]] = field(default_factory=list)
    fresh: dict[int, float] = field(default_factory=dict)

    def round(self) -> None:
        """Draw three children of each of the two best open nodes."""
        ahead = sorted(self.open, key=lambda node: (-self.reward[node], node))
        active, dead = ahead[:2], ahead[12:]
        self.open -= {*active, *dead}
        self.engine.hint("tree", Hint(self.fresh, tuple(active), tuple(dead), tuple(ahead[:12])))
        branches = []
        for parent in active:
            for child in range(3):
                node = len(self.paths) + len(branches)
                seed = node_seed(1, "test", (parent, child))
                branches.append(Branch(parent, child, self.paths[parent], seed, LIMIT, node))
        self.fresh = {}
        for branch, step in zip(branches, draw_round(self.engine, branches, STEPS), strict=True):
            self.paths[branch.node] = branch.tokens + step.tokens
            self.reward[branch.node] = round(self.draw.random(), 4)
            if step.finish is not Finish.END:
                self.fresh[branch.node] = self.reward[branch.node]
                if len(self.paths[branch.node]) + LIMIT <= LONGEST:
                    self.open.add(branch.node)
            self.history.append((branch, step))

    def rounds(self, count: int) -> list[bool]:
        """Run up to ``count`` rounds; for each step whether a naive engine draws the same."""
        for _ in range(count):
            if self.open:
                self.round()
        return [step == naive_step(branch, STEPS) for branch, step in self.history]


def searching(kv_policy: str, kv_tokens: int, share: float = 1.0, seed: int = 0) -> Searching:
    """A search on an engine with a budget."""
    return Searching(engine_in(kv_policy, kv_tokens, share), random.Random(seed))


@pytest.mark.parametrize("kv_policy", TOKEN_EVICTION)
def test_with_room_for_everything_every_policy_draws_what_a_naive_engine_does(
    kv_policy: str,
) -> None:
    """Tokens, texts, log-probabilities and finishes are equal, bit for bit."""
    search = searching(kv_policy, 5_000)
    assert all(search.rounds(6))
    assert search.engine.spent.rehydrations == 0


@pytest.mark.slow
@pytest.mark.promise(
    "Token eviction stays within its budget, accounts correctly and touches no other tree; with "
    "rehydration steps read whole paths."
)
@settings(max_examples=20)
@given(
    kv_policy=st.sampled_from(TOKEN_EVICTION),
    kv_tokens=st.integers(LONGEST, 300),
    share=st.sampled_from([1.0, 0.5, 0.2]),
    seed=st.integers(0, 3),
)
def test_budgets_and_accounting_hold_whatever_the_policy(
    kv_policy: str, kv_tokens: int, share: float, seed: int
) -> None:
    """No pass holds more than the budget. A row reads each place once. With rehydration it reads
    the whole path, and every step is a naive engine's; without, only the token that a step starts
    from is computed again. Another tree has a budget of its own."""
    search, beside = searching(kv_policy, kv_tokens, share, seed), engine_in(kv_policy, kv_tokens)
    rehydrates = kv_policy in EXTRACTIVE and EXTRACTIVE[kv_policy].rehydrate

    def see(places: np.ndarray, rows: int) -> None:
        assert len(set(places)) == len(places)
        if rehydrates:
            assert sorted(places) == list(range(len(places)))
        else:
            assert rows == 1

    reader: Any = search.engine._reader
    reader.see = see
    same, cost = search.rounds(8), search.engine.spent
    assert all(same) or not rehydrates
    assert (cost.rehydrated_tokens > 0) == (cost.rehydrations > 0)
    assert rehydrates or cost.rehydrated_tokens == 0
    assert beside.held.count == len(PROMPT)


@pytest.mark.parametrize("kv_policy", ["extractive_never", "h2o", "tail_only"])
def test_without_what_was_given_up_other_steps_are_drawn(kv_policy: str) -> None:
    """A tight budget changes some steps, so that the comparisons above can fail."""
    assert not all(searching(kv_policy, 70, share=0.25).rounds(6))


@pytest.mark.parametrize(("kv_tokens", "first"), [(36, 3), (35, 2)])
def test_a_wave_is_what_fits(kv_tokens: int, first: int) -> None:
    """A prompt of 12 tokens and three steps of up to 8 need 36: in 35 two of them go first."""
    branches = [Branch(ROOT, i, PROMPT, i, LIMIT, i + 1) for i in range(3)]
    engine = engine_in("extractive", kv_tokens)
    assert len(engine._fitting(branches)) == first
    assert draw_round(engine, branches, STEPS) == [naive_step(branch, STEPS) for branch in branches]
    assert engine.active_peak <= kv_tokens


def test_equal_steps_are_held_once() -> None:
    """Two nodes with one seed below one node have equal steps: one block, until both are dead."""
    engine = engine_in("extractive", 500)
    branches = [Branch(ROOT, i, PROMPT, 5, LIMIT, i + 1) for i in range(2)]
    first, second = draw_round(engine, branches, STEPS)
    assert first == second
    cache = engine.held
    assert cache.block_of[2] == 1
    for dead, steps in ((3, 1), (1, 1), (2, 0)):
        engine.hint("tree", Hint(dead=(dead,)))
        assert cache.count == len(PROMPT) + steps * len(first.tokens)
    with pytest.raises(EngineError, match="node 2 has no KV"):
        draw_round(engine, [Branch(2, 0, (*PROMPT, *first.tokens), 1, LIMIT, 3)])


def family() -> tuple[TokenEvictionEngine, list[Branch]]:
    """An engine with step 1 below the prompt, 2 and 3 below 1; a branch below each of 2 and 3."""
    engine = engine_in("extractive", 200)
    (first,) = draw_round(engine, [Branch(ROOT, 0, PROMPT, 3, 6, 1)])
    above = PROMPT + first.tokens
    steps = draw_round(engine, [Branch(1, i, above, 10 + i, 5, 2 + i) for i in range(2)])
    assert [step.finish for step in (first, *steps)] == [Finish.LENGTH] * 3
    below = [Branch(2 + i, 0, above + steps[i].tokens, 24 + i, 4, 4 + i) for i in range(2)]
    return engine, below


def test_what_two_paths_miss_is_computed_once() -> None:
    """Three tokens of step 1 and two of step 3 were evicted; both paths are resumed at once: these
    five and the last token of each path are computed before the first token is drawn."""
    engine, below = family()
    for name, places in ((1, [2, 3, 5]), (3, [2, 3, 4])):
        engine.held.blocks[name].keep(np.array(places))
    before = engine.spent.prefilled_tokens
    assert draw_round(engine, below) == [naive_step(branch, ENDLESS) for branch in below]
    assert engine.spent.prefilled_tokens - before == 3 + 2 + 2
    assert (engine.spent.rehydrated_tokens, engine.spent.rehydrations) == (5, 2)


def test_attention_is_booked_where_it_was_paid() -> None:
    """A row pays to all places up to its own that are multiples of three. Checks what later steps
    paid to each token of the prompt and of step 1, and what step 1's tokens paid to each other."""
    engine, below = family()
    draw_round(engine, below)
    start, end = len(PROMPT), len(PROMPT) + 6
    rows = [*range(start, end), *2 * list(range(end, end + 5)), *2 * list(range(end + 5, end + 9))]
    assert {4, 5} <= engine.held.block_of.keys(), "every token of every step was read"

    def attention_paid(place: int, first: int, last: int) -> float:
        """The attention that rows from ``first`` to before ``last`` pay to a place."""
        here = [row for row in rows if max(first, place) <= row < last]
        return sum(1 / (row // 3 + 1) for row in here) if place % 3 == 0 else 0.0

    prompt, step = engine.held.blocks[ROOT], engine.held.blocks[1]
    far = end + 9
    assert prompt.later == pytest.approx(
        [attention_paid(place, start, far) for place in range(start)]
    )
    assert step.later == pytest.approx(
        [attention_paid(place, end, far) for place in range(start, end)]
    )
    assert step.within == pytest.approx(
        [attention_paid(place, start, end) for place in range(start, end)]
    )


def test_what_is_too_long_is_refused_with_both_sizes() -> None:
    """A path with its step is larger than the budget: nothing of the round is drawn."""
    engine = engine_in("extractive", 18)
    with pytest.raises(PrefixTooLong, match=r"12 tokens and a step of up to 8 .* 18"):
        draw_round(engine, [Branch(ROOT, i, PROMPT, 1, 7 + i, i + 1) for i in range(2)])
    assert engine.spent.decoded_tokens == 0


def test_the_last_token_of_the_longest_path_may_stand_beyond_the_budget() -> None:
    """That step is not held, since nothing can be drawn below it; a shorter one is."""
    engine = engine_in("extractive", 19)
    branches = [Branch(ROOT, i, PROMPT, 7 + i, LIMIT - i, i + 1) for i in range(2)]
    steps = draw_round(engine, branches)
    assert steps == [naive_step(branch, ENDLESS) for branch in branches]
    assert [len(step.tokens) for step in steps] == [8, 7]
    assert engine.held.block_of == {ROOT: ROOT, 2: 2}
    assert engine.held.count == engine.spent.kv_tokens_peak == 19


@pytest.mark.parametrize(("kv_tokens", "lowered"), [(LONGEST, True), (5_000, False)])
def test_floors_that_do_not_fit_are_lowered(kv_tokens: int, lowered: bool) -> None:
    """One path and its step fit the budget, floors of three tokens a block do not."""
    search = searching("extractive", kv_tokens)
    search.rounds(8)
    blocks = search.engine.held.blocks.values()
    assert any(len(block.there) < min(3, len(block.tokens)) for block in blocks) == lowered
    assert (search.engine.spent.rehydrated_tokens > 0) == lowered


async def test_costs_of_both_engines_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn and scored tokens add up; the engine is not exact, but its draws follow from seeds."""
    llama = make_checkpoint(tmp_path / "llama", initializer_range=0.05)
    engine, prompt = support.token_eviction(llama, "extractive", 200), support.PROMPT
    able = engine.capabilities
    assert (able.engine, able.exact, able.reproducible) == ("token_eviction", False, "seeded")
    branches = [Branch(ROOT, i, prompt, 7 + i, 10, i + 1) for i in range(2)]
    steps = await engine.expand("tree", branches, Sampling(stop=()))
    paths = [Trajectory(1, (steps[0].tokens,), (steps[0].text,))]
    assert await engine.score("tree", prompt, "", paths) == await support.reference(llama).score(
        "tree", prompt, "", paths
    )
    monkeypatch.setattr(engine._engine, "release", AsyncMock(return_value=Counters(prm_tokens=9)))
    cost = await engine.release("tree")
    lengths = [len(step.tokens) for step in steps]
    assert cost.decoded_tokens == sum(lengths)
    assert cost.prefilled_tokens == len(prompt) + 1
    assert cost.prm_tokens == 9
    assert len(prompt) + max(lengths) <= cost.kv_tokens_peak <= len(prompt) + sum(lengths)
