"""SGLang's radix cache, told by searches what their KV is worth.

Room is made leaf by leaf from the tips: first what no search holds, by age, then in kvpolicy's
exact order. A leaf that need not go whole keeps its head. What has died goes when the note that
says so arrives. SGLang's own prefill brings back what is asked for again.

Built on the classic ``RadixCache``, which has changed least from 0.5.16 to 0.5.23: its counts,
locks and matching are SGLang's.
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import (  # pyright: ignore[reportMissingImports]
    EvictParams,
    EvictResult,
)
from sglang.srt.mem_cache.radix_cache import (  # pyright: ignore[reportMissingImports]
    RadixCache,
    RadixKey,
)

from hedgerow_sglang.plugin_protocol import NAME, Note, parse_note
from hedgerow_sglang.search_registry import CacheNamespace, DeadPath, SearchRegistry, Tokens
from kvpolicy.block_table import EvictionKey

MARGIN = 0.02
"""Share of the pool that making room frees beyond what is wanted, of what no search is about to
read: so that it happens seldom, since all that is held is looked at each time."""
UNHELD, HELD, NEXT = range(3)

Place = tuple[Any, int]
"""A node of the radix tree and how many tokens lead to its end."""


class SearchCache(RadixCache):
    """The classic radix cache with the order of searches."""

    def __init__(self, params: Any) -> None:
        self.searches = SearchRegistry()
        self.evicted_tokens = 0
        self.split_evicted_tokens = 0
        self.freed_tokens = 0
        self.recomputed_tokens = 0
        self.queue: Callable[[], Sequence[Any]] = tuple
        """The scheduler's requests that wait."""
        super().__init__(params)

    def reset(self) -> None:
        """Forget all that is cached."""
        super().reset()
        self.searches.clear()

    def take_note(self, note: Note) -> None:
        """A request has brought a note: free at once what died by it."""
        start = time.perf_counter()
        dead_paths = self.searches.take_note(note)
        if not dead_paths:
            return
        held = self.ranks()
        freed = sum(self._free_dead_path(path, held) for path in dead_paths)
        self.freed_tokens += freed
        self.update_eviction_metrics(freed, start)

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least as many tokens as are wanted, or all that may go."""
        start = time.perf_counter()
        freed = 0 if self.disable else self._evict_tokens(params.num_tokens)
        self.evicted_tokens += freed
        self.update_eviction_metrics(freed, start)
        return EvictResult(num_tokens_evicted=freed)

    def ranks(self) -> dict[int, EvictionKey]:
        """What each radix node that a search holds is worth, by node id: the most of its blocks.

        A block that is cached in part is worth something in that part; edges are split where a
        held path leaves them, as a match would.
        """
        ranks: dict[int, EvictionKey] = {}
        places: dict[tuple[str, int], Place] = {}
        for namespace, block in self.searches.held(self._waiting()):
            start = places.get((block.tree, block.parent), (self.root_node, 0))
            path = list(self._walk(self._key(block.tokens, namespace), start, ranks))
            for node, _ in path:
                ranks[node.id] = max(ranks.get(node.id, block.rank), block.rank)
            places[block.tree, block.node] = path[-1] if path else start
        return ranks

    def _waiting(self) -> list[Note]:
        """The notes of requests that wait, the next one first."""
        brought = (request.sampling_params.custom_params or {} for request in self.queue())
        return [parse_note(params[NAME]) for params in brought if NAME in params]

    def state(self) -> dict[str, int]:
        """What ``plugin_protocol.plugin_counts`` reads."""
        held = self.ranks()
        return {
            "evicts": 1,
            "held_tokens": sum(len(node.key) for node in self._nodes() if node.id in held),
            "cached_tokens": self.evictable_size() + self.protected_size(),
            "evicted_tokens": self.evicted_tokens,
            "split_evicted_tokens": self.split_evicted_tokens,
            "freed_tokens": self.freed_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "searches": len(self.searches),
        }

    # how SGLang says that a request's tokens are in the tree: from 0.5.22 on, in 0.5.21, before

    def checkpoint(self, req: Any, **how: Any) -> None:
        """Put a request's tokens into the tree; when it has finished, its step is a block."""
        super().checkpoint(req, **how)
        self._record_step(req)

    def insert_req(self, req: Any, **how: Any) -> None:
        """As ``checkpoint``."""
        super().insert_req(req, **how)
        self._record_step(req)

    def cache_finished_req(self, req: Any, *args: Any, **how: Any) -> None:
        """As ``checkpoint``."""
        super().cache_finished_req(req, *args, **how)
        self._record_step(req)

    def _record_step(self, req: Any) -> None:
        """Note the block that a finished request leaves; an aborted one leaves none."""
        text = (req.sampling_params.custom_params or {}).get(NAME)
        if text is None or not req.finished() or req.finished_reason.to_json()["type"] == "abort":
            return
        note = parse_note(text)
        prefix = array("q", req.origin_input_ids)
        known = self.searches.read_before(note, prefix)
        self.recomputed_tokens += max(0, known - req.cached_tokens)
        tokens = prefix + array("q", req.output_ids_through_stop)
        salt = getattr(req, "cache_salt", None)
        self.searches.complete_step(note, tokens, CacheNamespace(req.extra_key, salt or None))

    def _evict_tokens(self, wanted: int) -> int:
        margin = int(MARGIN * self.token_to_kv_pool_allocator.size)
        ranks = self.ranks()
        heap = [(_order(leaf, ranks), leaf.id, leaf) for leaf in self.evictable_leaves]
        heapq.heapify(heap)
        freed = 0
        while heap:
            (tier, *_), _, leaf = heapq.heappop(heap)
            left = wanted - freed + (margin if tier < NEXT else 0)
            if left <= 0:
                break
            freed += self._evict_leaf(leaf, left)
            above = leaf.parent
            if above in self.evictable_leaves:
                heapq.heappush(heap, (_order(above, ranks), above.id, above))
        return freed

    def _evict_leaf(self, leaf: Any, wanted: int) -> int:
        """Free a leaf's last tokens, at least as many as are wanted, or all of it."""
        cut = (len(leaf.key) - wanted) // self.page_size * self.page_size
        if cut > 0:
            self._split_node(leaf.key, leaf, cut)
            self.split_evicted_tokens += len(leaf.key)
        return self._free(leaf)

    def _free_dead_path(self, dead: DeadPath, held: dict[int, EvictionKey]) -> int:
        """Free what is cached of a path, beyond its prompt and from where nobody holds it on."""
        key = self._key(dead.tokens, dead.namespace)
        kept = self._key(dead.tokens[: dead.keep], dead.namespace)
        prompt = [(self.root_node, 0), *self._walk(kept, (self.root_node, 0), held)]
        if prompt[-1][1] < len(kept):
            return 0
        path = self._walk(key, prompt[-1], held)
        top = next((node for node, _ in path if node.id not in held), None)
        if top is None:
            return 0
        below = list(self._nodes(top))
        return sum(self._free(node) for node in reversed(below) if node in self.evictable_leaves)

    def _free(self, leaf: Any) -> int:
        """Free an unlocked leaf."""
        tokens = len(leaf.key)
        _free_slots(self.token_to_kv_pool_allocator, leaf.value)
        self._delete_leaf(leaf)
        _record_removal(self, leaf)
        return tokens

    def _walk(self, key: RadixKey, place: Place, ranks: dict[int, EvictionKey]) -> Iterator[Place]:
        """The nodes that hold ``key`` from a place on, the last one split where the key leaves it.

        Both parts of what is split have its rank. Touches no time of access.
        """
        node, at = place
        while at < len(key):
            rest = key[at:]
            child = node.children.get(rest.child_key(self.page_size))
            shared = 0 if child is None else child.key.match(rest, page_size=self.page_size)
            if child is None or not shared:
                return
            node = child
            if shared < len(child.key):
                node = self._split_node(child.key, child, shared)
                if child.id in ranks:
                    ranks[node.id] = ranks[child.id]
            at += shared
            yield node, at

    def _nodes(self, top: Any = None) -> Iterator[Any]:
        """The nodes at and below ``top``, parents first; by default all but the root."""
        stack: list[Any] = list(self.root_node.children.values()) if top is None else [top]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _key(self, tokens: Tokens, namespace: CacheNamespace) -> RadixKey:
        key = RadixKey(tokens, namespace.extra_key, is_bigram=self.is_eagle)
        if namespace.cache_salt is not None:
            key.cache_salt = namespace.cache_salt
        return key.page_aligned(self.page_size)


def _order(leaf: Any, ranks: dict[int, EvictionKey]) -> tuple[Any, ...]:
    """A leaf's turn to go, lowest first."""
    rank = ranks.get(leaf.id)
    if rank is None:
        return UNHELD, leaf.last_access_time
    on_path, *rest = rank
    return (NEXT if on_path else HELD, *rest)


def _free_slots(allocator: Any, slots: Any) -> None:
    """Give slots back, whole pages as they stand in the tree."""
    if hasattr(allocator, "free_segment"):
        allocator.free_segment(slots, start_pos=0)
    else:
        allocator.free(slots)


def _record_removal(cache: Any, leaf: Any) -> None:
    """Tell those who listen to the cache's events, if anybody does."""
    if hasattr(cache, "kv_events"):
        cache.kv_events.record_remove(leaf)
    else:
        cache._record_remove_event(leaf)
