"""Choose the leaves that are worth their KV, by the ETS paper's integer program.

Objective (7) over the blocks of a tree: keep a set of blocks that contains the parent of each of
its blocks, and maximise

    sum of kept leaves' weights / sum of all weights
    - budget_weight * cost of kept blocks / cost of all blocks
    + diversity_weight * covered clusters / clusters.

Rows: one for each edge of the tree (a kept child needs its parent: the pairs of ancestor and leaf
that the paper writes follow from these), one for each cluster (z_k <= sum of y over the blocks that
hold its leaves; the paper prints it the other way round) and one for "at least one leaf". No row
says that a kept inner block needs a kept child: dropping one without a kept child can only raise
the objective, so only the kept leaves are read from a solution.

Coefficients are whole numbers of 1/UNIT, so that solvers with a relative gap of 0 agree on the
optimum; rows stand in a fixed order; the limit is one of branch-and-bound nodes, never of time.
If most of a round's leaves are equal, the program is small: then every set of leaf blocks is
evaluated, in a tenth of the time that a solver takes to start.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pulp
from scipy.optimize import Bounds, milp
from scipy.sparse import coo_array

from search.spec import SolverName
from search.stats import LeafKvBlocks

UNIT = 1_000_000
"""The objective is counted in whole numbers of 1/UNIT."""

NODE_LIMIT = 500
"""Most branch-and-bound nodes of a solver; trees of 1,000 nodes usually take one."""

FEW = 12
"""Up to this many leaf blocks, every set of them is evaluated."""

# SciPy warns of options that it hands to HiGHS unchecked, such as the number of threads
warnings.filterwarnings("ignore", "Unrecognized options", RuntimeWarning, "search.leaf_selection")


@dataclass(frozen=True, slots=True)
class Program:
    """The program in whole numbers.

    ``above``: as in ``LeafKvBlocks``. ``gains``: what keeping each block adds, its leaves' weights
    less its cost. ``bonus``: what covering a cluster adds. ``members``: the blocks where each
    cluster's leaves end. ``leaf_blocks``: the blocks where any leaf ends, in the leaves' order.
    """

    above: tuple[int, ...]
    gains: tuple[int, ...]
    bonus: int
    members: tuple[tuple[int, ...], ...]
    leaf_blocks: tuple[int, ...]

    @classmethod
    def of(
        cls,
        blocks: LeafKvBlocks,
        weights: Sequence[int],
        clusters: Sequence[int],
        budget_weight: float,
        diversity_weight: float,
    ) -> Program:
        """Build it from the leaves' ``weights`` and ``clusters`` (from 0; empty: no bonus)."""
        whole, price = sum(weights), sum(blocks.costs)
        gains = [-round(UNIT * budget_weight * cost / price) for cost in blocks.costs]
        for end, weight in zip(blocks.ends, weights, strict=True):
            gains[end] += round(UNIT * weight / whole)
        members: list[set[int]] = [set() for _ in range(max(clusters, default=-1) + 1)]
        for end, cluster in zip(blocks.ends, clusters, strict=bool(clusters)):
            members[cluster].add(end)
        return cls(
            above=blocks.above,
            gains=tuple(gains),
            bonus=round(UNIT * diversity_weight / len(members)) if members else 0,
            members=tuple(tuple(sorted(ends)) for ends in members),
            leaf_blocks=tuple(dict.fromkeys(blocks.ends)),
        )

    def path(self, block: int) -> Iterator[int]:
        """Yield a block and all its ancestors, up to the first block."""
        while block >= 0:
            yield block
            block = self.above[block]

    def value(self, ends: Iterable[int]) -> int:
        """The objective, in 1/UNIT, of keeping these leaf blocks and what is above them."""
        blocks = {block for end in ends for block in self.path(end)}
        clusters = sum(not blocks.isdisjoint(ends) for ends in self.members)
        return sum(self.gains[block] for block in blocks) + self.bonus * clusters


def optimum(program: Program, solver: SolverName, node_limit: int = NODE_LIMIT) -> set[int] | None:
    """The leaf blocks of an optimum, by ``best_set`` up to FEW leaf blocks, else by ``solve``."""
    if len(program.leaf_blocks) <= FEW:
        return best_set(program)
    return solve(program, solver, node_limit)


