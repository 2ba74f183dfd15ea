"""Paths in SGLang's classic radix tree, where each node but the root has some tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def depth(node: Any) -> int:
    """How many tokens lead to a node's end."""
    tokens = 0
    while node.parent is not None:
        tokens += len(node.key)
        node = node.parent
    return tokens


def nodes_at_and_below(*tops: Any) -> Iterator[Any]:
    """These nodes and all their descendants, parents first."""
    stack = list(tops)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def touch_path(node: Any) -> list[Any]:
    """The KV slots from the root to a node; all nodes on the way get its time of access."""
    slots, access_time = [], node.last_access_time
    while node.parent is not None:
        slots.append(node.value)
        node = node.parent
        node.last_access_time = access_time
    return slots[::-1]


def begins_with(key: Any, prefix: Any) -> bool:
    """Whether a key begins with the tokens of ``prefix``, in the same namespace."""
    same = key.extra_key == prefix.extra_key and _salt(key) == _salt(prefix)
    return same and key.token_ids[: len(prefix.token_ids)] == prefix.token_ids


def _salt(key: Any) -> str | None:
    return getattr(key, "cache_salt", None)
