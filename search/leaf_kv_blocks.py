"""The KV of a tree's open leaves, cut into blocks that are kept or dropped whole.

What counts is what the next round needs: the paths of the open leaves, the prompt included. A step
under which only finished or pruned ones stand is on no such path: its KV is let go of anyway. Equal
token prefixes are stored once, so they are counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from search.logical_kv import LogicalKV
from search.tree import ROOT, Node, Tree


@dataclass(frozen=True, slots=True)
class LeafKvBlocks:
    """A tree of blocks, whose numbers say nothing: a parent's may be above its child's.

    ``above``: each block's parent, -1 for the first, which holds the prompt. ``costs``: whole
    numbers. ``ends``: the block in which each leaf ends, by rising leaf id; leaves with the same
    token path share it.
    """

    above: tuple[int, ...]
    costs: tuple[int, ...]
    ends: tuple[int, ...]


def step_blocks(tree: Tree, leaves: Sequence[Node]) -> LeafKvBlocks:
    """A block a distinct step, each at a cost of 1, as in the ETS paper; the prompt is one too."""
    parent: dict[int, int] = {}
    for leaf in leaves:
        first = leaf.first
        while first != ROOT and first not in parent:
            parent[first] = tree[tree[first].parent].first
            first = parent[first]
    place = {first: block for block, first in enumerate(sorted((ROOT, *parent)))}
    above = (-1, *(place[parent[first]] for first in sorted(parent)))
    return LeafKvBlocks(above, (1,) * len(above), tuple(place[leaf.first] for leaf in leaves))


def token_blocks(tree: Tree, leaves: Sequence[Node]) -> LeafKvBlocks:
    """A block an edge of the radix tree, which costs its tokens; the prompt costs its own."""
    kv = LogicalKV(len(tree.prompt))
    for node_id in sorted(tree.above(leaves)):
        kv.add(tree[node_id])
    return LeafKvBlocks(*kv.edges(), tuple(kv.end(leaf.id) for leaf in leaves))
