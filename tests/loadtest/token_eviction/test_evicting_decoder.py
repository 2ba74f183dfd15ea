"""Searches that go back, in budgets of any size: what is read, what is held, what is drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.token_allocation import Floors
from loadtest.token_eviction.evicting_decoder import EvictingDecoder
from loadtest.token_eviction.sparse_forward import SparseInput
from loadtest.token_eviction.token_eviction_options import TokenEvictionOptions
from loadtest.token_eviction.token_eviction_policies import (
    EXTRACTIVE,
    TOKEN_EVICTION,
    ExtractivePolicy,
)
from search.engine import Branch, EngineError, Hint, PrefixTooLong, Sampling, Step
from search.tree import ROOT, Finish, node_seed
from tests.loadtest.token_eviction.hash_reader import HashReader
from tests.runtime.hash_model import Letters, naive_step

LIMIT = 8
LONGEST = 60
PROMPT = tuple(range(1, 13))
STEPS = Sampling(temperature=0.9, top_p=0.95, max_step_tokens=LIMIT)


@dataclass
class Searching:
    """A search that expands open nodes, two at a time, by rewards that it makes up; it goes back
    often and gives up some nodes."""

    drawing: EvictingDecoder
    draw: random.Random
    paths: dict[int, tuple[int, ...]] = field(default_factory=lambda: {ROOT: PROMPT})
    reward: dict[int, float] = field(default_factory=lambda: {ROOT: 0.5})
    open: set[int] = field(default_factory=lambda: {ROOT})
    drawn: list[tuple[Branch, Step]] = field(default_factory=list)
    fresh: dict[int, float] = field(default_factory=dict)

    def round(self) -> None:
        """Three children of each of the best two."""
        ahead = sorted(self.open, key=lambda node: (-self.reward[node], node))
        active, dead = ahead[:2], ahead[12:]
        self.open -= {*active, *dead}
        self.drawing.hint(Hint(self.fresh, tuple(active), tuple(dead), tuple(ahead[:12])))
        branches = []
        for parent in active:
            for child in range(3):
                node = len(self.paths) + len(branches)
                seed = node_seed(1, "test", (parent, child))
                branches.append(Branch(parent, child, self.paths[parent], seed, LIMIT, node))
        steps = self.drawing.expand(branches, STEPS)
        self.fresh = {}
        for branch, step in zip(branches, steps, strict=True):
            self.paths[branch.node] = branch.tokens + step.tokens
            self.reward[branch.node] = round(self.draw.random(), 4)
            if step.finish is not Finish.END:
                self.fresh[branch.node] = self.reward[branch.node]
                if len(self.paths[branch.node]) + LIMIT <= LONGEST:
                    self.open.add(branch.node)
            self.drawn.append((branch, step))


def searching(kv_policy: str, kv_tokens: int, share: float = 1.0, seed: int = 0) -> Searching:
    """A search in a budget."""
    options = TokenEvictionOptions(kv_policy, kv_tokens, share, Floors(0.05, 3, 2))
    return Searching(EvictingDecoder(HashReader(), Letters(), options, PROMPT), random.Random(seed))  # type: ignore[arg-type]


def must_be_right(search: Searching) -> None:
    """Every slot in one place, the budget kept, positions ascending."""
    drawing = search.drawing
    drawing.check()
    held = drawing.held
    assert held.count == sum(block.held for block in held.blocks.values())
    assert drawing.spent.kv_tokens_peak <= held.pool.capacity
    for name in held.blocks:
        _, places = held.slots(held.chain(name))
        assert np.all(np.diff(places) > 0)
        assert len(places) == 0 or places[-1] < held.length(name)


@pytest.mark.parametrize("kv_policy", TOKEN_EVICTION)
def test_with_room_for_everything_every_policy_draws_what_a_naive_engine_does(
    kv_policy: str,
) -> None:
    """Tokens, texts, likelihoods and ends, to the last bit of a hash."""
    search = searching(kv_policy, 5_000)
    for _ in range(6):
        search.round()
        must_be_right(search)
    assert [step for _, step in search.drawn] == [
        naive_step(branch, STEPS) for branch, _ in search.drawn
    ]
    assert search.drawing.spent.rehydrations == 0


@pytest.mark.promise(
    "Token eviction: active paths whole where they come back, the budget kept, the accounting "
    "right, private to its tree"
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
    """No pass holds more than the budget. What a row reads is in order and ends with itself; with
    rehydration it is the whole path and every step a naive engine's; without, nothing is ever
    computed again but the token that a step starts from."""
    search = searching(kv_policy, kv_tokens, share, seed)
    drawing = search.drawing
    whole = kv_policy in EXTRACTIVE and EXTRACTIVE[kv_policy].rehydrate

    def see(reading: SparseInput) -> None:
        assert np.all(np.diff(reading.places) > 0)
        assert np.all(np.diff(reading.positions) > 0)
        assert set(reading.writes) <= set(reading.keys)
        assert drawing.held.count <= kv_tokens
        if whole:
            assert reading.places.tolist() == list(range(len(reading.places)))
        else:
            assert len(reading.tokens) == 1

    drawing._forward.see = see  # type: ignore[attr-defined]
    for _ in range(8):
        if not search.open:
            break
        search.round()
        must_be_right(search)
    same = [step == naive_step(branch, STEPS) for branch, step in search.drawn]
    assert all(same) or not whole
    assert (drawing.spent.rehydrated_tokens > 0) == (drawing.spent.rehydrations > 0)
    assert whole or drawing.spent.rehydrated_tokens == 0


@pytest.mark.parametrize("kv_policy", ["extractive_never", "h2o", "tail_only"])
def test_without_what_was_given_up_other_steps_are_drawn(kv_policy: str) -> None:
    """A tight budget shows: the comparisons above are not between constants."""
    search = searching(kv_policy, 70, share=0.25)
    for _ in range(6):
        search.round()
    assert any(step != naive_step(branch, STEPS) for branch, step in search.drawn)


def test_a_wave_is_what_fits() -> None:
    """Twelve tokens and three steps of up to eight are 36: in 35 two of them go first."""
    branches = [Branch(ROOT, i, PROMPT, i, LIMIT, i + 1) for i in range(3)]
    for kv_tokens, first in ((36, 3), (35, 2)):
        drawing = searching("extractive", kv_tokens).drawing
        assert len(drawing._wave(branches)) == first
        steps = drawing.expand(branches, STEPS)
        assert steps == [naive_step(branch, STEPS) for branch in branches]
        assert drawing.spent.active <= kv_tokens


def test_equal_steps_are_held_once() -> None:
    """Two nodes with one seed say the same below the same node: one block, until both are dead."""
    drawing = searching("extractive", 500).drawing
    branches = [Branch(ROOT, i, PROMPT, 5, LIMIT, i + 1) for i in range(2)]
    first, second = drawing.expand(branches, STEPS)
    assert first == second
    held = drawing.held
    assert held.count == len(PROMPT) + len(first.tokens)
    assert held.block_of(2) == 1
    drawing.hint(Hint(dead=(1,)))
    assert held.count == len(PROMPT) + len(first.tokens)
    drawing.hint(Hint(dead=(2,)))
    assert held.count == len(PROMPT)
    with pytest.raises(EngineError, match="node 2 has no KV"):
        drawing.expand([Branch(2, 0, (*PROMPT, *first.tokens), 1, LIMIT, 3)], STEPS)


ENDLESS = Sampling(stop=(), max_step_tokens=LIMIT)
"""Steps of just the tokens asked for, unless the reply ends."""


def family() -> tuple[EvictingDecoder, list[Branch]]:
    """Step 1 below the prompt, 2 and 3 below step 1; a child for each of the latter two."""
    drawing = searching("extractive", 200).drawing
    (one,) = drawing.expand([Branch(ROOT, 0, PROMPT, 3, 6, 1)], ENDLESS)
    above = PROMPT + one.tokens
    twins = [Branch(1, i, above, 10 + i, 5, 2 + i) for i in range(2)]
    steps = drawing.expand(twins, ENDLESS)
    assert [step.finish for step in (one, *steps)] == [Finish.LENGTH] * 3
    below = [Branch(2 + i, 0, above + steps[i].tokens, 24 + i, 4, 4 + i) for i in range(2)]
    return drawing, below


def test_what_two_paths_miss_is_computed_once() -> None:
    """Three tokens of step 1 and two of step 3 were given up; both paths come back at once: five
    tokens and the last of each path are computed, in one pass before the first token is drawn."""
    drawing, below = family()
    for name, gone in ((1, [0, 1, 4]), (3, [0, 1])):
        drawing.held.drop(drawing.held[name], np.array(gone))
    before = drawing.spent.prefilled_tokens
    steps = drawing.expand(below, ENDLESS)
    assert steps == [naive_step(branch, ENDLESS) for branch in below]
    assert drawing.spent.prefilled_tokens - before == 3 + 2 + 2
    assert (drawing.spent.rehydrated_tokens, drawing.spent.rehydrations) == (5, 2)
    drawing.check()


def test_attention_is_booked_where_it_was_paid() -> None:
    """A row pays to all places before it that are multiples of three, itself included: what later
    steps paid to each token of the prompt and of step 1, and step 1's own tokens to each other."""
    drawing, below = family()
    drawing.expand(below, ENDLESS)
    start, end = len(PROMPT), len(PROMPT) + 6
    rows = [*range(start, end), *2 * list(range(end, end + 5)), *2 * list(range(end + 5, end + 9))]
    ended = [step for step in (4, 5) if drawing.held.block_of(step) is None]
    assert not ended, "every token of every step was fed"

    def paid(place: int, first: int, last: int) -> float:
        """What rows from ``first`` to before ``last`` pay to a place."""
        here = [row for row in rows if max(first, place) <= row < last]
        return sum(1 / (row // 3 + 1) for row in here) if place % 3 == 0 else 0.0

    prompt, one = drawing.held[ROOT], drawing.held[1]
    far = end + 9
    assert prompt.later == pytest.approx([paid(place, start, far) for place in range(start)])
    assert one.later == pytest.approx([paid(place, end, far) for place in range(start, end)])
    assert one.within == pytest.approx([paid(place, start, end) for place in range(start, end)])


def test_what_is_too_long_is_refused_with_both_sizes() -> None:
    """A prompt, and a path with its step; nothing is lost by it."""
    with pytest.raises(PrefixTooLong, match="12 tokens does not fit kv_tokens 11"):
        searching("extractive", 11)
    drawing = searching("extractive", 18).drawing
    with pytest.raises(PrefixTooLong, match=r"12 tokens and a step of up to 8 .* 18"):
        drawing.expand([Branch(ROOT, 0, PROMPT, 1, LIMIT, 1)], STEPS)
    drawing.check()


def test_the_last_token_of_the_longest_path_may_stand_beyond_the_budget() -> None:
    """Nothing can be drawn from there, so nothing of that step is held; a shorter one goes on."""
    drawing = searching("extractive", 19).drawing
    branches = [Branch(ROOT, i, PROMPT, 7 + i, LIMIT - i, i + 1) for i in range(2)]
    steps = drawing.expand(branches, ENDLESS)
    assert steps == [naive_step(branch, ENDLESS) for branch in branches]
    assert [len(step.tokens) for step in steps] == [8, 7]
    assert drawing.held.block_of(1) is None
    assert drawing.held.block_of(2) == 2
    assert drawing.held.count == drawing.spent.kv_tokens_peak == 19
    drawing.check()


def test_a_round_that_is_stopped_leaves_nothing_behind() -> None:
    """The third pass is not made; the slots of what was under way are free again."""
    drawing = searching("extractive", 100).drawing
    calls = iter(range(100))

    def must_go_on() -> None:
        if next(calls) == 2:
            raise EngineError("stopped")

    with pytest.raises(EngineError, match="stopped"):
        drawing.expand([Branch(ROOT, 0, PROMPT, 1, LIMIT, 1)], STEPS, must_go_on)
    drawing.check()
    assert drawing.held.count == len(PROMPT)


def test_floors_that_do_not_fit_are_lowered_and_counted() -> None:
    """One path and its step fit the budget, floors of three tokens a block do not."""
    search = searching("extractive", LONGEST)
    for _ in range(8):
        search.round()
    policy = search.drawing.policy
    assert isinstance(policy, ExtractivePolicy)
    assert policy.lowered > 0
    assert search.drawing.spent.rehydrated_tokens > 0
    roomy = searching("extractive", 5_000)
    roomy.round()
    assert isinstance(roomy.drawing.policy, ExtractivePolicy)
    assert roomy.drawing.policy.lowered == 0
