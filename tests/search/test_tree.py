"""The tree's own rules, and the seeds of nodes' random streams."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.tree import Finish, Node, NodeState, Tree, node_seed
from tests.search.trees import END, LENGTH, LIMIT, STEP, tree_of


def test_a_tree_needs_a_prompt() -> None:
    """An empty prompt is refused by name."""
    with pytest.raises(ValueError, match="prompt: empty"):
        Tree(())


@pytest.mark.parametrize(
    ("finish", "state"),
    [
        (STEP, NodeState.OPEN),
        (LENGTH, NodeState.OPEN),
        (END, NodeState.FINISHED),
        (LIMIT, NodeState.FINISHED),
        (Finish.EMPTY, NodeState.PRUNED),
        (Finish.LOOP, NodeState.PRUNED),
    ],
)
def test_a_steps_end_decides_its_state(finish: Finish, state: NodeState) -> None:
    """Each way to end has one outcome, and only open nodes grow."""
    tree = tree_of((0, "a", finish, None))
    assert tree[1].state is state
    if state is not NodeState.OPEN:
        with pytest.raises(ValueError, match=f"node 1 is {state}; only open nodes grow"):
            tree.add(1, (1,), "b", STEP)


def test_a_node_is_what_was_said_of_it() -> None:
    """Every field of the root, of a step and of its twin, whose ``first`` is the step; tokens are
    copied from the caller's list."""
    tree, ids = Tree([7]), [5, 6]
    tree.add(0, ids, "ab", STEP, logprob=-0.5, entropy=0.25)
    twin = tree.add(0, ids, "ab", END)
    ids.clear()
    opened = NodeState.OPEN
    assert tree.nodes == [
        Node(0, -1, 0, 0, (), "", STEP, opened, (), 0, children=[1, 2]),
        Node(1, 0, 0, 1, (5, 6), "ab", STEP, opened, (0,), 1, -0.5, 0.25),
        Node(2, 0, 1, 1, (5, 6), "ab", END, NodeState.FINISHED, (1,), 1),
    ]
    assert (tree.prompt, tree.generated_tokens, tree.finished()) == ((7,), 4, [twin])


def test_paths_depths_and_texts() -> None:
    """Two levels: child indices name the path, tokens and texts add up from the prompt."""
    tree = tree_of(
        (0, "a", STEP, None), (0, "b", STEP, None), (2, "c", STEP, None), (2, "d", END, 1)
    )
    node = tree[4]
    assert (node.path, node.child, node.depth) == ((1, 1), 1, 2)
    assert tree.tokens(4) == tuple(map(ord, "?bd"))
    assert tree.text(4) == "bd"
    assert [n.id for n in tree.chain(4)] == [2, 4]
    assert (tree.chain(0), tree.tokens(0), tree.text(0)) == ([], (ord("?"),), "")
    assert [n.id for n in tree.leaves()] == [1, 3]
    assert tree.generated_tokens == 4


def test_above_are_the_steps_on_the_way() -> None:
    """Leaf 3 gives 2 and 3, leaf 1 itself until it is pruned; 4 has ended. The root is no step."""
    tree = tree_of(
        (0, "aa", STEP, None), (0, "b", STEP, None), (2, "c", STEP, None), (2, "d", END, 1)
    )
    assert tree.above(tree.leaves()) == {1, 2, 3}
    tree.prune(1)
    assert tree.above(tree.leaves()) == {2, 3}
    assert tree.above([tree[0]]) == set()


def test_an_inner_node_is_pruned_alone() -> None:
    """Its children stay open."""
    tree = tree_of((0, "a", STEP, None), (1, "b", STEP, None))
    tree.prune(1)
    assert [node.state for node in tree.nodes[1:]] == [NodeState.PRUNED, NodeState.OPEN]
    assert [leaf.id for leaf in tree.leaves()] == [2]


def test_pruning_leaves_the_finished_alone() -> None:
    """A finished trajectory stays finished."""
    tree = tree_of((0, "a", END, None))
    tree.prune(1)
    assert tree[1].state is NodeState.FINISHED


PURPOSES = ("step", "judge", "vote")
"""Purposes of which two have the same length."""


@pytest.mark.promise(
    "A node's noise follows from the request's seed, the purpose and its path, and no two streams "
    "are alike."
)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), max_size=4)), unique_by=str)
)
def test_streams_differ_by_seed_purpose_and_path(names: list[tuple[int, list[int]]]) -> None:
    """No two nodes share a stream, nor do two purposes at one node."""
    seeds = [node_seed(s, purpose, path) for s, path in names for purpose in PURPOSES]
    assert len(set(seeds)) == len(seeds)


def test_streams_do_not_change_unnoticed() -> None:
    """Recorded trees can be grown again: these numbers are part of the format."""
    assert node_seed(0, "step", ()) == 990951245300568122
    assert node_seed(2**63 - 1, "step", (3, 0, 7)) == 16851138981010949263
