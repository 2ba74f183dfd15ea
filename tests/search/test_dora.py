"""DORA's quotas, worked by hand against its published description."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.clusters import rounded, uniqueness
from search.engine import EngineError
from search.policies.dora import Dora, quotas
from search.policies.policy import EmbeddingPolicy, Round
from search.policies.rebase import Rebase
from search.spec import SearchSpec
from search.tree import Tree
from tests.search.scripted_engine import ScriptedEngine, grow
from tests.search.trees import STEP, row, tree_of

EAST, NORTH = (1.0, 0.0), (0.0, 1.0)


def level(*leaves: tuple[str, float, tuple[float, ...]]) -> Tree:
    """A first level of steps with rewards and directions."""
    tree = tree_of(*((0, text, STEP, reward) for text, reward, _ in leaves))
    for node, vector in zip(tree.nodes[1:], rounded([v for _, _, v in leaves]), strict=True):
        node.embedding = vector
    return tree


def test_uniqueness_by_hand() -> None:
    """Three equal vectors have 1/3 each, another one 1. At cosine .8, T_s = .2: 1 / (1 + e^-1)."""
    alike = rounded([EAST, EAST, NORTH, EAST])
    assert uniqueness(alike, 0.01) == pytest.approx([1 / 3, 1 / 3, 1, 1 / 3])
    near = rounded([EAST, (0.8, 0.6)])
    assert uniqueness(near, 0.2) == pytest.approx([1 / (1 + exp(-1))] * 2)
    assert uniqueness(rounded([EAST]), 0.01) == [1.0]


def test_a_direction_has_what_one_leaf_would_have() -> None:
    """Equal rewards, three leaves east and one north: 8 places are 4 and 4, not 6 and 2.

    Quotas 8/6, 8/6, 8/6, 4: whole parts 1, 1, 1, 4, the last place to the first of equal fractions.
    """
    tree = level(("a", 0.5, EAST), ("a", 0.5, EAST), ("b", 0.5, EAST), ("c", 0.5, NORTH))
    assert Dora(8, 0.1).plan(tree) == Round({1: 2, 2: 1, 3: 1, 4: 4})
    assert Rebase(8, 0.1).plan(tree) == Round({1: 2, 2: 2, 3: 2, 4: 2})


def test_directions_are_weighed_by_their_rewards() -> None:
    """East .6 twice, north .5, T = .1: e^1/2 each and 1, of 10: 3.655, 3.655, 2.689.

    3, 3, 2, and two more to the largest fractions: .689 of north, then the first .655.
    """
    tree = level(("a", 0.6, EAST), ("b", 0.6, EAST), ("c", 0.5, NORTH))
    assert Dora(10, 0.1).plan(tree) == Round({1: 4, 2: 3, 3: 3})


def test_between_one_direction_and_two() -> None:
    """Cosine .8 at T_s = .2 between east and north-east; north is .6 from the latter.

    Company: 1 + e^-1 + e^-5, 1 + e^-1 + e^-2, 1 + e^-5 + e^-2; shares of 12 by 1/company:
    .7275, .6650, .8757 of 2.2682: 3.849, 3.518, 4.633 -> 4, 3, 5.
    """
    tree = level(("a", 0.5, EAST), ("b", 0.5, (0.8, 0.6)), ("c", 0.5, NORTH))
    assert Dora(12, 0.1, 0.2).plan(tree) == Round({1: 4, 2: 3, 3: 5})


def test_what_gets_nothing_is_pruned_unless_the_floor_holds_it() -> None:
    """Rewards .9 and .1 at T = .1: a share of e^-8 of 4 rounds to no child."""
    tree = level(("a", 0.9, EAST), ("b", 0.1, NORTH))
    assert Dora(4, 0.1).plan(tree) == Round({1: 4}, (2,))
    assert Dora(4, 0.1, floor_levels=1).plan(tree) == Round({1: 3, 2: 1})


def test_without_embeddings_equal_steps_are_directions() -> None:
    """``a`` twice and ``b`` share 4 as 2 and 2, although their embeddings are equal."""
    tree = level(("a", 0.5, EAST), ("a", 0.5, EAST), ("b", 0.5, EAST))
    assert Dora(4, 0.1).uncompared(tree) == Round({1: 1, 2: 1, 3: 2})


def test_where_all_say_the_same_nothing_is_embedded() -> None:
    """Neither leaves with equal tokens nor the root need embeddings."""
    policy = Dora(4, 0.1)
    assert isinstance(policy, EmbeddingPolicy)
    assert policy.to_embed(tree_of()) == []
    twins = tree_of((0, "a", STEP, 0.5), (0, "a", STEP, 0.5))
    assert policy.to_embed(twins) == []
    assert policy.plan(twins) == Round({1: 2, 2: 2})
    assert len(policy.to_embed(row(0.5, 0.5))) == 2


def test_what_is_missing_is_named() -> None:
    """A missing embedding and a missing embedder are named in the error."""
    with pytest.raises(EngineError, match="node 1 has no embedding; policy dora"):
        Dora(4, 0.1).plan(row(0.5, 0.5))
    with pytest.raises(EngineError, match="embeds nothing; policy dora needs embeddings"):
        Dora(4, 0.1).suited_to(None)


@pytest.mark.parametrize(
    ("weights", "total", "shares"),
    [
        ([1, 1, 1], 7, [3, 2, 2]),
        ([3, 1], 4, [3, 1]),
        ([0.7, 0.2, 0.1], 10, [7, 2, 1]),  # 7.000000000000001 and 0.9999999999999999
        ([5, 4, 1], 1, [1, 0, 0]),
        ([1.0, 0.0], 3, [3, 0]),
    ],
)
def test_quotas_by_hand(weights: list[float], total: int, shares: list[int]) -> None:
    assert quotas(weights, total) == shares


@given(st.lists(st.floats(1e-9, 1), min_size=1, max_size=30), st.integers(1, 1024))
def test_quotas_add_up_and_miss_by_less_than_one(weights: list[float], total: int) -> None:
    shares = quotas(weights, total)
    assert sum(shares) == total
    for weight, share in zip(weights, shares, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1 + 1e-6


async def test_a_whole_search_by_its_name() -> None:
    """It spends its width and grows another tree than REBASE."""
    dora = await grow(ScriptedEngine(), SearchSpec(policy="dora", width=12, seed=3))
    rebase = await grow(ScriptedEngine(), SearchSpec(policy="rebase", width=12, seed=3))
    assert len(dora.tree.finished()) == 12
    assert dora.digest != rebase.digest
