"""What keys have used and what they have left; requests that were cut off are booked too."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from search.engine import Branch
from server.api_errors import ApiError
from server.api_keys import ApiKey
from server.prometheus_metrics import Metrics
from server.quotas import DAY, Quotas
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import Call, question

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "sprig", "messages": question()}
ROOM = {"running": 1, "queued": 1, "width": 1, "depth": 1, "prompt_tokens": 1, "tree_tokens": 1}


def test_a_days_tokens_come_back_at_midnight() -> None:
    """10 a day: 4 + 6 use them up; the header has the seconds to midnight UTC; a reply without a
    drawn token costs nothing."""
    now = 5 * DAY - 100.0
    quotas = Quotas(["ann"], Metrics(), lambda: now)
    ann = ApiKey(name="ann", tokens_a_day=10, **ROOM)
    with quotas.booking(ann, 4, searched=False):
        pass
    quotas.must_have_left(ann)
    with quotas.booking(ann, 4, searched=True) as booking:
        booking.completion = 6
    with pytest.raises(ApiError, match="quota of 10 tokens a day") as error:
        quotas.must_have_left(ann)
    assert (error.value.headers or {})["retry-after"] == "100"
    now = 5 * DAY + 1.0
    quotas.must_have_left(ann)
    assert quotas.account("ann") == {
        "key": "ann",
        "requests": 1,
        "searches": 1,
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "tokens_today": 0,
    }


def test_a_clock_that_is_set_back_gives_no_day_twice() -> None:
    """Over midnight and back: the tokens used that day stay used."""
    now = 5 * DAY + 10.0
    quotas = Quotas(["ann"], Metrics(), lambda: now)
    ann = ApiKey(name="ann", tokens_a_day=10, **ROOM)
    with quotas.booking(ann, 4, searched=True) as booking:
        booking.completion = 6
    for time in (5 * DAY - 10.0, 5 * DAY + 20.0):
        now = time
        with pytest.raises(ApiError, match="quota of 10 tokens a day"):
            quotas.must_have_left(ann)
    now = 6 * DAY
    quotas.must_have_left(ann)


@pytest.mark.parametrize("settings", [{"key_tokens_total": 5}], indirect=True)
@pytest.mark.parametrize("body", [BODY, BODY | {"search": {"width": 2}}])
async def test_who_has_used_up_a_quota_is_refused(
    http: httpx2.AsyncClient, engine: ScriptedEngine, body: dict[str, Any]
) -> None:
    """The reply that overdraws is given whole; the next request is refused before it costs."""
    assert (await http.post(CHAT, json=body)).status_code == 200
    calls = len(engine.expanded)
    for path in (CHAT, "/v1/completions", "/v1/search"):
        answer = await http.post(path, json=body)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "insufficient_quota"
        assert answer.headers["x-should-retry"] == "false"
    assert len(engine.expanded) == calls
    assert (await http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    "settings", [{"key_tokens_total": 5, "key_running": 1, "max_running": 1}], indirect=True
)
@pytest.mark.parametrize("body", [BODY, BODY | {"search": {"width": 2}}])
async def test_who_waits_while_a_quota_is_used_up_is_refused(
    http: httpx2.AsyncClient, body: dict[str, Any]
) -> None:
    """Three requests arrive before any token is drawn: one reply overdraws, as it may, and no other
    is begun."""
    answers = await asyncio.gather(*(http.post(CHAT, json=body) for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [200, 429, 429]
    usage = (await http.get("/v1/usage")).json()
    assert usage["requests"] == 1


async def tokens_of_leaver(app: FastAPI, engine: ScriptedEngine, body: dict[str, Any]) -> int:
    """The completion tokens that are booked, with the prompt, for a client that leaves while the
    engine waits at its gate."""
    call = Call(app, CHAT, body)
    await engine.waiting.wait()
    call.disconnect.set()
    await call.task
    await app.state.service.runner.close()
    account = app.state.service.quotas.account("anybody")
    assert account["requests"] == 1
    assert account["prompt_tokens"] == len("user: What is it?\n")
    return account["completion_tokens"]


@pytest.mark.parametrize("extra", [{}, {"search": {"width": 2, "max_depth": 9}}])
async def test_leaving_midway_is_not_for_free(
    app: FastAPI, engine: ScriptedEngine, extra: dict[str, Any]
) -> None:
    """The prompt and what had been drawn by then are booked."""

    def wait_later(branch: Branch) -> str:
        engine.gate = asyncio.Event()
        return f"step {branch.tokens[-3:]}\n\n"

    engine.say = wait_later
    assert await tokens_of_leaver(app, engine, BODY | extra) >= len("step ()\n\n")


@pytest.mark.parametrize(
    ("extra", "tokens"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"search": {"width": 2}}, 2),
        ({"search": {"policy": "self_consistency", "width": 4}, "logprobs": True}, 4),
    ],
)
async def test_leaving_in_the_first_round_is_not_for_free(
    app: FastAPI, engine: ScriptedEngine, extra: dict[str, Any], tokens: int
) -> None:
    """No round is complete: the engine says what it has decoded, here a token a branch."""
    engine.gate = asyncio.Event()
    assert await tokens_of_leaver(app, engine, BODY | extra) == tokens
