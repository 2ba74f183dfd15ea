"""What a budget keeps of every block, computed at once, to compare the eviction order with."""

from __future__ import annotations

import numpy as np

from kvpolicy.block_table import BlockTable
from kvpolicy.eviction_order import Infeasible, Ints
from kvpolicy.value import Floats


def kept_tokens(table: BlockTable, budget: int) -> dict[str, Ints]:
    """Tokens to keep of every block, by tree and row, so that they are at most ``budget``.

    Blocks on active paths stay whole, dead ones go, the others are kept in order of weight, parents
    first, and the last one is cut at its tail. Raises Infeasible if the active paths alone exceed
    the budget.
    """
    plan: dict[str, Ints] = {}
    off_path: list[tuple[Ints, Ints]] = []
    weights, sizes = [np.empty(0)], [np.empty(0, dtype=np.int64)]
    for tree in table:
        tokens = table[tree].tokens
        weight, on_path = table[tree].weights()
        plan[tree] = tokens * on_path
        rows = np.flatnonzero(~on_path & (weight > -np.inf))
        off_path.append((plan[tree], rows))
        weights.append(weight[rows])
        sizes.append(tokens[rows])
    needed = sum(int(tokens.sum()) for tokens in plan.values())
    if needed > budget:
        raise Infeasible(needed, budget, "active paths")
    shares = keep_within(np.concatenate(sizes), np.concatenate(weights), budget - needed)
    at = 0
    for whole, rows in off_path:
        whole[rows] = shares[at : at + len(rows)]
        at += len(rows)
    return plan


def keep_within(tokens: Ints, weight: Floats, budget: int) -> Ints:
    """Tokens kept of each block (n,), counted from its start; they add up to the budget or to all.

    Blocks are kept whole by falling weight, equal weights by rising index, and the last one is cut
    at its tail. Where weights do not increase down the tree and parents stand before children, what
    is kept is prefix-closed; a larger budget keeps a superset.
    """
    order = np.argsort(-weight, kind="stable")
    sizes = tokens[order]
    before = np.cumsum(sizes) - sizes
    shares = np.empty_like(tokens)
    shares[order] = np.minimum(np.maximum(budget - before, 0), sizes)
    return shares
