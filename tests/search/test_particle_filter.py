"""Particle filtering: odds, systematic resampling, and a generator without state."""

from __future__ import annotations

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.engine import Branch
from search.policies.particle_filter import (
    ParticleFilter,
    effective_size,
    odds_of,
    offset,
    softened,
    systematic,
)
from search.policies.policy import Round
from search.spec import SearchSpec
from search.tree import Finish, Tree
from tests.search.scripted_engine import ScriptedEngine, grow
from tests.search.trees import END, STEP, row, tree_of


def test_a_leaf_weighs_its_odds() -> None:
    """.5 is 1 : 1, .75 is 3 : 1; softmax of the logits is their share."""
    assert odds_of(0.5) == 1.0
    assert odds_of(0.75) == 3.0
    assert log(odds_of(0.9)) == pytest.approx(log(0.9) - log(0.1))


def test_certain_rewards_weigh_finitely() -> None:
    """0 and 1 count as half a rounding unit inside [0, 1]: 1 : 19999 and 19999 : 1."""
    assert odds_of(0.0) == pytest.approx(1 / 19_999)
    assert odds_of(1.0) == pytest.approx(19_999)
    assert odds_of(0.0001) > odds_of(0.0)


@pytest.mark.parametrize(
    ("weights", "total", "start", "copies"),
    [
        # points 1/8, 3/8, 5/8, 7/8; stretches to 1/10, 1/2, 1
        pytest.param([1, 4, 5], 4, 0.5, [0, 2, 2], id="half"),
        # points 1/40, 11/40, 21/40, 31/40
        pytest.param([1, 4, 5], 4, 0.1, [1, 1, 2], id="early"),
        # points 9/40, 19/40, 29/40, 39/40
        pytest.param([1, 4, 5], 4, 0.9, [0, 2, 2], id="late"),
        pytest.param([1, 1, 1], 3, 0.5, [1, 1, 1], id="all equal"),
        pytest.param([7], 5, 0.5, [5], id="one particle"),
        pytest.param([1, 1, 1, 1], 1, 0.3, [0, 1, 0, 0], id="one place"),
    ],
)
def test_copies_worked_by_hand(
    weights: list[float], total: int, start: float, copies: list[int]
) -> None:
    """A particle is drawn once for each point (start + j) / total in its stretch."""
    assert systematic(weights, total, start) == copies


units = st.integers(0, 10_000).map(lambda i: i / 10_000)


@given(st.lists(units, min_size=1, max_size=60), st.integers(1, 1024), st.integers(0, 2**63 - 1))
def test_each_count_is_its_share_rounded(rewards: list[float], total: int, seed: int) -> None:
    """Counts add up to the total and never miss their exact share by one or more."""
    odds = [odds_of(reward) for reward in rewards]
    copies = systematic(odds, total, offset(seed, 1))
    assert sum(copies) == total
    for weight, n in zip(odds, copies, strict=True):
        assert abs(n - total * weight / sum(odds)) < 1 + 1e-9


@given(st.integers(1, 40), st.integers(1, 25), units, st.integers(0, 2**63 - 1))
def test_equal_particles_get_equal_places(
    particles: int, each: int, reward: float, seed: int
) -> None:
    """Whole-number shares are met exactly in spite of rounding noise."""
    odds = [odds_of(reward)] * particles
    assert systematic(odds, particles * each, offset(seed, 3)) == [each] * particles


def test_the_offset_is_uniform_enough() -> None:
    """Ten thousand seeds: within (0, 1), each tenth of it hit about a thousand times."""
    offsets = [offset(seed, 2) for seed in range(10_000)]
    assert 0 < min(offsets) < max(offsets) < 1
    tenths = [sum(int(10 * u) == tenth for u in offsets) for tenth in range(10)]
    assert 850 < min(tenths) <= max(tenths) < 1150


