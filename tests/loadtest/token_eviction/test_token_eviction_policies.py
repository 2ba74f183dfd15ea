"""Which tokens are evicted, by hand: a prompt of four tokens and three steps of ten below it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
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
    StreamPolicy,
    policy_for,
)
from search.engine import Hint
from search.tree import ROOT

FLOORS = Floors(0.0, 3, 2)


def block(parent: int, start: int, tokens: np.ndarray) -> CachedBlock:
    """A block of tokens from position ``start`` whose keys are their positions."""
    places = torch.arange(start, start + len(tokens))
    return CachedBlock(parent, start, tokens, places[:, None], np.zeros(len(tokens)))


def cache_under(
    name: str, capacity: int = 34, share: float = 1.0
) -> tuple[TokenCache, ExtractivePolicy | StreamPolicy]:
    """A cache with steps 1, 2 and 3, all of them whole, and the policy ``name`` over it."""
    cache = TokenCache(capacity, block(-1, 0, np.arange(4)))
    policy = policy_for(name, cache, share=share, floors=FLOORS)
    for node in (1, 2, 3):
        assert cache.add(node, block(ROOT, 4, 10 * node + np.arange(10)))
        policy.add_block(node, ROOT, 10, 0.5)
    return cache, policy


def there(cache: TokenCache) -> dict[int, list[int]]:
    """The held places of each step, counted within it; checks that keys are these tokens'."""
    steps = {name: step for name, step in cache.blocks.items() if name != ROOT}
    for step in steps.values():
        assert (step.kv[:, 0].numpy() - step.start).tolist() == step.there.tolist()
    return {name: step.there.tolist() for name, step in steps.items()}


def sizes(cache: TokenCache) -> list[int]:
    """The number of held tokens of each step."""
    return [len(places) for places in there(cache).values()]


def test_a_block_brings_what_an_equal_one_misses() -> None:
    """Nodes 1 and 4 have equal steps: one block, whole again, until both are dead."""
    cache, _ = cache_under("extractive")
    cache.blocks[1].keep(np.array([2, 5]))
    assert not cache.add(4, block(ROOT, 4, 10 + np.arange(10)))
    assert (there(cache)[1], cache.block_of[4]) == (list(range(10)), 1)
    assert cache.mark_dead([1, 7]) == []
    assert cache.mark_dead([4]) == [1]
    assert (list(cache.blocks), cache.count) == ([ROOT, 2, 3], 24)


def test_positions_are_put_where_they_belong() -> None:
    """A block takes its own positions out of a path's, and replaces those it has."""
    cache, _ = cache_under("extractive")
    cache.blocks[1].keep(np.array([0, 4, 9]))
    for name in (ROOT, 1):
        cache.blocks[name].put(np.array([3, 6, 13]), torch.tensor([[3], [6], [13]]))
    assert there(cache)[1] == [0, 2, 4, 9]
    assert cache.path(1).places.tolist() == [0, 1, 2, 3, 4, 6, 8, 13]
    assert cache.path(1).kv[:, 0].tolist() == cache.path(1).places.tolist()


def test_steps_off_the_path_share_what_it_leaves() -> None:
    """Six slots of 34 are needed: the path takes 14, steps 2 and 3 weigh the same and get 7 each:
    the last two tokens, and those with the most attention, of equal ones the first."""
    cache, policy = cache_under("extractive")
    cache.blocks[2].later[[3, 6]] = 4.0, 5.0
    policy.enter([1])
    policy.fit(28)
    assert there(cache) == {1: list(range(10)), 2: [0, 1, 2, 3, 6, 8, 9], 3: [0, 1, 2, 3, 4, 8, 9]}


def test_tail_only_keeps_the_most_recent() -> None:
    """Without heavy hitters the seven kept tokens are the last seven."""
    cache, policy = cache_under("extractive_tail")
    cache.blocks[2].later[[3, 6]] = 4.0, 5.0
    policy.enter([1])
    policy.fit(28)
    assert there(cache)[2] == there(cache)[3] == list(range(3, 10))


def test_what_is_worth_more_keeps_more_and_nothing_comes_back() -> None:
    """Step 2 is worth more than 3. Once evicted, tokens stay away when there is room again."""
    cache, policy = cache_under("extractive")
    policy.transition(Hint({1: 0.5, 2: 0.9, 3: 0.1}))
    policy.enter([1])
    policy.fit(30)
    assert sizes(cache) == [10, 10, 6]
    policy.fit(26)
    assert sizes(cache) == [10, 9, 3]
    before = there(cache)
    policy.fit(34)
    assert there(cache) == before


