"""A server whose reward model scores only finished replies."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest

from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import refusal

ALLOWED = "one of best_of_n, self_consistency is needed"


@pytest.fixture
def engine() -> ScriptedEngine:
    """An engine that scores only finished replies."""
    return ScriptedEngine(outcome=True)


@pytest.mark.parametrize(
    ("search", "param", "message"),
    [
        ({"policy": "beam"}, "search.policy", f"'beam' needs a reward for each step.*{ALLOWED}"),
        ({"policy": "rebase"}, "search.policy", f"'rebase' needs.*{ALLOWED}"),
        (
            {"policy": "best_of_n", "vote": "best_min"},
            "search.vote",
            "'best_min' needs.*one of weighted_majority, majority, "
            "confidence, lowest_confidence, lineages, best_last is needed",
        ),
    ],
)
async def test_what_compares_steps_is_refused(
    http: httpx2.AsyncClient,
    engine: ScriptedEngine,
    search: dict[str, Any],
    param: str,
    message: str,
) -> None:
    """The error has the field, its value and what is allowed; nothing is drawn."""
    error = await refusal(http, "/v1/search", {"question": "?", "search": search})
    assert error["param"] == param
    assert re.search(message, error["message"])
    assert engine.expanded == []


@pytest.mark.parametrize("fields", [{"search": {"width": 4}}, {"reasoning_effort": "low"}])
async def test_without_a_word_of_a_policy_it_is_best_of_n(
    http: httpx2.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    """The policy that outcome models are for is the default."""
    messages = [{"role": "user", "content": "?"}]
    body = {"model": "sprig", "messages": messages, "seed": 1} | fields
    reply = (await http.post("/v1/chat/completions", json=body)).json()
    assert reply["search"]["policy"] == "best_of_n"
    assert reply["search"]["spec"]["policy"] == "best_of_n"


async def test_aliases_that_would_be_refused_are_not_listed(http: httpx2.AsyncClient) -> None:
    """Clients that can only name a model see only aliases that work."""
    names = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
    assert "sprig:best_of_n-16" in names
    assert "sprig:rebase-16" not in names
