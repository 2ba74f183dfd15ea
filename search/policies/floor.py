"""Give every distinct step a child: soft pruning while rewards are still unreliable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from search.tree import Node


def with_floor(ranked: Sequence[Node], shares: Mapping[int, int]) -> dict[int, int]:
    """Change shares, by node id, so that each distinct path has a child, as far as they suffice.

    ``ranked``: the leaves, best first. The best leaf of a path without a child gets one, taken from
    the largest share, among equal ones from the lower-ranked leaf; no path gives its last child. If
    there are fewer children than paths, the better paths have them.
    """
    leaf_children = dict(shares)
    children = Counter[int]()
    for leaf in ranked:
        children[leaf.first] += leaf_children[leaf.id]
    lowest_first = ranked[::-1]
    for leaf in ranked:
        if children[leaf.first]:
            continue
        givers = [giver for giver in lowest_first if children[giver.first] > 1]
        if not givers:
            break
        giver = max(givers, key=lambda giver: leaf_children[giver.id])
        leaf_children[giver.id] -= 1
        children[giver.first] -= 1
        leaf_children[leaf.id] += 1
        children[leaf.first] += 1
    return leaf_children
