"""Streams send text as soon as it can no longer change, and never take it back."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from search.engine import Branch
from search.events import Event, Expanded, Pruned, Selected, Started
from search.events import grow as change
from search.policies.registry import POLICIES
from search.spec import PolicyName, SearchSpec
from search.tree import Finish, Tree
from server.streams import StablePrefix, shared
from tests.search.scripted_engine import ScriptedEngine, dice, grow
from tests.server.conftest import Call, question


def say(branch: Branch) -> str:
    """Return one of few steps, some empty, so that branches agree, part, loop and die."""
    roll = dice(branch.tokens, branch.seed) % 12
    if roll < 2:
        return "\n\n"
    return f"The answer is {roll}." if roll < 5 else f"step {roll // 4}\n\n"


@pytest.mark.promise(
    "Text of a reply that a stream has sent never changes: the final reply begins with it."
)
@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=15)
@given(width=st.integers(1, 8), seed=st.integers(0, 2**32), restarts=st.integers(0, 2))
async def test_what_was_certain_begins_the_reply(
    policy: PolicyName, width: int, seed: int, restarts: int
) -> None:
    """Read before every round, the prefix only grows, and the reply begins with it."""
    hopes = {"restarts": restarts, "hopeless_below": 0.9}
    fields = {"policy": policy, "width": width, "seed": seed, "max_depth": 5, **hopes}
    spec = SearchSpec.model_validate(fields)
    prefix = StablePrefix(spec)
    prefixes = [""]

    def on_event(event: Event) -> None:
        if isinstance(event, Selected):
            prefixes.append(prefix.text())
        prefix.on_event(event)

    outcome = await grow(ScriptedEngine(say), spec, listen=on_event)
    prefixes.append(outcome.text)
    if outcome.chosen is not None:
        assert all(later.startswith(earlier) for earlier, later in pairwise(prefixes))


@given(st.lists(st.tuples(st.integers(0, 9), st.text("ab", max_size=3), st.integers(0, 4))))
def test_it_is_what_all_replies_still_begin_with(moves: list[tuple[int, str, int]]) -> None:
    """A tree grows and is pruned at random: after every change the prefix is that of comparing the
    whole texts."""
    prefix, tree = StablePrefix(SearchSpec(policy="beam")), Tree((1,))
    prefix.on_event(Started("t", "beam", 4, 0, (1,)))
    for place, text, kind in moves:
        leaves = list(tree.leaves())
        if not leaves:
            break
        leaf = leaves[place % len(leaves)]
        events: list[Event] = [Pruned(1, leaf.id, "")]
        if kind:
            finish = Finish.END if kind == 1 else Finish.STEP
            nodes = range(len(tree), len(tree) + kind)
            fields = (leaf.id, 0, leaf.depth + 1, (2,), text, finish.value, 0.0, 0.0)
            events = [Expanded(1, node, *fields) for node in nodes]
        for event in events:
            prefix.on_event(event)
            change(tree, event)
        texts = [tree.text(node.id) for node in (*tree.leaves(), *tree.finished())]
        if texts:
            assert prefix.text() == shared(texts)


def test_shared_is_the_longest_common_beginning() -> None:
    """Without texts it is empty."""
    assert shared(["abc", "abd", "ab"]) == "ab"
    assert shared(["abc"]) == "abc"
    assert shared([]) == shared(["x", "y"]) == ""


@pytest.mark.parametrize(
    ("stop", "expected"), [(None, "one\\n\\ntwo\\n\\n"), (["wo"], "one\\n\\nt")]
)
async def test_steps_are_streamed_while_the_search_goes_on(
    app: FastAPI, engine: ScriptedEngine, stop: list[str] | None, expected: str
) -> None:
    """Two branches with the same text: a step is sent once both have it, long before the end, and
    nothing after a stop string."""
    steps = ["one\n\n", "two\n\n", "The answer is 3."]
    engine.gate = asyncio.Event()

    def step(branch: Branch) -> str:
        return steps["".join(map(chr, branch.tokens)).count("\n\n")]

    engine.say = step
    body: dict[str, Any] = {"model": "sprig", "messages": question(), "stream": True, "stop": stop}
    call = Call(app, "/v1/chat/completions", body | {"search": {"width": 2, "seed": 1}})
    for piece in (b"one", b"t"):
        await engine.waiting.wait()
        engine.waiting.clear()
        gate, engine.gate = engine.gate, asyncio.Event()
        gate.set()
        await call.until(1, b'"content":"' + piece)
        assert b'"finish_reason":"' not in call.body
    engine.gate.set()
    engine.gate = None
    await call.task
    contents = call.body.decode().split('"content":"')[2:]
    assert "".join(part.partition('"')[0] for part in contents).startswith(expected)
    assert ("answer is" in call.body.decode().partition('"search"')[0]) is (stop is None)
    assert call.complete
