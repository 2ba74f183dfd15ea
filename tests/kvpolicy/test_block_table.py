"""Several searches under one budget: a hand-drawn case, and random searches against invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpolicy.block_table import BlockTable
from kvpolicy.eviction_order import EvictionParams, Infeasible
from kvpolicy.value import Theta
from tests.kvpolicy.pressure import kept_tokens

NAMES = ("ash", "oak", "elm")


def two_trees() -> BlockTable:
    """Ash: prompt 5, leaves 1 (value 0.9) and 2 (0.1), active 1. Oak: prompt 5, leaf 1 (0.5)."""
    table = BlockTable()
    table.add_tree("ash", 5)
    table.add_tree("oak", 5)
    table["ash"].add_block(1, 0, 10)
    table["ash"].add_block(2, 0, 10)
    table["oak"].add_block(1, 0, 10)
    table["ash"].transition({1: 0.9, 2: 0.1}, [1], [])
    table["oak"].transition({1: 0.5}, [], [])
    return table


def test_one_budget_over_all_trees_by_hand() -> None:
    """Ash's active prompt and leaf 1 take 15 tokens, oak's prompt 5; oak's leaf is cut to fit."""
    plan = kept_tokens(two_trees(), 24)
    assert plan["ash"].tolist() == [5, 10, 0]
    assert plan["oak"].tolist() == [5, 4]
    assert not kept_tokens(two_trees(), 15)["oak"].any()


def test_ranks_put_the_path_last_and_the_later_tree_first() -> None:
    """Off the path the lower weight goes first; on it and at ties, the later tree and higher id."""
    table = two_trees()
    table["oak"].transition({}, [1], [])
    order = sorted(
        [("ash", 1), ("ash", 2), ("oak", 1), ("oak", 9)], key=lambda b: table.eviction_key(*b)
    )
    assert order == [("ash", 2), ("oak", 9), ("oak", 1), ("ash", 1)]


def test_trees_weigh_by_the_tables_theta_and_params() -> None:
    """A prompt without signals, off the path, weighs η 0.25 times sigmoid(ln 3) squared."""
    table = BlockTable(Theta("exact", {"": (math.log(3),)}), EvictionParams(off_path=0.25))
    table.add_tree("ash", 5)
    assert table.eviction_key("ash", 0)[1] == pytest.approx(0.25 * 0.75**2)


def test_attention_reaches_a_trees_blocks() -> None:
    """A block's weight rises when later tokens attend to it."""
    table = two_trees()
    before = table.eviction_key("ash", 2)
    table["ash"].add_attention(2, 9.0, 10)
    assert table.eviction_key("ash", 2) > before


def test_what_is_over_is_forgotten() -> None:
    """A removed tree is in no plan, its blocks rank as unknown, and its name can be used again."""
    table = two_trees()
    table.remove_tree("ash")
    table.remove_tree("ash")
    assert "ash" not in table
    assert table.eviction_key("ash", 1) == table.eviction_key("never", 1) == (True, 0.0, 0, -1)
    assert list(kept_tokens(table, 20)) == ["oak"]
    table.add_tree("ash", 3)
    assert "ash" in table