@pytest.mark.parametrize(
    ("name", "expected"), [("extractive", [7, 5, 5]), ("extractive_never", [10, 5, 5])]
)
def test_a_path_that_is_come_back_to_counts_whole_or_as_it_is(
    name: str, expected: list[int]
) -> None:
    """Step 2, cut to 5 tokens, is resumed with room for 26: rehydrated it leaves 12 for the others,
    of which step 3 has only 5; without rehydration it leaves 17, and nothing is evicted."""
    cache, policy = cache_under(name)
    policy.enter([1])
    policy.fit(24)
    assert sizes(cache) == [10, 5, 5]
    policy.enter([2])
    policy.fit(26)
    assert sizes(cache) == expected


def test_without_a_signal_it_does_not_matter() -> None:
    """Different values give different shares, but equal ones where the estimator ignores values."""
    for name, equal in (("extractive", False), ("extractive_no_value", True)):
        cache, policy = cache_under(name)
        policy.transition(Hint({1: 0.5, 2: 0.9, 3: 0.1}))
        policy.enter([1])
        policy.fit(28)
        assert (sizes(cache)[1] == sizes(cache)[2]) == equal


def test_a_path_that_does_not_fit_is_refused() -> None:
    """Floors are lowered for the path of 14 tokens; a budget of 13 raises Infeasible."""
    cache, policy = cache_under("extractive")
    policy.enter([1])
    policy.fit(14)
    assert there(cache) == {1: list(range(10)), 2: [], 3: []}
    with pytest.raises(Infeasible, match=r"budget: 13 tokens; .* need 14"):
        policy.fit(13)


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
    """Path 0-1 of 14 tokens becomes active and keeps 7; other steps are not touched.

    H2O's heavy hitters count attention from any row; ThinKV's minimum is more than the share.
    """
    cache, policy = cache_under(name, share=0.5)
    cache.blocks[ROOT].within[1] = 2.0
    cache.blocks[1].within[2] = cache.blocks[1].later[5] = 1.0
    policy.enter([1])
    assert cache.blocks[ROOT].there.tolist() == prompt
    assert there(cache) == {1: step, 2: list(range(10)), 3: list(range(10))}
    policy.enter([1])
    assert there(cache)[1] == step, "the share is of the path, not of what is left"


@given(
    name=st.sampled_from(sorted(EXTRACTIVE)),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    draw=st.randoms(use_true_random=False),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_pressure_after_pressure(
    name: str, lengths: list[int], draw: random.Random, shares: list[float]
) -> None:
    """A random tree under shrinking budgets: the path is untouched, each budget is met, no token
    comes back, floors hold where they fit, and tails are evicted last."""
    cache = TokenCache(4 + sum(lengths), block(-1, 0, np.arange(4)))
    policy = policy_for(name, cache, share=1.0, floors=FLOORS)
    for node, length in enumerate(lengths, 1):
        parent = draw.randrange(node)
        step = block(parent, cache.blocks[parent].end, np.full(length, node))
        step.later[:] = [draw.random() for _ in range(length)]
        cache.add(node, step)
        policy.add_block(node, parent, length, draw.random())
        policy.add_attention(parent, draw.random(), 1)
    policy.transition(Hint({node: draw.random() for node in cache.blocks if draw.random() < 0.5}))
    leaf = draw.randrange(len(lengths) + 1)
    policy.enter([leaf])
    path = cache.chain(leaf)
    needed = cache.blocks[leaf].end
    floors = sum(min(FLOORS.tokens, n) for node, n in enumerate(lengths, 1) if node not in path)
    for share in sorted(shares):
        before = there(cache)
        room = cache.capacity - int(share * (cache.capacity - needed))
        policy.fit(room)
        assert cache.count <= room
        for node, now in there(cache).items():
            was = before[node]
            assert set(now) <= set(was)
            assert node not in path or now == was
            assert len(now) >= min(FLOORS.tokens, len(was)) or needed + floors > room
            assert now[-FLOORS.tail :] == was[-min(FLOORS.tail, len(now)) :] or not now


def test_beyond_the_budget_a_stream_policy_drops_what_was_used_longest_ago() -> None:
    """Step 3 was active longest ago, then 2, now 1: for six tokens all of step 3 goes."""
    cache, policy = cache_under("tail_only", capacity=36)
    for leaf in (3, 2, 1):
        policy.enter([leaf])
    policy.fit(30)
    assert there(cache) == {1: list(range(10)), 2: list(range(10)), 3: []}
    with pytest.raises(Infeasible, match="active paths need 14"):
        policy.fit(13)


def test_names() -> None:
    """Every variant of the extractive mode has one that never rehydrates."""
    assert len(TOKEN_EVICTION) == 2 * 9 + 4
    assert EXTRACTIVE["extractive"] == ExtractiveParams()
    assert not EXTRACTIVE["extractive_no_distance_never"].rehydrate
