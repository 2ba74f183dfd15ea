"""The integer program of ETS against brute force, against a second solver, and by hand."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import chain, combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.leaf_selection import FEW, UNIT, Program, best_set, optimum, solve
from search.spec import SolverName
from search.stats import LeafKvBlocks, step_blocks, token_blocks
from tests.search.trees import END, STEP, tree_of


@st.composite
def programs(draw: st.DrawFn, most_leaves: int = 12) -> tuple[LeafKvBlocks, list[int], list[int]]:
    """Random blocks with leaves in some of them, also inner ones; leaves' weights and clusters."""
    count = draw(st.integers(1, 20))
    above = [-1, *(draw(st.integers(0, i)) for i in range(count))]
    costs = draw(st.lists(st.integers(1, 40), min_size=count + 1, max_size=count + 1))
    bare = sorted(set(range(count + 1)) - set(above))[:most_leaves]
    more = draw(st.lists(st.integers(1, count), max_size=most_leaves - len(bare)))
    ends = sorted([*bare, *more])
    weights = draw(st.lists(st.integers(0, 9), min_size=len(ends), max_size=len(ends)))
    weights[0] += 1
    names = draw(st.lists(st.integers(0, 4), min_size=len(ends), max_size=len(ends)))
    numbers: dict[int, int] = {}
    clusters = [numbers.setdefault(name, len(numbers)) for name in names]
    return LeafKvBlocks(tuple(above), tuple(costs), tuple(ends)), weights, clusters


dials = st.one_of(st.just(0.0), st.floats(0.0, 3.0))


def objective(
    instance: tuple[LeafKvBlocks, list[int], list[int]],
    kept_blocks: set[int],
    lambda_b: float,
    lambda_d: float,
) -> Fraction:
    """Objective (7) as the paper prints it, for keeping the leaves in ``kept_blocks``."""
    blocks, weights, clusters = instance
    leaves = [i for i, end in enumerate(blocks.ends) if end in kept_blocks]
    path_blocks: set[int] = set()
    for block in kept_blocks:
        while block >= 0:
            path_blocks.add(block)
            block = blocks.above[block]
    retained = Fraction(sum(weights[i] for i in leaves), sum(weights))
    cost = Fraction(sum(blocks.costs[block] for block in path_blocks), sum(blocks.costs))
    covered = len({clusters[i] for i in leaves}) if clusters else 0
    coverage = Fraction(covered, len(set(clusters)) or 1)
    return retained - Fraction(lambda_b) * cost + Fraction(lambda_d) * coverage


@pytest.mark.slow
@pytest.mark.promise(
    "ETS keeps the best set of leaves by the paper's objective (7): no other set is better, but "
    "for rounding, for both costs."
)
@settings(max_examples=150)
@given(instance=programs(), lambda_b=dials, lambda_d=dials, clustered=st.booleans())
def test_the_optimum_is_brute_forces(
    instance: tuple[LeafKvBlocks, list[int], list[int]],
    lambda_b: float,
    lambda_d: float,
    clustered: bool,
) -> None:
    """No other non-empty set of leaves is better: exactly in whole numbers, up to the rounding of
    the coefficients in the paper's fractions."""
    blocks, weights, clusters = instance
    instance = (blocks, weights, clusters if clustered else [])
    program = Program.of(blocks, weights, instance[2], lambda_b, lambda_d)
    kept_blocks = solve(program, "highs")
    assert kept_blocks
    ends = sorted(set(blocks.ends))
    sets = chain.from_iterable(combinations(ends, n) for n in range(1, len(ends) + 1))
    every = [set(subset) for subset in sets]
    assert program.value(kept_blocks) == max(map(program.value, every))
    assert program.value(best_set(program)) == program.value(kept_blocks)
    best = max(objective(instance, subset, lambda_b, lambda_d) for subset in every)
    rounding = Fraction(len(blocks.above) + len(weights) + len(program.members), 2 * UNIT)
    assert objective(instance, kept_blocks, lambda_b, lambda_d) >= best - 2 * rounding


