"""SGLang's radix cache, which evicts by what searches say their KV is worth.

KV is evicted leaf by leaf from the tips: first what no search holds, oldest first, then in
kvpolicy's exact order. A leaf larger than what is needed keeps its head. Dead nodes are freed when
the note that names them arrives. SGLang's own prefill recomputes what is needed again. The order is
updated when a hint arrives, a step completes or a leaf becomes free; eviction takes from its front.

Built on the classic ``RadixCache``, which changed least from 0.5.16 to 0.5.23: its counts, locks
and matching are SGLang's. Paths of searches are long and span many nodes, so a path is walked from
where it is known to be cached, not from the root.
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import (  # pyright: ignore[reportMissingImports]
    EvictParams,
    EvictResult,
)
from sglang.srt.mem_cache.radix_cache import (  # pyright: ignore[reportMissingImports]
    RadixCache,
    RadixKey,
)

from hedgerow_sglang.held_nodes import Block, HeldNodes, Place
from hedgerow_sglang.plugin_protocol import NAME, Note, parse_note
from hedgerow_sglang.queue_order import dfs_weight_order
from hedgerow_sglang.radix_paths import begins_with, depth, nodes_at_and_below, touch_path
from hedgerow_sglang.search_registry import CacheNamespace, DeadPath, SearchRegistry, Tokens

UNHELD, HELD, NEXT = range(3)
STALE = 4
"""Most heap entries for each evictable leaf: with more, the heap is rebuilt without old ones."""


class SearchCache(RadixCache):
    """The classic radix cache with kvpolicy's eviction order."""

    def __init__(self, params: Any) -> None:
        self.searches = SearchRegistry()
        self._held = HeldNodes()
        self._evict_heap: list[tuple[tuple[Any, ...], int, Any]] = []
        """A heap of leaves by ``_evict_key``. An entry is valid if its leaf may be evicted and
        still has that key; whatever makes a key smaller must add an entry."""
        self.evicted_tokens = 0
        self.split_evicted_tokens = 0
        self.freed_tokens = 0
        self.recomputed_tokens = 0
        self.queue: Callable[[], Sequence[Any]] = tuple
        """Returns the scheduler's waiting requests."""
        self._cached_end: Place | None = None
        """How far the path being processed is known to be cached; None where it is not."""
        super().__init__(params)

    def reset(self) -> None:
        """Forget all that is cached."""
        super().reset()
        self.searches.clear()
        self._held.clear()
        self._evict_heap.clear()

    def take_note(self, note: Note) -> None:
        """Take a request's note, and free at once what it says is dead."""
        start = time.perf_counter()
        dead_paths = self.searches.take_note(note)
        self._line_up([node for path in dead_paths for node in self._held.release(path.block)])
        if note.hints:
            self._rank_again(self.searches.blocks(note.tree))
        freed = sum(self._free_dead_path(path) for path in dead_paths if not path.silent)
        if freed:
            self.freed_tokens += freed
            self.update_eviction_metrics(freed, start)

    def complete_step(self, note: Note, tokens: Tokens, namespace: CacheNamespace) -> None:
        """Record that a request's step is complete; its tokens may be cached only in part."""
        for block in self.searches.complete_step(note, tokens, namespace):
            self._held.release(block)
            self._find(block)
        if note.parent is not None:
            self._rank_again(self.searches.chain((note.tree, note.parent)))

    def insert(self, params: Any, *args: Any, **more: Any) -> Any:
        """Insert as SGLang does; blocks that had lost some of these tokens hold them again."""
        result = super().insert(params, *args, **more)
        if not self._held.whole and result.last_device_node is not None:
            self._find_again(result.last_device_node)
        return result

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least ``params.num_tokens`` tokens, or all that may be evicted."""
        start = time.perf_counter()
        freed = 0 if self.disable else self._evict_tokens(params.num_tokens)
        self.evicted_tokens += freed
        self.update_eviction_metrics(freed, start)
        return EvictResult(num_tokens_evicted=freed)

    def match_prefix(self, params: Any) -> Any:
        """Match as SGLang does, but start from the cached end of the request's parent step."""
        req = getattr(params, "req", None)
        place = None if req is None else self._end_of_parent(req, params.key)
        if place is None:
            return super().match_prefix(params)
        with self._from(place):
            return super().match_prefix(params)

    def dfs_weight_order(self, node_handles: Sequence[Any]) -> list[int]:
        """SGLang's ``dfs-weight`` order, computed faster (see ``queue_order``)."""
        return dfs_weight_order(self.root_node, node_handles)

    def _waiting(self) -> list[Note]:
        """The notes of the waiting requests, the next one first."""
        all_params = (request.sampling_params.custom_params or {} for request in self.queue())
        return [parse_note(params[NAME]) for params in all_params if NAME in params]

    def state(self) -> dict[str, int]:
        """The counts that ``plugin_protocol.plugin_counts`` reads."""
        cached = nodes_at_and_below(*self.root_node.children.values())
        held_nodes = (node for node in cached if self._held.holders(node))
        return {
            "evicts": 1,
            "held_tokens": sum(len(node.key) for node in held_nodes),
            "cached_tokens": self.evictable_size() + self.protected_size(),
            "evicted_tokens": self.evicted_tokens,
            "split_evicted_tokens": self.split_evicted_tokens,
            "freed_tokens": self.freed_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "searches": len(self.searches),
        }

    # what SGLang calls to put a request's tokens into the tree: from 0.5.22 on, in 0.5.21, before

    def checkpoint(self, req: Any, **more: Any) -> None:
        """Put a request's tokens into the tree; if it has finished, record its step as a block."""
        with self._from(self._prefix_end(req)):
            super().checkpoint(req, **more)
            self._record_step(req)

    def insert_req(self, req: Any, **more: Any) -> None:
        """``checkpoint``, by its name in SGLang 0.5.21."""
        with self._from(self._prefix_end(req)):
            super().insert_req(req, **more)
            self._record_step(req)

    def cache_finished_req(self, req: Any, *args: Any, **more: Any) -> None:
        """``checkpoint``, by its name before SGLang 0.5.21."""
        with self._from(self._prefix_end(req)):
            super().cache_finished_req(req, *args, **more)
            self._record_step(req)

    def _record_step(self, req: Any) -> None:
        """Record the block of a finished request; an aborted one has none."""
        text = (req.sampling_params.custom_params or {}).get(NAME)
        if text is None or not req.finished() or req.finished_reason.to_json()["type"] == "abort":
            return
        note = parse_note(text)
        prefix = array("q", req.origin_input_ids)
        read_tokens = self.searches.read_before(note, prefix)
        self.recomputed_tokens += max(0, read_tokens - req.cached_tokens)
        tokens = prefix + array("q", req.output_ids_through_stop)
        salt = getattr(req, "cache_salt", None)
        self.complete_step(note, tokens, CacheNamespace(req.extra_key, salt or None))

    def _evict_tokens(self, tokens: int) -> int:
        """Evict ``tokens`` tokens or more, in order; what waiting requests will read goes last."""
        freed, readers = 0, None
        deferred_leaves: list[tuple[tuple[Any, ...], int, Any]] = []
        while freed < tokens and self._evict_heap:
            key, _, leaf = heapq.heappop(self._evict_heap)
            if leaf not in self.evictable_leaves:
                continue
            current_key = self._evict_key(leaf)
            if current_key != key:
                heapq.heappush(self._evict_heap, (current_key, leaf.id, leaf))
                continue
            if key[0] == NEXT:
                readers = self.searches.readers(self._waiting()) if readers is None else readers
                if not readers.keys().isdisjoint(self._held.holders(leaf)):
                    deferred_leaves.append((self._evict_key(leaf, readers), leaf.id, leaf))
                    continue
            freed += self._evict_leaf(leaf, tokens - freed)
        if readers:
            freed += self._evict_read_soon(tokens - freed, deferred_leaves, readers)
        return freed

    def _evict_read_soon(
        self,
        tokens: int,
        leaves: list[tuple[tuple[Any, ...], int, Any]],
        readers: Mapping[Block, int],
    ) -> int:
        """Evict ``tokens`` tokens or more of what waiting requests will read, the latest first."""
        freed = 0
        heapq.heapify(leaves)
        while freed < tokens and leaves:
            _, _, leaf = heapq.heappop(leaves)
            if leaf not in self.evictable_leaves:
                continue
            freed += self._evict_leaf(leaf, tokens - freed)
            above = leaf.parent
            if above in self.evictable_leaves:
                heapq.heappush(leaves, (self._evict_key(above, readers), above.id, above))
        self._line_up(leaf for _, _, leaf in leaves)
        return freed

    def _evict_key(self, leaf: Any, readers: Mapping[Block, int] | None = None) -> tuple[Any, ...]:
        """A leaf's place in the eviction order, lowest first: UNHELD, HELD or NEXT, then its rank.
        ``readers``: which of the waiting requests will read a block."""
        blocks = self._held.holders(leaf)
        if not blocks:
            return UNHELD, leaf.last_access_time
        on_path, *rest = max(self.searches.rank(block, readers) for block in blocks)
        return (NEXT if on_path else HELD, *rest)

    def _line_up(self, nodes: Iterable[Any]) -> None:
        """Add the evictable leaves among ``nodes`` with their current keys; prune a full heap."""
        for node in nodes:
            if node in self.evictable_leaves:
                heapq.heappush(self._evict_heap, (self._evict_key(node), node.id, node))
        if len(self._evict_heap) > STALE * (len(self.evictable_leaves) + 16):
            leaves = self.evictable_leaves
            self._evict_heap = [(self._evict_key(leaf), leaf.id, leaf) for leaf in leaves]
            heapq.heapify(self._evict_heap)

    def _rank_again(self, blocks: Iterable[Block]) -> None:
        """Update the keys of the leaves of ``blocks``, whose worth may have changed."""
        self._line_up({node for block in blocks for node in self._held.nodes(block)})

    @contextmanager
    def _from(self, place: Place) -> Iterator[None]:
        """In this context the path being processed is walked from ``place``, not from the root."""
        self._cached_end = place
        try:
            yield
        finally:
            self._cached_end = None

    def _prefix_end(self, req: Any) -> Place:
        """The end of the cached prefix that a running request has locked; the root for none."""
        node = req.last_node
        return (self.root_node, 0) if node is None else (node, depth(node))

    def _end_of_parent(self, req: Any, key: RadixKey) -> Place | None:
        """How far the path of a request's parent step is cached; None where it is not known."""
        text = (req.sampling_params.custom_params or {}).get(NAME)
        if text is None:
            return None
        note = parse_note(text)
        if note.parent is None:
            return None
        block = note.tree, note.parent
        place = self._held.end(block)
        if place is None:
            return None
        namespace, tokens, _ = self.searches.path(block)
        return place if begins_with(key, self._key(tokens, namespace)) else None

    def _start(self, most: int) -> Place:
        """Where a walk along the path being processed begins: behind ``most`` tokens at most."""
        node, at = self._cached_end or (self.root_node, 0)
        while at > most:
            at -= len(node.key)
            node = node.parent
        return node, at

    def _insert_helper(self, node: Any, key: RadixKey, value: Any, *args: Any, **more: Any) -> Any:
        """Insert as SGLang does, but begin at ``_start``. The nodes skipped so are missing from
        SGLang's hit counts, which this order does not use."""
        start, at = self._start(len(key))
        if not at:
            return super()._insert_helper(node, key, value, *args, **more)
        count, last = super()._insert_helper(start, key[at:], value[at:], *args, **more)
        touch_path(start)
        return at + count, last

    def _match_prefix_helper(self, node: Any, key: RadixKey) -> Any:
        """Match as SGLang does, but begin at ``_start``; the nodes skipped count as read."""
        start, at = self._start(len(key) - 1)
        if not at:
            return super()._match_prefix_helper(node, key)
        values, last = super()._match_prefix_helper(start, key[at:])
        return [*touch_path(start), *values], last

    def _update_leaf_status(self, node: Any) -> None:
        """Update as SGLang does; a leaf that may be evicted now gets its key."""
        super()._update_leaf_status(node)
        if node in self.evictable_leaves:
            self._line_up((node,))

    def _split_node(self, key: RadixKey, child: Any, split_len: int) -> Any:
        """Split as SGLang does; a node's holders hold both parts, which keep its time of access."""
        upper = super()._split_node(key, child, split_len)
        upper.last_access_time = child.last_access_time
        self._held.split(upper, child)
        return upper

    def _evict_leaf(self, leaf: Any, tokens: int) -> int:
        """Free a leaf's last tokens: ``tokens`` of them or more, or all of it."""
        cut = (len(leaf.key) - tokens) // self.page_size * self.page_size
        if cut > 0:
            self._split_node(leaf.key, leaf, cut)
            self.split_evicted_tokens += len(leaf.key)
        return self._free(leaf)

    def _free_dead_path(self, dead: DeadPath) -> int:
        """Free the cached part of a path behind its prompt, from the first unheld node on."""
        key = self._key(dead.tokens, dead.namespace)
        prompt_key = self._key(dead.tokens[: dead.keep], dead.namespace)
        prompt = [(self.root_node, 0), *self._walk(prompt_key, (self.root_node, 0))]
        if prompt[-1][1] < len(prompt_key):
            return 0
        path = self._walk(key, prompt[-1])
        top = next((node for node, _ in path if not self._held.holders(node)), None)
        if top is None:
            return 0
        below = list(nodes_at_and_below(top))
        return sum(self._free(node) for node in reversed(below) if node in self.evictable_leaves)

    def _free(self, leaf: Any) -> int:
        """Free an unlocked leaf; returns the number of its tokens."""
        tokens = len(leaf.key)
        _free_slots(self.token_to_kv_pool_allocator, leaf.value)
        self._held.remove(leaf, leaf.key.child_key(self.page_size), tokens)
        self._delete_leaf(leaf)
        _record_removal(self, leaf)
        return tokens

    def _find(self, block: Block, place: Place | None = None) -> None:
        """Let the block hold what is cached of its own tokens; ``place``: how far its path is known
        to be cached. Nodes are split where the path leaves them, as a match would."""
        namespace, tokens, above = self.searches.path(block)
        key = self._key(tokens, namespace)
        start = self._key(tokens[:above], namespace)
        place = place or self._start(len(start))
        path = [place, *self._walk(start, place)]
        places = [*self._walk(key, path[-1])] if path[-1][1] >= len(start) else []
        for node, _ in places:
            self._held.hold(block, node)
        self._line_up(node for node, _ in places)
        last, at = [*path, *places][-1]
        if at < len(key):
            self._held.ends_at(block, (last, at), key[at:].child_key(self.page_size))
        elif places:
            self._held.ends_at(block, (last, at), None)

    def _find_again(self, last: Any) -> None:
        """Extend the blocks that waited for ``last``, the end of a path that was just inserted."""
        above = last.parent
        if above is not None:
            for block in self._held.go_on(above, last.key.child_key(self.page_size)):
                self._find(block, (above, depth(above)))

    def _walk(self, key: RadixKey, place: Place) -> Iterator[Place]:
        """The nodes that hold ``key`` from a place on, the last one split where the key leaves it.

        Access times stay as they are.
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
            at += shared
            yield node, at

    def _key(self, tokens: Tokens, namespace: CacheNamespace) -> RadixKey:
        key = RadixKey(tokens, namespace.extra_key, is_bigram=self.is_eagle)
        if namespace.cache_salt is not None:
            key.cache_salt = namespace.cache_salt
        return key.page_aligned(self.page_size)


def _free_slots(allocator: Any, slots: Any) -> None:
    """Return KV slots to the allocator, in whole pages as they stand in the tree."""
    if hasattr(allocator, "free_segment"):
        allocator.free_segment(slots, start_pos=0)
    else:
        allocator.free(slots)


def _record_removal(cache: Any, leaf: Any) -> None:
    """Publish a leaf's removal to the listeners of the cache's events."""
    if hasattr(cache, "kv_events"):
        cache.kv_events.record_remove(leaf)
    else:
        cache._record_remove_event(leaf)
