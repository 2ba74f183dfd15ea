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
class Blocks:
    """A tree of blocks.

    ``above``: each block's parent, -1 for the first, which holds the prompt. ``costs``: whole
    numbers. ``ends``: the block in which each leaf ends; leaves with the same token path share it.
    """

    above: tuple[int, ...]
    costs: tuple[int, ...]
    ends: tuple[int, ...]


def step_blocks(tree: Tree, leaves: Sequence[Node]) -> Blocks:
    """A block a distinct step, each at a cost of 1, as in the ETS paper; the prompt is one too."""
    above, place = [-1], {ROOT: 0}
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    for node in _paths(tree, leaves):
        parent = place[node.parent]
        block = place[node.id] = known.setdefault((parent, node.tokens), len(above))
        if block == len(above):
            above.append(parent)
    return Blocks(tuple(above), (1,) * len(above), tuple(place[leaf.id] for leaf in leaves))


def token_blocks(tree: Tree, leaves: Sequence[Node]) -> Blocks:
    """A block an edge of the radix tree, which costs its tokens; the prompt costs its own."""
    kv = LogicalKV(len(tree.prompt))
    for node in _paths(tree, leaves):
        kv.add(node)
    return Blocks(*kv.edges(), tuple(kv.end(leaf.id) for leaf in leaves))


def _paths(tree: Tree, leaves: Sequence[Node]) -> list[Node]:
    """The steps down to the leaves, in id order: parents first."""
    found: set[int] = set()
    for leaf in leaves:
        node_id = leaf.id
        while node_id != ROOT and node_id not in found:
            found.add(node_id)
            node_id = tree[node_id].parent
    return [tree[node_id] for node_id in sorted(found)]