def random_tree(
    rng: np.random.Generator, tokens: bool
) -> tuple[LeafKvBlocks, list[int], list[int]]:
    """A tree of up to 150 blocks whose leaves have one depth, as in a search."""
    above, level = [-1], [0]
    for _ in range(int(rng.integers(1, 6))):
        below = len(above) + np.arange(int(rng.integers(1, 31)))
        above += [int(rng.choice(level)) for _ in below]
        level = below.tolist()
    needed: set[int] = set()
    for leaf in level:
        while leaf >= 0:
            needed.add(leaf)
            leaf = above[leaf]
    place = {block: i for i, block in enumerate(sorted(needed))} | {-1: -1}
    costs = rng.integers(1, 60, len(needed)) if tokens else np.ones(len(needed), dtype=int)
    blocks = LeafKvBlocks(
        tuple(place[above[block]] for block in sorted(needed)),
        tuple(costs.tolist()),
        tuple(place[leaf] for leaf in level),
    )
    clusters = np.unique(rng.integers(0, 9, len(level)), return_inverse=True)[1]
    return blocks, rng.integers(0, 20, len(level)).tolist(), clusters.tolist()


@pytest.mark.promise("Both ETS solvers, HiGHS and CBC, prove the same optimum.")
@pytest.mark.slow
def test_both_solvers_reach_the_same_objective_on_500_trees() -> None:
    """HiGHS and CBC prove the same optimum, in whole numbers, for both costs."""
    rng = np.random.default_rng(0)
    for number in range(500):
        blocks, weights, clusters = random_tree(rng, tokens=bool(number % 2))
        weights[0] += 1
        lambda_b, lambda_d = rng.uniform(0.2, 2.5), rng.uniform(0.0, 2.0)
        program = Program.of(blocks, weights, clusters, lambda_b, lambda_d)
        highs, cbc = solve(program, "highs"), solve(program, "cbc")
        assert highs
        assert cbc
        assert program.value(highs) == program.value(cbc)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_coverage_worked_by_hand(solver: SolverName) -> None:
    """Root, a with leaves 2 and 3, b with leaf 5: six blocks, each at 1/6 of lambda_b = 1.2.

    Weights 5, 3, 2 of 10, so 2 and 3 together gain .5 + .3 - .2 - .2 - .2 = .2 below the root; b
    with its leaf gains .2 - .4 = -.2. As one cluster each, b's is worth lambda_d / 3 = .2667: it is
    kept too. With 3 and 5 alike there are two clusters, a's leaves cover both, and b is given up;
    so it is where each of three clusters is worth .5 / 3 = .1667 only.
    """
    blocks = LeafKvBlocks((-1, 0, 1, 1, 0, 4), (1,) * 6, (2, 3, 5))
    for clusters, kept_blocks in (([0, 1, 2], {2, 3, 5}), ([0, 1, 1], {2, 3}), ([], {2, 3})):
        program = Program.of(blocks, [5, 3, 2], clusters, 1.2, 0.8)
        assert solve(program, solver) == kept_blocks
    assert solve(Program.of(blocks, [5, 3, 2], [0, 1, 2], 1.2, 0.5), solver) == {2, 3}
    program = Program.of(blocks, [5, 3, 2], [0, 1, 1], 1.2, 0.8)
    assert program.gains == (-200_000, -200_000, 300_000, 100_000, -200_000, 0)
    assert program.bonus == 400_000
    assert program.members == ((2,), (3, 5))
    assert program.value({2, 3}) == 800_000
    assert program.value({5}) == -400_000 + 400_000
    without = Program.of(blocks, [5, 3, 2], [], 1.2, 0.8)
    assert (without.members, without.bonus) == ((), 0)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_one_leaf_is_kept_however_dear_it_is(solver: SolverName) -> None:
    """At lambda_b = 50 keeping nothing would be best; the better of two leaves is kept."""
    blocks = LeafKvBlocks((-1, 0, 0), (1, 1, 1), (1, 2))
    assert solve(Program.of(blocks, [1, 2], [], 50.0, 0.0), solver) == {2}


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_a_cluster_is_covered_once(solver: SolverName) -> None:
    """Two leaves of one cluster that is worth 30: a second leaf costs 5 and covers nothing more."""
    program = Program((-1, 0, 0), (-10, -5, -5), 30, ((1, 2),), (1, 2))
    kept_blocks = solve(program, solver)
    assert kept_blocks
    assert len(kept_blocks) == 1


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_a_solver_counts_every_block_above_a_leaf(solver: SolverName) -> None:
    """Blocks may have any order: 1 is the root, 0 below it costs 10, more than its leaf 2 gains."""
    program = Program((1, -1, 0, 1), (-10, 0, 5, -1), 0, (), (2, 3))
    assert solve(program, solver) == best_set(program) == {3}


