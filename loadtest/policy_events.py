"""Time the KV policy's decisions, event by event, once a search has 1,000 blocks."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import numpy as np
import torch

from loadtest.searches import SPRIG
from runtime.embedded.choices import KvPolicy
from runtime.embedded.eviction import VALUE_PARAMS, ValueParams
from runtime.embedded.model.batch_plan import KVStore
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.prefix_cache import PrefixCache
from runtime.embedded.sequence import TokenSequence
from search.engine import Hint
from search.tree import ROOT

BLOCKS = 1_000
STEP_TOKENS = 12
DEPTH = 10
BRANCH = 3
ACTIVE = 4
ROUNDS = 60
SHARE = 0.25
"""The pool's size as a share of all blocks' tokens."""
TREE = "tree"


class RandomSearch:
    """A best-first search by random values, over steps of random tokens, in a cache that cannot
    hold it. ``events``: the seconds of each transition and each event of pressure."""

    def __init__(self, cache: PrefixCache, draw: random.Random) -> None:
        """Begin with the prompt alone."""
        self.cache, self.draw = cache, draw
        self.events: list[float] = []
        self.depth, self.value = {ROOT: 0}, {ROOT: 0.5}
        self._open, self._fresh = {ROOT}, dict[int, float]()
        self._paths = {ROOT: self._tokens(4 * STEP_TOKENS)}
        cache.evictor.add_tree(TREE, self._paths[ROOT])

    def round(self) -> None:
        """Expand the best open nodes, noting the seconds of each event.

        A transition's weighing is done when room is first needed after it, and counted with it.
        """
        hint, evictor = self._move(), self.cache.evictor
        moving = self._timed(lambda: evictor.hint(TREE, hint))
        for parent in hint.active:
            for _ in range(BRANCH):
                evictions = evictor.evictions
                pressing = self._grow(parent)
                if evictor.evictions > evictions:
                    self.events.append(moving + pressing)
                    moving = 0.0

    def _move(self) -> Hint:
        """Activate the best open nodes, to be expanded now; the hint that says so."""
        ahead = sorted(self._open, key=lambda node: (-self.value[node], node))
        hint = Hint(self._fresh, tuple(ahead[:ACTIVE]), (), tuple(ahead))
        self._open -= set(hint.active)
        self._fresh = {}
        return hint

    def _grow(self, parent: int) -> float:
        """Add a step of random tokens below a node, to be expanded if it is not too deep; seconds
        to make room for it."""
        step, node = self._tokens(STEP_TOKENS), len(self.depth)
        self.depth[node] = self.depth[parent] + 1
        self.value[node] = self._fresh[node] = round(self.draw.betavariate(2, 2), 4)
        if self.depth[node] < DEPTH:
            self._open.add(node)
        path = self._paths[node] = np.concatenate([self._paths[parent], step])
        sequence = TokenSequence(TREE, (0, 0, node), len(path))
        self.cache.open(sequence, path, len(path) - 1)
        pressing = self._timed(lambda: self.cache.reserve(sequence, sequence.missing))
        assert sequence.allocated == sequence.length, "a path does not fit the pool"
        sequence.computed = sequence.length
        self.cache.publish(sequence)
        self.cache.evictor.end_step(TREE, node, parent, path, node % 7 / 7)
        return pressing

    def _tokens(self, count: int) -> np.ndarray:
        """``count`` random tokens."""
        return np.array(self.draw.choices(range(900), k=count), dtype=np.int64)

    def _timed(self, event: Callable[[], object]) -> float:
        """Seconds that the policy takes for an event."""
        before = self.cache.evictor.seconds
        event()
        return self.cache.evictor.seconds - before


def event_us(policy: KvPolicy, seed: int = 0, worth: ValueParams = VALUE_PARAMS) -> float:
    """The median of transitions and events of pressure, in microseconds.

    Full retention has none: it decides nothing. Where ``worth`` asks for attention it is read at
    boundaries, from a store of the bundled policy model's shape.
    """
    share = 2.0 if policy == "full" else SHARE
    capacity = int(share * (BLOCKS + ROUNDS * ACTIVE * BRANCH) * STEP_TOKENS)
    cache = PrefixCache(capacity, policy, worth)
    if cache.evictor.attends:
        config = ModelConfig.from_checkpoint(SPRIG.policy)
        cache.evictor.use_attention(random_store(config, capacity, seed).attention)
    search = RandomSearch(cache, random.Random(seed))
    while len(search.depth) < BLOCKS:
        search.round()
    search.events.clear()
    for _ in range(ROUNDS):
        search.round()
    return 1e6 * statistics.median(search.events) if search.events else 0.0


def random_store(config: ModelConfig, slots: int, seed: int) -> KVStore:
    """A watched store whose every slot holds random keys, values and queries."""
    dice, store = torch.Generator().manual_seed(seed), KVStore(config, slots)
    store.watch()
    assert store.slice is not None, "it is watched"
    for layer in store.both:
        layer.normal_(generator=dice)
    queries = torch.randn(store.rows, config.heads, config.head_dim, generator=dice)
    store.slice.note(torch.arange(store.rows), queries)
    return store
