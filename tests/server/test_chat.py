"""Chat completions through the real ``openai`` client: plain, searched, streamed."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import Call, chat, chunks, concat, question, refusal, saying, search_of

REPLY = "It is a small hedge, cut every year, and it grows back."


async def test_a_plain_completion_is_one_ordinary_reply(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """Without ``search`` the response has nothing of trees; tokens are characters here."""
    engine.say = saying(REPLY)
    completion = await chat(openai, "What?")
    assert completion.object == "chat.completion"
    assert completion.choices[0].message.content == REPLY
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len("user: What?\n")
    assert completion.usage.completion_tokens == len(REPLY) + 1  # and the end token
    assert completion.usage.completion_tokens_details is not None
    assert completion.usage.completion_tokens_details.reasoning_tokens == 0
    assert "search" not in (completion.model_extra or {})
    assert engine.released
    assert not engine.live


async def test_a_plain_stream_shows_each_piece_as_it_is_drawn(
    openai: AsyncOpenAI, engine: ScriptedEngine, settings: Settings
) -> None:
    """Deltas are pieces of ``step_tokens`` tokens and join to the reply; ids never change."""
    engine.say = saying(REPLY)
    stream = await chunks(openai, stream_options={"include_usage": True})
    deltas = [c.choices[0].delta for c in stream if c.choices]
    texts = [d.content for d in deltas if d.content]
    assert deltas[0].role == "assistant"
    assert "".join(texts) == REPLY
    assert [len(t) for t in texts[:-1]] == [settings.step_tokens] * (len(texts) - 1)
    assert len({(c.id, c.created, c.model, c.object) for c in stream}) == 1
    assert stream[-2].choices[0].finish_reason == "stop"
    assert stream[-1].choices == []
    assert stream[-1].usage is not None
    assert stream[-1].usage.completion_tokens == len(REPLY) + 1
    assert all(c.usage is None for c in stream[:-1])


async def test_the_usage_chunk_comes_only_when_asked_for(openai: AsyncOpenAI) -> None:
    """Without include_usage every chunk has a choice and none has a usage."""
    stream = await chunks(openai)
    assert all(chunk.choices and chunk.usage is None for chunk in stream)


async def test_a_search_answers_in_openais_shape(openai: AsyncOpenAI) -> None:
    """``extra_body`` asks for a search; the reply is the chosen member of the winning class."""
    completion = await chat(openai, seed=5, search={"policy": "rebase", "width": 8})
    search = search_of(completion)
    text = completion.choices[0].message.content or ""
    assert text.endswith(f"The answer is {search['answer']}.")
    assert (search["policy"], search["width"], search["seed"]) == ("rebase", 8, 5)
    assert sum(vote["count"] for vote in search["votes"]) == search["stats"]["finished"] <= 8
    assert len(search["tree_digest"]) == 64
    assert completion.usage is not None
    assert completion.usage.completion_tokens == search["stats"]["generated_tokens"]
    assert completion.usage.completion_tokens_details is not None
    hidden = completion.usage.completion_tokens_details.reasoning_tokens
    assert hidden == search["stats"]["generated_tokens"] - search["stats"]["reply_tokens"]
    assert completion.system_fingerprint is not None


async def test_same_seed_same_tree_and_a_random_seed_is_echoed(openai: AsyncOpenAI) -> None:
    """The echoed seed grows the same tree; ``search.seed`` wins over ``seed``."""
    body = {"search": {"policy": "beam", "width": 6}}

    async def run(**fields: object) -> dict:
        return search_of(await chat(openai, **body | fields))

    first = await run()
    second = await run(seed=first["seed"])
    nested = await run(seed=0, search=body["search"] | {"seed": first["seed"]})
    assert second["tree_digest"] == nested["tree_digest"] == first["tree_digest"]
    assert (await run())["seed"] != first["seed"]


async def test_a_searched_stream_sends_the_reply_once_it_is_certain(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """Role first, then the reply, then the reason with the ``search`` object, then the usage."""
    body = {"search": {"width": 4, "seed": 3}}
    whole = await chat(openai, **body)
    stream = await chunks(openai, stream_options={"include_usage": True}, **body)
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text == whole.choices[0].message.content
    assert search_of(stream[-2])["tree_digest"] == search_of(whole)["tree_digest"]
    assert stream[-1].usage == whole.usage


@pytest.mark.parametrize("settings", [{"keepalive_seconds": 0.01}], indirect=True)
async def test_silence_is_filled_with_empty_deltas(app: FastAPI, engine: ScriptedEngine) -> None:
    """While a search works the stream carries empty deltas, which every client survives."""
    engine.gate = asyncio.Event()
    body = {"model": "sprig", "messages": question(), "stream": True, "search": {"width": 2}}
    call = Call(app, "/v1/chat/completions", body)
    await call.until(3, b'"delta":{}')
    assert b'"finish_reason":"stop"' not in call.body
    engine.gate.set()
    await call.task
    assert call.body.endswith(b"data: [DONE]\n\n")
    assert call.complete


@pytest.mark.parametrize("stop", ["hedge", ["cut", "hedge"], ["zzz", "hedge, c"]])
async def test_a_stop_string_ends_the_reply_before_it(
    openai: AsyncOpenAI, engine: ScriptedEngine, stop: str | list[str]
) -> None:
    """The earliest stop string ends the reply, also across pieces; no stream shows a part of it."""
    engine.say = saying(REPLY)
    completion = await chat(openai, stop=stop)
    assert concat(await chunks(openai, stop=stop)) == {0: "It is a small "}
    assert completion.choices[0].message.content == "It is a small "
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_bounds_one_trajectory(
    openai: AsyncOpenAI, engine: ScriptedEngine, name: str
) -> None:
    """A plain reply is cut with reason ``length``; so is every trajectory of a search."""
    engine.say = saying(REPLY)
    completion = await chat(openai, **{name: 7})
    assert completion.choices[0].message.content == REPLY[:7]
    assert completion.choices[0].finish_reason == "length"
    engine.say = lambda branch: f"on and on {len(branch.tokens)}\n\n"
    completion = await chat(openai, **{name: 40, "search": {"width": 2}})
    assert completion.choices[0].finish_reason == "length"
    assert search_of(completion)["spec"]["trajectory_tokens"] == 40
    assert completion.usage is not None
    assert completion.usage.completion_tokens <= 80


async def test_a_reply_ends_where_the_context_does(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """A reply that does not fit the context is cut there with reason ``length``."""
    engine.context_tokens = len("user: What is it?\n") + 5
    engine.say = saying(REPLY)
    completion = await chat(openai)
    assert completion.choices[0].message.content == REPLY[:5]
    assert completion.choices[0].finish_reason == "length"


async def test_temperature_shapes_a_plain_completion_only(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """A search has its own temperature: clients that always send 0 still get diverse branches."""
    await chat(openai, temperature=0, top_p=0.5)
    assert {(s.temperature, s.top_p) for s in engine.samplings} == {(0.0, 0.5)}
    engine.samplings.clear()
    await chat(openai, temperature=0, search={"width": 2, "temperature": 0.7})
    assert {s.temperature for s in engine.samplings} == {0.7}


async def test_an_alias_searches_and_the_field_wins(openai: AsyncOpenAI) -> None:
    """``sprig:beam-4`` is a search; explicit fields of ``search`` override the alias."""
    ids = [model.id async for model in openai.models.list()]
    assert "sprig" in ids
    assert "sprig:beam-4" in ids
    completion = await chat(openai, model="sprig:beam-4")
    search = search_of(completion)
    assert (search["policy"], search["width"], completion.model) == ("beam", 4, "sprig:beam-4")
    search = search_of(await chat(openai, model="sprig:beam-4", search={"width": 3}))
    assert (search["policy"], search["width"]) == ("beam", 3)


async def test_every_kind_of_content_and_role_is_read(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """Strings, null and text parts; developer counts as system; extra keys are ignored."""
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "tool", "content": "4", "tool_call_id": "x"},
        {"role": "user", "content": "Well?", "name": "me"},
    ]
    answer = await http.post("/v1/chat/completions", json={"model": "sprig", "messages": messages})
    assert answer.status_code == 200
    prompt = "".join(map(chr, engine.expanded[0][0].tokens))
    assert prompt == "system: Be brief.\nuser: ab\nassistant: \ntool: 4\nuser: Well?\n"


async def test_harmless_fields_are_accepted_and_unknown_ones_logged_once(
    http: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Fields that lm-eval, guidellm and others attach do no harm; a new name is logged once."""
    body = {
        "model": "sprig",
        "messages": question(),
        "temperature": 0,
        "stop": [],
        "n": 1,
        "tools": None,
        "response_format": {"type": "text"},
        "logprobs": False,
        "presence_penalty": 0.0,
        "user": "me",
        "metadata": {},
        "ignore_eos": True,
        "gen_kwargs": {"x": 1},
        "thinking": {"type": "enabled"},
        "stream_options": None,
    }
    caplog.set_level("INFO", "hedgerow.requests")
    for _ in range(2):
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    lines = [record.getMessage() for record in caplog.records if record.name == "hedgerow.requests"]
    assert sorted("gen_kwargs" in line for line in lines) == [False, True]
    assert any("thinking" in line for line in lines)


