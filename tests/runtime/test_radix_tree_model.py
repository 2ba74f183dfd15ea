"""The radix tree against a naive model with one dictionary entry for every token path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.embedded.radix_tree import RadixTree

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
TREES = st.sampled_from(["ash", "oak", "elm"])


def ids(numbers: Sequence[int]) -> np.ndarray:
    """Token ids or slots as the tree takes them."""
    return np.array(numbers, dtype=np.int64)


class RadixMachine(RuleBasedStateMachine):
    """Random operations on the radix tree and on dictionaries by token path."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.slot: dict[tuple[int, ...], int] = {}
        self.holders: dict[tuple[int, ...], set[str]] = {}
        self.kept_prefixes: set[tuple[int, ...]] = set()
        self.locks: list[tuple[tuple[int, ...], object]] = []
        self.marks: dict[tuple[str, int], tuple[int, ...]] = {}
        self.next_slot = 0

    def cached(self, path: tuple[int, ...]) -> int:
        """The length of the longest cached prefix."""
        return next((n for n in range(len(path), 0, -1) if path[:n] in self.slot), 0)

    def locked(self) -> Counter[tuple[int, ...]]:
        """The number of locks on each token's path."""
        return Counter(p[:n] for p, _ in self.locks for n in range(1, len(p) + 1))

    def forget(self, path: tuple[int, ...]) -> None:
        """Drop one token from the model."""
        del self.slot[path], self.holders[path]
        self.kept_prefixes.discard(path)

    @rule(path=PATHS, name=TREES)
    def insert(self, path: tuple[int, ...], name: str) -> None:
        """Insert a path: only tokens that are not cached take its slots."""
        slots = ids(range(self.next_slot, self.next_slot + len(path)))
        self.next_slot += len(path)
        _, spare = self.tree.insert(self.tree.root_of(name), ids(path), slots, name)
        matched = self.cached(path)
        assert spare.tolist() == slots[:matched].tolist()
        for n in range(1, len(path) + 1):
            self.slot.setdefault(path[:n], int(slots[n - 1]))
            self.holders.setdefault(path[:n], set()).add(name)

    @rule(path=PATHS)
    def match(self, path: tuple[int, ...]) -> None:
        """A match has the length of the longest cached prefix."""
        assert self.tree.match("ash", ids(path)) == self.cached(path)

    @rule(path=PATHS, name=TREES)
    def lock(self, path: tuple[int, ...], name: str) -> None:
        """A sequence starts: it locks the cached prefix, and its search holds it."""
        node, slots = self.tree.lock(name, ids(path))
        assert slots.tolist() == [self.slot[path[:n]] for n in range(1, self.cached(path) + 1)]
        self.locks.append((path[: len(slots)], node))
        for n in range(1, len(slots) + 1):
            self.holders[path[:n]].add(name)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        """A sequence ends and unlocks its prefix."""
        at = data.draw(st.integers(0, len(self.locks) - 1))
        _, node = self.locks.pop(at)
        self.tree.unlock(node)  # type: ignore[arg-type]

    @precondition(lambda self: not self.locks)
    @rule(name=TREES, paths=st.lists(PATHS, max_size=3), prompt=st.none() | PATHS)
    def retain(self, name: str, paths: list[tuple[int, ...]], prompt: object) -> None:
        """A search retains some paths; kept prompts stay cached, other unheld tokens are freed."""
        if isinstance(prompt, tuple):
            self.tree.keep(name, ids(prompt))
            self.kept_prefixes |= {prompt[:n] for n in range(1, self.cached(prompt) + 1)}
        retained = {p[:n] for p in paths for n in range(1, len(p) + 1)}
        freed = set(self.tree.retain(name, [ids(p) for p in paths]).tolist())
        expected = set()
        for path in list(self.slot):
            if name in self.holders[path] and path not in retained:
                self.holders[path].remove(name)
                if not self.holders[path] and path not in self.kept_prefixes:
                    expected.add(self.slot[path])
                    self.forget(path)
        assert freed == expected

    @rule(name=TREES, node=st.integers(0, 3), path=PATHS)
    def mark(self, name: str, node: int, path: tuple[int, ...]) -> None:
        """Index a step's end: its mark is where the cached part of its path ends."""
        self.tree.index_step((name, node), ids(path))
        self.marks[name, node] = path
        assert self.end_of((name, node)) == path[: self.cached(path)]

    @rule(name=TREES, node=st.integers(0, 3))
    def unmark(self, name: str, node: int) -> None:
        """Remove a step's mark, if there is one."""
        self.tree.steps.remove((name, node))
        self.marks.pop((name, node), None)

    @rule(name=TREES, path=PATHS)
    def mend(self, name: str, path: tuple[int, ...]) -> None:
        """Reindex a path: the search's marks on it are where the cached part of each ends."""
        self.tree.reindex_steps(name, ids(path), 0)
        for (tree, node), ends in self.marks.items():
            if tree == name and path[: len(ends)] == ends:
                assert self.end_of((tree, node)) == ends[: self.cached(ends)]

    def end_of(self, mark: tuple[str, int]) -> tuple[int, ...] | None:
        """The token path down to a mark; None if the step has no mark of its own."""
        node = self.tree.steps.node_of(mark)
        if node is None:
            return None
        tokens: tuple[int, ...] = ()
        while node.parent is not None:
            tokens = (*node.tokens.tolist(), *tokens)
            node = node.parent
        return tokens

    @rule(tokens=st.integers(1, 6))
    def evict(self, tokens: int) -> None:
        """Evict unlocked tokens: tips first, unheld before held ones."""
        locked = self.locked()
        free = [p for p in self.slot if not locked[p]]
        freed = self.tree.evict(tokens).tolist()
        assert len(freed) == min(tokens, len(free))
        path_of = {slot: path for path, slot in self.slot.items()}
        for slot in freed:
            assert not locked[path_of[slot]]
        any_held = any(self.holders[path_of[slot]] for slot in freed)
        for slot in freed:
            self.forget(path_of[slot])
        assert all(len(p) == 1 or p[:-1] in self.slot for p in self.slot), "a token lost its prefix"
        assert not (any_held and any(not h for h in self.holders.values()))

    @invariant()
    def agrees(self) -> None:
        """Sizes, counts and marks agree, and the tree's own check passes."""
        self.tree.check()
        locked = self.locked()
        assert self.tree.size == len(self.slot)
        assert self.tree.locked == len(locked)
        assert self.tree.unheld == sum(not h for h in self.holders.values())
        expected = Counter(name for names in self.holders.values() for name in names)
        assert +self.tree.held_tokens == expected
        for mark, path in self.marks.items():
            end = self.end_of(mark)
            if end is None:
                assert self.cached(path) < len(path), "a whole step has no mark"
                continue
            assert path[: len(end)] == end, "a mark left its step's path"


RadixMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestRadix = RadixMachine.TestCase
