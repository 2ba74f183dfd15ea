"""One tree's blocks: inherited values, distances, weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.eviction_order import EvictionParams
from kvpolicy.tree_blocks import TreeBlocks
from kvpolicy.value import Theta

STRAIGHT = Theta("exact", {"": (0.0,), "v": (0.0, 1.0)})
"""s = sigmoid(v); a block without a value scores 0.5."""


def tree_of(*parents: int, params: EvictionParams | None = None) -> TreeBlocks:
    """A tree with blocks 1, 2, ... below these parents; prompt and blocks have 10 tokens each."""
    blocks = TreeBlocks(10, STRAIGHT.table(), params or EvictionParams())
    for node, parent in enumerate(parents, start=1):
        blocks.add_block(node, parent, 10)
    return blocks


def sigmoid(v: float) -> float:
    """The score of a value."""
    return 1 / (1 + math.exp(-v))


def test_a_block_weighed_alone_is_weighed_anew_once_the_search_moves() -> None:
    """A block that closed below Path* is on the path once the search moves to it."""
    blocks = tree_of(0)
    blocks.set_active([1])
    blocks.weights()
    blocks.add_block(2, 1, 10)
    assert not blocks.path_and_weight(2)[0]
    blocks.set_values({99: 0.5})
    blocks.set_active([2])
    assert blocks.path_and_weight(2)[0]


def test_without_an_active_leaf_nothing_is_on_the_path() -> None:
    """Before the first transition distances are 0 and everything is off the path."""
    distance, on_path = tree_of(0, 1).distances()
    assert not distance.any()
    assert not on_path.any()


def test_what_the_search_would_turn_to_next_is_worth_more() -> None:
    """Leaves 2, 4 and 3 in this order are worth 1, 1/2 and 1/3, whatever their rewards were."""
    blocks = tree_of(0, 0, 0, 1)
    blocks.set_values({1: 0.5, 2: 0.1, 3: 0.9})
    blocks.set_active([1])
    blocks.set_outlook([2, 4, 3, 99])
    weights, _ = blocks.weights()
    expected = [sigmoid(v) ** 2 * math.exp(-0.3 * d) * 0.5 for v, d in ((1, 2), (1 / 2, 1))]
    assert weights[[2, 4]] == pytest.approx(expected)
    assert weights[3] == pytest.approx(sigmoid(1 / 3) ** 2 * math.exp(-0.6) * 0.5)
    blocks.set_outlook(())
    assert blocks.weights_current
    blocks.set_values({1: 0.2})
    assert blocks.signals(np.array([1, 2, 4]))[0] == pytest.approx([0.2, 1.0, 1 / 2])


def test_what_two_searches_want_equally_soon_is_worth_the_same() -> None:
    """Weights follow a block's place in the outlook, however long the outlook is."""
    short, long = (tree_of(*[0] * 6, params=EvictionParams(distance_decay=0.0)) for _ in range(2))
    short.set_outlook([1, 2])
    long.set_outlook([6, 5, 4, 3, 2, 1])
    for mine, other in ((1, 6), (2, 5)):
        assert short.weights()[0][mine] == long.weights()[0][other]
    assert short.weights()[0][2] > long.weights()[0][4]


@given(
    parents=st.lists(st.integers(0, 6), min_size=3, max_size=10),
    active=st.integers(0, 3),
    decay=st.sampled_from([0.0, 0.3]),
)
def test_a_block_that_joins_weighs_what_it_would_among_all(
    parents: list[int], active: int, decay: float
) -> None:
    """A block that closes below Path* is weighed alone, with the same weight as if all were."""
    parents = [min(parent, node) for node, parent in enumerate(parents)]
    blocks = tree_of(*parents[:-1], params=EvictionParams(distance_decay=decay))
    blocks.set_values({node: 0.1 * node for node in range(1, len(parents))})
    blocks.set_active([min(active, len(parents) - 1)])
    blocks.weights()
    blocks.add_block(len(parents), parents[-1], 10)
    joined = blocks.weights_current
    alone = [blocks.path_and_weight(node) for node in range(len(parents) + 1)]
    weights, on_path = blocks.weights()
    assert joined == bool(on_path[parents[-1]])
    for node, (ahead, weight) in enumerate(alone):
        assert ahead == on_path[node]
        assert ahead or weight == pytest.approx(weights[node], rel=1e-12)


