"""Events are complete: the tree can be rebuilt from them alone."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.events import (
    Answered,
    Event,
    Expanded,
    Finished,
    Pruned,
    Scored,
    Selected,
    Started,
    grow,
)
from search.policies.registry import POLICIES
from search.spec import PolicyName
from search.tree import Tree, tree_digest
from tests.search.scripted_engine import END, encode
from tests.search.test_width import rough, watch


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=15)
@given(seed=st.integers(0, 2**63 - 1), width=st.integers(1, 20), empty=st.integers(0, 30))
async def test_replaying_events_rebuilds_the_tree(
    policy: PolicyName, seed: int, width: int, empty: int
) -> None:
    """Rebuilt nodes are equal: ids, texts, rewards, states, log-probabilities, entropies."""
    outcome, events = await watch(rough(empty, 20, 10), policy, width, seed)
    first_event, *rest = events
    assert isinstance(first_event, Started)
    tree = Tree(first_event.prompt)
    for event in rest:
        grow(tree, event)
    assert tree.nodes == outcome.tree.nodes
    last = events[-1]
    assert isinstance(last, Answered)
    assert tree_digest(tree, last.answer) == last.tree_digest == outcome.digest


async def test_the_story_of_a_small_search() -> None:
    """Width 2: one child is empty, the other is a step, whose two children give the answer."""
    engine = rough(0, 0, 1)
    engine.say = lambda b: "The answer is 1." if b.parent else ("s\n\n" if b.child else "\n\n")
    engine.score_of = lambda texts: len(texts) / 4
    outcome, events = await watch(engine, "rebase", 2, 9)
    answer = encode("The answer is 1.")
    assert events == [
        Started("t", "rebase", 2, 9, encode("Q")),
        Selected(1, 0, 2),
        Expanded(1, 1, 0, 0, 1, encode("\n\n"), "\n\n", "empty", *_signals(outcome, 1)),
        Pruned(1, 1, "empty"),
        Expanded(1, 2, 0, 1, 1, encode("s\n\n"), "s\n\n", "step", *_signals(outcome, 2)),
        Scored(1, 2, 0.25),
        Selected(2, 2, 2),
        *(
            event
            for i in (3, 4)
            for event in (
                Expanded(
                    2,
                    i,
                    2,
                    i - 3,
                    2,
                    (*answer, END),
                    "The answer is 1.",
                    "end",
                    *_signals(outcome, i),
                ),
                Scored(2, i, 0.5),
                Finished(2, i, "end", 3 + 17),
            )
        ),
        Answered(3, "1", "s\n\nThe answer is 1.", "weighted_majority", "answered", outcome.digest),
    ]


def _signals(outcome: object, node: int) -> tuple[float, float]:
    tree = outcome.tree  # type: ignore[attr-defined]
    return tree[node].logprob, tree[node].entropy


async def test_policy_prunings_are_told_with_the_plan() -> None:
    """A node that the policy prunes is reported with the round that leaves it out."""
    engine = rough(0, 0, 1)
    engine.say = lambda b: "The answer is 1." if b.parent else f"s{b.child}\n\n"
    engine.score_of = lambda texts: 0.9 if texts[0] == "s1\n\n" else 0.1
    _, events = await watch(engine, "beam", 2, 1)
    plan = [e for e in events if isinstance(e, Selected | Pruned)]
    assert plan == [Selected(1, 0, 2), Selected(2, 1, 1), Selected(2, 2, 1)]
    _, events = await watch(engine, "beam", 3, 1)
    plan = [e for e in events if isinstance(e, Selected | Pruned)]
    assert plan == [Selected(1, 0, 3), Selected(2, 1, 1), Selected(2, 2, 2), Pruned(2, 3, "policy")]


async def test_events_are_flat_json() -> None:
    """Each event is one JSON object of plain values, with its name."""
    _, events = await watch(rough(20, 20, 10), "rebase", 6, 4)
    names = set()
    for event in events:
        document = json.loads(json.dumps(event.to_dict()))
        names.add(document["event"])
        assert [*document] == ["event", *(field.name for field in fields(event))]
        for value in document.values():
            assert value is None or isinstance(value, str | int | float | list)
    assert names == {"started", "selected", "expanded", "scored", "pruned", "finished", "answered"}


@pytest.mark.parametrize("kind", Event.__subclasses__())
def test_an_event_tells_all_its_fields(kind: type[Event]) -> None:
    """``to_dict`` uses ``__match_args__``, which must list all fields."""
    assert is_dataclass(kind)
    assert list(kind.__match_args__) == [field.name for field in fields(kind)]