class BlockTableMachine(RuleBasedStateMachine):
    """Random searches, and a cache that follows the plans. ``cached``: tokens of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable()
        self.parents: dict[str, list[int]] = {}
        self.dead: dict[str, set[int]] = {}
        self.cached: dict[str, list[int]] = {}
        self.budget = 0

    @initialize(budget=st.integers(20, 300))
    def begin(self, budget: int) -> None:
        """Choose the budget of the pool."""
        self.budget = budget

    @rule(name=st.sampled_from(NAMES), prompt=st.integers(1, 20))
    def grow(self, name: str, prompt: int) -> None:
        """Start a search with a prompt, after ending the one of the same name."""
        self.table.remove_tree(name)
        self.table.add_tree(name, prompt)
        self.parents[name], self.dead[name], self.cached[name] = [-1], set(), [prompt]
        self.press()

    @precondition(lambda self: self.parents)
    @rule(data=st.data(), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6))
    def expand(self, data: st.DataObject, sizes: list[int]) -> None:
        """Run a round: move to an open node, close children there, give some of them rewards."""
        name = data.draw(st.sampled_from(sorted(self.parents)))
        parents, dead = self.parents[name], self.dead[name]
        leaf = data.draw(st.sampled_from([n for n in range(len(parents)) if n not in dead]))
        self.table[name].transition({}, [leaf], [])
        values = {}
        for size in sizes:
            node = len(parents)
            parents.append(leaf)
            self.table[name].add_block(node, leaf, size)
            self.cached[name].append(size)
            if data.draw(st.booleans()):
                values[node] = data.draw(st.floats(0, 1))
        self.table[name].transition(values, [len(parents) - 1], [])
        self.press()

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        """Mark a subtree without an active leaf dead."""
        name = data.draw(st.sampled_from(sorted(self.parents)))
        parents, active = self.parents[name], self.table[name].active
        top = data.draw(st.integers(0, len(parents) - 1))
        removed = {top}
        removed |= {n for n in range(top + 1, len(parents)) if self.above(name, n) & removed}
        if top and not removed & set(active):
            self.dead[name] |= removed
            self.table[name].transition({}, active, removed)
            self.press()

    def above(self, name: str, node: int) -> set[int]:
        """A node's ancestors."""
        ancestors: set[int] = set()
        while node > 0:
            node = self.parents[name][node]
            ancestors.add(node)
        return ancestors

    def press(self) -> None:
        """Apply a plan to the cache; active blocks are whole again, as if computed anew."""
        needed = sum(
            int(self.table[name].tokens[self.table[name].weights()[1]].sum())
            for name in self.parents
        )
        if needed > self.budget:
            with pytest.raises(Infeasible):
                kept_tokens(self.table, self.budget)
            return
        plan = kept_tokens(self.table, self.budget)
        larger = kept_tokens(self.table, self.budget + 7)
        total = sum(int(tokens.sum()) for tokens in plan.values())
        everything = 0
        for name, tokens in plan.items():
            blocks = self.table[name]
            _, on_path = blocks.weights()
            assert np.all(larger[name] >= tokens), "a larger budget gave something up"
            assert np.all(tokens[on_path] == blocks.tokens[on_path]), "an active block was cut"
            assert not tokens[sorted(self.dead[name])].any(), "a dead block was kept"
            for node, parent in enumerate(self.parents[name][1:], start=1):
                whole = tokens[parent] == blocks.tokens[parent]
                assert whole or not tokens[node], "a block is kept below one that is not whole"
            self.cached[name] = tokens.tolist()
            everything += int(np.delete(blocks.tokens, sorted(self.dead[name])).sum())
        assert total == min(self.budget, everything), "the budget is exceeded or left unused"

    @invariant()
    def weights_never_rise_on_the_way_down(self) -> None:
        """No block weighs more than its parent."""
        for name, parents in self.parents.items():
            weights, _ = self.table[name].weights()
            assert all(weights[p] >= weights[n] for n, p in enumerate(parents) if n)

    @invariant()
    def ranks_order_what_the_plan_keeps(self) -> None:
        """Off the path, no block that was cut ranks above a block that was kept whole."""
        for name, tokens in self.cached.items():
            blocks = self.table[name]
            weights, on_path = blocks.weights()
            off = [n for n in np.flatnonzero(~on_path) if n < len(tokens) and weights[n] > -np.inf]
            cut = [self.table.eviction_key(name, n) for n in off if tokens[n] < blocks.tokens[n]]
            whole = [self.table.eviction_key(name, n) for n in off if tokens[n] == blocks.tokens[n]]
            if cut and whole and sum(map(sum, self.cached.values())) == self.budget:
                assert max(cut) <= min(whole)


BlockTableMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=25)
TestBlockTable = pytest.mark.promise(
    "The KV policy stays within its budget, keeps active paths whole and prefixes closed, and "
    "keeps a superset in a larger budget."
)(BlockTableMachine.TestCase)
