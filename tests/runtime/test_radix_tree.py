"""The radix tree by hand."""

from __future__ import annotations

import numpy as np

from runtime.embedded.cache_node import CacheNode
from runtime.embedded.radix_tree import RadixTree, common_prefix, namespace_of


def ids(*tokens: int) -> np.ndarray:
    """Token ids or slots as the tree takes them."""
    return np.array(tokens, dtype=np.int64)


def node_at(tree: RadixTree, search: str, tokens: np.ndarray) -> CacheNode:
    """The node in which a path's longest cached prefix ends."""
    node = tree.root_of(search)
    while len(tokens) and (below := node.children.get(int(tokens[0]))) is not None:
        node = below
        tokens = tokens[len(node.tokens) :]
    return node


def test_common_prefix_by_hand() -> None:
    """The number of leading tokens shared, up to the shorter one's length."""
    assert common_prefix(ids(1, 2, 3), ids(1, 2, 4)) == 2
    assert common_prefix(ids(1, 2), ids(1, 2, 4)) == 2
    assert common_prefix(ids(5), ids(1)) == 0
    assert common_prefix(ids(), ids(1)) == 0


def test_a_split_copies_nothing() -> None:
    """Two paths with a common prefix share its slots, those of the first path."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3), ids(10, 11, 12), "ash")
    _, spare = tree.insert(tree.root_of("ash"), ids(1, 2, 4), ids(20, 21, 22), "ash")
    assert spare.tolist() == [20, 21]
    assert tree.lock("ash", ids(1, 2, 4))[1].tolist() == [10, 11, 22]
    assert tree.size == 4
    tree.check()


def test_eviction_takes_unheld_then_oldest_tips_token_by_token() -> None:
    """Unheld tokens go first, then the tip used longest ago, and only as many as requested."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 1, 1), ids(0, 1, 2), "ash")
    tree.insert(tree.root_of("ash"), ids(2, 2, 2), ids(3, 4, 5), "ash")
    tree.insert(tree.root_of("oak"), ids(3, 3), ids(6, 7), "oak")
    tree.keep("oak", ids(3, 3))
    tree.retain("oak", ())
    tree.unlock(tree.lock("ash", ids(1, 1, 1))[0])
    assert tree.evict(3).tolist() == [6, 7, 5]
    assert tree.match("ash", ids(2, 2, 2)) == 2
    assert tree.held_evicted == 1
    tree.check()


def test_held_tokens_that_are_evicted_count_once_whoever_holds_them() -> None:
    """Evicting three unheld tokens counts none; the held ones, three of ash and oak and three of
    ash alone, count once each."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3), ids(0, 1, 2), "ash")
    tree.unlock(tree.lock("oak", ids(1, 2, 3))[0])
    tree.insert(tree.root_of("elm"), ids(4, 5, 6), ids(3, 4, 5), "elm")
    tree.keep("elm", ids(4, 5, 6))
    tree.retain("elm", ())
    tree.insert(tree.root_of("ash"), ids(7, 8, 9), ids(6, 7, 8), "ash")
    counted = []
    for tokens in (2, 1, 1, 2, 1, 2):
        tree.evict(tokens)
        counted.append(tree.held_evicted)
    assert counted == [0, 0, 1, 3, 4, 6]
    tree.check()


def test_what_a_search_holds_stays_if_only_the_rest_may_go() -> None:
    """With ``held`` False only the unheld path is evicted, whatever is requested."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3), ids(0, 1, 2), "ash")
    tree.insert(tree.root_of("oak"), ids(4, 5), ids(3, 4), "oak")
    tree.keep("oak", ids(4, 5))
    tree.retain("oak", ())
    assert tree.evict(9, allow_held=False).tolist() == [3, 4]
    assert tree.evict(9, allow_held=False).tolist() == []
    assert tree.evict(9).tolist() == [0, 1, 2]