@pytest.mark.promise(
    "A KV block without a reward inherits its parent's value until it gets a reward."
)
def test_a_block_without_a_reward_has_its_parents_value_until_it_gets_one() -> None:
    """Values are inherited over any number of unscored blocks, also when a reward comes late."""
    blocks = tree_of(0, 1, 2, params=EvictionParams(distance_decay=0.0))
    blocks.set_values({1: 0.8})
    assert blocks.own_weights()[0][1:] == pytest.approx([0.5 * sigmoid(0.8) ** 2] * 3)
    blocks.set_values({3: 0.2})
    blocks.set_values({1: 0.6})
    expected = [0.5 * sigmoid(v) ** 2 for v in (0.6, 0.6, 0.2)]
    assert blocks.own_weights()[0][1:] == pytest.approx(expected)
    blocks.add_block(4, 3, 10)
    assert blocks.own_weights()[0][4] == blocks.own_weights()[0][3]


def test_dead_blocks_weigh_nothing_and_reopen_their_parent() -> None:
    """With all children dead the parent is a leaf again; an id may be marked dead in advance."""
    blocks = tree_of(0, 1, 1)
    blocks.set_values({1: 0.9})
    blocks.mark_dead([2, 3, 4])
    weights, _ = blocks.weights()
    assert weights[2] == weights[3] == -math.inf
    assert weights[0] == weights[1] == pytest.approx(0.5 * sigmoid(0.9) ** 2)
    blocks.add_block(4, 1, 10)
    assert 4 not in blocks


def test_attention_is_the_mean_mass_a_later_token() -> None:
    """Two reports with a total mass of 3 over 10 queries give a = 0.3."""
    theta = Theta("exact", {"": (0.0,), "a": (0.0, 10.0)})
    blocks = TreeBlocks(10, theta.table(), EvictionParams())
    blocks.add_block(1, 0, 5)
    blocks.add_attention(1, 1.0, 4)
    blocks.add_attention(1, 2.0, 6)
    assert blocks.own_weights()[0][1] == pytest.approx(0.5 * sigmoid(3.0) ** 2)
    blocks.add_attention(0, 1.0, 0)
    blocks.add_attention(1, 99.0, 1)
    a = blocks.signals(np.array([0, 1]))[2]
    assert a.tolist() == pytest.approx([math.nan, 1.0], nan_ok=True), "never asked, and at most 1"


def test_all_three_signals_are_read() -> None:
    """v 0.5, u 0.75 and a 0.25: a logit of -1 + 2 v + 3 u + 4 a = 3.25; without v the set "ua".

    The prompt has no signals and scores by the bias of 2.
    """
    sets = {"": (2.0,), "v": (9.0, 9.0), "u": (9.0, 9.0), "a": (9.0, 9.0)}
    sets |= {"vu": (9.0, 9.0, 9.0), "va": (9.0, 9.0, 9.0), "ua": (-2.0, 1.0, 5.0)}
    theta = Theta("exact", {**sets, "vua": (-1.0, 2.0, 3.0, 4.0)})
    blocks = TreeBlocks(10, theta.table(), EvictionParams())
    blocks.add_block(1, 0, 5, 0.75)
    blocks.add_attention(1, 0.25, 1)
    assert blocks.own_weights()[0] == pytest.approx(
        [0.5 * sigmoid(2.0) ** 2, 0.5 * sigmoid(0.0) ** 2]
    )
    blocks.set_values({1: 0.5})
    assert blocks.own_weights()[0][1] == pytest.approx(0.5 * sigmoid(3.25) ** 2)


