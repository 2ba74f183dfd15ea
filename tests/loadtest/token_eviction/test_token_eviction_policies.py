"""What goes, by hand: a prompt of four tokens and three steps of ten below it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.eviction_order import Infeasible
from kvpolicy.token_allocation import Floors
from loadtest.token_eviction.token_cache import CachedBlock, TokenCache
from loadtest.token_eviction.token_eviction_policies import (
    EXTRACTIVE,
    TOKEN_EVICTION,
    ExtractiveParams,
    ExtractivePolicy,
    TokenEvictionPolicy,
    policy_for,
)
from search.tree import ROOT

FLOORS = Floors(0.0, 3, 2)


def grown(
    name: str, capacity: int = 34, share: float = 1.0
) -> tuple[TokenCache, TokenEvictionPolicy]:
    """Steps 1, 2 and 3, all of them whole, under a policy."""
    held = TokenCache(capacity, np.arange(4))
    policy = policy_for(name, held, share=share, floors=FLOORS)
    held.restore(held[ROOT], np.arange(4))
    for node in (1, 2, 3):
        block = CachedBlock.of(ROOT, 4, 10 * node + np.arange(10))
        held.restore(block, np.arange(10))
        assert held.add(node, block)
        policy.add_block(node, ROOT, 10, 0.5)
    return held, policy


def there(held: TokenCache) -> dict[int, list[int]]:
    """What is held of each step, counted within it."""
    return {name: held[name].there.tolist() for name in held.blocks if name != ROOT}


def test_steps_off_the_path_share_what_it_leaves() -> None:
    """Six slots of 34 are wanted: the path takes 14, steps 2 and 3 weigh the same and get 7 each:
    the last two tokens, and of the others those attended to most, equal ones from the first."""
    held, policy = grown("extractive")
    held[2].later[[3, 6]] = 4.0, 5.0
    policy.enter([1])
    policy.fit(6)
    assert there(held) == {1: list(range(10)), 2: [0, 1, 2, 3, 6, 8, 9], 3: [0, 1, 2, 3, 4, 8, 9]}
    held.check()


def test_tail_only_keeps_the_most_recent() -> None:
    """Without heavy hitters seven tokens are the last seven."""
    held, policy = grown("extractive_tail")
    held[2].later[[3, 6]] = 4.0, 5.0
    policy.enter([1])
    policy.fit(6)
    assert there(held)[2] == there(held)[3] == list(range(3, 10))


def test_what_is_worth_more_keeps_more_and_nothing_comes_back() -> None:
    """Step 2 is worth more than 3. Once cut, both stay so when there is room again."""
    held, policy = grown("extractive")
    policy.transition({1: 0.5, 2: 0.9, 3: 0.1}, [], [])
    policy.enter([1])
    policy.fit(4)
    assert [held[2].held, held[3].held] == [10, 6]
    policy.fit(8)
    assert [held[2].held, held[3].held] == [9, 3]
    before = there(held)
    policy.fit(0)
    assert there(held) == before


@pytest.mark.parametrize(
    ("name", "kept"), [("extractive", [7, 5, 5]), ("extractive_never", [10, 5, 5])]
)
def test_a_path_that_is_come_back_to_counts_whole_or_as_it_is(name: str, kept: list[int]) -> None:
    """From step 2 on, cut to 5 tokens, with 8 slots wanted: if it comes back whole it leaves 12 for
    the others, of which step 3 has but 5; if it never does it leaves 17, and nothing goes."""
    held, policy = grown(name)
    policy.enter([1])
    policy.fit(10)
    assert [held[node].held for node in (1, 2, 3)] == [10, 5, 5]
    policy.enter([2])
    policy.fit(8)
    assert [held[node].held for node in (1, 2, 3)] == kept


def test_without_a_signal_it_does_not_matter() -> None:
    """Values that differ, and an estimator that does not know them: equal shares."""
    for name, equal in (("extractive", False), ("extractive_no_value", True)):
        held, policy = grown(name)
        policy.transition({1: 0.5, 2: 0.9, 3: 0.1}, [], [])
        policy.enter([1])
        policy.fit(6)
        assert (held[2].held == held[3].held) == equal


def test_a_path_that_does_not_fit_is_refused() -> None:
    """Floors give way, the path does not: 14 of 34 tokens leave 20."""
    held, policy = grown("extractive")
    policy.enter([1])
    policy.fit(20)
    assert there(held) == {1: list(range(10)), 2: [], 3: []}
    assert isinstance(policy, ExtractivePolicy)
    assert policy.lowered == 1
    with pytest.raises(Infeasible, match=r"budget: 13 tokens; .* need 14"):
        policy.fit(21)


@pytest.mark.parametrize(
    ("name", "prompt", "step"),
    [
        ("tail_only", [], [3, 4, 5, 6, 7, 8, 9]),
        ("streaming_llm", [0, 1, 2, 3], [7, 8, 9]),
        ("h2o", [1], [2, 5, 6, 7, 8, 9]),
        ("thinkv", [0, 1, 2, 3], list(range(10))),
    ],
)
def test_half_of_a_stream(name: str, prompt: list[int], step: list[int]) -> None:
    """Path 0-1 of 14 tokens becomes active and keeps 7; other steps are none of its business.

    H2O's heavy hitters are by attention from anywhere; ThinKV's least is more than the share.
    """
    held, policy = grown(name, share=0.5)
    held[ROOT].within[1] = 2.0
    held[1].within[2] = held[1].later[5] = 1.0
    policy.enter([1])
    assert held[ROOT].there.tolist() == prompt
    assert there(held) == {1: step, 2: list(range(10)), 3: list(range(10))}
    policy.enter([1])
    assert there(held)[1] == step, "the share is of the path, not of what is left"


@given(
    name=st.sampled_from(sorted(EXTRACTIVE)),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    draw=st.randoms(use_true_random=False),
    rooms=st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_pressure_after_pressure(
    name: str, sizes: list[int], draw: random.Random, rooms: list[float]
) -> None:
    """A random tree under one pressure after another: the path is left alone, what is wanted is
    free, nothing comes back, floors hold unless they were lowered, and tails stay to the last."""
    held = TokenCache(4 + sum(sizes), np.arange(4))
    policy = policy_for(name, held, share=1.0, floors=FLOORS)
    assert isinstance(policy, ExtractivePolicy)
    held.restore(held[ROOT], np.arange(4))
    for node, size in enumerate(sizes, 1):
        parent = draw.randrange(node)
        block = CachedBlock.of(parent, held.length(parent), np.full(size, node))
        block.later[:] = [draw.random() for _ in range(size)]
        held.restore(block, np.arange(size))
        held.add(node, block)
        policy.add_block(node, parent, size, draw.random())
        policy.add_attention(parent, draw.random(), 1)
    policy.transition({node: draw.random() for node in held.blocks if draw.random() < 0.5}, [], [])
    leaf = draw.randrange(len(sizes) + 1)
    policy.enter([leaf])
    path = set(held.chain(leaf))
    needed = sum(held[block].held for block in path)
    for share in sorted(rooms):
        before = {block: set(held[block].there) for block in held.blocks}
        room, lowered = int(share * (held.pool.capacity - needed)), policy.lowered
        policy.fit(room)
        assert held.pool.available >= room
        held.check()
        for block, was in before.items():
            now = held[block].there
            assert set(now) <= was
            assert block not in path or set(now) == was
            floor = min(FLOORS.tokens, len(was))
            assert len(now) >= floor or policy.lowered > lowered
            tail = sorted(was)[-min(FLOORS.tail, len(now)) :] if len(now) else []
            assert set(tail) <= set(now)


def test_beyond_the_budget_a_stream_policy_drops_what_was_used_longest_ago() -> None:
    """Step 3 was active last, then 2, now 1: for six tokens step 3 goes whole."""
    held, policy = grown("tail_only", capacity=36)
    for leaf in (3, 2, 1):
        policy.enter([leaf])
    policy.fit(6)
    assert there(held) == {1: list(range(10)), 2: list(range(10)), 3: []}
    with pytest.raises(Infeasible, match="active paths need 14"):
        policy.fit(23)


def test_names() -> None:
    """Every variant of the extractive mode has one that never rehydrates."""
    assert len(TOKEN_EVICTION) == 2 * 9 + 4
    assert EXTRACTIVE["extractive"] == ExtractiveParams()
    assert not EXTRACTIVE["extractive_no_distance_never"].rehydrate