async def test_a_deadline_returns_the_best_so_far(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """One branch finishes at once, the other's next step never comes: the finished one answers."""
    engine.say = lambda branch: "step\n\n" if branch.child else "The answer is 1."

    engine.on_expand = lambda: setattr(engine, "gate", asyncio.Event())
    completion = await chat(openai, search={"width": 2, "policy": "best_of_n", "deadline_ms": 100})
    assert completion.choices[0].message.content == "The answer is 1."
    assert search_of(completion)["stop_reason"] == "deadline"
    assert not engine.live


async def test_a_reply_may_be_the_rest_of_the_last_message(
    openai: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """As vLLM's clients ask: the reply continues the last message where it ends."""
    engine.say = saying(" grows back.")
    messages = [*question("What?"), {"role": "assistant", "content": "A hedge"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    completion = await chat(openai, messages=messages, **fields)
    assert completion.choices[0].message.content == " grows back."
    prompt = "".join(map(chr, engine.expanded[0][0].tokens))
    assert prompt == "user: What?\nassistant: A hedge"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ({"continue_final_message": True, "search": {"width": 2}}, "continue_final_message"),
    ],
)
async def test_going_on_where_nothing_can_is_refused_by_name(
    http: httpx2.AsyncClient, extra: dict[str, object], param: str
) -> None:
    """A user's message, a new reply and a search cannot be continued."""
    body = {"model": "sprig", "messages": question(), **extra}
    error = await refusal(http, "/v1/chat/completions", body)
    assert error["param"] == param