@pytest.mark.parametrize(("hash_value", "half_steps"), [(0, 1), (2**64 - 1, 2**33 - 1)])
def test_no_offset_reaches_zero_or_one(
    hash_value: int, half_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest and the highest hash: half a step of 2**-32 inside."""
    monkeypatch.setattr("search.policies.particle_filter.node_seed", lambda *_: hash_value)
    assert offset(3, 2) == half_steps / 2**33


def test_the_offset_follows_from_seed_and_level() -> None:
    """The offset is repeatable, and differs for another seed or level."""
    assert offset(3, 1) == offset(3, 1)
    assert len({offset(3, 1), offset(3, 2), offset(4, 1)}) == 3


def test_the_undrawn_are_pruned() -> None:
    """Odds 1 : 9999, 9999 : 1 and 1 : 9999 for four places: all go to the second."""
    tree = row(0.0001, 0.9999, 0.0001)
    assert ParticleFilter(4, 3).plan(tree) == Round({2: 4}, (1, 3))


@pytest.mark.promise(
    "Particle filtering has one plan for a tree and a seed, whatever was planned before."
)
def test_a_tree_has_one_plan() -> None:
    """Planning again changes nothing, and neither does another policy object in between."""
    tree = row(0.5, 0.6, 0.3, 0.8, 0.45)
    policy = ParticleFilter(8, 7)
    first = policy.plan(tree)
    ParticleFilter(8, 7).plan(row(0.1, 0.2))
    assert policy.plan(tree) == ParticleFilter(8, 7).plan(tree) == first
    others = {str(ParticleFilter(8, seed).plan(tree)) for seed in range(30)}
    assert len(others) > 1


def test_ended_trajectories_keep_their_places() -> None:
    """Two of four have ended: the open two share two places; the best, which ended, gets none."""
    tree = tree_of((0, "a", END, 1.0), (0, "b", STEP, 0.5), (0, "c", STEP, 0.5), (0, "d", END, 0.0))
    assert ParticleFilter(4, 3).plan(tree) == Round({2: 1, 3: 1})


def test_the_seed_is_the_searchs() -> None:
    """The seed is the spec's, and 0 where the spec has none."""
    spec = SearchSpec(policy="particle_filter", width=8, seed=5)
    assert ParticleFilter.from_spec(spec) == ParticleFilter(8, 5)
    dials = {"ess_threshold": 0.5, "soft_start": True, "max_depth": 9}
    configured = ParticleFilter.from_spec(spec.model_copy(update=dials))
    assert configured == ParticleFilter(8, 5, 0.5, True, 9)
    for seed in (0, None):
        spec = SearchSpec(policy="particle_filter", width=8, seed=seed)
        assert ParticleFilter.from_spec(spec) == ParticleFilter(8, 0)


@pytest.mark.parametrize(
    ("weights", "size"),
    [([1, 1, 1, 1], 4.0), ([3, 1], 1.6), ([1, 0, 0], 1.0), ([0.1] * 10, 10.0)],
)
def test_effective_sizes_by_hand(weights: list[float], size: float) -> None:
    """(3 + 1)^2 / (9 + 1) = 1.6."""
    assert effective_size(weights) == size


def test_it_is_resampled_where_few_count() -> None:
    """Odds 3 : 1, ESS 1.6 of 2 = .8: at threshold .5 each goes on once, at .8 it is resampled.

    Odds 9999 : 1 / 9999: ESS hardly above 1 of 2, resampled at .6 too.
    """
    assert ParticleFilter(2, 3, 0.5).plan(row(0.75, 0.5)) == Round({1: 1, 2: 1})
    resampled = ParticleFilter(2, 3).plan(row(0.75, 0.5))
    assert ParticleFilter(2, 3, 0.8).plan(row(0.75, 0.5)) == resampled
    assert ParticleFilter(2, 3, 0.6).plan(row(0.9999, 0.0001)) == Round({1: 2}, (2,))


def test_free_places_are_always_drawn() -> None:
    """One of three died empty: with two leaves for three places the level is always resampled."""
    tree = tree_of((0, "a", STEP, 0.5), (0, "", Finish.EMPTY, None), (0, "b", STEP, 0.5))
    plan = ParticleFilter(3, 3, 0.1).plan(tree)
    assert plan is not None
    assert sum(plan.expand.values()) == 3


def two_levels(second: tuple[float, float]) -> Tree:
    """Two particles of odds 3 : 1, each with one child."""
    return tree_of(
        (0, "a", STEP, 0.75),
        (0, "b", STEP, 0.5),
        (1, "c", STEP, second[0]),
        (2, "d", STEP, second[1]),
    )


def test_weights_multiply_until_they_are_drawn_by() -> None:
    """Not resampled at .5, the children weigh 3 * 3 : 1 * 1; resampled (at .8), 3 : 1."""
    tree = two_levels((0.75, 0.5))
    leaves = list(tree.leaves())
    multiplied = ParticleFilter(2, 3, 0.5).weights(tree, leaves)
    assert multiplied == pytest.approx([1, 1 / 9])
    fresh = ParticleFilter(2, 3, 0.8).weights(tree, leaves)
    assert fresh == pytest.approx([1, 1 / 3])
    # 9 : 1 has an ESS of 100/82 = 1.22 of 2: at .65 this level is resampled, the first (1.6) is not
    assert ParticleFilter(2, 3, 0.5).plan(tree) == Round({3: 1, 4: 1})
    assert effective_size([9, 1]) == pytest.approx(100 / 82)
    assert ParticleFilter(2, 4, 0.65).plan(tree) == Round({3: 2}, (4,))


def test_weights_that_even_out_are_left_alone() -> None:
    """3 * 1 : 1 * 3 is even: no threshold below 1 resamples."""
    tree = two_levels((0.5, 0.75))
    policy = ParticleFilter(2, 3, 0.7)
    assert policy.weights(tree, list(tree.leaves())) == pytest.approx([1, 1])
    assert policy.plan(tree) == Round({3: 1, 4: 1})


def test_a_soft_start_by_hand() -> None:
    """9 : 1, ESS 100/82, N/ESS = 1.64; with all of the way to go: 9^(1/1.64) = 3.82 : 1.

    With half to go .82 is below 1: the odds are unchanged. Equal weights stay equal.
    """
    assert softened([9, 1], 1.0) == pytest.approx([9 ** (1 / 1.64), 1])
    assert softened([9, 1], 0.5) == [9, 1]
    assert softened([2, 2], 1.0) == [2, 2]


def test_a_soft_start_keeps_more_particles_early() -> None:
    """Odds 99 : 1 three times over: 8 places at depth 1 of 10, softened by 4 / 1.02 * .9 = 3.5."""
    tree = row(0.99, 0.5, 0.5, 0.5)
    hard, soft = (ParticleFilter(8, 1, 1.0, s, 10).plan(tree) for s in (False, True))
    assert hard is not None
    assert soft is not None
    assert len(hard.expand) < len(soft.expand)


def say(branch: Branch) -> str:
    """Text of a step that does not repeat its parent, or of an answer."""
    return "The answer is 1." if branch.seed % 4 == 0 else f"s{len(branch.tokens)}\n\n"


@given(st.integers(1, 30), st.integers(0, 2**32), st.sampled_from([0.2, 0.5, 0.9]), st.booleans())
async def test_every_round_spends_the_width_at_any_threshold(
    width: int, seed: int, threshold: float, soft: bool
) -> None:
    """At any threshold exactly the width finishes, and the same seed gives the same tree."""
    dials = {"ess_threshold": threshold, "soft_start": soft, "max_depth": 6}
    fields = {"policy": "particle_filter", "width": width, "seed": seed, **dials}
    spec = SearchSpec.model_validate(fields)
    outcome = await grow(ScriptedEngine(say), spec)
    assert len(outcome.tree.finished()) == width
    again = await grow(ScriptedEngine(say), spec)
    assert again.digest == outcome.digest
