"""SGLang's ``dfs-weight`` order of the requests that wait, found on their own paths alone.

SGLang's classic cache looks at all that is cached, once a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


def dfs_weight_order(root: Any, nodes: Sequence[Any]) -> list[int]:
    """The order of requests by the nodes where their cached prefixes end, as indices: depth first,
    among siblings where most requests are first."""
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
