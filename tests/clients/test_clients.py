"""Widely used clients, unchanged, against one server with the bundled models."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, InternalServerError, OpenAI

from tests.clients.conftest import MESSAGES, QUESTIONS, SEARCH
from tests.clients.environment import HERE, run_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("program", ["with_openai.py", "with_openai.mjs"])
def test_the_client_that_most_have(url: str, expected: dict[str, str], program: str) -> None:
    """openai for Python and Node: chat, completions and responses, whole and streamed, agree."""
    output = run_program(program, url, QUESTIONS[0])
    assert "sprig:rebase-4" in output["models"]
    assert output["whole"] == output["streamed"] == expected["plain"]
    assert output["response"] == output["response_streamed"] == expected["plain"]
    assert output["search"] == expected["search"]
    assert output["completion"]
    if program.endswith(".py"):
        assert output["completion_streamed"] == output["completion"]
        assert output["response_status"] == "incomplete"
        assert output["last_event"] == "response.incomplete"
    else:
        assert output["helper"] == expected["plain"]
        assert output["refused"] == [400, "search.wdith"]


def test_ai_sdk(url: str, expected: dict[str, str]) -> None:
    """The Vercel AI SDK by its provider for compatible servers, and by OpenAI's provider, which
    uses the Responses API and sends no seed there. A stream is a single text part."""
    output = run_program("with_ai_sdk.mjs", url, QUESTIONS[0])
    assert output["whole"] == output["chat"] == output["streamed"]["text"] == expected["plain"]
    assert output["usage"] == output["streamed"]["usage"] == 24
    assert output["finish_reason"] == "length"
    parts = ["start", "start-step", "text-start", "text-delta", "text-end"]
    for name in ("streamed", "response_streamed"):
        assert output[name]["kinds"] == [*parts, "finish-step", "finish"]
    assert output["response"]
    assert output["response_streamed"]["usage"] == 24
    assert output["search"] == expected["search"]
    assert "The answer is" in output["aliased"]


def is_answer(value: Any) -> bool:
    """Return whether a value has the two fields that the programs ask for, and no other."""
    return isinstance(value, dict) and {k: type(v) for k, v in value.items()} == ANSWER


ANSWER = {"first": int, "last": bool}


def test_typed_replies_and_calls_by_openai(url: str) -> None:
    """``.parse`` and named tools, plain and searched, chat and responses: all fit the type."""
    output = run_program("typed_with_openai.py", url, QUESTIONS[0])
    assert output.pop("finish_reason") == "tool_calls"
    assert output["streamed"] == output["called"]
    assert [name for name, value in output.items() if not is_answer(value)] == []


def test_typed_replies_and_calls_by_langchain(url: str) -> None:
    """LangChain's three methods of structured output, and a bound tool, also streamed."""
    output = run_program("typed_with_langchain.py", url, QUESTIONS[0])
    assert output.pop("json_mode")
    assert output["streamed"] == output["bound"]
    assert [name for name, value in output.items() if not is_answer(value)] == []


def test_typed_replies_and_calls_by_ai_sdk(url: str) -> None:
    """``generateObject``, ``streamObject`` and required tools by each of its three models."""
    for output in run_program("typed_with_ai_sdk.mjs", url, QUESTIONS[0]).values():
        assert output.pop("reason") == "tool-calls"
        assert [name for name, value in output.items() if not is_answer(value)] == []


def test_typed_replies_and_calls_by_litellm(url: str) -> None:
    """A pydantic model as ``response_format``, and a tool that must be called."""
    output = run_program("typed_with_litellm.py", url, QUESTIONS[0])
    assert output["finish_reason"] == "tool_calls"
    assert is_answer(output["typed"])
    assert is_answer(output["called"])


