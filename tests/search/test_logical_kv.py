"""Logical KV: a count of unique tokens, against sets of prefixes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from search.stats import LogicalKV
from search.tree import Finish, Tree


def kv_of(tree: Tree) -> LogicalKV:
    """A LogicalKV with all nodes of the tree."""
    kv = LogicalKV(len(tree.prompt))
    for node in tree.nodes[1:]:
        kv.add(node)
    return kv


@given(
    st.lists(st.tuples(st.integers(0), st.text("ab", min_size=1, max_size=5)), max_size=30),
    st.sets(st.integers(0, 30)),
    st.integers(1, 3),
)
def test_equals_the_number_of_distinct_prefixes(
    steps: list[tuple[int, str]], node_ids: set[int], prompt: int
) -> None:
    """It equals the number of distinct prefixes of the paths, in any tree."""
    tree = Tree((0,) * prompt)
    for above, text in steps:
        tree.add(above % len(tree), tuple(map(ord, text)), text, Finish.STEP)
    nodes = [node for node in node_ids if node < len(tree)]
    paths = [tree.tokens(node)[prompt:] for node in nodes]
    prefixes = {path[:n] for path in paths for n in range(1, len(path) + 1)}
    assert kv_of(tree).tokens(nodes) == prompt + len(prefixes)