ATTENTIVE = Theta("exact", {"": (0.0,), "a": (-1.0, 4.0)})


@given(
    parents=st.lists(st.integers(0, 6), min_size=3, max_size=10),
    active=st.integers(0, 3),
    masses=st.lists(st.tuples(st.integers(0, 11), st.floats(0, 1)), max_size=6),
)
def test_attention_weighs_as_if_all_were_weighed_anew(
    parents: list[int], active: int, masses: list[tuple[int, float]]
) -> None:
    """After new attention, weights off Path* are those of weighing everything anew."""
    parents = [min(parent, node) for node, parent in enumerate(parents)]
    singly, together = (TreeBlocks(10, ATTENTIVE.table(), EvictionParams()) for _ in range(2))
    last = len(parents)
    for blocks in (singly, together):
        for node, parent in enumerate(parents[:-1], start=1):
            blocks.add_block(node, parent, 10)
        blocks.set_active([min(active, last - 1)])
    singly.weights()
    for blocks in (singly, together):
        blocks.add_block(last, parents[-1], 10)
        for node, mass in masses:
            blocks.add_attention(node, mass, 1)
    alone = [singly.path_and_weight(node) for node in reversed(range(last + 1))][::-1]
    weights, on_path = together.weights()
    for node, (ahead, weight) in enumerate(alone):
        assert ahead == on_path[node]
        assert ahead or weight == pytest.approx(weights[node], rel=1e-12)


def test_attention_on_the_path_leaves_the_order_settled() -> None:
    """Attention to blocks on the path does not outdate the weights; elsewhere it counts at once."""
    blocks = TreeBlocks(10, ATTENTIVE.table(), EvictionParams())
    for node, parent in ((1, 0), (2, 0)):
        blocks.add_block(node, parent, 10)
    blocks.set_active([1])
    before = blocks.weights()[0][2]
    blocks.add_attention(1, 0.9, 1)
    assert blocks.weights_current
    blocks.add_attention(2, 0.9, 1)
    assert not blocks.weights_current
    assert blocks.path_and_weight(2)[1] > before
    assert blocks.chain(2) == [0, 2]


def test_blocks_may_close_in_any_order_and_leave_gaps() -> None:
    """Neither the order in which siblings close nor gaps in the ids change a weight."""
    values = {node: node % 97 / 97 for node in range(1, 400, 2)}
    rising, falling = tree_of(), tree_of()
    for node in values:
        rising.add_block(node, 0, node)
    for node in reversed(values):
        falling.add_block(node, 0, node)
    for blocks in (rising, falling):
        blocks.set_values(values | {2: 0.5})
        blocks.add_attention(2, 1.0, 1)
        blocks.add_block(3, 0, 99)
        blocks.set_active([2, 5])
        blocks.mark_dead([7, 7])
    assert rising.weights()[0].tolist() == falling.weights()[0].tolist()
    assert rising.tokens.tolist() == falling.tokens.tolist()
    assert rising.active == (5,)
    assert 2 not in rising
    rising.set_outlook([2, 9, 11])
    assert rising.signals(np.array([9, 11]))[0].tolist() == [1.0, 0.5], "what has no block passes"


def test_there_is_room_for_any_number_of_blocks() -> None:
    """A star and a chain of 200 blocks; the chain's last block is 200 steps away."""
    star, chain = tree_of(*[0] * 200), tree_of(*range(200))
    assert star.tokens.tolist() == chain.tokens.tolist() == [10] * 201
    chain.set_active([0])
    assert chain.distances()[0].tolist() == list(range(201))


@pytest.mark.parametrize(
    ("node", "parent", "tokens", "error"),
    [(2, 7, 1, "parent: 7"), (1, 1, 1, "parent: 1"), (2, 1, 0, "tokens: 0"), (-3, 0, 1, "node")],
)
def test_a_block_that_cannot_be_is_refused(node: int, parent: int, tokens: int, error: str) -> None:
    """An unknown parent, an id not above its parent's, an empty step and a negative id."""
    blocks = tree_of(0) if error != "parent: 1" else tree_of()
    with pytest.raises(ValueError, match=error):
        blocks.add_block(node, parent, tokens)


