"""Several choices, text completions, and a search that reports its progress."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from search.tree import ROOT
from server.reply_text import answer_of
from tests.search.scripted_engine import ScriptedEngine, babble
from tests.server.conftest import chat, chunks, concat, refusal, saying, search_of


@pytest.mark.parametrize("stream", [False, True])
async def test_n_of_a_search_is_its_best_distinct_answers(
    openai: AsyncOpenAI, stream: bool
) -> None:
    """Choices are the heaviest answers, each once; fewer if there are not that many."""
    body = {"search": {"policy": "rebase", "width": 16, "seed": 2}}
    single = await chat(openai, **body)
    votes = search_of(single)["votes"]
    assert len(votes) > 2
    for n in (2, 16):
        if stream:
            replies = list(concat(await chunks(openai, n=n, **body)).values())
        else:
            completion = await chat(openai, n=n, **body)
            assert [choice.index for choice in completion.choices] == list(
                range(len(completion.choices))
            )
            assert completion.usage == single.usage
            replies = [choice.message.content or "" for choice in completion.choices]
        answers = [answer_of("?")(reply) for reply in replies]
        assert answers == [vote["answer"] for vote in votes][:n]
        assert replies[0] == single.choices[0].message.content


async def test_n_of_a_plain_reply_is_n_draws(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """The first is the reply of n = 1; the others have their own noise; the prompt counts once."""
    single, several = await chat(openai, seed=4), await chat(openai, seed=4, n=5)
    texts = [choice.message.content for choice in several.choices]
    assert texts[0] == single.choices[0].message.content
    assert len(set(texts)) > 1
    assert several.usage is not None
    assert single.usage is not None
    assert several.usage.prompt_tokens == single.usage.prompt_tokens
    assert several.usage.completion_tokens > single.usage.completion_tokens
    assert concat(await chunks(openai, seed=4, n=5)) == dict(enumerate(texts))
    assert not engine.live
    assert max(len(branches) for branches in engine.expanded) == 5


async def test_a_text_completion_takes_the_prompt_as_it_stands(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """No chat template is applied; streamed and whole replies are the same."""
    engine.say = saying(" grows back.")
    completion = await openai.completions.create(model="sprig", prompt="A hedge", seed=1)
    assert completion.object == "text_completion"
    assert completion.choices[0].text == " grows back."
    assert "".join(map(chr, engine.expanded[0][0].tokens)) == "A hedge"
    stream = [
        chunk
        async for chunk in await openai.completions.create(
            model="sprig",
            prompt=["A hedge"],
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    assert "".join(c.choices[0].text for c in stream if c.choices) == " grows back."
    assert stream[-2].choices[0].finish_reason == "stop"
    assert stream[-1].usage == completion.usage


async def test_text_completions_of_several_prompts_are_those_of_each(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """Choices are in the prompts' order, ``n`` for each, whole or streamed, with the seed that each
    has alone; the usage counts every prompt once."""
    engine.say = lambda branch: babble(branch).removesuffix("\n\n")
    fields: dict[str, Any] = {"model": "sprig", "seed": 4, "n": 2, "max_tokens": 40}
    prompts = ["A hedge", "A fence", "A wall"]
    alone = [await openai.completions.create(prompt=prompt, **fields) for prompt in prompts]
    together = await openai.completions.create(prompt=prompts, **fields)
    texts = [choice.text for completion in alone for choice in completion.choices]
    assert [choice.index for choice in together.choices] == [*range(6)]
    assert [choice.text for choice in together.choices] == texts
    assert len(set(texts)) > 1
    assert together.usage is not None
    usages = [completion.usage for completion in alone if completion.usage is not None]
    assert together.usage.prompt_tokens == sum(map(len, prompts))
    assert together.usage.completion_tokens == sum(usage.completion_tokens for usage in usages)
    stream = await openai.completions.create(prompt=prompts, **fields, stream=True)
    assert concat([chunk async for chunk in stream]) == dict(enumerate(texts))
    assert not engine.live


async def test_prompts_may_be_token_ids(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """A prompt is one list of ids or several; a search uses the text that they spell."""
    engine.say = lambda branch: "".join(map(chr, branch.tokens))[-3:].upper()
    ids = [list(map(ord, prompt)) for prompt in ("A hedge", "A fence")]
    single = await openai.completions.create(model="sprig", prompt=ids[0])
    both = await openai.completions.create(model="sprig", prompt=ids)
    assert [choice.text for choice in single.choices] == ["DGE"]
    assert [choice.text for choice in both.choices] == ["DGE", "NCE"]
    engine.say, texts = babble, []
    for prompt in (ids[0], "A hedge"):
        completion = await openai.completions.create(model="sprig:beam-4", prompt=prompt, seed=1)
        texts.append((completion.choices[0].text, search_of(completion)["tree_digest"]))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, 2.5]}, "prompt[0]"),
        ({"prompt": [[1], [0x110000]]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", "b"], "search": {}}, "prompt"),
        ({"prompt": ["a", "b"], "model": "sprig:beam-4"}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
    ],
)
async def test_what_a_text_completion_does_not_offer_is_named(
    http: httpx2.AsyncClient, change: dict[str, Any], param: str
) -> None:
    """The error names the field, as for chats."""
    error = await refusal(http, "/v1/completions", {"model": "sprig", "prompt": "a"} | change)
    assert error["param"] == param


async def test_a_search_tells_how_it_gets_on_if_asked(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """One line per round as ``reasoning_content``, before the reply and never within it, though
    much of the reply is certain early; whole replies have the same; none unless asked."""
    engine.say = lambda branch: (
        "Let us see.\n\n" if branch.parent == ROOT else babble(branch)  # the first step of all
    )
    body: dict[str, Any] = {"search": {"policy": "rebase", "width": 4, "seed": 3}}

    async def deltas(extra: dict[str, Any]) -> list[Any]:
        return [chunk.choices[0].delta for chunk in await chunks(openai, **body | extra)]

    stream = await deltas({"include_reasoning": True})
    lines = [d.reasoning_content for d in stream if getattr(d, "reasoning_content", None)]
    assert [line.split(":")[0] for line in lines] == [
        f"round {number}" for number in range(1, len(lines) + 1)
    ]
    assert "4 steps" in lines[0]
    assert "best 0." in lines[0]
    thoughts = [bool(getattr(d, "reasoning_content", None)) for d in stream]
    parts = [thought for thought, d in zip(thoughts, stream, strict=True) if thought or d.content]
    assert parts == [True] * len(lines) + [False]
    quiet = await deltas({})
    assert not any(getattr(d, "reasoning_content", None) for d in quiet)
    assert len([d for d in quiet if d.content]) > 1
    text = "".join(d.content or "" for d in stream)
    assert text == "".join(d.content or "" for d in quiet)
    for extra, thought in (({"include_reasoning": True}, "".join(lines)), ({}, None)):
        whole = await chat(openai, **body | extra)
        message = whole.choices[0].message
        assert message.content == text
        assert (message.model_extra or {}).get("reasoning_content") == thought


async def test_a_search_says_how_its_answers_are_read(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """As maths, 0.5 and 1/2 vote together and a bare number is an answer; as text neither."""
    engine.say = lambda branch: ["The answer is 0.5.", "So it is 1/2"][branch.child % 2]

    async def votes(rule: str) -> list[tuple[str, int]]:
        search = {"policy": "self_consistency", "width": 4, "answers": rule}
        document = search_of(await chat(openai, search=search))
        return [(vote["answer"], vote["count"]) for vote in document["votes"]]

    assert await votes("maths") == [("0.5", 4)]
    assert await votes("text") == [("0.5", 2)]
