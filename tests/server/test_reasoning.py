"""Models that think aloud: the thought is separated, and no answer is read from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from server.reply_text import opens_reasoning, split_reasoning
from server.streams import ReplyStream
from tests.search.scripted_engine import ScriptedEngine, encode
from tests.server.conftest import chat, chunks, saying, search_of

THINKING = "<think>\nThe answer is 1? No.\n</think>\n\nThe answer is 2."


@pytest.mark.parametrize(
    ("text", "inside", "parts"),
    [
        ("Hello.", False, ("", "Hello.")),
        ("<think>a\n\nb</think>\n\nc", False, ("a\n\nb", "c")),
        ("a</think>c", True, ("a", "c")),
        ("a</think>c", False, ("", "a</think>c")),
        ("<think>a", False, ("a", "")),
        ("a", True, ("a", "")),
        ("say <think>a</think>", False, ("", "say <think>a</think>")),
    ],
)
def test_a_thought_stands_at_the_beginning(text: str, inside: bool, parts: tuple[str, str]) -> None:
    """The reply or the prompt opens it; a thought that is never closed leaves no reply."""
    assert split_reasoning(text, opened=inside) == parts


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "\n", "a", "</"]), max_size=12),
    st.booleans(),
)
def test_pieces_are_the_whole(pieces: list[str], inside: bool) -> None:
    """However a text is cut, its streamed parts join to what the whole text is split into."""
    saying = ReplyStream(inside, None)
    parts = [saying.more(piece) for piece in pieces]
    parts.append(saying.rest("".join(pieces)))
    totals = "".join(part.thought for part in parts), "".join(part.text for part in parts)
    assert not any(part.calls for part in parts)
    assert totals == split_reasoning("".join(pieces), opened=inside)


def test_a_template_may_open_the_thought() -> None:
    """A prompt that ends with the tag has begun a thought; an earlier tag has not."""
    assert opens_reasoning(encode("assistant:<think>\n"), lambda text: list(encode(text)))
    assert opens_reasoning(encode("assistant:<think>"), lambda text: list(encode(text)))
    assert not opens_reasoning(encode("<think>\n\n</think>\n\n"), lambda text: list(encode(text)))


async def test_a_thought_is_reasoning_content(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """Both whole and streamed replies have it apart from the content."""
    engine.say = saying(THINKING)
    message = (await chat(openai)).choices[0].message
    deltas = [chunk.choices[0].delta for chunk in await chunks(openai)]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert message.content == "".join(d.content or "" for d in deltas) == "The answer is 2."
    assert (message.model_extra or {})["reasoning_content"] == thought == "The answer is 1? No."


async def test_answers_are_not_looked_for_in_thoughts(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """Answers inside a thought do not vote; a thought that never ends has no answer."""
    body = {"search": {"policy": "self_consistency", "width": 2, "step_tokens": 200}}

    async def run() -> tuple[str | None, dict]:
        completion = await chat(openai, **body)
        return completion.choices[0].message.content, search_of(completion)

    engine.say = saying(THINKING)
    content, search = await run()
    assert (content, search["answer"]) == ("The answer is 2.", "2")
    engine.say = lambda _: THINKING.partition("</think>")[0]
    content, search = await run()
    assert (content, search["answer"], search["unanswered"]) == ("", None, 2)