def test_a_value_outside_zero_to_one_is_refused() -> None:
    """The error names the value and the node."""
    with pytest.raises(ValueError, match=r"value: 1\.5 of node 1"):
        tree_of(0).set_values({1: 1.5})


TREES = st.lists(st.integers(0, 10**6), min_size=1, max_size=60).map(
    lambda draws: [draw % (i + 1) for i, draw in enumerate(draws)]
)


@given(parents=TREES, data=st.data())
def test_weights_agree_with_a_naive_walk(parents: list[int], data: st.DataObject) -> None:
    """Weights equal those of a walk up every leaf's chain, and never rise from parent to child."""
    nodes = range(len(parents) + 1)
    blocks = tree_of(*parents)
    values = data.draw(st.dictionaries(st.sampled_from(nodes), st.floats(0, 1)))
    active = data.draw(st.sets(st.sampled_from(nodes), min_size=1, max_size=4))
    dead = data.draw(st.sets(st.sampled_from(nodes), max_size=5)) - active - {0}
    above = dict(enumerate(parents, start=1))
    blocks.set_values(values)
    blocks.mark_dead(dead)
    blocks.set_active(active)
    value: dict[int, float | None] = {0: values.get(0)}
    for node in nodes[1:]:
        value[node] = values.get(node, value[above[node]])

    def chain(node: int) -> list[int]:
        return [node, *(chain(above[node]) if node else [])]

    def apart(left: int, right: int) -> int:
        return len(set(chain(left)) ^ set(chain(right)))

    path = {step for leaf in active for step in chain(leaf)}
    expected = dict.fromkeys(nodes, -math.inf)
    for node in nodes:
        if node in dead or any(above[c] == node and c not in dead for c in nodes[1:]):
            continue
        inherited = value[node]
        score = 0.5 if inherited is None else sigmoid(inherited)
        near = min(apart(node, leaf) for leaf in active)
        weight = score**2 * math.exp(-0.3 * near) * (1.0 if node in path else 0.5)
        for step in chain(node):
            expected[step] = max(expected[step], weight)
    weights, on_path = blocks.weights()
    assert weights == pytest.approx([expected[node] for node in nodes])
    assert set(np.flatnonzero(on_path)) == path
    assert all(weights[above[node]] >= weights[node] for node in nodes[1:])


def test_what_has_no_block_stands_as_on_its_path() -> None:
    """Ids without a block (a step being drawn, a gap, a verdict) weigh infinity, as on the path."""
    blocks = tree_of(0)
    blocks.add_block(4, 0, 10)
    blocks.set_active([1])
    off = blocks.path_and_weight(4)[1]
    nodes = np.array([-70, -1, 0, 1, 3, 4, 9], dtype=np.int64)
    assert blocks.weights_of(nodes).tolist() == [math.inf] * 5 + [off, math.inf]
    assert blocks.weights_of(nodes[2:5]).tolist() == [math.inf] * 3
    assert blocks.weights_of(nodes[2:]).tolist() == [math.inf] * 3 + [off, math.inf]
    assert blocks.weights_of(nodes[1:4]).tolist() == [math.inf] * 3
    assert blocks.weights_of(nodes[:0]).tolist() == []


def test_a_block_that_the_search_may_grow_again_weighs_for_itself_too() -> None:
    """Block 1 has a child but is first in the outlook, so it weighs more than its child."""
    blocks = tree_of(0, 1, 0, params=EvictionParams(distance_decay=0.0))
    blocks.set_active([3])
    blocks.set_outlook([1, 2])
    weights, _ = blocks.weights()
    assert weights[[1, 2]] == pytest.approx([0.5 * sigmoid(1) ** 2, 0.5 * sigmoid(0.5) ** 2])
    blocks.mark_dead([1, 2])
    assert blocks.weights()[0][1] == -math.inf