def test_no_leaf_more_or_less_would_be_better() -> None:
    """On 50 trees too large for brute force no set that differs by one leaf beats HiGHS's."""
    rng = np.random.default_rng(0)
    for number in range(50):
        blocks, weights, clusters = random_tree(rng, tokens=bool(number % 2))
        weights[0] += 1
        program = Program.of(blocks, weights, clusters, rng.uniform(0.2, 2.5), rng.uniform(0, 3))
        kept_blocks = solve(program, "highs")
        assert kept_blocks
        others = [kept_blocks ^ {end} for end in program.leaf_blocks if kept_blocks != {end}]
        assert program.value(kept_blocks) >= max(map(program.value, others))


@pytest.mark.promise(
    "The ETS solver HiGHS stops at a limit on nodes and then returns no set of leaves."
)
def test_the_node_limit_is_met() -> None:
    """With a node limit of 0 HiGHS proves nothing and ``solve`` returns None; 1 is enough."""
    blocks, weights, clusters = random_tree(np.random.default_rng(2), tokens=True)
    program = Program.of(blocks, weights, clusters, 1.0, 1.0)
    assert solve(program, "highs", node_limit=0) is None
    assert solve(program, "highs", node_limit=1) is not None


def test_cbc_without_a_proof_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that CBC found but did not prove to be best is not returned."""
    import pulp

    def find_without_proof(self: pulp.LpProblem, _: object) -> None:
        self.sol_status = pulp.LpSolutionIntegerFeasible

    monkeypatch.setattr(pulp.LpProblem, "solve", find_without_proof)
    assert solve(Program.of(LeafKvBlocks((-1, 0), (1, 1), (1,)), [1], [], 1.0, 0.0), "cbc") is None


def test_searches_may_decide_at_the_same_time() -> None:
    """Four threads that switch every microsecond all get the right answer."""
    blocks = LeafKvBlocks((-1, 0, 1, 1, 0, 4), (1,) * 6, (2, 3, 5))
    program = Program.of(blocks, [5, 3, 2], [0, 1, 2], 1.2, 0.8)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: solve(program, "highs"), range(400)))
    finally:
        sys.setswitchinterval(interval)
    assert answers == [{2, 3, 5}] * 400


def test_between_equal_sets_the_lower_ids_are_kept() -> None:
    """Of equal leaves in one cluster one covers it, and a second is worth 0.

    Three leaves below the root, each of weight 1/3 and cost 1/4 of lambda_b = 4/3: a leaf's own
    gain is 0. So the lowest is kept alone; in three clusters all of them are.
    """
    blocks = LeafKvBlocks((-1, 0, 0, 0), (1, 1, 1, 1), (1, 2, 3))
    assert best_set(Program.of(blocks, [1, 1, 1], [0, 0, 0], 4 / 3, 1.0)) == {1}
    assert best_set(Program.of(blocks, [1, 1, 1], [0, 1, 2], 4 / 3, 1.0)) == {1, 2, 3}


def test_a_cluster_is_worth_no_more_than_its_bonus() -> None:
    """Every leaf costs what its cluster is worth, and two share a cluster: the first is kept."""
    program = Program((-1, 0, 0, 0), (0, -5, -5, -5), 5, ((1,), (2, 3)), (1, 2, 3))
    assert best_set(program) == {1}


@given(instance=programs(), lambda_b=dials, lambda_d=dials, order=st.randoms(use_true_random=False))
def test_how_blocks_are_numbered_changes_nothing(
    instance: tuple[LeafKvBlocks, list[int], list[int]],
    lambda_b: float,
    lambda_d: float,
    order: Random,
) -> None:
    """Even in ties, which are broken by the order of leaves, not of blocks."""
    blocks, weights, clusters = instance
    place = order.sample(range(len(blocks.above)), len(blocks.above))
    above, costs = [-1] * len(place), [0] * len(place)
    for block, number in enumerate(place):
        above[number] = place[blocks.above[block]] if block else -1
        costs[number] = blocks.costs[block]
    renumbered = LeafKvBlocks(tuple(above), tuple(costs), tuple(place[end] for end in blocks.ends))
    kept_blocks, moved = (
        best_set(Program.of(each, weights, clusters, lambda_b, lambda_d))
        for each in (blocks, renumbered)
    )
    assert moved == {place[end] for end in kept_blocks}


def test_a_leaf_above_kept_leaves_is_kept_with_them() -> None:
    """Leaf block 2 stands below leaf block 1: keeping 2 keeps 1 too, with its weight."""
    program = Program.of(LeafKvBlocks((-1, 0, 1), (1, 1, 1), (1, 2)), [1, 9], [], 1.0, 0.0)
    assert best_set(program) == {1, 2}


@pytest.mark.parametrize(("leaves", "calls"), [(FEW, 0), (FEW + 1, 1)])
def test_a_solver_is_asked_for_many_leaves(
    leaves: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to FEW leaves all sets are tried, without a solver; above, the solver is called."""
    solved: list[object] = []
    monkeypatch.setattr("search.leaf_selection.solve", lambda *args: solved.append(args))
    blocks = LeafKvBlocks((-1, *(0,) * leaves), (1,) * (leaves + 1), tuple(range(1, leaves + 1)))
    program = Program.of(blocks, [1] * leaves, [], 0.5, 0.0)
    kept_blocks = optimum(program, "cbc", node_limit=0)
    assert kept_blocks == (None if calls else set(range(1, leaves + 1)))
    assert solved == [(program, "cbc", 0)] * calls


