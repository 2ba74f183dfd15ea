"""Clients that people have, unchanged, against one server with the bundled models."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, InternalServerError, OpenAI

from tests.clients.conftest import ASKED, QUESTIONS, SEARCH
from tests.clients.environment import HERE, told

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("program", ["with_openai.py", "with_openai.mjs"])
def test_the_client_that_most_have(url: str, expected: dict[str, str], program: str) -> None:
    """openai for Python and for Node: chat, completions and responses say the same streamed."""
    found = told(program, url, QUESTIONS[0])
    assert "sprig:rebase-4" in found["models"]
    assert found["whole"] == found["streamed"] == expected["plain"]
    assert found["response"] == found["response_streamed"] == expected["plain"]
    assert found["search"] == expected["search"]
    assert found["completion"]
    if program.endswith(".py"):
        assert found["completion_streamed"] == found["completion"]
        assert found["response_status"] == "incomplete"
        assert found["last_event"] == "response.incomplete"
    else:
        assert found["helper"] == expected["plain"]
        assert found["refused"] == [400, "search.wdith"]


def test_ai_sdk(url: str, expected: dict[str, str]) -> None:
    """The Vercel AI SDK by its provider for compatible servers, and by OpenAI's, whose default is
    the Responses API and which knows of no seed there. A stream is one text from end to end."""
    found = told("with_ai_sdk.mjs", url, QUESTIONS[0])
    assert found["whole"] == found["chat"] == found["streamed"]["text"] == expected["plain"]
    assert found["usage"] == found["streamed"]["usage"] == 24
    assert found["finish_reason"] == "length"
    parts = ["start", "start-step", "text-start", "text-delta", "text-end"]
    for name in ("streamed", "response_streamed"):
        assert found[name]["kinds"] == [*parts, "finish-step", "finish"]
    assert found["response"]
    assert found["response_streamed"]["usage"] == 24
    assert found["search"] == expected["search"]
    assert "The answer is" in found["aliased"]


def is_answer(value: Any) -> bool:
    """Whether something has the two fields that the programs ask for, and no other."""
    return isinstance(value, dict) and {k: type(v) for k, v in value.items()} == ANSWER


ANSWER = {"first": int, "last": bool}


def test_typed_replies_and_calls_by_openai(url: str) -> None:
    """``.parse`` and tools by name, plain and searched, chat and responses: all fit the type."""
    found = told("typed_with_openai.py", url, QUESTIONS[0])
    assert found.pop("finish_reason") == "tool_calls"
    assert found["streamed"] == found["called"]
    assert [name for name, value in found.items() if not is_answer(value)] == []


def test_typed_replies_and_calls_by_langchain(url: str) -> None:
    """Its three methods of structured output, and a bound tool, streamed too."""
    found = told("typed_with_langchain.py", url, QUESTIONS[0])
    assert found.pop("json_mode")
    assert found["streamed"] == found["bound"]
    assert [name for name, value in found.items() if not is_answer(value)] == []


def test_typed_replies_and_calls_by_ai_sdk(url: str) -> None:
    """``generateObject``, ``streamObject`` and required tools by each of its three ways to ask."""
    for one in told("typed_with_ai_sdk.mjs", url, QUESTIONS[0]).values():
        assert one.pop("reason") == "tool-calls"
        assert [name for name, value in one.items() if not is_answer(value)] == []


def test_typed_replies_and_calls_by_litellm(url: str) -> None:
    """A pydantic model as ``response_format``, and a tool that must be called."""
    found = told("typed_with_litellm.py", url, QUESTIONS[0])
    assert found["finish_reason"] == "tool_calls"
    assert is_answer(found["typed"])
    assert is_answer(found["called"])


async def test_openai(url: str, expected: dict[str, str]) -> None:
    """Sync, async and streamed they say the same; ids, unknown keys and usage come through."""
    asked: Any = {"model": "sprig", "messages": ASKED, "seed": 3, "max_tokens": 24}
    with OpenAI(base_url=url, api_key="any") as client:
        whole = client.chat.completions.create(**asked)
        stream = client.chat.completions.create(**asked, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.choices[0].message.content == streamed == expected["plain"]
    assert whole._request_id
    assert (whole.model_extra or {})["seed"] == 3
    async with AsyncOpenAI(base_url=url, api_key="any") as client:
        found = await client.chat.completions.create(
            model="sprig",
            messages=ASKED,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"search": SEARCH},
        )
        chunks = [chunk async for chunk in found]
    assert all(chunk.choices is not None for chunk in chunks)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == expected["search"]
    assert chunks[-1].usage is not None
    assert (chunks[-2].model_extra or {})["search"]["answer"]


def test_a_search_that_came_to_nothing_is_not_tried_three_times(url: str) -> None:
    """OpenAI's client repeats a 504 twice by itself, unless it is told not to."""
    asked: list[httpx2.Request] = []
    with (
        httpx2.Client(event_hooks={"request": [asked.append]}) as http,
        OpenAI(base_url=url, api_key="any", http_client=http) as client,
        pytest.raises(InternalServerError) as told,
    ):
        client.chat.completions.create(
            model="sprig", messages=ASKED, extra_body={"search": {"deadline_ms": 1}}
        )
    assert told.value.status_code == 504
    assert len(asked) == 1


