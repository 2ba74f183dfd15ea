"""The radix tree of cached tokens: which token path has its keys and values in which slots.

Edges hold token ids and their slots. A node is *locked* while a running sequence reads it, and
*held* while a running search may come back to it; both are prefix-closed. Unlocked leaves may be
evicted from the tip at any time: evicted tokens are computed again when they are needed. An index
tells where the steps of searches end, so that an eviction can ask what a leaf is worth to them.

Each namespace has its own root, so searches of different namespaces share nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import count

import numpy as np

from runtime.embedded.cache_node import EMPTY, TOKEN_BYTES, CacheNode, StepId, StepIndex


class RadixTree:
    """Token paths and their slots. Slots that it gives up are returned to the caller."""

    def __init__(self) -> None:
        self._serials = count()
        self._clock = count(1)
        self._roots: dict[str, CacheNode] = {}
        self.size = 0
        self.locked = 0
        self.unheld = 0
        self.held_evicted = 0
        self.held_tokens: Counter[str] = Counter()
        self._held_nodes: defaultdict[str, set[CacheNode]] = defaultdict(set)
        self.leaves: set[CacheNode] = set()
        """Every node without children, except roots. Other modules only read it."""
        self.steps = StepIndex()

    def root_of(self, tree: str) -> CacheNode:
        """The root of a search's namespace."""
        namespace = namespace_of(tree)
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = CacheNode(None, EMPTY, EMPTY, next(self._serials))
        return root

    def match(self, tree: str, tokens: np.ndarray) -> int:
        """The length of the longest cached prefix of ``tokens``.

        A pure look-up: no edge is split, and nothing counts as used.
        """
        return _walk(self.root_of(tree), tokens)[1]

    def lock(self, tree: str, tokens: np.ndarray) -> tuple[CacheNode, np.ndarray]:
        """Lock the longest cached prefix of ``tokens`` against eviction, and hold it for ``tree``.

        Returns the node at which it ends, to be passed to ``unlock``, and the prefix's slots. The
        last edge is split there, which copies nothing.
        """
        path, stamp = self._split_walk(self.root_of(tree), tokens), next(self._clock)
        for node in path:
            node.stamp = stamp
            self.locked += 0 if node.locks else len(node.tokens)
            node.locks += 1
            self._hold(node, tree)
        end = path[-1] if path else self.root_of(tree)
        return end, np.concatenate([EMPTY, *(node.slots for node in path)])

    def unlock(self, node: CacheNode) -> None:
        """Undo one ``lock`` that ended at this node."""
        for step in _upward(node):
            assert step.locks > 0, "a path was unlocked that is not locked"
            step.locks -= 1
            if not step.locks:
                self.locked -= len(step.tokens)

    def insert(
        self, node: CacheNode, tokens: np.ndarray, slots: np.ndarray, tree: str
    ) -> tuple[CacheNode, np.ndarray]:
        """Add ``tokens`` below ``node``, held by ``tree``; the last node, and the unused slots.

        Tokens that are cached there already keep their slots, and those in ``slots`` are unused.
        """
        duplicates = []
        stamp = next(self._clock)
        while len(tokens):
            child = node.children.get(int(tokens[0]))
            if child is None:
                child = self._add(node, tokens, slots)
                shared = len(tokens)
            else:
                shared = common_prefix(child.tokens, tokens)
                child = self._split(child, shared)
                duplicates.append(slots[:shared])
            child.stamp = stamp
            self._hold(child, tree)
            node, tokens, slots = child, tokens[shared:], slots[shared:]
        return node, np.concatenate(duplicates) if duplicates else EMPTY

    def keep(self, tree: str, tokens: np.ndarray) -> None:
        """Keep the cached prefix of ``tokens`` cached even when nobody holds it any more."""
        for node in self._split_walk(self.root_of(tree), tokens):
            node.pinned = True

    def retain(self, tree: str, paths: Iterable[np.ndarray]) -> np.ndarray:
        """Reduce what ``tree`` holds to these token paths; returns the slots that became free.

        Tokens that nobody holds then are freed at once, unless ``keep`` has pinned them.
        """
        nodes = self._nodes_of(tree, paths)
        dropped = [node for node in self._held_nodes.get(tree, ()) if node not in nodes]
        for node in dropped:
            self._let_go(node, tree)
        if not self._held_nodes.get(tree):
            self._held_nodes.pop(tree, None)
            self.held_tokens.pop(tree, None)
        removed = {node for node in dropped if not node.holders and not node.pinned}
        assert not any(node.locks for node in removed), "a locked path is held by nobody"
        for node in removed:
            self._move_steps_up(node, removed)
            self._remove(node, removed)
        return np.concatenate([EMPTY, *(node.slots for node in removed)])

    def index_step(self, step: StepId, path: np.ndarray, above: StepId | None = None) -> None:
        """File a step that ends with ``path``. ``above``: a step whose path is a prefix of it."""
        start, cached = self.root_of(step[0]), 0
        end = None if above is None else self.steps.end_of(above)
        if end is not None and end.complete and end.node is not None:
            start, cached = end.node, end.length
        nodes = self._split_walk(start, path[cached:])
        cached += sum(len(node.tokens) for node in nodes)
        self.steps.put(step, path.tobytes(), nodes[-1] if nodes else start, cached)

    def reindex_steps(self, tree: str, path: np.ndarray, since: int) -> None:
        """File again the incomplete steps that end on ``path`` after its first ``since`` tokens,
        because it is cached again from there on."""
        for number, step_path in self.steps.restorable(tree, path.tobytes(), since):
            self.index_step((tree, number), np.frombuffer(step_path, dtype=np.int64))

    def slots_of(self, step: StepId) -> np.ndarray:
        """The slots of a step's cached part, from the path's start; nothing counts as used."""
        end = self.steps.node_of(step)
        path = [] if end is None else [node.slots for node in _upward(end)]
        return np.concatenate([EMPTY, *path[::-1]])

    def changed_steps(self, tree: str) -> dict[int, int]:
        """The steps whose cached part has changed since the last call: cached tokens of their
        paths, by node id. The first call reports all steps that were ever evicted from.
        """
        changed = self.steps.take_changed(tree)
        return {n: self.match(tree, np.frombuffer(path, np.int64)) for n, path in changed.items()}

    def evict(self, tokens: int, *, allow_held: bool = True) -> np.ndarray:
        """Free up to ``tokens`` slots of unlocked leaves, token by token from the tips.

        Tokens that nobody holds go first, then those used longest ago. ``allow_held``: whether
        tokens that a search holds may be evicted at all.
        """
        heap = [(oldest_first(node), node) for node in self.leaves if not node.locks]
        heapq.heapify(heap)
        freed = [EMPTY]
        remaining = tokens
        while heap and remaining > 0:
            _, node = heapq.heappop(heap)
            if node.holders and not allow_held:
                break
            parent = node.parent
            freed.append(self.evict_tip(node, remaining))
            remaining -= len(freed[-1])
            if not len(node.tokens) and parent in self.leaves and not parent.locks:
                heapq.heappush(heap, (oldest_first(parent), parent))
        return np.concatenate(freed)

    def evict_tip(self, leaf: CacheNode, tokens: int) -> np.ndarray:
        """Free up to ``tokens`` slots at the tip of an unlocked leaf."""
        assert not leaf.children, "a node is evicted from that is no leaf"
        assert not leaf.locks, "a node is evicted from that is being read"
        count = min(tokens, len(leaf.tokens))
        slots = leaf.slots[len(leaf.slots) - count :]
        self._truncate(leaf, count)
        return slots

    def nodes(self) -> Iterator[CacheNode]:
        """Every node except the roots."""
        stack = [node for root in self._roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def check(self) -> None:
        """Raise AssertionError unless counts, links and prefix-closedness are right."""
        nodes = list(self.nodes())
        assert self.size == sum(len(n.tokens) for n in nodes), "size"
        assert self.locked == sum(len(n.tokens) for n in nodes if n.locks), "locked"
        assert self.unheld == sum(len(n.tokens) for n in nodes if not n.holders), "unheld"
        assert self.leaves == {n for n in nodes if not n.children}, "leaves"
        held_tokens = Counter[str]()
        for node in nodes:
            above = node.parent
            assert above is not None, "a node has no parent"
            assert above.children.get(int(node.tokens[0])) is node, "a child is filed wrongly"
            assert len(node.tokens) == len(node.slots), "tokens and slots differ in length"
            if above.parent is not None:
                assert node.holders <= above.holders, "a held node lies below one that is not"
                assert node.locks <= above.locks, "a locked node lies below one that is not"
                assert above.pinned or not node.pinned, "a kept node lies below one that is not"
            assert node.holders or (node.pinned and not node.locks), "a node nobody needs"
            held_tokens.update(dict.fromkeys(node.holders, len(node.tokens)))
        assert held_tokens == +self.held_tokens, "tokens held by tree"
        assert {t: s for t, s in self._held_nodes.items() if s} == {
            tree: {n for n in nodes if tree in n.holders} for tree in held_tokens
        }, "nodes held by tree"
        self.steps.check((*self._roots.values(), *nodes))

    def _split_walk(self, start: CacheNode, tokens: np.ndarray) -> list[CacheNode]:
        """The nodes below ``start`` that make up the longest cached prefix, split where it ends."""
        path, cached = _walk(start, tokens)
        if path:
            beyond = sum(len(node.tokens) for node in path) - cached
            path[-1] = self._split(path[-1], len(path[-1].tokens) - beyond)
        return path

    def _nodes_of(self, tree: str, paths: Iterable[np.ndarray]) -> set[CacheNode]:
        """The nodes of the longest cached prefixes of all these paths.

        Paths are sorted so that each comes after its own prefixes, and the walk starts where the
        longest of these ends.
        """
        matched: set[CacheNode] = set()
        above: list[tuple[bytes, CacheNode]] = []
        for key in sorted({path.tobytes() for path in paths}):
            while above and not key.startswith(above[-1][0]):
                above.pop()
            parent, start = above[-1] if above else (b"", self.root_of(tree))
            nodes = self._split_walk(start, np.frombuffer(key[len(parent) :], dtype=np.int64))
            matched.update(nodes)
            cached = len(parent) + TOKEN_BYTES * sum(len(node.tokens) for node in nodes)
            if cached == len(key):
                above.append((key, nodes[-1] if nodes else start))
        return matched

    def _split(self, node: CacheNode, at: int) -> CacheNode:
        """Split an edge after ``at`` tokens; returns the upper part. ``node`` is the lower part."""
        if at == len(node.tokens):
            return node
        parent = node.parent
        assert parent is not None
        assert at > 0, "an edge is split at its start"
        upper = CacheNode(parent, node.tokens[:at], node.slots[:at], next(self._serials))
        upper.holders = set(node.holders)
        upper.pinned, upper.locks, upper.stamp = node.pinned, node.locks, node.stamp
        for tree in upper.holders:
            self._held_nodes[tree].add(upper)
        parent.children[int(upper.tokens[0])] = upper
        node.parent, node.tokens, node.slots = upper, node.tokens[at:], node.slots[at:]
        upper.children[int(node.tokens[0])] = node
        return upper

    def _add(self, parent: CacheNode, tokens: np.ndarray, slots: np.ndarray) -> CacheNode:
        node = CacheNode(parent, tokens.copy(), slots.copy(), next(self._serials))
        parent.children[int(tokens[0])] = node
        self.leaves.discard(parent)
        self.leaves.add(node)
        self.size += len(tokens)
        self.unheld += len(tokens)
        return node

    def _truncate(self, node: CacheNode, count: int) -> None:
        """Drop the last ``count`` tokens of an unlocked leaf, and the leaf with its last token."""
        if count == len(node.tokens):
            self._move_steps_up(node, {node})
            for tree in list(node.holders):
                self.held_evicted += count if len(node.holders) == 1 else 0
                self._let_go(node, tree)
            self._remove(node, {node})
            node.tokens = node.slots = EMPTY
            return
        for step in node.steps:
            self.steps.evict(step)
        self.size -= count
        self.held_evicted += count if node.holders else 0
        self.unheld -= 0 if node.holders else count
        for tree in node.holders:
            self.held_tokens[tree] -= count
        node.tokens, node.slots = node.tokens[:-count], node.slots[:-count]

    def _move_steps_up(self, node: CacheNode, removed: set[CacheNode]) -> None:
        """File a removed node's steps at its nearest ancestor that is not removed as well."""
        above = node.parent
        while above in removed:
            above = above.parent
        assert above is not None
        self.steps.move_up(node, above)

    def _remove(self, node: CacheNode, removed: set[CacheNode]) -> None:
        """Remove one of the nodes in ``removed``, which nobody holds."""
        parent = node.parent
        assert parent is not None
        self.size -= len(node.tokens)
        self.unheld -= len(node.tokens)
        self.leaves.discard(node)
        if parent in removed:
            return
        del parent.children[int(node.tokens[0])]
        if not parent.children and parent.parent is not None:
            self.leaves.add(parent)

    def _hold(self, node: CacheNode, tree: str) -> None:
        if tree in node.holders:
            return
        if not node.holders:
            self.unheld -= len(node.tokens)
        node.holders.add(tree)
        self._held_nodes[tree].add(node)
        self.held_tokens[tree] += len(node.tokens)

    def _let_go(self, node: CacheNode, tree: str) -> None:
        node.holders.remove(tree)
        self._held_nodes[tree].remove(node)
        self.held_tokens[tree] -= len(node.tokens)
        if not node.holders:
            self.unheld += len(node.tokens)


def _walk(start: CacheNode, tokens: np.ndarray) -> tuple[list[CacheNode], int]:
    """The nodes below ``start`` that contain the longest cached prefix of ``tokens``, and its
    length; it may end inside the last node's edge."""
    node, cached, path = start, 0, []
    while cached < len(tokens):
        child = node.children.get(int(tokens[cached]))
        if child is None:
            break
        path.append(child)
        shared = common_prefix(child.tokens, tokens[cached:])
        cached += shared
        if shared < len(child.tokens):
            break
        node = child
    return path, cached


def _upward(node: CacheNode) -> Iterator[CacheNode]:
    """A node and its ancestors, except the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def namespace_of(tree: str) -> str:
    """The namespace within which a search shares cached tokens: its id before the last slash."""
    return tree.rpartition("/")[0]


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """The number of leading tokens that two int64 arrays share."""
    length = min(len(left), len(right))
    if not length:
        return 0
    differ = left[:length] != right[:length]
    first = int(differ.argmax())
    return first if differ[first] else length


def oldest_first(node: CacheNode) -> tuple[bool, int, int]:
    """A sort key: nodes that nobody holds first, then those used longest ago."""
    return bool(node.holders), node.stamp, node.serial