def test_a_look_up_changes_nothing() -> None:
    """A look-up neither splits the edge that it ends in nor counts as a use."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3), ids(0, 1, 2), "ash")
    tree.insert(tree.root_of("ash"), ids(4, 5), ids(3, 4), "ash")
    assert tree.match("ash", ids(1, 2, 9)) == 2
    assert sorted(len(node.tokens) for node in tree.nodes()) == [2, 3]
    assert tree.evict(1).tolist() == [2]


def test_namespaces_share_nothing() -> None:
    """Each namespace has its own root; searches share only within one."""
    tree = RadixTree()
    tree.insert(tree.root_of("ann/ash"), ids(1, 2), ids(0, 1), "ann/ash")
    assert tree.match("ann/oak", ids(1, 2)) == 2
    for search in ("ash", "bob/ash"):
        assert tree.match(search, ids(1, 2)) == 0
    assert namespace_of("ann/b/ash") == "ann/b"
    tree.check()


def test_every_node_has_a_number_of_its_own() -> None:
    """In two namespaces, each with a root, two halves of an edge and a branch, serials differ."""
    tree = RadixTree()
    names = ("ash", "ann/ash")
    for name in names:
        tree.insert(tree.root_of(name), ids(1, 2, 3), ids(0, 1, 2), name)
        tree.insert(tree.root_of(name), ids(1, 2, 4), ids(9, 9, 3), name)
    nodes = [*tree.nodes(), *map(tree.root_of, names)]
    assert len({node.serial for node in nodes}) == len(nodes) == 8


def test_a_search_that_is_over_is_forgotten() -> None:
    """A search that holds nothing is in no table, though its kept prompt stays cached."""
    tree = RadixTree()
    tree.insert(tree.root_of("elm"), ids(1, 2), ids(0, 1), "elm")
    tree.keep("elm", ids(1))
    assert tree.retain("elm", ()).tolist() == [1]
    assert tree.size == 1
    assert "elm" not in str(vars(tree))


def test_a_locked_path_is_never_evicted() -> None:
    """A locked prefix stays under any pressure; tokens below it may be evicted."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3), ids(0, 1, 2), "ash")
    node, _ = tree.lock("ash", ids(1, 2))
    assert tree.evict(100).tolist() == [2]
    tree.unlock(node)
    assert sorted(tree.evict(100).tolist()) == [0, 1]
    assert tree.size == 0


def test_pruned_subtrees_are_freed_at_once_and_shared_parts_stay() -> None:
    """Dropping one of two paths frees exactly the tokens that are not on the other."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3, 4), ids(0, 1, 2, 3), "ash")
    tree.insert(tree.root_of("ash"), ids(1, 2, 5), ids(8, 9, 4), "ash")
    freed = tree.retain("ash", [ids(1, 2, 3)])
    assert sorted(freed.tolist()) == [3, 4]
    assert tree.held_tokens["ash"] == 3
    tree.check()


def test_a_retained_path_may_go_on_from_another_one() -> None:
    """With 1 2 3, its prefix 1 2, and 5 6 retained only the tokens 4 and 7 are freed."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3), ids(0, 1, 2), "ash")
    tree.insert(tree.root_of("ash"), ids(1, 2, 4), ids(9, 9, 3), "ash")
    tree.insert(tree.root_of("ash"), ids(5, 6, 7), ids(4, 5, 6), "ash")
    freed = tree.retain("ash", [ids(5, 6), ids(1, 2, 3), ids(), ids(1, 2)])
    assert sorted(freed.tolist()) == [3, 6]
    tree.check()


def test_a_path_that_goes_on_from_an_uncached_one_keeps_no_more() -> None:
    """Of 1 9 and 1 9 2 only 1 is cached; the cached 2 after 1 is on neither path and is freed."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2), ids(0, 1), "ash")
    assert tree.retain("ash", [ids(1, 9), ids(1, 9, 2)]).tolist() == [1]
    tree.check()


def test_unheld_tokens_are_counted_as_their_tips_go() -> None:
    """With three unheld and three held tokens only evicted unheld tips lower ``unheld``."""
    tree = RadixTree()
    tree.insert(tree.root_of("elm"), ids(1, 2, 3), ids(0, 1, 2), "elm")
    tree.keep("elm", ids(1, 2, 3))
    tree.retain("elm", ())
    ash_leaf, _ = tree.insert(tree.root_of("ash"), ids(4, 5, 6), ids(3, 4, 5), "ash")
    counted = [tree.unheld]
    for leaf in (ash_leaf, node_at(tree, "elm", ids(1, 2, 3)), node_at(tree, "elm", ids(1, 2))):
        tree.evict_tip(leaf, 1)
        counted.append(tree.unheld)
    assert counted == [3, 3, 2, 1]
    tree.check()


def steps_of_two_searches() -> RadixTree:
    """Ash's steps 1: 1 2 3, and below it 2: 4 5 and 3: 6, all marked."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3, 4, 5), ids(0, 1, 2, 3, 4), "ash")
    tree.insert(tree.root_of("ash"), ids(1, 2, 3, 6), ids(9, 9, 9, 5), "ash")
    tree.index_step(("ash", 1), ids(1, 2, 3))
    tree.index_step(("ash", 2), ids(1, 2, 3, 4, 5))
    tree.index_step(("ash", 3), ids(1, 2, 3, 6))
    tree.check()
    return tree


