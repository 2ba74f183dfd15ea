"""Policy ``auto`` and ``reasoning_effort``, with and without a tuned file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from server.app import create_app
from server.service import create_service
from server.settings import Settings, SettingsError
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import PlainText, client_over, question

TUNED = """
policy_model = "sprig"
reward_model = "sprig/prm"

[auto.search]
policy = "dora"
width = 6
vote = "lineages"
temperature = 0.8

[reasoning_effort.low.search]
policy = "self_consistency"
width = 3

[reasoning_effort.high.search]
policy = "rebase"
width = 24
mass = 0.5
"""


def app_of(tmp_path: Path, text: str | None, engine: ScriptedEngine, **changes: Any) -> FastAPI:
    """Return a server's app, with a tuned file of this text."""
    if text is not None:
        path = tmp_path / "tuned.toml"
        path.write_text(text)
        changes["tuned"] = path
    return create_app(create_service(Settings(**changes), engine, PlainText()))


async def post(app: FastAPI, path: str, body: dict[str, Any]) -> httpx2.Response:
    """Post a request to the app."""
    async with client_over(app) as client:
        return await client.post(path, json=body)


async def run_search(app: FastAPI, search: dict[str, Any]) -> dict[str, Any]:
    """Run a search with seed 3 and return its document."""
    reply = await post(app, "/v1/search", {"question": "?", "search": {"seed": 3, **search}})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def chat_search(app: FastAPI, **fields: Any) -> dict[str, Any] | None:
    """Return the ``search`` of a chat completion, None for a plain one."""
    messages = [{"role": "user", "content": "?"}]
    body = {"model": "sprig", "messages": messages, "seed": 3, **fields}
    reply = await post(app, "/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json().get("search")


@pytest.mark.promise(
    "Policy `auto` grows the tree of the policy that it stands for, and the reply names that "
    "policy."
)
async def test_auto_is_what_the_file_says_and_the_reply_names_it(tmp_path: Path) -> None:
    """The tree is that of the same seed with the policy and its fields named."""
    app = app_of(tmp_path, TUNED, ScriptedEngine())
    auto = await run_search(app, {"policy": "auto"})
    fields = {"policy": "dora", "width": 6, "vote": "lineages", "temperature": 0.8}
    by_name = await run_search(app, fields)
    assert (auto["policy"], auto["width"], auto["vote"]) == ("dora", 6, "lineages")
    assert auto["tree_digest"] == by_name["tree_digest"]
    assert auto["spec"] == by_name["spec"]


async def test_what_the_client_says_wins(tmp_path: Path) -> None:
    """The client's width, by field or by alias, wins; the rest is the file's."""
    app = app_of(tmp_path, TUNED, ScriptedEngine())
    by_name = await run_search(app, {"policy": "dora", "width": 4, "vote": "lineages"} | WARM)
    assert (await run_search(app, {"policy": "auto", "width": 4}))["spec"] == by_name["spec"]
    by_alias = await chat_search(app, model="sprig:auto-4")
    assert by_alias is not None
    assert by_alias["spec"] == by_name["spec"]
    whole = await chat_search(app, model="sprig:auto")
    assert whole is not None
    assert (whole["policy"], whole["width"]) == ("dora", 6)
    beam = await chat_search(app, model="sprig:auto-4", search={"policy": "beam"})
    assert beam is not None
    assert (beam["policy"], beam["width"], beam["vote"]) == ("beam", 4, "best_last")


WARM = {"temperature": 0.8}


@pytest.mark.parametrize(
    ("scripted", "changes", "policy"),
    [
        ({}, {}, "adaptive"),
        ({"outcome": True}, {}, "best_of_n"),
        ({"scores": False}, {}, "self_consistency"),
        ({}, {"reward_model": None}, "self_consistency"),  # log-probabilities are no judge
        ({}, {"reward_model": None, "verifier": "arithmetic"}, "adaptive"),
    ],
)
async def test_without_a_file_auto_suits_what_judges_steps(
    tmp_path: Path, scripted: dict[str, Any], changes: dict[str, Any], policy: str
) -> None:
    """The tree is that of naming the chosen policy."""
    app = app_of(tmp_path, None, ScriptedEngine(**scripted), **changes)
    auto = await run_search(app, {"policy": "auto", "width": 4})
    by_name = await run_search(app, {"policy": policy, "width": 4})
    assert (auto["policy"], auto["tree_digest"]) == (policy, by_name["tree_digest"])


@pytest.mark.parametrize("settings", [{"max_width": 16}], indirect=True)
async def test_an_effort_is_lowered_to_the_keys_limits(http: httpx2.AsyncClient) -> None:
    """The client has not set the width itself, so a smaller limit is no error."""
    body = {"model": "sprig", "messages": question(), "reasoning_effort": "high"}
    reply = (await http.post("/v1/chat/completions", json=body)).json()
    assert reply["search"]["width"] == 16


@pytest.mark.parametrize(
    ("effort", "tuned", "plain"),
    [
        ("none", None, None),
        ("minimal", None, None),
        ("low", ("self_consistency", 3), ("ets", 4)),
        ("medium", ("ets", 16), ("ets", 16)),
        ("high", ("rebase", 24), ("ets", 64)),
    ],
)
async def test_efforts_are_the_files_where_it_has_them(
    tmp_path: Path, effort: str, tuned: tuple[str, int] | None, plain: tuple[str, int] | None
) -> None:
    """An effort that the file lacks, and every effort without a file, is the built-in one."""
    for text, expected in ((TUNED, tuned), (None, plain)):
        app = app_of(tmp_path, text, ScriptedEngine())
        search = await chat_search(app, reasoning_effort=effort)
        assert (search and (search["policy"], search["width"])) == expected
        if search and text and effort == "high":
            assert search["spec"]["mass"] == 0.5


async def test_a_branch_by_auto(tmp_path: Path) -> None:
    """A branch with ``auto`` uses the file's search, not that of the first search."""
    app = app_of(tmp_path, TUNED, ScriptedEngine())
    first = await run_search(app, {"policy": "beam", "width": 4, "vote": "best_last"})
    body = {"node": 1, "search": {"policy": "auto", "seed": 5}}
    reply = await post(app, f"/v1/search/{first['id']}/branch", body)
    assert reply.status_code == 200, reply.text
    spec = reply.json()["spec"]
    assert (spec["policy"], spec["width"], spec["vote"]) == ("dora", 6, "lineages")


async def test_auto_is_no_wider_than_the_key_allows(tmp_path: Path) -> None:
    """A width that the client did not give is lowered; one that it gave is refused."""
    app = app_of(tmp_path, TUNED, ScriptedEngine(), max_width=5)
    assert (await run_search(app, {"policy": "auto"}))["width"] == 5
    body = {"question": "?", "search": {"policy": "auto", "width": 6}}
    reply = await post(app, "/v1/search", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "search.width")


async def test_other_models_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once at start; no warning for the models it was tuned on, nor for a file without names."""
    with caplog.at_level(logging.WARNING, logger="hedgerow"):
        app_of(tmp_path, TUNED, ScriptedEngine())
        app_of(tmp_path, "", ScriptedEngine())
        assert caplog.messages == []
        other_text = TUNED.replace('"sprig"', '"Qwen/Qwen3-0.6B"')
        app = app_of(tmp_path, other_text, ScriptedEngine(), reward_model=None)
        await run_search(app, {"policy": "auto"})
    (line,) = caplog.messages
    assert "policy_model: sprig, not Qwen/Qwen3-0.6B" in line
    assert "reward_model: None, not sprig/prm" in line


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"scores": False}, r"auto.search.policy: it needs a reward model"),
        ({"outcome": True}, r"auto.search.policy: 'dora' needs a reward for each step"),
    ],
)
def test_what_the_engine_cannot_do_is_said_at_start(
    tmp_path: Path, engine: dict[str, Any], message: str
) -> None:
    """The error names the field, before any request."""
    with pytest.raises(SettingsError, match=message):
        app_of(tmp_path, TUNED, ScriptedEngine(**engine))
