"""The least that any cache of a given size would have read again: Belady's order, in hindsight.

Searches are gone through once more, draw by draw: a draw needs its whole prefix cached, reads what
is missing of it, and leaves its step behind. What goes is what is needed again latest or never, a
token at a time from the tips; what a draw needs stays, beside nothing else if it alone is more than
the pool. Draws are taken one after the other, and searches in turn, fork by fork. A server that has
several draws of one search at work holds all of their prefixes and needs more, but for one thing:
a round that forks many nodes (`ets`) is drawn at once there, and what its paths share is read once.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest

from search.outcome import Outcome
from search.tree import Tree

Path = tuple[int, ...]
ROOT = 0


@dataclass(frozen=True, slots=True)
class Draw:
    """A step drawn after a prefix."""

    prefix: Path
    step: Path


def draws_of(outcomes: Sequence[Outcome]) -> list[Draw]:
    """All draws: of each search in turn those below one node, in the order of their ids."""
    turns = zip_longest(*(_forks(outcome.tree) for outcome in outcomes), fillvalue=())
    return [draw for turn in turns for fork in turn for draw in fork]


def _forks(tree: Tree) -> Iterator[list[Draw]]:
    for parent, nodes in groupby(tree.nodes[1:], key=lambda node: node.parent):
        prefix = tree.tokens(parent)
        yield [Draw(prefix, node.tokens) for node in nodes]


@dataclass(slots=True)
class _Trie:
    """Every token of every path, by a number of its own; 0 is the root."""

    above: list[int] = field(default_factory=lambda: [-1])
    depth: list[int] = field(default_factory=lambda: [0])
    _below: dict[tuple[int, int], int] = field(default_factory=dict)

    def walk(self, tokens: Path, at: int = ROOT) -> list[int]:
        """The numbers of a path's tokens."""
        found = []
        for token in tokens:
            number = self._below.setdefault((at, token), len(self.above))
            if number == len(self.above):
                self.above.append(at)
                self.depth.append(self.depth[at] + 1)
            at = number
            found.append(at)
        return found


def least_read_again(draws: Sequence[Draw], pool: int) -> int:
    """Tokens that were cached once and are read again."""
    trie = _Trie()
    paths, steps = [], []
    uses: dict[int, list[int]] = defaultdict(list)
    for draw in draws:
        paths.append(trie.walk(draw.prefix))
        steps.append(trie.walk(draw.step, paths[-1][-1]))
    for turn in reversed(range(len(draws))):
        for token in paths[turn]:
            uses[token].append(turn)
    cache = _Cache(trie, uses)
    for path, step in zip(paths, steps, strict=True):
        for token in path:
            uses[token].pop()
        cache.hold([*path, *step], len(path), pool)
    return cache.read_again


@dataclass(slots=True)
class _Cache:
    """The tokens that are cached. ``uses``: the draws that will need each, the next one last."""

    trie: _Trie
    uses: dict[int, list[int]]
    read_again: int = 0
    _cached: set[int] = field(default_factory=set)
    _seen: set[int] = field(default_factory=set)
    _children: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def hold(self, needed: Sequence[int], read: int, pool: int) -> None:
        """Make room for all of ``needed``, the first ``read`` of which a draw reads."""
        missing = [token for token in needed if token not in self._cached]
        self.read_again += sum(t in self._seen and t not in self._cached for t in needed[:read])
        self._make_room(len(self._cached) + len(missing) - pool, set(needed))
        for token in missing:
            self._cached.add(token)
            self._children[self.trie.above[token]] += 1
        self._seen.update(missing)

    def _make_room(self, wanted: int, needed: set[int]) -> None:
        if wanted <= 0:
            return
        tips = [t for t in self._cached if not self._children[t] and t not in needed]
        heap = [(self._turn(token), token) for token in tips]
        heapq.heapify(heap)
        while wanted > 0 and heap:
            token = heapq.heappop(heap)[1]
            self._cached.discard(token)
            wanted -= 1
            above = self.trie.above[token]
            self._children[above] -= 1
            if above in self._cached and not self._children[above] and above not in needed:
                heapq.heappush(heap, (self._turn(above), above))

    def _turn(self, token: int) -> tuple[float, int]:
        """Lowest first: what is needed latest, then the deepest."""
        coming = self.uses.get(token)
        return -(coming[-1] if coming else math.inf), -self.trie.depth[token]
