"""The digest: equal trees have equal digests, and any change changes it."""

from __future__ import annotations

import copy
import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.tree import NodeState, Tree, combined_digest, round_reward, tree_digest
from tests.search.test_width import rough, watch
from tests.search.trees import END, STEP, row, tree_of

DIGEST_OF_THE_EXAMPLE = "e74c139a0b0fadd1b6e2999223fe22395b876b0e099ff643ad403f29af944e5b"


def example() -> Tree:
    """A tree with two steps below the root, one of which has a final step."""
    return tree_of((0, "a", STEP, 0.25), (0, "b", STEP, None), (1, "cd", END, 0.5))


def test_the_layout_written_by_hand() -> None:
    """The bytes of the documented format, spelt out."""
    u32 = lambda n: n.to_bytes(4, "little")  # noqa: E731
    none = b"\xff\xff\xff\xff"
    layout = b"".join(
        [
            b"hedgerow-tree-1",
            u32(1) + u32(ord("?")),
            u32(4),
            u32(0) + none + b"\0" + none + u32(0),
            u32(1) + u32(0) + b"\0" + u32(2500) + u32(1) + u32(ord("a")),
            u32(2) + u32(0) + b"\0" + none + u32(1) + u32(ord("b")),
            u32(3) + u32(1) + b"\1" + u32(5000) + u32(2) + u32(ord("c")) + u32(ord("d")),
        ]
    )
    with_answer = layout + b"\1" + u32(2) + "é".encode()
    assert tree_digest(example(), "é") == hashlib.sha256(with_answer).hexdigest()
    assert tree_digest(example(), None) == hashlib.sha256(layout + b"\0" + u32(0)).hexdigest()


def test_the_format_does_not_change_unnoticed() -> None:
    """A stored digest is still this tree's; a new layout needs a new format version."""
    assert tree_digest(example(), "4") == DIGEST_OF_THE_EXAMPLE


def test_texts_and_thoughts_are_not_part_of_it() -> None:
    """Text, log-probability, entropy and embedding do not change the digest."""
    twin = example()
    for node in twin.nodes:
        node.text, node.logprob, node.entropy, node.embedding = "?", -9.0, 9.0, (1.0,)
    assert tree_digest(twin, "4") == tree_digest(example(), "4")


CHANGES = ["id", "parent", "tokens", "token", "reward", "no reward", "state", "prompt", "answer"]


def changed(tree: Tree, answer: str | None, what: str, which: int) -> tuple[Tree, str | None]:
    """The same tree but for one field of one node, of the prompt, or of the answer."""
    tree = copy.deepcopy(tree)
    node = tree[1 + which % (len(tree) - 1)]
    match what:
        case "id":
            node.id += 1
        case "parent":
            node.parent += 1
        case "tokens":
            node.tokens += (1,)
        case "token":
            node.tokens = (node.tokens[0] ^ 1, *node.tokens[1:])
        case "reward":
            node.reward = 0.1234 if node.reward is None else round_reward(node.reward + 1e-4)
        case "no reward":
            node.reward = 0.0 if node.reward is None else None
        case "state":
            states = list(NodeState)
            node.state = states[(states.index(node.state) + 1 + which % 2) % 3]
        case "prompt":
            tree.prompt = (tree.prompt[0] + 1, *tree.prompt[1:])
        case _:
            answer = "" if answer is None else None if which % 2 else answer + "0"
    return tree, answer


@pytest.mark.promise(
    "`tree_digest` changes with every id, parent, token, reward and state, with the prompt and "
    "with the answer."
)
@settings(max_examples=100)
@given(
    seed=st.integers(0, 50),
    what=st.sampled_from(CHANGES),
    which=st.integers(0, 1000),
    scored=st.booleans(),
)
async def test_any_change_changes_it(seed: int, what: str, which: int, scored: bool) -> None:
    """One field of one node, the prompt or the answer: another digest."""
    policy = "rebase" if scored else "self_consistency"
    outcome, _ = await watch(rough(10, 30, 10), policy, 4, seed)
    tree, answer = changed(outcome.tree, outcome.answer, what, which)
    assert tree_digest(tree, answer) != outcome.digest
    assert tree_digest(outcome.tree, outcome.answer) == outcome.digest


def test_no_two_rewards_have_one_digest() -> None:
    """Rewards are hashed as whole ten-thousandths: 0.0029 is 28.999... of them in floats."""
    digests = {tree_digest(row(i / 10_000), None) for i in range(10_001)}
    assert len(digests) == 10_001


def test_tokens_do_not_slip_between_steps() -> None:
    """``ab`` + ``c`` is not ``a`` + ``bc``."""
    first = tree_of((0, "ab", STEP, None), (1, "c", STEP, None))
    second = tree_of((0, "a", STEP, None), (1, "bc", STEP, None))
    assert tree_digest(first, None) != tree_digest(second, None)


def test_no_answer_is_not_an_empty_answer() -> None:
    """None and the empty string differ."""
    assert tree_digest(example(), None) != tree_digest(example(), "")


def test_combined_digest_depends_on_each_and_on_their_order() -> None:
    """The combined digest changes if a tree is changed, left out or moved."""
    a, b = tree_digest(example(), "a"), tree_digest(example(), "b")
    combined = [combined_digest(d) for d in ([a, b], [b, a], [a], [a, a], [])]
    assert len(set(combined)) == 5
    assert combined_digest([a, b]) == combined[0]


@pytest.mark.parametrize(
    ("reward", "rounded"),
    [(0.123449, 0.1234), (0.123451, 0.1235), (0.0, 0.0), (1.0, 1.0), (0.99996, 1.0)],
)
def test_rewards_are_rounded_to_ten_thousandths(reward: float, rounded: float) -> None:
    """Noise below 5e-5 is gone before anything is compared."""
    assert round_reward(reward) == rounded