async def test_openai(url: str, expected: dict[str, str]) -> None:
    """Sync, async and streamed replies agree; ids, unknown keys and usage come through."""
    request: Any = {"model": "sprig", "messages": MESSAGES, "seed": 3, "max_tokens": 24}
    with OpenAI(base_url=url, api_key="any") as client:
        whole = client.chat.completions.create(**request)
        stream = client.chat.completions.create(**request, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.choices[0].message.content == streamed == expected["plain"]
    assert whole._request_id
    assert (whole.model_extra or {})["seed"] == 3
    async with AsyncOpenAI(base_url=url, api_key="any") as client:
        search_stream = await client.chat.completions.create(
            model="sprig",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"search": SEARCH},
        )
        chunks = [chunk async for chunk in search_stream]
    assert all(chunk.choices is not None for chunk in chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected["search"]
    assert chunks[-1].usage is not None
    assert (chunks[-2].model_extra or {})["search"]["answer"]


def test_a_search_that_came_to_nothing_is_not_tried_three_times(url: str) -> None:
    """OpenAI's client repeats a 504 twice by itself, unless the response tells it not to."""
    requests: list[httpx2.Request] = []
    with (
        httpx2.Client(event_hooks={"request": [requests.append]}) as http,
        OpenAI(base_url=url, api_key="any", http_client=http) as client,
        pytest.raises(InternalServerError) as error,
    ):
        client.chat.completions.create(
            model="sprig", messages=MESSAGES, extra_body={"search": {"deadline_ms": 1}}
        )
    assert error.value.status_code == 504
    assert len(requests) == 1


def test_langchain(url: str, expected: dict[str, str]) -> None:
    """``ChatOpenAI``: ``extra_body`` searches, batches run side by side, and a tool that the
    bundled model would only be free to call is refused. ``OpenAI`` sends its prompts in one
    list."""
    output = run_program("with_langchain.py", url, QUESTIONS[0])
    assert output["whole"] == output["streamed"] == expected["plain"]
    assert output["search"] == output["search_streamed"] == expected["search"]
    assert output["batch"] == [expected["plain"]] * 3
    assert output["listed"] == output["apart"]
    assert output["finish_reason"] == "length"
    assert output["usage"] == output["streamed_usage"]
    assert output["usage"]["output_tokens"] == 24
    assert output["refused"] == "tool_choice"


def test_litellm(url: str, expected: dict[str, str]) -> None:
    """Parameters that LiteLLM does not know pass through; it maps our errors to its exceptions."""
    output = run_program("with_litellm.py", url, QUESTIONS[0])
    assert output["whole"] == output["streamed"] == expected["plain"]
    assert output["search"] == expected["search"]
    assert output["usage"] == [24, 24]
    assert output["errors"] == {
        "model": "NotFoundError",
        "field": "BadRequestError",
        "context": "ContextWindowExceededError",
    }


def test_its_hub(url: str) -> None:
    """Another test-time library votes over our plain replies, or over whole searches by alias."""
    output = run_program("with_its_hub.py", url, QUESTIONS[0])
    assert "The answer is" in output["searched"]
    assert output["reply"]


def test_its_hub_with_our_reward_model(url: str) -> None:
    """Its beam search and particle filter ask ``/v1/score`` for all beams at once."""
    output = run_program("with_its_hub_prm.py", url, QUESTIONS[0])
    assert len(output["beam"]) == 4
    assert all(0 <= score <= 1 for score in output["beam"])
    assert max(output["calls"]) == 4
    assert output["particles"] == 3
    assert output["beam_reply"]
    assert output["particle_reply"]


def test_lm_eval(url: str, clients: Path, tmp_path: Path) -> None:
    """``local-chat-completions`` on ten items, offline: it sends temperature 0 and an empty list of
    stops; the search draws at a temperature of its own."""
    items = [json.dumps({"question": text, "answer": "24"}) for text in QUESTIONS]
    (tmp_path / "ten.jsonl").write_text("\n".join(items))
    task = (HERE / "ten.yaml").read_text().replace("TEN", str(tmp_path / "ten.jsonl"))
    (tmp_path / "ten.yaml").write_text(task)
    model_args = f"model=sprig,base_url={url}/chat/completions,num_concurrent=2,timeout=300"
    command = [clients / "lm-eval", "run", "--model", "local-chat-completions"]
    command += ["--model_args", model_args, "--tasks", "ten", "--include_path", tmp_path]
    command += ["--apply_chat_template", "--output_path", tmp_path / "out", "--gen_kwargs"]
    command += [json.dumps({"search": {"policy": "rebase", "width": 4, "seed": 1}})]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | offline
    )
    assert process.returncode == 0, process.stderr
    (results_file,) = tmp_path.rglob("results_*.json")
    results = json.loads(results_file.read_text())
    assert results["n-samples"]["ten"]["effective"] == 10
    assert results["results"]["ten"]["exact_match,answer"] >= 0.5


def test_curl(url: str) -> None:
    """A stream read line by line, with the fields that guidellm and bench_serving send: each
    nonempty line is ``data:`` and JSON, or [DONE], as their parsers need."""
    body = {"model": "sprig", "messages": MESSAGES, "stream": True, "search": SEARCH}
    body |= {"stop": None, "ignore_eos": True, "max_completion_tokens": 200}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    curl = ["curl", "-sSN", "-H", "content-type: application/json", "-d", json.dumps(body)]
    out = subprocess.run(
        [*curl, f"{url}/chat/completions"], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.removeprefix("data: ") for line in out.splitlines() if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert all("choices" in chunk for chunk in chunks)
    assert all("delta" in choice for chunk in chunks for choice in chunk["choices"])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert any(chunk["choices"][0]["delta"] == {} for chunk in chunks[:-2])
