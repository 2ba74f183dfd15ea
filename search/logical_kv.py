"""How many tokens of KV a set of paths needs if equal prefixes are stored once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from search.tree import ROOT, Node


class LogicalKV:
    """A radix tree over the token paths of a search tree, kept only to count.

    Its tokens do not depend on how paths are cut into steps: two siblings that begin alike share
    their common beginning, two that are equal share everything.
    """

    def __init__(self, prompt_tokens: int) -> None:
        """``prompt_tokens``: the prompt's length; it is on every path."""
        self._prompt = prompt_tokens
        self._edge: list[tuple[int, ...]] = [()]
        self._above: list[int] = [-1]
        self._below: dict[tuple[int, int], int] = {}
        self._end: dict[int, int] = {ROOT: 0}

    def add(self, node: Node) -> None:
        """Take in a node whose parent has been taken in."""
        at, rest = self._end[node.parent], node.tokens
        while rest:
            child = self._below.get((at, rest[0]))
            if child is None:
                at, rest = self._hang(at, rest), ()
                continue
            shared = _common(self._edge[child], rest)
            at = child if shared == len(self._edge[child]) else self._split(child, shared)
            rest = rest[shared:]
        self._end[node.id] = at

    def tokens(self, nodes: Iterable[int]) -> int:
        """Unique tokens, prompt included, on the paths down to ``nodes``."""
        seen: set[int] = set()
        for node in nodes:
            at = self._end[node]
            while at and at not in seen:
                seen.add(at)
                at = self._above[at]
        return self._prompt + sum(len(self._edge[at]) for at in seen)

    def edges(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The radix tree so far: each edge's parent (-1: none) and its tokens, the prompt first.

        Where an edge was split, its upper part has a higher number than its lower one.
        """
        lengths = map(len, self._edge[1:])
        return tuple(self._above), (self._prompt, *lengths)

    def end(self, node: int) -> int:
        """The edge, counted as in ``edges``, in whose last token the path of ``node`` ends."""
        return self._end[node]

    def _hang(self, above: int, edge: tuple[int, ...]) -> int:
        self._edge.append(edge)
        self._above.append(above)
        self._below[above, edge[0]] = len(self._edge) - 1
        return len(self._edge) - 1

    def _split(self, child: int, at: int) -> int:
        """Put a new node ``at`` tokens down the edge of ``child``, which keeps its end."""
        edge = self._edge[child]
        middle = self._hang(self._above[child], edge[:at])
        self._edge[child], self._above[child] = edge[at:], middle
        self._below[middle, edge[at]] = child
        return middle


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
