"""Several choices, text completions, and a search that tells how it gets on."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from search.tree import ROOT
from server.reply_text import answer_of
from tests.search.scripted_engine import ScriptedEngine, babble
from tests.server.conftest import chat, chunks, joined, refusal, saying, search_of


@pytest.mark.parametrize("stream", [False, True])
async def test_n_of_a_search_is_its_best_distinct_answers(
    openai: AsyncOpenAI, stream: bool
) -> None:
    """Heaviest first, each answer once; fewer if there are not as many."""
    body = {"search": {"policy": "rebase", "width": 16, "seed": 2}}
    one = await chat(openai, **body)
    votes = search_of(one)["votes"]
    assert len(votes) > 2
    for n in (2, 16):
        if stream:
            replies = list(joined(await chunks(openai, n=n, **body)).values())
        else:
            done = await chat(openai, n=n, **body)
            assert [choice.index for choice in done.choices] == list(range(len(done.choices)))
            assert done.usage == one.usage
            replies = [choice.message.content or "" for choice in done.choices]
        answers = [answer_of("?")(reply) for reply in replies]
        assert answers == [vote["answer"] for vote in votes][:n]
        assert replies[0] == one.choices[0].message.content


async def test_n_of_a_plain_reply_is_n_draws(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """The first is what n = 1 says; the others have noise of their own; the prompt counts once."""
    one, many = await chat(openai, seed=4), await chat(openai, seed=4, n=5)
    texts = [choice.message.content for choice in many.choices]
    assert texts[0] == one.choices[0].message.content
    assert len(set(texts)) > 1
    assert many.usage is not None
    assert one.usage is not None
    assert many.usage.prompt_tokens == one.usage.prompt_tokens
    assert many.usage.completion_tokens > one.usage.completion_tokens
    assert joined(await chunks(openai, seed=4, n=5)) == dict(enumerate(texts))
    assert not engine.live
    assert max(len(branches) for branches in engine.expanded) == 5


async def test_a_text_completion_takes_the_prompt_as_it_stands(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """No chat template; streamed or whole it says the same."""
    engine.say = saying(" grows back.")
    done = await openai.completions.create(model="sprig", prompt="A hedge", seed=1)
    assert done.object == "text_completion"
    assert done.choices[0].text == " grows back."
    assert "".join(map(chr, engine.expanded[0][0].tokens)) == "A hedge"
    found = [
        chunk
        async for chunk in await openai.completions.create(
            model="sprig",
            prompt=["A hedge"],
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    assert "".join(c.choices[0].text for c in found if c.choices) == " grows back."
    assert found[-2].choices[0].finish_reason == "stop"
    assert found[-1].usage == done.usage


async def test_text_completions_of_several_prompts_are_those_of_each(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """In the prompts' order, ``n`` to each; whole or streamed, with the seed that each has alone;
    the usage counts every prompt once."""
    engine.say = lambda branch: babble(branch).removesuffix("\n\n")
    asked: dict[str, Any] = {"model": "sprig", "seed": 4, "n": 2, "max_tokens": 40}
    prompts = ["A hedge", "A fence", "A wall"]
    alone = [await openai.completions.create(prompt=one, **asked) for one in prompts]
    done = await openai.completions.create(prompt=prompts, **asked)
    texts = [choice.text for one in alone for choice in one.choices]
    assert [choice.index for choice in done.choices] == [*range(6)]
    assert [choice.text for choice in done.choices] == texts
    assert len(set(texts)) > 1
    assert done.usage is not None
    counted = [one.usage for one in alone if one.usage is not None]
    assert done.usage.prompt_tokens == sum(map(len, prompts))
    assert done.usage.completion_tokens == sum(usage.completion_tokens for usage in counted)
    stream = await openai.completions.create(prompt=prompts, **asked, stream=True)
    assert joined([chunk async for chunk in stream]) == dict(enumerate(texts))
    assert not engine.live


async def test_prompts_may_be_token_ids(openai: AsyncOpenAI, engine: ScriptedEngine) -> None:
    """One list of them or several; what is searched for is what they spell."""
    engine.say = lambda branch: "".join(map(chr, branch.tokens))[-3:].upper()
    ids = [list(map(ord, prompt)) for prompt in ("A hedge", "A fence")]
    one = await openai.completions.create(model="sprig", prompt=ids[0])
    both = await openai.completions.create(model="sprig", prompt=ids)
    assert [choice.text for choice in one.choices] == ["DGE"]
    assert [choice.text for choice in both.choices] == ["DGE", "NCE"]
    engine.say, texts = babble, []
    for prompt in (ids[0], "A hedge"):
        done = await openai.completions.create(model="sprig:beam-4", prompt=prompt, seed=1)
        texts.append((done.choices[0].text, search_of(done)["tree_digest"]))
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
    """Refused by name, like the chat's."""
    error = await refusal(http, "/v1/completions", {"model": "sprig", "prompt": "a"} | change)
    assert error["param"] == param


async def test_a_search_tells_how_it_gets_on_if_asked(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """A line a round as ``reasoning_content``, before the reply and never within it, though much of
    that is certain early; whole the same; none unless asked."""
    engine.say = lambda branch: (
        "Let us see.\n\n" if branch.parent == ROOT else babble(branch)  # all say that first
    )
    body: dict[str, Any] = {"search": {"policy": "rebase", "width": 4, "seed": 3}}

    async def deltas(extra: dict[str, Any]) -> list[Any]:
        return [chunk.choices[0].delta for chunk in await chunks(openai, **body | extra)]

    told = await deltas({"include_reasoning": True})
    lines = [d.reasoning_content for d in told if getattr(d, "reasoning_content", None)]
    assert [line.split(":")[0] for line in lines] == [
        f"round {number}" for number in range(1, len(lines) + 1)
    ]
    assert "4 steps" in lines[0]
    assert "best 0." in lines[0]
    thoughts = [bool(getattr(d, "reasoning_content", None)) for d in told]
    parts = [thought for thought, d in zip(thoughts, told, strict=True) if thought or d.content]
    assert parts == [True] * len(lines) + [False]
    quiet = await deltas({})
    assert not any(getattr(d, "reasoning_content", None) for d in quiet)
    assert len([d for d in quiet if d.content]) > 1
    said = "".join(d.content or "" for d in told)
    assert said == "".join(d.content or "" for d in quiet)
    for extra, thought in (({"include_reasoning": True}, "".join(lines)), ({}, None)):
        whole = await chat(openai, **body | extra)
        message = whole.choices[0].message
        assert message.content == said
        assert (message.model_extra or {}).get("reasoning_content") == thought


async def test_a_search_says_how_its_answers_are_read(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """0.5 and 1/2 vote together as maths, and a bare number counts; as text neither is so."""
    engine.say = lambda branch: ["The answer is 0.5.", "So it is 1/2"][branch.child % 2]

    async def votes(rule: str) -> list[tuple[str, int]]:
        search = {"policy": "self_consistency", "width": 4, "answers": rule}
        found = search_of(await chat(openai, search=search))
        return [(vote["answer"], vote["count"]) for vote in found["votes"]]

    assert await votes("maths") == [("0.5", 4)]
    assert await votes("text") == [("0.5", 2)]
