"""Sampling parameters that reach the engine, for plain replies and searches, or are refused."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from search.engine import LOGITS_PARAMS, NEUTRAL, LogitsParams
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import question, refusal

FIELDS: dict[str, Any] = {
    "top_k": 5,
    "min_p": 0.1,
    "logit_bias": {"50": -100, "7": 1.5},
    "min_tokens": 3,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
}
UNDERSTOOD = LogitsParams(5, 0.1, ((7, 1.5), (50, -100)), 3, 1.1, 0.5, -0.5)
NOTHING: dict[str, Any] = {"top_k": -1, "logit_bias": None, "presence_penalty": 0}
SEARCH = {"policy": "self_consistency", "width": 2, "seed": 1}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def engine() -> ScriptedEngine:
    """An engine that supports all of them."""
    return ScriptedEngine(logits_params=LOGITS_PARAMS)


def body(**fields: Any) -> dict[str, Any]:
    """Return a short request."""
    return {"model": "sprig", "messages": question(), "max_tokens": 20, "seed": 1} | fields


async def answer_to(http: httpx2.AsyncClient, path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Post a request and return the answer, which must be no error."""
    answer = await http.post(path, json=request)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_plain_reply_is_drawn_by_them(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """Chats and texts alike; ``prompt_tokens`` says where the output begins."""
    await answer_to(http, CHAT, body(**FIELDS))
    assert engine.samplings[-1].logits == UNDERSTOOD
    assert engine.samplings[-1].prompt_tokens == len("user: What is it?\n")
    await answer_to(http, TEXT, {"model": "sprig", "prompt": "abc", "max_tokens": 9} | FIELDS)
    assert engine.samplings[-1].logits == UNDERSTOOD
    assert engine.samplings[-1].prompt_tokens == 3


async def test_a_search_is_drawn_by_them(http: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
    """Fields beside ``search`` apply to its draws; fields in it win, and the spec has them."""
    spec = (await answer_to(http, CHAT, body(**FIELDS, search=SEARCH)))["search"]["spec"]
    assert engine.samplings[-1].logits == UNDERSTOOD
    assert spec["logit_bias"] == {"7": 1.5, "50": -100}
    search = SEARCH | {"top_k": 9, "logit_bias": {"7": 2}}
    echo = (await answer_to(http, CHAT, body(**FIELDS, search=search)))["search"]["spec"]
    assert engine.samplings[-1].logits.top_k == 9
    assert engine.samplings[-1].logits.logit_bias == ((7, 2.0),)
    await answer_to(http, "/v1/search", {"question": "What is it?", "search": echo})
    assert engine.samplings[-1].logits == engine.samplings[-2].logits


@pytest.mark.parametrize("search", [None, SEARCH])
async def test_neutral_values_change_nothing(
    http: httpx2.AsyncClient, engine: ScriptedEngine, search: dict[str, Any] | None
) -> None:
    """Neutral values, which many clients always send, give the same choices."""
    fields = {} if search is None else {"search": search}
    assert (await answer_to(http, CHAT, body(**fields, **NOTHING)))["choices"] == (
        await answer_to(http, CHAT, body(**fields))
    )["choices"]
    assert engine.samplings[-1].logits.active() == NEUTRAL.active()


async def test_a_thinking_budget_caps_a_trajectory(http: httpx2.AsyncClient) -> None:
    """The smaller of the budget and ``max_tokens`` is the limit."""
    for budget, expected in ((7, 7), (70, 20)):
        request = body(search=SEARCH, thinking_token_budget=budget)
        answer = await answer_to(http, CHAT, request)
        assert answer["search"]["spec"]["trajectory_tokens"] == expected


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
        ({"logit_bias": {"word": 1}}, "logit_bias", "valid integer"),
        ({"logit_bias": {"9": 101}}, "logit_bias", "less than or equal to 100"),
        ({"logit_bias": {"2000000": 1}}, "logit_bias", "ids are from 0 to"),
        ({"min_tokens": 21}, "min_tokens", "at most 20"),
        ({"repetition_penalty": 0}, "repetition_penalty", "equal to 0.01"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "without a search"),
        ({"search": SEARCH | {"min_tokens": 21}}, "search.min_tokens", "at most 20"),
        ({"search": SEARCH | {"logit_bias": {"2000000": 1}}}, "search.logit_bias", "ids are from"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    http: httpx2.AsyncClient, change: dict[str, Any], param: str, words: str
) -> None:
    """The error names the field and what is allowed."""
    error = await refusal(http, CHAT, body(**change))
    assert error["param"].startswith(param)
    assert words in error["message"]


@pytest.mark.parametrize("name", LOGITS_PARAMS)
async def test_an_engine_that_does_not_honour_one_says_so(
    http: httpx2.AsyncClient, engine: ScriptedEngine, name: str
) -> None:
    """The error names the parameter, plain or searched; the others are accepted."""
    engine.logits_params = tuple(parameter for parameter in LOGITS_PARAMS if parameter != name)
    for request, prefix in ((body(**FIELDS), ""), (body(search=SEARCH | FIELDS), "search.")):
        error = await refusal(http, CHAT, request)
        assert (error["code"], error["param"]) == ("unsupported_parameter", prefix + name)
        assert "scripted" in error["message"]
    del request["search"][name]
    await answer_to(http, CHAT, request)


async def test_a_temperature_that_an_engine_does_not_draw_at(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """A temperature above the engine's maximum is refused; OpenAI's servers take 2 at most."""
    engine.most_temperature = 2.0
    error = await refusal(http, CHAT, body(search=SEARCH | {"temperature": 2.5}))
    assert error["param"] == "search.temperature"
    assert "at most 2 on the scripted engine, got 2.5" in error["message"]
    await answer_to(http, CHAT, body(search=SEARCH | {"temperature": 2.0}))