def names_at(tree: RadixTree, *path: int) -> set[int]:
    """The node ids of ash's marks where the cached part of a path ends."""
    return {node for _, node in node_at(tree, "ash", ids(*path)).steps}


def test_marks_stay_with_their_steps_through_splits_and_evictions() -> None:
    """Splits leave marks at their ends, evictions move them up, reindexing moves them back."""
    tree = steps_of_two_searches()
    assert names_at(tree, 1, 2, 3) == {1}
    tree.match("ash", ids(1, 2))
    assert names_at(tree, 1, 2, 3, 4, 5) == {2}
    leaf = node_at(tree, "ash", ids(1, 2, 3, 4, 5))
    assert tree.changed_steps("ash") == {}
    assert tree.evict_tip(leaf, 1).tolist() == [4]
    assert names_at(tree, 1, 2, 3, 4, 5) == {2}
    assert tree.changed_steps("ash") == {2: 4}
    assert tree.evict_tip(leaf, 5).tolist() == [3]
    assert tree.changed_steps("ash") == {2: 3}
    assert names_at(tree, 1, 2, 3) == {1}, "a whole step speaks for those that are gone"
    tree.check()
    tree.insert(node_at(tree, "ash", ids(1, 2, 3)), ids(4, 5), ids(7, 8), "ash")
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
    """Marks of two evicted steps move up to their shared prefix 1 2, where no step ends."""
    tree = RadixTree()
    tree.insert(tree.root_of("ash"), ids(1, 2, 3), ids(0, 1, 2), "ash")
    tree.insert(tree.root_of("ash"), ids(1, 2, 4), ids(9, 9, 3), "ash")
    tree.index_step(("ash", 1), ids(1, 2, 3))
    tree.index_step(("ash", 2), ids(1, 2, 4))
    for path in ((1, 2, 3), (1, 2, 4)):
        tree.evict_tip(node_at(tree, "ash", ids(*path)), 1)
    assert names_at(tree, 1, 2) == {1, 2}
    tree.index_step(("ash", 3), ids(1, 2, 4, 5), ("ash", 2))
    assert names_at(tree, 1, 2) == {1, 2, 3}
    tree.check()


def test_a_step_goes_on_from_a_whole_one() -> None:
    """Step 2 is cached whole two tokens below step 1; of step 3 only step 1's part is cached."""
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
    """A step's slots are those of its cached path from the root; an unknown step has none."""
    tree = steps_of_two_searches()
    assert tree.slots_of(("ash", 2)).tolist() == [0, 1, 2, 3, 4]
    assert tree.slots_of(("ash", 3)).tolist() == [0, 1, 2, 5]
    assert tree.slots_of(("oak", 2)).tolist() == []
    tree.evict_tip(node_at(tree, "ash", ids(1, 2, 3, 4, 5)), 1)
    assert tree.slots_of(("ash", 2)).tolist() == [0, 1, 2, 3]


def test_a_leaf_has_nothing_below_it() -> None:
    """Of 1 2 3 and, below it, 4 5 and 6 the latter two are leaves; a root never is one."""
    tree = steps_of_two_searches()
    ends = [node_at(tree, "ash", ids(*path)) for path in ((1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3, 6))]
    assert tree.leaves == set(ends[1:])
    assert not RadixTree().leaves
