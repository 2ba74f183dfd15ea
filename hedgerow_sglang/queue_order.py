"""SGLang's ``dfs-weight`` order of the waiting requests, computed from their own paths alone.

SGLang's classic cache walks everything that is cached, once a scheduler pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


def dfs_weight_order(root: Any, nodes: Sequence[Any]) -> list[int]:
    """Indices of requests in depth-first order; among siblings the subtree with the most requests
    comes first. ``nodes``: where each request's cached prefix ends."""
    indices_of: dict[Any, list[int]] = {}
    for index, node in enumerate(nodes):
        indices_of.setdefault(node, []).append(index)
    weights = Counter[Any]()
    for last, indices in indices_of.items():
        node = last
        while node is not None:
            weights[node] += len(indices)
            node = node.parent
    order: list[int] = []
    stack = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order += indices_of.get(node, ())
            continue
        children = [child for child in node.children.values() if child in weights]
        children.sort(key=lambda child: -weights[child])
        stack += [(node, True), *((child, False) for child in reversed(children))]
    return order
