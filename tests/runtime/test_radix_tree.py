"""The radix tree against a naive model, and by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.embedded.radix_tree import RadixTree, common_prefix, namespace_of

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
TREES = st.sampled_from(["ash", "oak", "elm"])


def ids(*tokens: int) -> np.ndarray:
    """Token ids or slots as the tree takes them."""
    return np.array(tokens, dtype=np.int64)


def test_common_prefix_by_hand() -> None:
    """The number of leading tokens shared, up to the shorter one's length."""
    assert common_prefix(ids(1, 2, 3), ids(1, 2, 4)) == 2
    assert common_prefix(ids(1, 2), ids(1, 2, 4)) == 2
    assert common_prefix(ids(5), ids(1)) == 0
    assert common_prefix(ids(), ids(1)) == 0


def test_a_split_copies_nothing() -> None:
    """Two paths with a common beginning keep it in one place, with the first one's slots."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3), ids(10, 11, 12), "ash")
    _, spare = tree.insert(tree.root_of("ash"), ids(1, 2, 4), ids(20, 21, 22), "ash")
    assert spare.tolist() == [20, 21]
    assert tree.match("ash", ids(1, 2, 4))[1].tolist() == [10, 11, 22]
    assert tree.size == 4
    tree.check()


def test_trimming_takes_unheld_then_oldest_tips_token_by_token() -> None:
    """What nobody holds goes first; then the tip used longest ago; only as much as is wanted."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 1, 1), ids(0, 1, 2), "ash")
    tree.insert(tree.root_of("ash"), ids(2, 2, 2), ids(3, 4, 5), "ash")
    tree.insert(tree.root_of("oak"), ids(3, 3), ids(6, 7), "oak")
    tree.keep("oak", ids(3, 3))
    tree.retain("oak", ())
    tree.unlock(tree.lock("ash", ids(1, 1, 1))[0])
    assert tree.evict(3).tolist() == [6, 7, 5]
    assert tree.match("ash", ids(2, 2, 2))[1].tolist() == [3, 4]
    assert tree.held_evicted == 1
    tree.check()


def test_held_tokens_that_are_evicted_count_once_whoever_holds_them() -> None:
    """Three unheld ones none; then of three of ash's and oak's together and of three of ash's alone
    a tip each first and then the rest."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3), ids(0, 1, 2), "ash")
    tree.unlock(tree.lock("oak", ids(1, 2, 3))[0])
    tree.insert(tree.root_of("elm"), ids(4, 5, 6), ids(3, 4, 5), "elm")
    tree.keep("elm", ids(4, 5, 6))
    tree.retain("elm", ())
    tree.insert(tree.root_of("ash"), ids(7, 8, 9), ids(6, 7, 8), "ash")
    counted = []
    for wanted in (2, 1, 1, 2, 1, 2):
        tree.evict(wanted)
        counted.append(tree.held_evicted)
    assert counted == [0, 0, 1, 3, 4, 6]
    tree.check()


def test_what_a_search_holds_stays_if_only_the_rest_may_go() -> None:
    """Of a held and an unheld path only the latter goes, however much is wanted."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3), ids(0, 1, 2), "ash")
    tree.insert(tree.root_of("oak"), ids(4, 5), ids(3, 4), "oak")
    tree.keep("oak", ids(4, 5))
    tree.retain("oak", ())
    assert tree.evict(9, held=False).tolist() == [3, 4]
    assert tree.evict(9, held=False).tolist() == []
    assert tree.evict(9).tolist() == [0, 1, 2]


