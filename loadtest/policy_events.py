"""What the KV policy takes to decide, an event at a time, once a search has 1,000 blocks."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

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
"""The pool's share of what the blocks take."""
TREE = "tree"
EVENTS = ("policy_us_p50", "transition_us_p50", "pressure_us_p50", "boundary_us_p50")


@dataclass(slots=True)
class RandomSearch:
    """A best-first search by values that it draws, and the seconds that each kind of event took."""

    draw: random.Random
    depth: dict[int, int] = field(default_factory=lambda: {ROOT: 0})
    value: dict[int, float] = field(default_factory=lambda: {ROOT: 0.5})
    open: set[int] = field(default_factory=lambda: {ROOT})
    fresh: dict[int, float] = field(default_factory=dict)
    transitions: list[float] = field(default_factory=list)
    pressures: list[float] = field(default_factory=list)
    boundaries: list[float] = field(default_factory=list)

    def tokens(self, count: int) -> np.ndarray:
        """Random ones."""
        return np.array(self.draw.choices(range(900), k=count), dtype=np.int64)

    def move(self) -> Hint:
        """The best open nodes are active, to be expanded now."""
        ahead = sorted(self.open, key=lambda node: (-self.value[node], node))
        hint = Hint(self.fresh, tuple(ahead[:ACTIVE]), (), tuple(ahead))
        self.open -= set(hint.active)
        self.fresh = {}
        return hint

    def add(self, parent: int) -> int:
        """A node below another, which may be expanded if it is not too deep."""
        node = len(self.depth)
        self.depth[node] = self.depth[parent] + 1
        self.value[node] = self.fresh[node] = round(self.draw.betavariate(2, 2), 4)
        if self.depth[node] < DEPTH:
            self.open.add(node)
        return node


class SearchInCache:
    """A random search over steps of random tokens in a cache that cannot hold it."""

    def __init__(self, cache: PrefixCache, search: RandomSearch) -> None:
        """The prompt alone."""
        self.cache, self.search = cache, search
        self.paths = {ROOT: search.tokens(4 * STEP_TOKENS)}
        cache.evictor.add_tree(TREE, self.paths[ROOT])

    def round(self) -> None:
        """Expand the best open nodes, noting what each event takes.

        A transition's weighing is done when room is first needed after it, and counted with it.
        """
        hint, evictor, search = self.search.move(), self.cache.evictor, self.search
        moving: float | None = self.timed(lambda: evictor.hint(TREE, hint))
        for parent in hint.active:
            for _ in range(BRANCH):
                evictions = evictor.evictions
                pressing = self.grow(parent)
                if evictor.evictions > evictions:
                    first = moving is not None
                    events = search.transitions if first else search.pressures
                    events.append((moving or 0) + pressing)
                    moving = None

    def timed(self, event: Callable[[], object]) -> float:
        """Seconds that the policy takes for an event."""
        before = self.cache.evictor.seconds
        event()
        return self.cache.evictor.seconds - before

    def grow(self, parent: int) -> float:
        """A step of random tokens below a node; seconds to make room for it."""
        step = self.search.tokens(STEP_TOKENS)
        node = self.search.add(parent)
        path = self.paths[node] = np.concatenate([self.paths[parent], step])
        sequence = TokenSequence(TREE, (0, 0, node), len(path))
        self.cache.open(sequence, path, len(path) - 1)
        pressing = self.timed(lambda: self.cache.reserve(sequence, sequence.missing))
        assert sequence.allocated == sequence.length, "a path does not fit the pool"
        sequence.computed = sequence.length
        self.cache.publish(sequence)
        close = self.cache.evictor.end_step
        confidence = node % 7 / 7
        boundary = self.timed(lambda: close(TREE, node, parent, path, confidence))
        self.search.boundaries.append(boundary)
        return pressing


def event_us(
    policy: KvPolicy, seed: int = 0, worth: ValueParams = VALUE_PARAMS
) -> dict[str, float]:
    """Medians in microseconds: of transitions and pressure events together, and of each kind.

    Full retention has no events: it decides nothing. Where ``worth`` asks for attention it is read
    at boundaries, from a store of the bundled policy model's shape.
    """
    share = 2.0 if policy == "full" else SHARE
    capacity = int(share * (BLOCKS + ROUNDS * ACTIVE * BRANCH) * STEP_TOKENS)
    cache = PrefixCache(capacity, policy, worth)
    if cache.evictor.attends:
        config = ModelConfig.from_checkpoint(SPRIG.policy)
        cache.evictor.use_attention(random_store(config, capacity, seed).attention)
    search = RandomSearch(random.Random(seed))
    grown = SearchInCache(cache, search)
    while len(search.depth) < BLOCKS:
        grown.round()
    kinds = search.transitions, search.pressures, search.boundaries
    for events in kinds:
        events.clear()
    for _ in range(ROUNDS):
        grown.round()
    medians = map(_median_us, (search.transitions + search.pressures, *kinds))
    return dict(zip(EVENTS, medians, strict=True))


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


def _median_us(seconds: list[float]) -> float:
    """0 where nothing happened."""
    return 1e6 * statistics.median(seconds) if seconds else 0.0