def test_the_same_program_has_the_same_answer() -> None:
    """Three solutions are equal though every weight and cost is tied."""
    above = (-1, *(0,) * 10, *(1 + i % 10 for i in range(40)))
    blocks = LeafKvBlocks(above, (1,) * 51, tuple(range(11, 51)))
    program = Program.of(blocks, [1] * 40, [i % 7 for i in range(40)], 1.3, 1.0)
    answers = [solve(program, "highs") for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]


def test_blocks_of_steps() -> None:
    """Twins (1 and 2, and below them 4 and 5) are one block; finished and dead paths have none.

    Blocks: prompt, aa, b, c. Node 6 has ended, so that node 3 has nothing open below it.
    """
    tree = tree_of(
        (0, "aa", STEP, 0.5),
        (0, "aa", STEP, 0.5),
        (0, "ab", STEP, 0.5),
        (1, "b", STEP, 0.5),
        (2, "b", STEP, 0.5),
        (3, "z", END, 0.5),
        (2, "c", STEP, 0.5),
    )
    leaves = list(tree.leaves())
    assert [leaf.id for leaf in leaves] == [4, 5, 7]
    assert step_blocks(tree, leaves) == LeafKvBlocks((-1, 0, 1, 1), (1, 1, 1, 1), (2, 2, 3))
    assert token_blocks(tree, leaves) == LeafKvBlocks((-1, 0, 1, 1), (1, 2, 1, 1), (2, 2, 3))


def test_blocks_of_tokens_share_common_beginnings() -> None:
    """For abc, abd and ab the edge ab is split off above c and d, and a leaf ends in it."""
    tree = tree_of((0, "abc", STEP, 0.5), (0, "abd", STEP, 0.5), (0, "ab", STEP, 0.5))
    leaves = list(tree.leaves())
    blocks = token_blocks(tree, leaves)
    assert sorted(blocks.costs) == [1, 1, 1, 2]
    assert sum(blocks.costs) == tree_tokens(leaves)
    assert blocks.above[blocks.ends[0]] == blocks.above[blocks.ends[1]] == blocks.ends[2]
    assert step_blocks(tree, leaves).costs == (1, 1, 1, 1)


def tree_tokens(leaves: list) -> int:
    """The prompt's one token and the distinct beginnings of the leaves' steps."""
    return 1 + len({leaf.tokens[: n + 1] for leaf in leaves for n in range(len(leaf.tokens))})