def test_a_look_up_changes_nothing() -> None:
    """It may end inside an edge, which stays whole, and does not count as a use."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3), ids(0, 1, 2), "ash")
    tree.insert(tree.root_of("ash"), ids(4, 5), ids(3, 4), "ash")
    assert tree.match("ash", ids(1, 2, 9))[1].tolist() == [0, 1]
    assert sorted(len(node.tokens) for node in tree.nodes()) == [2, 3]
    assert tree.evict(1).tolist() == [2]


def test_namespaces_share_nothing() -> None:
    """A namespace has a root of its own; within it searches share."""
    tree = RadixTree()
    tree.insert(tree.root_of("ann/ash"), ids(1, 2), ids(0, 1), "ann/ash")
    assert tree.match("ann/oak", ids(1, 2))[1].tolist() == [0, 1]
    for other in ("ash", "bob/ash"):
        assert tree.match(other, ids(1, 2))[1].tolist() == []
    assert namespace_of("ann/b/ash") == "ann/b"
    tree.check()


def test_every_node_has_a_number_of_its_own() -> None:
    """In two namespaces a root, the halves of a split edge and a branch below it: eight nodes."""
    tree = RadixTree()
    names = ("ash", "ann/ash")
    for name in names:
        tree.insert(tree.root_of(name), ids(1, 2, 3), ids(0, 1, 2), name)
        tree.insert(tree.root_of(name), ids(1, 2, 4), ids(9, 9, 3), name)
    nodes = [*tree.nodes(), *map(tree.root_of, names)]
    assert len({node.serial for node in nodes}) == len(nodes) == 8


def test_a_search_that_is_over_is_forgotten() -> None:
    """Where it holds nothing any more its name is in no book, though what it kept is cached."""
    tree = RadixTree()
    tree.insert(tree.root_of("elm"), ids(1, 2), ids(0, 1), "elm")
    tree.keep("elm", ids(1))
    assert tree.retain("elm", ()).tolist() == [1]
    assert tree.size == 1
    assert "elm" not in str(vars(tree))


def test_a_locked_path_is_never_trimmed() -> None:
    """Under any pressure the locked prefix stays; what hangs below it may go."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3), ids(0, 1, 2), "ash")
    node, _ = tree.lock("ash", ids(1, 2))
    assert tree.evict(100).tolist() == [2]
    tree.unlock(node)
    assert sorted(tree.evict(100).tolist()) == [0, 1]
    assert tree.size == 0


def test_pruned_subtrees_are_freed_at_once_and_shared_parts_stay() -> None:
    """Letting one of two paths go frees exactly the tokens the other does not pass through."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3, 4), ids(0, 1, 2, 3), "ash")
    tree.insert(tree.root_of("ash"), ids(1, 2, 5), ids(8, 9, 4), "ash")
    freed = tree.retain("ash", [ids(1, 2, 3)])
    assert sorted(freed.tolist()) == [3, 4]
    assert tree.held_tokens["ash"] == 3
    tree.check()


def steps_of_two_searches() -> RadixTree:
    """Ash has a step 1 2 3 | 4 5 and its sibling 1 2 3 | 6, both marked."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3, 4, 5), ids(0, 1, 2, 3, 4), "ash")
    tree.insert(tree.root_of("ash"), ids(1, 2, 3, 6), ids(9, 9, 9, 5), "ash")
    tree.index_step(("ash", 1), ids(1, 2, 3))
    tree.index_step(("ash", 2), ids(1, 2, 3, 4, 5))
    tree.index_step(("ash", 3), ids(1, 2, 3, 6))
    tree.check()
    return tree


def names_at(tree: RadixTree, *path: int) -> set[int]:
    """The nodes of the marks where the cached part of a path ends."""
    return {node for _, node in tree.match("ash", ids(*path))[0].steps}


def test_marks_stay_with_their_steps_through_splits_and_trims() -> None:
    """A split leaves them at their ends, a trim moves them up, mending brings them back."""
    tree = steps_of_two_searches()
    assert names_at(tree, 1, 2, 3) == {1}
    tree.match("ash", ids(1, 2))
    assert names_at(tree, 1, 2, 3, 4, 5) == {2}
    leaf, _ = tree.match("ash", ids(1, 2, 3, 4, 5))
    assert tree.changed_steps("ash") == {}
    assert tree.evict_tip(leaf, 1).tolist() == [4]
    assert names_at(tree, 1, 2, 3, 4, 5) == {2}
    assert tree.changed_steps("ash") == {2: 4}
    assert tree.evict_tip(leaf, 5).tolist() == [3]
    assert tree.changed_steps("ash") == {2: 3}
    assert names_at(tree, 1, 2, 3) == {1}, "a whole step speaks for those that are gone"
    tree.check()
    tree.insert(tree.match("ash", ids(1, 2, 3))[0], ids(4, 5), ids(7, 8), "ash")
    tree.reindex_steps("ash", ids(1, 2, 3, 4, 5), 3)
    assert names_at(tree, 1, 2, 3) == {1}
    assert names_at(tree, 1, 2, 3, 4, 5) == {2}
    assert tree.changed_steps("ash") == {2: 5}
    assert tree.changed_steps("ash") == {}
    tree.check()
    tree.steps.remove_tree("ash")
    assert names_at(tree, 1, 2, 3) == set()
    tree.check()


