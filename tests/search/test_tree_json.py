"""A tree survives JSON; a bad document is refused with the field's name."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.tree_json import from_json, to_json
from tests.search.test_width import rough, watch
from tests.search.trees import END, STEP, tree_of


@settings(max_examples=25)
@given(seed=st.integers(0, 2**63 - 1), width=st.integers(1, 12), scored=st.booleans())
async def test_there_and_back(seed: int, width: int, scored: bool) -> None:
    """Every node of every searched tree is the same after a trip through JSON text."""
    policy = "rebase" if scored else "self_consistency"
    outcome, _ = await watch(rough(20, 20, 10), policy, width, seed)
    tree = from_json(json.loads(json.dumps(to_json(outcome.tree))))
    assert tree.nodes == outcome.tree.nodes
    assert tree.prompt == outcome.tree.prompt
    assert tree.generated_tokens == outcome.tree.generated_tokens


def test_the_layout() -> None:
    """Version 1, spelt out."""
    tree = tree_of((0, "a", STEP, 0.25), (0, "b", STEP, None), (1, "c", END, 1.0))
    tree.prune(2)
    step = {"finish": "step", "logprob": -1.0, "entropy": 0.0}
    assert to_json(tree) == {
        "version": 1,
        "prompt": [63],
        "nodes": [
            {"id": 1, "parent": 0, "tokens": [97], "text": "a", "state": "open", "reward": 0.25}
            | step,
            {"id": 2, "parent": 0, "tokens": [98], "text": "b", "state": "pruned", "reward": None}
            | step,
            {"id": 3, "parent": 1, "tokens": [99], "text": "c", "state": "finished", "reward": 1.0}
            | step
            | {"finish": "end"},
        ],
    }


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 2, "tree.version: 2; only version 1"),
        (("version",), None, "tree.version: None; only version 1"),
        (("prompt",), [], r"tree.prompt: \[\]; "),
        (("nodes", 0, "id"), 7, "tree.nodes.id: 7; expected 1"),
        (("nodes", 1, "parent"), 2, "tree.nodes.parent: 2 of node 2; must be lower"),
        (("nodes", 0, "finish"), "stop", "tree.nodes.0.finish: 'stop'; .*'end'"),
        (("nodes", 0, "reward"), 1.5, "tree.nodes.0.reward: 1.5; .*less than or equal to 1"),
        (("nodes", 0, "state"), "finished", "tree.nodes.state: finished of node 1; open after"),
        (("nodes", 0, "colour"), "red", "tree.nodes.0.colour: 'red'"),
    ],
)
def test_a_bad_document_is_refused_by_field(
    path: tuple[str | int, ...], value: object, message: str
) -> None:
    """The error names the field, what it holds and what is allowed."""
    document = copy.deepcopy(to_json(tree_of((0, "a", STEP, 0.25), (1, "b", END, 0.5))))
    at: object = document
    for part in path[:-1]:
        at = at[part]  # type: ignore[index]
    at[path[-1]] = value  # type: ignore[index]
    with pytest.raises(ValueError, match=message):
        from_json(document)


def test_a_child_of_a_finished_step_is_refused() -> None:
    """A document with such a parent is refused, since only open nodes grow."""
    document = to_json(tree_of((0, "a", END, 0.25), (0, "b", STEP, 0.5)))
    nodes = document["nodes"]
    assert isinstance(nodes, list)
    nodes[1]["parent"] = 1
    with pytest.raises(ValueError, match="node 1 is finished"):
        from_json(document)
