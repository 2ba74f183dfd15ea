"""The optimum over trees whose steps begin alike, so that edges of their radix tree are split.

The solution is compared with every set of leaves, whose cost is counted from token prefixes and
whose value follows the paper's objective (7), without using ``search.stats`` or
``search.leaf_selection``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from random import Random

import pytest

from search.leaf_selection import UNIT, Program, best_set, solve
from search.policies.ets import Ets
from search.policies.policy import Round
from search.stats import token_blocks
from search.tree import Node, Tree
from tests.search.trees import END, STEP

KV = Ets(4, 0.2, diversity_weight=0.0, cost="tokens")


@dataclass(frozen=True)
class Case:
    """A tree's open leaves with REBASE's weights and clusters (none if steps are not compared)."""

    tree: Tree
    leaves: list[Node]
    weights: list[int]
    clusters: list[int]
    budget: Fraction
    diversity: Fraction

    @property
    def program(self) -> Program:
        """The program that is solved."""
        blocks = token_blocks(self.tree, self.leaves)
        dials = float(self.budget), float(self.diversity)
        return Program.of(blocks, self.weights, self.clusters, *dials)

    def bits_of(self, ends: set[int]) -> int:
        """The leaves that end in these blocks, leaf i as bit i."""
        blocks = token_blocks(self.tree, self.leaves)
        return sum(1 << i for i, end in enumerate(blocks.ends) if end in ends)

    def objectives(self) -> dict[int, Fraction]:
        """Objective (7) of every non-empty set that has, with each leaf, every leaf whose path is a
        prefix of that leaf's, since it costs nothing more. A set is a bit mask of leaves."""
        paths = [self.tree.tokens(leaf.id) for leaf in self.leaves]
        prefixes = {path[:n] for path in paths for n in range(1, len(path) + 1)}
        bit = {prefix: 1 << i for i, prefix in enumerate(sorted(prefixes))}
        needs = [sum(bit[path[:n]] for n in range(1, len(path) + 1)) for path in paths]
        values = {}
        for bits in range(1, 1 << len(paths)):
            members = [i for i in range(len(paths)) if bits >> i & 1]
            cover = 0
            for i in members:
                cover |= needs[i]
            if any(need | cover == cover and not bits >> i & 1 for i, need in enumerate(needs)):
                continue
            covered = len({self.clusters[i] for i in members}) if self.clusters else 0
            values[bits] = (
                Fraction(sum(self.weights[i] for i in members), sum(self.weights))
                - self.budget * Fraction(cover.bit_count(), len(prefixes))
                + self.diversity * Fraction(covered, len(set(self.clusters)) or 1)
            )
        return values


def case(seed: int, most: int = 9) -> Case:
    """A random case of up to ``most`` steps a level, with few letters, so that edges are split."""
    dice = Random(seed)
    tree, letters = Tree((7,) * dice.randint(1, 4)), dice.randint(1, 3)
    branches = dice.randint(2, most)
    for _ in range(dice.randint(1, 4)):
        level = [leaf.id for leaf in tree.leaves()]
        for branch in range(branches):
            step = [dice.randint(1, letters) for _ in range(dice.randint(1, 4))]
            ends = END if branch and dice.random() < 0.1 else STEP
            tree.add(dice.choice(level), step, "", ends)
        for node in level:
            if not tree[node].children:
                tree.prune(node)
    leaves = list(tree.leaves())
    weights = [dice.randint(0, 9) for _ in leaves]
    weights[0] += 1
    names = [dice.randint(0, 3) for _ in leaves] if dice.random() < 0.5 else []
    numbers: dict[int, int] = {}
    clusters = [numbers.setdefault(name, len(numbers)) for name in names]
    budget, diversity = (Fraction(dice.randint(0, 30), 10) for _ in range(2))
    return Case(tree, leaves, weights, clusters, budget, diversity)


def check(instance: Case) -> int:
    """Check that the solution is optimal up to rounding; returns whether an edge was split."""
    program = instance.program
    objectives = instance.objectives()
    count = len(program.above) + len(instance.weights) + len(program.members)
    least = max(objectives.values()) - Fraction(count, UNIT)
    assert objectives[instance.bits_of(best_set(program))] >= least
    return any(above > block for block, above in enumerate(program.above))


def test_every_choice_is_brute_forces() -> None:
    """Solutions of a thousand trees are optimal, most of them with split edges."""
    assert sum(check(case(seed)) for seed in range(1000)) > 600


@pytest.mark.nightly
@pytest.mark.slow
def test_ten_thousand_choices_are_brute_forces() -> None:
    """Solutions of ten thousand larger trees are optimal."""
    assert sum(check(case(seed, most=10)) for seed in range(10_000)) > 6000


def test_the_solver_says_the_same() -> None:
    """HiGHS's sets are as good as ``best_set``'s, for a hundred trees."""
    for seed in range(100):
        program = case(seed).program
        kept_blocks = solve(program, "highs")
        assert kept_blocks
        assert program.value(kept_blocks) == program.value(best_set(program))


@pytest.mark.slow
def test_both_solvers_say_the_same() -> None:
    """CBC's sets are as good too; it starts a process for each."""
    for seed in range(100, 200):
        program = case(seed).program
        highs, cbc = solve(program, "highs"), solve(program, "cbc")
        assert highs
        assert cbc
        best = program.value(best_set(program))
        assert program.value(highs) == program.value(cbc) == best


def test_a_round_worked_by_hand() -> None:
    """12 and 13 share the 1, so that their edge is split; six tokens, each 1/6 of lambda_b = 1.

    Rewards .9, .8, .9 at T = .2 weigh 4 as 2, 0, 2. Leaves 1 and 3 gain 1 - 5/6, which leaf 2 would
    lower by its 1/6; leaf 3 alone gains 1/2 - 3/6, and so does leaf 1.
    """
    tree = Tree((7,))
    for step, reward in (((1, 2), 0.9), ((1, 3), 0.8), ((4, 4), 0.9)):
        tree.add(0, step, "", STEP).reward = reward
    assert KV.plan(tree) == Round({1: 2, 3: 2}, (2,))
