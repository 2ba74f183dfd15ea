"""Log-probabilities of a reply's tokens, through the real ``openai`` client.

The scripted engine's tokens are characters, and each log-probability follows from the token's id.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import chat, chunks, concat, saying, search_of

REPLY = "It is a hedge."
SEARCH = {"policy": "self_consistency", "width": 2, "seed": 1}


def words(content: Any) -> str:
    """Join the tokens, and check each one's bytes and log-probability."""
    for token in content:
        assert bytes(token.bytes).decode() == token.token
        assert token.logprob == -ord(token.token) / 1024
    return "".join(token.token for token in content)


async def test_a_plain_replys_tokens(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """Whole and streamed: each token of the text once, no end token, and the likeliest beside."""
    engine.say = saying(REPLY)
    fields: Any = {"logprobs": True, "top_logprobs": 2}
    whole = (await chat(openai, **fields)).choices[0].logprobs
    assert whole is not None
    assert words(whole.content) == REPLY
    assert [t.token for t in whole.content[0].top_logprobs] == ["I", "J"]  # type: ignore[index]
    parts = []
    for chunk in await chunks(openai, **fields):
        logprobs = chunk.choices[0].logprobs
        if logprobs is not None and logprobs.content:
            assert words(logprobs.content) == chunk.choices[0].delta.content
            parts.append(words(logprobs.content))
    assert "".join(parts) == REPLY
    assert all(chunk.choices[0].logprobs is None for chunk in await chunks(openai))


async def test_what_a_stop_string_cuts_off_has_none(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """Each of several replies has log-probabilities of its own."""
    engine.say = saying(REPLY)
    fields: Any = {"logprobs": True, "stop": "hed", "n": 2}
    completion = await chat(openai, **fields)
    for choice in completion.choices:
        assert choice.message.content == "It is a "
        assert choice.logprobs is not None
        assert words(choice.logprobs.content) == "It is a "
    texts = {0: "", 1: ""}
    for chunk in await chunks(openai, **fields):
        for choice in chunk.choices:
            texts[choice.index] += words((choice.logprobs and choice.logprobs.content) or [])
    assert texts == {0: "It is a ", 1: "It is a "}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_chosen_reply_of_a_search(openai: AsyncOpenAI, stream: bool) -> None:
    """All its steps have them; in a stream they come as soon as the reply is chosen."""
    if not stream:
        [choice] = (await chat(openai, logprobs=True, search=SEARCH)).choices
        assert choice.logprobs is not None
        assert words(choice.logprobs.content) == choice.message.content
        return
    text = tokens = ""
    for chunk in await chunks(openai, logprobs=True, search=SEARCH):
        text += chunk.choices[0].delta.content or ""
        logprobs = chunk.choices[0].logprobs
        tokens += words((logprobs and logprobs.content) or [])
    assert text == tokens != ""


@pytest.mark.promise("A request for log-probabilities changes no tree.")
async def test_asking_for_them_changes_no_tree(openai: AsyncOpenAI) -> None:
    """The digest is the same with and without them."""
    plain = await chat(openai, search=SEARCH)
    with_logprobs = await chat(openai, search=SEARCH, logprobs=True)
    assert search_of(plain)["tree_digest"] == search_of(with_logprobs)["tree_digest"]


async def test_of_a_text_completion(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """The shape is vLLM's: the drawn token is among the likeliest; offsets count from the beginning
    of the text."""
    engine.say = saying(REPLY)
    completion = await openai.completions.create(model="sprig", prompt="say: ", logprobs=1)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list(REPLY)
    assert logprobs.text_offset == list(range(len(REPLY)))
    assert logprobs.token_logprobs == [-ord(letter) / 1024 for letter in REPLY]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"I": -ord("I") / 1024}


async def test_an_echo(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """The prompt precedes each of its replies, also streamed; with log-probabilities it is refused,
    as the prompt has none."""
    engine.say = saying(REPLY)
    fields: Any = {"model": "sprig", "prompt": ["one: ", "two: "], "echo": True}
    completion = await openai.completions.create(**fields, n=2)
    expected = [f"{name}: {REPLY}" for name in ("one", "one", "two", "two")]
    assert [choice.text for choice in completion.choices] == expected
    stream = await openai.completions.create(**fields, stream=True)
    assert concat([chunk async for chunk in stream]) == dict(enumerate(expected[1:3]))
    with pytest.raises(BadRequestError) as error:
        await openai.completions.create(**fields, logprobs=1)
    assert error.value.param == "echo"


async def test_an_engine_that_tells_none_says_so(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """The error names the field."""
    engine.logprobs = False
    with pytest.raises(BadRequestError, match="does not tell them") as error:
        await chat(openai, logprobs=True)
    assert error.value.param == "logprobs"
