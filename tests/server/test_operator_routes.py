"""The routes for health, readiness, models and metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import Call, question

SEARCH = {"model": "sprig", "messages": question(), "search": {"width": 4, "seed": 1}}
SERVED = ("served", "sprig")


async def samples(http: httpx2.AsyncClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample of /metrics by name and labels."""
    text = (await http.get("/metrics")).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_health_answers_while_the_engine_works(
    app: FastAPI, http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """A search that draws forever delays neither health nor readiness."""
    engine.gate = asyncio.Event()
    call = Call(app, "/v1/chat/completions", SEARCH)
    await engine.waiting.wait()
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/ready")).status_code == 200
    metrics = await samples(http)
    assert metrics["hedgerow_searches_in_flight", (("policy", "rebase"),)] == 1
    assert metrics["hedgerow_requests_in_flight", ()] == 2  # the search and this scrape
    engine.gate.set()
    await call.task
    metrics = await samples(http)
    assert metrics["hedgerow_searches_in_flight", (("policy", "rebase"),)] == 0


@pytest.mark.parametrize("settings", [{"ready_seconds": 0.01}], indirect=True)
async def test_ready_goes_red_with_the_engine_and_health_does_not(
    http: httpx2.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is down or silent makes the server unready, not unhealthy."""
    engine.down = True
    answer = await http.get("/ready")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert "retry-after" in answer.headers
    assert (await http.get("/health")).status_code == 200
    engine.down = False
    monkeypatch.setattr(engine, "health", asyncio.Event().wait)
    assert (await http.get("/ready")).status_code == 503


async def test_metrics_count_what_was_done(http: httpx2.AsyncClient) -> None:
    """Searches count by policy and reason; each generated token is kept or pruned."""
    completion = (await http.post("/v1/chat/completions", json=SEARCH)).json()
    await http.post("/v1/chat/completions", json=SEARCH | {"search": {"width": 0}})
    metrics = await samples(http)
    labels = (("policy", "rebase"), ("stop_reason", "answered"))
    assert metrics["hedgerow_searches_total", labels] == 1
    generated = metrics["hedgerow_generated_tokens_total", ()]
    assert generated == completion["usage"]["completion_tokens"]
    kept_tokens = metrics["hedgerow_kept_tokens_total", ()]
    assert kept_tokens + metrics["hedgerow_pruned_tokens_total", ()] == generated
    assert 0 < kept_tokens <= generated
    route = ("route", "/v1/chat/completions")
    assert metrics["hedgerow_request_seconds_count", (route, ("status", "200"))] == 1
    assert metrics["hedgerow_request_seconds_count", (route, ("status", "400"))] == 1
    assert metrics["hedgerow_kv_tokens", (("model", "policy"), SERVED, ("state", "active"))] == 0
    assert metrics["hedgerow_engine_up", (SERVED,)] == 1
    for name in ("decoded", "prefilled", "cached", "rehydrated", "prm"):
        assert (f"hedgerow_{name}_tokens_total", (SERVED,)) in metrics
    assert metrics["hedgerow_queue_wait_seconds_count", ()] == 1
    assert metrics["hedgerow_rounds_total", (("policy", "rebase"),)] > 1


async def test_labels_do_not_grow_with_what_clients_send(http: httpx2.AsyncClient) -> None:
    """Unknown paths, ids and models add no series."""
    await http.get("/nope-0")
    before = set(await samples(http))
    for i in range(1, 20):
        await http.get(f"/nope-{i}")
        await http.post("/v1/chat/completions", json=SEARCH | {"model": f"m{i}", f"f{i}": 1})
        await http.get(f"/v1/search/{i}")
    new_series = set(await samples(http)) - before
    assert {dict(labels).get("route") for _, labels in new_series} <= {
        "/v1/chat/completions",
        "/v1/search/{search_id}",
        "/metrics",
    }


async def test_metrics_survive_an_engine_that_is_down(
    http: httpx2.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scrape still answers, and reports the engine as down."""
    engine.down = True
    monkeypatch.setattr(engine, "usage", engine.health)
    metrics = await samples(http)
    assert metrics["hedgerow_engine_up", (SERVED,)] == 0


@pytest.mark.parametrize(
    ("settings", "reward_model", "verifier"),
    [
        ({}, "sprig/prm", None),
        ({"reward_model": None, "verifier": "arithmetic"}, None, "arithmetic"),
        ({"reward_model": Path("own/er")}, "own/er", None),
        ({"verifier": "https://secret.test/judge"}, "sprig/prm", "endpoint"),
    ],
    indirect=["settings"],
)
async def test_a_model_says_what_its_steps_are_judged_by(
    http: httpx2.AsyncClient, reward_model: str | None, verifier: str | None
) -> None:
    """Models have the hub's name or the folder's; an endpoint's address is not shown."""
    for model in (await http.get("/v1/models")).json()["data"]:
        assert (model["reward_model"], model["verifier"]) == (reward_model, verifier)


async def test_a_model_is_described_alone_and_in_the_list(http: httpx2.AsyncClient) -> None:
    """Both descriptions are the same, also for aliases with slashes and colons."""
    listing = (await http.get("/v1/models")).json()
    assert listing["object"] == "list"
    for model in listing["data"]:
        assert (await http.get(f"/v1/models/{model['id']}")).json() == model