def test_a_step_that_shares_its_beginning_is_lifted_to_where_that_ends() -> None:
    """No step ends at 1 2: what is left of two that share it still stands for them."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3), ids(0, 1, 2), "ash")
    tree.insert(tree.root_of("ash"), ids(1, 2, 4), ids(9, 9, 3), "ash")
    tree.index_step(("ash", 1), ids(1, 2, 3))
    tree.index_step(("ash", 2), ids(1, 2, 4))
    for path in ((1, 2, 3), (1, 2, 4)):
        tree.evict_tip(tree.match("ash", ids(*path))[0], 1)
    assert names_at(tree, 1, 2) == {1, 2}
    tree.index_step(("ash", 3), ids(1, 2, 4, 5), ("ash", 2))
    assert names_at(tree, 1, 2) == {1, 2, 3}
    tree.check()


def test_a_step_goes_on_from_a_whole_one() -> None:
    """2 ends two tokens below 1 and is whole; of 3, which is to end elsewhere, the beginning is."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3, 4, 5), ids(0, 1, 2, 3, 4), "ash")
    tree.index_step(("ash", 1), ids(1, 2, 3))
    tree.index_step(("ash", 2), ids(1, 2, 3, 4, 5), ("ash", 1))
    tree.index_step(("ash", 3), ids(1, 2, 3, 6), ("ash", 1))
    slots = [tree.slots_of(("ash", step)).tolist() for step in (1, 2, 3)]
    assert slots == [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2]]
    ends = [tree.steps.end_of(("ash", step)) for step in (1, 2, 3)]
    assert [end is not None and end.complete for end in ends] == [True, True, False]
    tree.check()


def test_slots_of_a_step_are_those_of_its_path_from_its_start() -> None:
    """Over every edge, of what is cached; none of a step that is not known."""
    tree = steps_of_two_searches()
    assert tree.slots_of(("ash", 2)).tolist() == [0, 1, 2, 3, 4]
    assert tree.slots_of(("ash", 3)).tolist() == [0, 1, 2, 5]
    assert tree.slots_of(("oak", 2)).tolist() == []
    tree.evict_tip(tree.match("ash", ids(1, 2, 3, 4, 5))[0], 1)
    assert tree.slots_of(("ash", 2)).tolist() == [0, 1, 2, 3]


def test_a_leaf_has_nothing_below_it() -> None:
    """Of 1 2 3 and, below it, 4 5 and 6: the latter two; and the root never is one."""
    tree = steps_of_two_searches()
    ends = [tree.match("ash", ids(*path))[0] for path in ((1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3, 6))]
    assert [tree.is_leaf(node) for node in ends] == [False, True, True]
    assert set(tree.leaves) == set(ends[1:])
    assert not tree.is_leaf(tree.root_of("ash"))
    assert not RadixTree().is_leaf(tree.root_of("ash"))