def test_langchain(url: str, expected: dict[str, str]) -> None:
    """``ChatOpenAI``: ``extra_body`` searches, batches go side by side, a call that the
    bundled model could only choose to make is refused.
    ``OpenAI`` sends prompts in one list."""
    found = told("with_langchain.py", url, QUESTIONS[0])
    assert found["whole"] == found["streamed"] == expected["plain"]
    assert found["search"] == found["search_streamed"] == expected["search"]
    assert found["batch"] == [expected["plain"]] * 3
    assert found["listed"] == found["apart"]
    assert found["finish_reason"] == "length"
    assert found["usage"] == found["streamed_usage"]
    assert found["usage"]["output_tokens"] == 24
    assert found["refused"] == "tool_choice"


def test_litellm(url: str, expected: dict[str, str]) -> None:
    """Parameters that it does not know pass through; its map of exceptions reads our errors."""
    found = told("with_litellm.py", url, QUESTIONS[0])
    assert found["whole"] == found["streamed"] == expected["plain"]
    assert found["search"] == expected["search"]
    assert found["usage"] == [24, 24]
    assert found["errors"] == {
        "model": "NotFoundError",
        "field": "BadRequestError",
        "context": "ContextWindowExceededError",
    }


def test_its_hub(url: str) -> None:
    """Another test-time library votes over our plain replies, or over whole searches by alias."""
    found = told("with_its_hub.py", url, QUESTIONS[0])
    assert "The answer is" in found["searched"]
    assert found["reply"]


def test_its_hub_with_our_reward_model(url: str) -> None:
    """Its beam search and its particle filter ask ``/v1/score`` of all their beams at once."""
    found = told("with_its_hub_prm.py", url, QUESTIONS[0])
    assert len(found["beam"]) == 4
    assert all(0 <= score <= 1 for score in found["beam"])
    assert max(found["calls"]) == 4
    assert found["particles"] == 3
    assert found["beam_reply"]
    assert found["particle_reply"]


def test_lm_eval(url: str, clients: Path, tmp_path: Path) -> None:
    """``local-chat-completions``, ten items, offline: always at temperature 0, with an empty list
    of stops; the search's diversity is its own."""
    items = [json.dumps({"question": text, "answer": "24"}) for text in QUESTIONS]
    (tmp_path / "ten.jsonl").write_text("\n".join(items))
    task = (HERE / "ten.yaml").read_text().replace("TEN", str(tmp_path / "ten.jsonl"))
    (tmp_path / "ten.yaml").write_text(task)
    where = f"model=sprig,base_url={url}/chat/completions,num_concurrent=2,timeout=300"
    command = [clients / "lm-eval", "run", "--model", "local-chat-completions"]
    command += ["--model_args", where, "--tasks", "ten", "--include_path", tmp_path]
    command += ["--apply_chat_template", "--output_path", tmp_path / "out", "--gen_kwargs"]
    command += [json.dumps({"search": {"policy": "rebase", "width": 4, "seed": 1}})]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | offline
    )
    assert done.returncode == 0, done.stderr
    (result,) = tmp_path.rglob("results_*.json")
    found = json.loads(result.read_text())
    assert found["n-samples"]["ten"]["effective"] == 10
    assert found["results"]["ten"]["exact_match,answer"] >= 0.5


def test_curl(url: str) -> None:
    """A stream line by line, with what guidellm and bench_serving send: each line that is not empty
    is ``data:`` and JSON, or [DONE]; they parse all of them."""
    body = {"model": "sprig", "messages": ASKED, "stream": True, "search": SEARCH}
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