def best_set(program: Program) -> set[int]:
    """Evaluate all sets of leaf blocks but the empty one, and return the best; ties: the lower ids.

    A set is a number whose bit i says that the i-th leaf block is in it; with a leaf block it has
    all leaf blocks above it. Among equally good sets the lowest number wins. A block is kept by
    every set with a leaf block at or below it. The numbering of the blocks does not matter.
    """
    below = [0] * len(program.above)
    for bit, end in enumerate(program.leaf_blocks):
        for block in program.path(end):
            below[block] |= 1 << bit
    worth: dict[int, int] = {}
    for leaves, gain in zip(below, program.gains, strict=True):
        worth[leaves] = worth.get(leaves, 0) + gain
    for ends in program.members:
        leaves = 0
        for end in ends:
            leaves |= below[end]
        worth[leaves] = worth.get(leaves, 0) + program.bonus
    sets = np.arange(1, 1 << len(program.leaf_blocks))
    for bit, end in enumerate(program.leaf_blocks):
        sets = sets[((sets & below[end]) == 0) | (sets >> bit & 1 == 1)]
    value = np.zeros(len(sets), dtype=np.int64)
    for leaves, gain in worth.items():
        value += gain * ((sets & leaves) > 0)
    best = int(sets[value.argmax()])
    return {end for bit, end in enumerate(program.leaf_blocks) if best >> bit & 1}


def solve(program: Program, solver: SolverName, node_limit: int = NODE_LIMIT) -> set[int] | None:
    """The leaf blocks of an optimum, at least one.

    None if the solver has not proven an optimum within ``node_limit`` branch-and-bound nodes. Of
    several optima the solver's first, which is always the same for one version of the solver.
    """
    mask = (_highs if solver == "highs" else _cbc)(program, node_limit)
    return None if mask is None else {block for block in program.leaf_blocks if mask[block]}


def _highs(program: Program, node_limit: int) -> list[bool] | None:
    """Solve by HiGHS through SciPy, in this process and thread: whether each block is kept."""
    blocks, clusters = len(program.above), len(program.members)
    rows = [*_rows(program), [(block, 1) for block in sorted(program.leaf_blocks)]]
    row = np.repeat(np.arange(len(rows)), [len(entries) for entries in rows])
    column, entry = np.array([pair for entries in rows for pair in entries]).T
    # Sparse: given a dense one, SciPy makes every thread's warnings errors for a moment
    matrix = coo_array((entry, (row, column))).tocsc()
    lower = np.repeat([-np.inf, 1], [len(rows) - 1, 1])
    upper = np.repeat([0, np.inf], [len(rows) - 1, 1])
    result = milp(
        -np.array([*program.gains, *[program.bonus] * clusters]),
        integrality=np.repeat([1, 0], [blocks, clusters]),
        bounds=Bounds(0, 1),
        constraints=[(matrix, lower, upper)],
        options={"mip_rel_gap": 0, "node_limit": node_limit, "threads": 1},
    )
    return [bool(x > 0.5) for x in result.x[:blocks]] if result.status == 0 else None


def _cbc(program: Program, node_limit: int) -> list[bool] | None:
    """Solve by CBC through PuLP, in a process of its own: whether each block is kept."""
    problem = pulp.LpProblem("retention", pulp.LpMaximize)
    blocks = [problem.add_variable(f"y{i}", cat="Binary") for i in range(len(program.above))]
    clusters = [problem.add_variable(f"z{k}", 0, 1) for k in range(len(program.members))]
    columns = blocks + clusters
    values = [*program.gains, *[program.bonus] * len(program.members)]
    problem += pulp.LpAffineExpression(list(zip(columns, values, strict=True)))
    for row in _rows(program):
        problem += pulp.LpAffineExpression([(columns[i], entry) for i, entry in row]) <= 0
    problem += pulp.lpSum(blocks[end] for end in sorted(program.leaf_blocks)) >= 1
    bundled = pulp.PULP_CBC_CMD.pulp_cbc_path
    problem.solve(pulp.COIN_CMD(path=bundled, msg=False, gapRel=0, maxNodes=node_limit))
    if problem.sol_status != pulp.LpSolutionOptimal:
        return None
    return [(block.value() or 0.0) > 0.5 for block in blocks]


def _rows(program: Program) -> list[list[tuple[int, int]]]:
    """The rows of edges and clusters as (column, entry) pairs, each sum at most 0.

    Columns: the blocks, then the clusters. The row of "at least one leaf" is not among them.
    """
    rows = [[(i, 1), (above, -1)] for i, above in enumerate(program.above) if above >= 0]
    for k, ends in enumerate(program.members):
        rows.append([(len(program.above) + k, 1), *((end, -1) for end in ends)])
    return rows