class RadixMachine(RuleBasedStateMachine):
    """Every token path as a dictionary entry of its own, next to the radix tree."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.slot: dict[tuple[int, ...], int] = {}
        self.holders: dict[tuple[int, ...], set[str]] = {}
        self.kept: set[tuple[int, ...]] = set()
        self.locks: list[tuple[tuple[int, ...], object]] = []
        self.marks: dict[tuple[str, int], tuple[int, ...]] = {}
        self.next_slot = 0

    def cached(self, path: tuple[int, ...]) -> int:
        """Length of the longest cached prefix."""
        return next((n for n in range(len(path), 0, -1) if path[:n] in self.slot), 0)

    def locked(self) -> Counter[tuple[int, ...]]:
        """How often each token is locked."""
        return Counter(p[:n] for p, _ in self.locks for n in range(1, len(p) + 1))

    def forget(self, path: tuple[int, ...]) -> None:
        """Drop one token from the model."""
        del self.slot[path], self.holders[path]
        self.kept.discard(path)

    @rule(path=PATHS, name=TREES)
    def insert(self, path: tuple[int, ...], name: str) -> None:
        """A new path gets new slots below what is cached; nothing cached gets another slot."""
        slots = ids(*range(self.next_slot, self.next_slot + len(path)))
        self.next_slot += len(path)
        _, spare = self.tree.insert(self.tree.root_of(name), ids(*path), slots, name)
        known = self.cached(path)
        assert spare.tolist() == slots[:known].tolist()
        for n in range(1, len(path) + 1):
            self.slot.setdefault(path[:n], int(slots[n - 1]))
            self.holders.setdefault(path[:n], set()).add(name)

    @rule(path=PATHS)
    def match(self, path: tuple[int, ...]) -> None:
        """A match is the longest cached prefix with its slots."""
        _, slots = self.tree.match("ash", ids(*path))
        known = self.cached(path)
        assert slots.tolist() == [self.slot[path[:n]] for n in range(1, known + 1)]

    @rule(path=PATHS, name=TREES)
    def lock(self, path: tuple[int, ...], name: str) -> None:
        """A sequence starts from what is cached: it locks and its search holds that path."""
        node, slots = self.tree.lock(name, ids(*path))
        self.locks.append((path[: len(slots)], node))
        for n in range(1, len(slots) + 1):
            self.holders[path[:n]].add(name)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        """A sequence ends."""
        at = data.draw(st.integers(0, len(self.locks) - 1))
        _, node = self.locks.pop(at)
        self.tree.unlock(node)  # type: ignore[arg-type]

    @precondition(lambda self: not self.locks)
    @rule(name=TREES, paths=st.lists(PATHS, max_size=3), prompt=st.none() | PATHS)
    def retain(self, name: str, paths: list[tuple[int, ...]], prompt: object) -> None:
        """A search keeps some paths; the prompt stays cached, unheld rest is freed."""
        if isinstance(prompt, tuple):
            self.tree.keep(name, ids(*prompt))
            self.kept |= {prompt[:n] for n in range(1, self.cached(prompt) + 1)}
        wanted = {p[:n] for p in paths for n in range(1, len(p) + 1)}
        freed = set(self.tree.retain(name, [ids(*p) for p in paths]).tolist())
        expected = set()
        for path in list(self.slot):
            if name in self.holders[path] and path not in wanted:
                self.holders[path].remove(name)
                if not self.holders[path] and path not in self.kept:
                    expected.add(self.slot[path])
                    self.forget(path)
        assert freed == expected

    @rule(name=TREES, node=st.integers(0, 3), path=PATHS)
    def mark(self, name: str, node: int, path: tuple[int, ...]) -> None:
        """A step has an end."""
        self.tree.index_step((name, node), ids(*path))
        self.marks[name, node] = path
        assert self.end_of((name, node)) == path[: self.cached(path)]

    @rule(name=TREES, node=st.integers(0, 3))
    def unmark(self, name: str, node: int) -> None:
        """A step is over, if there was one."""
        self.tree.steps.remove((name, node))
        self.marks.pop((name, node), None)

    @rule(name=TREES, path=PATHS)
    def mend(self, name: str, path: tuple[int, ...]) -> None:
        """The search's marks on the path stand where what is cached ends."""
        self.tree.reindex_steps(name, ids(*path), 0)
        for (tree, node), ends in self.marks.items():
            if tree == name and path[: len(ends)] == ends:
                assert self.end_of((tree, node)) == ends[: self.cached(ends)]

    def end_of(self, mark: tuple[str, int]) -> tuple[int, ...] | None:
        """The token path down to where a mark stands; None if another speaks for it."""
        node = self.tree.steps.node_of(mark)
        if node is None:
            return None
        tokens: tuple[int, ...] = ()
        while node.parent is not None:
            tokens = (*node.tokens.tolist(), *tokens)
            node = node.parent
        return tokens

    @rule(wanted=st.integers(1, 6))
    def trim(self, wanted: int) -> None:
        """As many unlocked tokens as asked go, tips first, what nobody holds before the rest."""
        locked = self.locked()
        free = [p for p in self.slot if not locked[p]]
        freed = self.tree.evict(wanted).tolist()
        assert len(freed) == min(wanted, len(free))
        path_of = {slot: path for path, slot in self.slot.items()}
        for slot in freed:
            assert not locked[path_of[slot]]
        held = any(self.holders[path_of[slot]] for slot in freed)
        for slot in freed:
            self.forget(path_of[slot])
        assert all(len(p) == 1 or p[:-1] in self.slot for p in self.slot), "a token lost its prefix"
        assert not (held and any(not h for h in self.holders.values()))

    @invariant()
    def agrees(self) -> None:
        """Sizes, counts and the tree's own check."""
        self.tree.check()
        locked = self.locked()
        assert self.tree.size == len(self.slot)
        assert self.tree.locked == len(locked)
        assert self.tree.unheld == sum(not h for h in self.holders.values())
        held = Counter(name for names in self.holders.values() for name in names)
        assert +self.tree.held_tokens == held
        for mark, path in self.marks.items():
            end = self.end_of(mark)
            if end is None:
                assert self.cached(path) < len(path), "a whole step has no mark"
                continue
            assert path[: len(end)] == end, "a mark left its step's path"


RadixMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestRadix = RadixMachine.TestCase
