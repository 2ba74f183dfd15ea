"""Plain completions: pieces, stop strings and the engine's tree."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from search.engine import Branch, PrefixTooLong
from server.completion import Completion, PlainReply, complete, first_stop, held_back
from server.errors import ApiError
from tests.search.scripted_engine import ScriptedEngine, dice, encode

PROMPT = encode("user: count\n")


def by_position(branch: Branch) -> str:
    """What a model with noise by (seed, absolute position) says from here on."""
    start = len(branch.tokens)
    letters = (chr(97 + dice(branch.seed, at) % 5) for at in range(start, start + 40))
    return "".join(letters) + "\n\n"


def draw(**change: object) -> tuple[str, list[str], ScriptedEngine]:
    """A completion of at most 40 tokens: its text, the parts told, and the engine."""
    engine = ScriptedEngine(say=by_position)
    wanted = Completion(prompt=PROMPT, limit=40, piece=16, seed=3)
    told: list[str] = []
    fields = {name: getattr(wanted, name) for name in wanted.__slots__} | change
    reply = asyncio.run(complete(Completion(**fields), engine, "t", told.append))  # type: ignore[arg-type]
    assert not engine.live
    return reply.text, told, engine


@given(st.integers(1, 50))
def test_the_size_of_the_pieces_changes_nothing(piece: int) -> None:
    """One seed and absolute positions: pieces decide when text is seen, never what it says."""
    text, told, _ = draw(piece=piece)
    assert text == draw(piece=40)[0]
    assert "".join(told) == text


@given(st.integers(1, 50), st.lists(st.text("abcde", min_size=1, max_size=3), max_size=3))
@example(1, ["b", "dbb"])
def test_a_stop_string_cuts_the_same_reply_whatever_the_pieces(piece: int, stop: list[str]) -> None:
    """The reply ends where the stop string begins that is complete first; no part of it is told."""
    whole = draw(piece=40)[0]
    text, told, _ = draw(piece=piece, stop=tuple(stop))
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole]
    assert text == whole[: min(ends)[1] if ends else None]
    assert "".join(told) == text


@pytest.mark.parametrize("pieces", [0, 1, 2])
async def test_a_deadline_ends_a_reply_where_it_is(pieces: int) -> None:
    """What is drawn by then, although the engine stands still and lets go of nothing; without a
    piece, a 504."""
    engine = ScriptedEngine(say=by_position)

    def stop() -> None:
        if len(engine.expanded) == pieces:
            engine.still = frozenset({"expand", "release", "abort"})

    engine.on_expand = stop
    stop()
    told: list[str] = []
    wanted = Completion(PROMPT, limit=40, piece=16, seed=3, stop=("!",), seconds=0.05)
    async with asyncio.timeout(30):
        if not pieces:
            with pytest.raises(ApiError, match="before any of the reply was drawn") as refused:
                await complete(wanted, engine, "t", told.append)
            assert (refused.value.status_code, refused.value.code) == (504, "deadline_exceeded")
            return
        reply = await complete(wanted, engine, "t", told.append)
    whole = await complete(replace(wanted, seconds=60), ScriptedEngine(say=by_position), "t", str)
    assert reply == PlainReply(whole.text[: 16 * pieces], 16 * pieces, "length")
    assert "".join(told) == reply.text


def test_first_stop_by_hand() -> None:
    """The earliest occurrence of any of the strings."""
    assert first_stop("abcabc", ("ca", "b")) == 1
    assert first_stop("abcabc", ("x",)) is None
    assert first_stop("abc", ()) is None


@pytest.mark.parametrize(
    ("text", "stop", "held"),
    [("abc", ("cd",), 1), ("ab\n", ("\n\n",), 1), ("abc", ("bcd", "cx"), 2), ("abc", ("x",), 0)],
)
def test_held_back_by_hand(text: str, stop: tuple[str, ...], held: int) -> None:
    """As many characters as may be the beginning of a stop string."""
    assert held_back(text, stop) == held


async def test_a_prompt_without_room_is_refused() -> None:
    """Nothing is drawn, nothing is held."""
    engine = ScriptedEngine(context_tokens=len(PROMPT))
    with pytest.raises(PrefixTooLong):
        await complete(Completion(PROMPT, 5, 5, 0), engine, "t", lambda _: None)
    assert not engine.expanded
