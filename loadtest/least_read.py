"""The fewest tokens that any cache of a given size has to read again: Belady's order, in hindsight.

The served requests are replayed: a request begins with a prefix, all of which has to be cached from
then on, draws, and is over. Tokens that no request uses may be evicted at any moment. Between two
reads a token either stays, and takes a place all the while, or is read again. Choosing which to
evict so that the fewest are read again is interval scheduling with unit weights: whenever places
run out, the token whose next read is latest goes, and no other choice is better. The number is
exact, not only a bound, since this order asks for nothing that a prefix tree forbids: the tokens
above a token are read whenever it is, so those read latest can be taken from the tips. In one case
it asks for more than a tree can give: a path that was evicted and is not read but drawn once more.
There it gives less than the best order would read, never more.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from search.outcome import Outcome

Path = tuple[int, ...]
Draw = tuple[Path, Path]
"""A prefix, and the step drawn after it."""
ROOT = 0


@dataclass(frozen=True, slots=True)
class RequestStart:
    """A request begins, with all of ``prefix`` cached."""

    request: int
    prefix: Path


@dataclass(frozen=True, slots=True)
class RequestDraw:
    """A request that has begun draws ``tokens`` after those that it has."""

    request: int
    tokens: Path


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request is over: what it read and drew is cached, and may be evicted."""

    request: int


RequestEvent = RequestStart | RequestDraw | RequestEnd


def draws_of(outcome: Outcome) -> list[Draw]:
    """All draws of a search, in the order of their ids."""
    tree = outcome.tree
    return [(tree.tokens(node.parent), node.tokens) for node in tree.nodes[1:]]


def one_by_one(draws: Sequence[Draw]) -> list[RequestEvent]:
    """The events of draws that are served one after the other."""
    return [
        event
        for turn, (prefix, step) in enumerate(draws)
        for event in (RequestStart(turn, prefix), RequestDraw(turn, step), RequestEnd(turn))
    ]


def least_read_again(served: Sequence[RequestEvent], pool: int) -> int:
    """Tokens that were cached once and are read again, in a cache of ``pool`` tokens.

    Where requests under way need more than that, they get it, and nothing else is kept.
    """
    trie, paths = TokenTrie(), dict[int, list[int]]()
    walked = [_walk(trie, paths, event) for event in served]
    uses: dict[int, list[float]] = defaultdict(list)
    for turn in reversed(range(len(served))):
        if not isinstance(served[turn], RequestEnd):
            read = isinstance(served[turn], RequestStart)
            for token in walked[turn]:
                uses[token].append(turn if read else math.inf)
    cache = _Cache(trie.depth, uses)
    for event, tokens in zip(served, walked, strict=True):
        if isinstance(event, RequestEnd):
            cache.let_go(tokens)
        else:
            cache.need(tokens, pool, read=isinstance(event, RequestStart))
    return cache.read_again


def _walk(trie: TokenTrie, paths: dict[int, list[int]], event: RequestEvent) -> list[int]:
    """The tokens of an event; for ``RequestEnd`` all tokens of its request."""
    if isinstance(event, RequestEnd):
        return paths.pop(event.request)
    if isinstance(event, RequestStart):
        tokens = trie.walk(event.prefix)
        paths[event.request] = list(tokens)
        return tokens
    path = paths[event.request]
    tokens = trie.walk(event.tokens, path[-1] if path else ROOT)
    path += tokens
    return tokens


@dataclass(slots=True)
class TokenTrie:
    """Every token of every path, by a number of its own; 0 is the root."""

    depth: list[int] = field(default_factory=lambda: [0])
    _below: dict[tuple[int, int], int] = field(default_factory=dict)

    def walk(self, tokens: Sequence[int], at: int = ROOT) -> list[int]:
        """The numbers of a path's tokens below the token ``at``."""
        numbers = []
        for token in tokens:
            number = self._below.setdefault((at, token), len(self.depth))
            if number == len(self.depth):
                self.depth.append(self.depth[at] + 1)
            at = number
            numbers.append(at)
        return numbers


@dataclass(slots=True)
class _Cache:
    """The cached tokens. ``uses``: turns at which each will be read, the next one last; infinite
    where it is drawn once more, which costs the same whether it is cached or not.

    ``_order``: a heap of tokens that no request uses, the first to evict in front; an entry whose
    token has been used since, or is in use, is out of date.
    """

    depth: list[int]
    uses: dict[int, list[float]]
    read_again: int = 0
    _cached: set[int] = field(default_factory=set)
    _ever_cached: set[int] = field(default_factory=set)
    _users: Counter[int] = field(default_factory=Counter)
    _order: list[tuple[float, int, int]] = field(default_factory=list)

    def need(self, tokens: Sequence[int], pool: int, *, read: bool) -> None:
        """A request uses these from now on; ``read``: it reads them, else it draws them."""
        for token in tokens:
            self.uses[token].pop()
            if read:
                self.read_again += token in self._ever_cached and token not in self._cached
            self._users[token] += 1
        self._cached.update(tokens)
        self._ever_cached.update(tokens)
        while len(self._cached) > pool and self._order:
            turn, _, token = heapq.heappop(self._order)
            if token in self._cached and not self._users[token] and turn == self._turn(token):
                self._cached.discard(token)

    def let_go(self, tokens: Sequence[int]) -> None:
        """A request does not need these any more."""
        for token in tokens:
            self._users[token] -= 1
            if not self._users[token]:
                heapq.heappush(self._order, (self._turn(token), -self.depth[token], token))

    def _turn(self, token: int) -> float:
        """Order of eviction, lowest first: tokens that are read latest, or never."""
        coming = self.uses[token]
        return -coming[-1] if coming else -math.inf
