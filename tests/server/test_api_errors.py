"""Every error in OpenAI's shape, naming the field, its value and what is allowed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import openai as openai_package
import pytest
from openai import AsyncOpenAI

from search.engine import EngineError, RewardMissing
from server.request_models import ChatRequest
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import chat, question, refusal

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": "sprig", "messages": question()}
IMAGE = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]


BAD_CALL = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
REFUSALS: list[tuple[dict[str, Any], str | None, str, str]] = [
    ({"messages": []}, "messages", "invalid_value", "at least 1"),
    ({"messages": [{"role": "me", "content": ""}]}, "messages[0].role", "invalid_value", "'user'"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_value", "3"),
    ({"messages": IMAGE}, "messages[0].content[1].type", "invalid_value", "'image_url'"),
    ({"temperature": 3}, "temperature", "invalid_value", "less than or equal to 2"),
    ({"temperature": "warm"}, "temperature", "invalid_value", "'warm'"),
    ({"top_p": 0}, "top_p", "invalid_value", "greater than 0"),
    ({"temperature": "1"}, "temperature", "invalid_value", "valid number, got '1'"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_value", "valid integer, got '5'"),
    ({"seed": True}, "seed", "invalid_value", "valid integer, got True"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", "greater than or equal to 1"),
    ({"stream": 1}, "stream", "invalid_value", "valid boolean, got 1"),
    ({"stop": 7}, "stop", "invalid_value", "list of strings"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value", "not empty"),
    ({"stop": ["x"] * 17}, "stop", "invalid_value", "at most 16"),
    ({"stop": "x" * 257}, "stop[0]", "invalid_value", "at most 256 characters"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "invalid_value", "'medium'"),
    ({"n": 0}, "n", "invalid_value", "greater than or equal to 1"),
    ({"n": 17}, "n", "invalid_value", "at most 16 choices are offered, got"),
    ({"n": 3, "search": {"width": 2}}, "n", "invalid_value", "offered with this search.width"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "invalid_value", "an object"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter", "t"),
    ({"logprobs": 1}, "logprobs", "invalid_value", "valid boolean, got 1"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value", "logprobs must be true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "equal to 20"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter", "leave it out"),
    ({"messages": BAD_CALL}, "messages[0].tool_calls[0].function", "invalid_value", "an object"),
    ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter", "leave it out"),
    ({"search": {"polcy": "beam"}}, "search.polcy", "unknown_parameter", "policy, width"),
    ({"search": {"policy": "dfs"}}, "search.policy", "invalid_value", "'auto', got 'dfs'"),
    ({"search": {"width": 0}}, "search.width", "invalid_value", "greater than or equal to 1"),
    ({"search": {"width": "16"}}, "search.width", "invalid_value", "valid integer, got '16'"),
    ({"search": {"vote": "loud"}}, "search.vote", "invalid_value", "'majority'"),
    ({"search": 5}, "search", "invalid_value", "got 5"),
    ({"model": "gpt-9"}, "model", "model_not_found", "'sprig'"),
    ({"model": "sprig:rebase-0"}, "model", "model_not_found", "does not exist"),
    ({"model": "sprig:rebase-9999"}, "model", "model_not_found", "does not exist"),
]


@pytest.mark.parametrize(("change", "param", "code", "words"), REFUSALS)
async def test_bad_input_names_the_field_its_value_and_what_is_allowed(
    http: httpx2.AsyncClient, change: dict[str, Any], param: str | None, code: str, words: str
) -> None:
    """One clear error per request: 404 for models, 400 for everything else."""
    answer = await http.post(CHAT, json=GOOD | change)
    error = answer.json()["error"]
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (param, code)
    assert words in error["message"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_body"),
        (b"{", "invalid_json"),
        (b'{"model": NaN', "invalid_json"),
        (b"[]", "invalid_body"),
        (b"3", "invalid_body"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"model": "sprig"}', "missing_required_parameter"),
        (b"[" * 100_000, "bad_request"),
        (b'{"model":"sprig","messages":[{"role":"user","content":"\\ud800"}]}', "invalid_value"),
        (b'{"model":"\\ud800","messages":[{"role":"user","content":"a"}]}', "model_not_found"),
        (b'{"model":"sprig","messages":[{"role":"user"}],"stop":"\\ud800"}', "invalid_value"),
        (b'{"model":"sprig","messages":[{"role":"user"}],"temperature":NaN}', "invalid_value"),
        (b'{"model":"sprig","messages":[{"role":"user"}],"seed":1e400}', "invalid_value"),
        (b'{"model":"sprig","messages":[{"role":"user"}],"search":{"\\ud800":1}}', "invalid_value"),
    ],
)
async def test_broken_bodies_are_refused(http: httpx2.AsyncClient, body: bytes, code: str) -> None:
    """A broken body is never a server error."""
    answer = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["code"].startswith(code)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"model": "sprig", "messages": [1] * 16_000}, "messages[0]"),
        ("/v1/search", {"messages": [{}] * 16_000}, "messages[0].role"),
        ("/v1/search", {"question": "a", "search": {str(i): 1 for i in range(9000)}}, "search"),
        ("/v1/completions", {str(i): 1 for i in range(9000)}, None),
        ("/v1/score", {"items": [{}] * 16_000}, "items[0]"),
        ("/v1/score", {"question": "a", "steps": [1] * 16_000}, "steps[0]"),
    ],
)
async def test_of_many_faults_one_is_told(
    http: httpx2.AsyncClient, path: str, body: dict[str, Any], param: str | None
) -> None:
    """Validation stops at the first fault; to find all would hold the event loop for seconds."""
    answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert len(answer.content) < 500


def test_of_what_nobody_reads_the_names_are_kept_alone() -> None:
    """Values of unknown fields are dropped, since a request may wait in the queue for long."""
    body = {"model": "sprig", "messages": question(), "metadata": {"a": "x" * 9000}, "priority": 5}
    request = ChatRequest.model_validate(body)
    assert request.model_extra == {"metadata": None, "priority": 5}
    assert body["metadata"] is None


async def test_a_body_that_is_not_declared_as_json_is_refused(http: httpx2.AsyncClient) -> None:
    """The message says which content type to send."""
    answer = await http.post(CHAT, content=b'{"model": "sprig"}')
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("PUT", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/search/search-0", 404, "search_not_found"),
        ("DELETE", "/v1/search/search-0", 404, "search_not_found"),
    ],
)
async def test_routes_and_methods_that_are_not_there(
    http: httpx2.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    """Unknown routes, methods and ids are answered in the same shape."""
    answer = await http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


async def test_openais_client_raises_its_own_errors(openai: AsyncOpenAI) -> None:
    """The client picks its exception class by status and body."""
    with pytest.raises(openai_package.NotFoundError) as not_found:
        await chat(openai, model="nope")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai_package.BadRequestError) as bad_request:
        await chat(openai, search={"policy": "x"})
    assert bad_request.value.param == "search.policy"


@pytest.mark.parametrize("extra", [{}, {"search": {"width": 2}}, {"stream": True}])
async def test_a_prompt_over_the_context_is_refused(
    http: httpx2.AsyncClient, engine: ScriptedEngine, extra: dict[str, Any]
) -> None:
    """The error has the code and the words "maximum context length", which clients look for."""
    engine.context_tokens = 10
    error = await refusal(http, CHAT, GOOD | extra)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 10 tokens" in error["message"]


@pytest.mark.parametrize(
    "body", [{"question": "Q" * 20}, {"messages": [{"role": "user", "content": "Q" * 20}]}]
)
async def test_a_searchs_question_over_the_context_is_named_as_it_was_sent(
    http: httpx2.AsyncClient, engine: ScriptedEngine, body: dict[str, Any]
) -> None:
    """By ``question`` or ``messages``."""
    engine.context_tokens = 10
    error = await refusal(http, "/v1/search", body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))


@pytest.mark.parametrize("extra", [{}, {"search": {"width": 2}}])
async def test_an_engine_that_is_down_is_503_with_retry_after(
    http: httpx2.AsyncClient, engine: ScriptedEngine, extra: dict[str, Any]
) -> None:
    """The error is a 503 that says when to come back."""
    engine.fail_at = 0
    answer = await http.post(CHAT, json=GOOD | extra)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert int(answer.headers["retry-after"]) > 0


async def test_a_deadline_before_anything_finished_is_504_and_not_to_be_retried(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """The 504 says not to retry, as clients would by themselves: a search must not run thrice."""
    engine.gate = asyncio.Event()
    body = GOOD | {"search": {"width": 2, "deadline_ms": 20}}
    answer = await http.post(CHAT, json=body)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"
    assert not engine.live


async def test_a_budget_that_nothing_fits_in_is_said(http: httpx2.AsyncClient) -> None:
    """Without a finished trajectory there is no reply to send; the error names the budget."""
    error = await refusal(http, CHAT, GOOD | {"search": {"width": 2, "max_tokens": 1}}, 504)
    assert "max_tokens" in error["message"]


@pytest.mark.parametrize(
    ("name", "reason"), [("max_tokens", "max_tokens"), ("max_kv_tokens", "kv")]
)
async def test_a_budget_of_tokens_leaves_what_was_drawn(
    http: httpx2.AsyncClient, engine: ScriptedEngine, name: str, reason: str
) -> None:
    """The text so far and ``length``, as from OpenAI; also streamed and by /v1/search."""
    engine.say = lambda branch: f"step {branch.child}{len(branch.tokens)}\n\n"
    search = {"width": 2, "seed": 1, name: 20}
    body = GOOD | {"search": search}
    answer = (await http.post(CHAT, json=body)).raise_for_status().json()
    text = answer["choices"][0]["message"]["content"]
    assert text.startswith("step ")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (answer["search"]["answer"], answer["search"]["stop_reason"]) == (None, reason)
    stream = (await http.post(CHAT, json=body | {"stream": True})).text
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line[6:7] == "{"]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == text
    document = await http.post("/v1/search", json={"messages": GOOD["messages"], "search": search})
    assert document.json()["text"] == text


@pytest.mark.parametrize(
    ("error", "status", "code", "words"),
    [
        (RewardMissing("format x: no tag"), 500, "reward_missing", "no tag"),
        (EngineError("bad counts"), 500, "engine_error", "bad counts"),
        (RuntimeError("secret"), 500, "internal_error", "x-request-id"),
    ],
)
async def test_faults_inside_are_told_without_their_secrets(
    http: httpx2.AsyncClient,
    engine: ScriptedEngine,
    error: Exception,
    status: int,
    code: str,
    words: str,
) -> None:
    """The engine's own messages go to clients; the text of an unforeseen exception does not."""

    def fail() -> None:
        raise error

    engine.on_expand = fail
    answer = await http.post(CHAT, json=GOOD | {"search": {"width": 2}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert words in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"]
    assert not engine.live


async def test_a_search_that_needs_rewards_is_refused_without_a_reward_model(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """The error names the field to change; self_consistency still works."""
    engine.scores = False
    error = await refusal(http, CHAT, GOOD | {"search": {"policy": "rebase", "width": 2}})
    assert error["param"] == "search.policy"
    answer = await http.post(CHAT, json=GOOD | {"search": {"policy": "self_consistency"}})
    assert answer.status_code == 200


@pytest.mark.parametrize("settings", [{"max_body_bytes": 2000}], indirect=True)
@pytest.mark.parametrize("declared", [True, False])
async def test_bodies_are_bounded(http: httpx2.AsyncClient, declared: bool) -> None:
    """Too many bytes are refused by the declared length, or as soon as they arrive."""
    content = b'{"model": "' + b"x" * 3000 + b'"}'

    async def pieces():
        for i in range(0, len(content), 500):
            yield content[i : i + 500]

    answer = await http.post(
        CHAT,
        content=content if declared else pieces(),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert "2000 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("settings", [{"max_messages": 4}], indirect=True)
@pytest.mark.parametrize(
    ("unknown", "limit"),
    [([1] * 100, "64 values"), ([10**600, 10**600], "1024 digits of numbers")],
)
async def test_bodies_hold_so_many_values(
    http: httpx2.AsyncClient, unknown: list[int], limit: str
) -> None:
    """Too many values or digits are refused before parsing; inside strings they do not count."""
    error = await refusal(http, CHAT, GOOD | {"unknown": unknown}, 413)
    assert limit in error["message"]
    answer = await http.post(CHAT, json=GOOD | {"unknown": json.dumps(unknown)})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("request_id", "echoed"), [("abc-123", True), ("with space", False), ("x" * 200, False)]
)
async def test_request_ids_are_echoed_or_minted(
    http: httpx2.AsyncClient, request_id: str, echoed: bool
) -> None:
    """A short printable id is echoed; anything else is replaced."""
    answer = await http.get("/health", headers={"x-request-id": request_id})
    assert (answer.headers["x-request-id"] == request_id) == echoed
    assert len(answer.headers["x-request-id"]) <= 128
