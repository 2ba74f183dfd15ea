"""Replies drawn together: one call per piece, each reply's own text, and what ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.engine import Branch, EngineDown
from search.tree import ROOT
from server.plain_completion import PlainCompletion, PlainReply, complete
from server.side_by_side import JointReplies
from tests.search.scripted_engine import ScriptedEngine, dice, encode

PROMPT = encode("user: count\n")
REQUEST = PlainCompletion(PROMPT, limit=100, piece=4, seed=3)


def of_lengths(*lengths: int) -> Callable[[Branch], str]:
    """Return a script of replies with these numbers of letters, by noise of seed and position."""
    seeds: list[int] = []

    def say(branch: Branch) -> str:
        if branch.seed not in seeds:
            seeds.append(branch.seed)
        whole = lengths[seeds.index(branch.seed)]
        start = len(branch.tokens)
        letters = range(start, len(PROMPT) + whole)
        return "".join(chr(97 + dice(branch.seed, at) % 5) for at in letters)

    return say


async def together(
    engine: ScriptedEngine, count: int, on_text: Callable[[str], None] = lambda _: None
) -> list[PlainReply]:
    """Draw ``count`` replies to one request, side by side."""
    trees = [f"t.{draw}" for draw in range(count)]
    joint = JointReplies(engine, "t", trees)
    replies = [
        complete(replace(REQUEST, draw=draw), joint, tree, on_text)
        for draw, tree in enumerate(trees)
    ]
    return await asyncio.gather(*replies)


@given(st.lists(st.integers(1, 14), min_size=1, max_size=5))
def test_each_says_what_it_says_alone(lengths: list[int]) -> None:
    """For any lengths: as many calls as the longest reply has pieces, a branch per reply that goes
    on, each with node ids of its own; nothing stays held."""

    async def run() -> None:
        engine = ScriptedEngine(say=of_lengths(*lengths))
        replies = await together(engine, len(lengths))
        say = of_lengths(*lengths)
        alone = [
            await complete(replace(REQUEST, draw=i), ScriptedEngine(say=say), "t", lambda _: None)
            for i in range(len(lengths))
        ]
        assert replies == alone
        pieces = max(-(-reply.tokens // REQUEST.piece) for reply in replies)
        assert len(engine.expanded) in (pieces, pieces + 1)  # an end at a piece's end is seen later
        branches = [branch for call in engine.expanded for branch in call]
        nodes = [branch.node for branch in branches]
        assert len(set(nodes)) == len(nodes)
        by_seed: dict[int, int] = {}
        for branch in branches:
            assert branch.parent == by_seed.get(branch.seed, ROOT) < branch.node
            by_seed[branch.seed] = branch.node
        assert (engine.live, engine.released, engine.aborted) == (set(), ["t"], [])

    asyncio.run(run())


async def test_an_engine_that_ends_fails_all() -> None:
    """Each reply has the error; the tree is aborted once."""
    engine = ScriptedEngine(say=of_lengths(20, 20), fail_at=1)
    replies = [f"t.{draw}" for draw in range(2)]
    joint = JointReplies(engine, "t", replies)
    works = [
        complete(replace(REQUEST, draw=draw), joint, tree, lambda _: None)
        for draw, tree in enumerate(replies)
    ]
    errors = await asyncio.gather(*works, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineDown, EngineDown]
    assert engine.aborted == ["t"]


async def test_who_leaves_takes_what_is_under_way_along() -> None:
    """The call ends when the last reply is cancelled."""
    engine = ScriptedEngine(say=of_lengths(20, 20), gate=asyncio.Event())
    work = asyncio.ensure_future(together(engine, 2))
    await engine.waiting.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert engine.aborted == ["t"]
    assert not engine.live
    assert len(asyncio.all_tasks()) == 1
