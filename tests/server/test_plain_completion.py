"""Plain completions: pieces, stop strings and the engine's tree."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from search.engine import Branch, LogitsParams, PrefixTooLong
from server.api_errors import ApiError
from server.plain_completion import PlainCompletion, PlainReply, complete
from server.reply_text import first_stop, held_back
from tests.search.scripted_engine import ScriptedEngine, dice, encode

PROMPT = encode("user: count\n")


def by_position(branch: Branch) -> str:
    """Return what a model with noise by (seed, absolute position) says from here on."""
    start = len(branch.tokens)
    letters = (chr(97 + dice(branch.seed, at) % 5) for at in range(start, start + 40))
    return "".join(letters) + "\n\n"


def draw(**change: object) -> tuple[str, list[str], ScriptedEngine]:
    """Run a completion of at most 40 tokens; return its text, the streamed parts and the engine."""
    engine = ScriptedEngine(say=by_position)
    request = PlainCompletion(prompt=PROMPT, limit=40, piece=16, seed=3)
    parts: list[str] = []
    fields = {name: getattr(request, name) for name in request.__slots__} | change
    reply = asyncio.run(complete(PlainCompletion(**fields), engine, "t", parts.append))  # type: ignore[arg-type]
    assert not engine.live
    return reply.text, parts, engine


@given(st.integers(1, 50))
def test_the_size_of_the_pieces_changes_nothing(piece: int) -> None:
    """Noise is by seed and position: pieces decide when text is seen, not what it says."""
    text, parts, _ = draw(piece=piece)
    assert text == draw(piece=40)[0]
    assert "".join(parts) == text


@given(st.integers(1, 50), st.lists(st.text("abcde", min_size=1, max_size=3), max_size=3))
@example(1, ["b", "dbb"])
def test_a_stop_string_cuts_the_same_reply_whatever_the_pieces(piece: int, stop: list[str]) -> None:
    """The reply ends before the stop string that is complete first; no part of it is streamed."""
    whole = draw(piece=40)[0]
    text, parts, _ = draw(piece=piece, stop=tuple(stop))
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole]
    assert text == whole[: min(ends)[1] if ends else None]
    assert "".join(parts) == text


@given(st.integers(1, 50), st.integers(0, 40), st.sampled_from("abcde"))
def test_before_the_least_tokens_no_stop_string_counts(piece: int, minimum: int, stop: str) -> None:
    """A character is a token here; for all sizes of pieces, no streamed text is taken back."""
    whole = draw(piece=40)[0]
    params = LogitsParams(min_tokens=minimum)
    text, parts, _ = draw(piece=piece, stop=(stop,), logits=params)
    end = whole.find(stop, minimum)
    assert text == whole[: end if end >= 0 else None]
    assert "".join(parts) == text


@pytest.mark.parametrize("pieces", [0, 1, 2])
async def test_a_deadline_ends_a_reply_where_it_is(pieces: int) -> None:
    """The reply is what was drawn by then, although the engine hangs; without a piece it is a
    504."""
    engine = ScriptedEngine(say=by_position)

    def stop() -> None:
        if len(engine.expanded) == pieces:
            engine.still = frozenset({"expand", "release", "abort"})

    engine.on_expand = stop
    stop()
    parts: list[str] = []
    request = PlainCompletion(PROMPT, limit=40, piece=16, seed=3, stop=("!",), seconds=0.05)
    async with asyncio.timeout(30):
        if not pieces:
            with pytest.raises(ApiError, match="before any of the reply was drawn") as error:
                await complete(request, engine, "t", parts.append)
            assert (error.value.status_code, error.value.code) == (504, "deadline_exceeded")
            return
        reply = await complete(request, engine, "t", parts.append)
    whole = await complete(replace(request, seconds=60), ScriptedEngine(say=by_position), "t", str)
    assert reply == PlainReply(whole.text[: 16 * pieces], 16 * pieces, "length")
    assert "".join(parts) == reply.text


@given(
    st.lists(st.text("ab\n", max_size=9), max_size=6),
    st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4).map(tuple),
)
def test_a_stream_finds_stops_as_the_whole_text_has_them(
    pieces: list[str], stop: tuple[str, ...]
) -> None:
    """By definition: held-back text could begin a stop, and no stop begins before it, so a growing
    text is searched only from there."""
    text, sent_length = "", 0
    for piece in pieces:
        text += piece
        ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
        end = min(ends)[1] if ends else None
        assert first_stop(text, stop, sent_length) == first_stop(text, stop) == end
        if end is not None:
            break
        continuation = [n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
        assert held_back(text, stop) == max(continuation, default=0)
        assert len(text) - held_back(text, stop) >= sent_length
        sent_length = len(text) - held_back(text, stop)


class CountingText(str):
    """A string that counts the characters that are searched or sliced."""

    __slots__ = ("cost",)
    cost: int

    def find(self, sub: str, start: Any = 0, end: Any = None, /) -> int:
        """Search as ``str`` does."""
        index = super().find(sub, start)
        self.cost += (len(self) if index < 0 else index + len(sub)) - start
        return index

    def __getitem__(self, place: Any) -> str:
        cut = super().__getitem__(place)
        self.cost += len(cut)
        return cut


def test_a_stream_costs_what_its_text_does() -> None:
    """A piece is searched with the text held back before it, not with all that was sent."""

    def cost_of(pieces: int) -> int:
        cost, sent_length, text = 0, 0, ""
        stop = ("no such text" * 20, "nor", "xy")
        for _ in range(pieces):
            counting = CountingText(text + "nothing of note. ")
            counting.cost = 0
            assert first_stop(counting, stop, sent_length) is None
            sent_length = len(counting) - held_back(counting, stop)
            cost, text = cost + counting.cost, str(counting)
        return cost

    assert cost_of(800) < 3 * cost_of(400)


async def test_a_prompt_without_room_is_refused() -> None:
    """Nothing is drawn or held."""
    engine = ScriptedEngine(context_tokens=len(PROMPT))
    with pytest.raises(PrefixTooLong):
        await complete(PlainCompletion(PROMPT, 5, 5, 0), engine, "t", lambda _: None)
    assert not engine.expanded


async def test_a_reply_whose_end_is_ignored_goes_on_to_its_limit() -> None:
    """Here the model ends the reply in every piece."""
    script = {"say": lambda branch: "Done."}
    request = PlainCompletion(PROMPT, limit=40, piece=16, seed=3)
    short = await complete(request, ScriptedEngine(**script), "t", lambda _: None)
    assert (short.tokens, short.finish_reason) == (6, "stop")
    unending = replace(request, ignore_eos=True)
    reply = await complete(unending, ScriptedEngine(**script), "t", lambda _: None)
    assert (reply.tokens, reply.finish_reason) == (40, "length")
