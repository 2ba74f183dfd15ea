"""No parameter is ignored silently: an unsupported one is refused if it asks for anything."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from server.unsupported_parameters import CHAT, TEXT, asks_nothing
from tests.server.conftest import question

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "sprig", "messages": question(), "max_tokens": 4, "seed": 1},
    "/v1/completions": {"model": "sprig", "prompt": "a", "max_tokens": 4, "seed": 1},
}
TABLES = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
VALUES: dict[str, Any] = {
    "min_new_tokens": 3,
    "guided_json": {"type": "object"},
    "priority": 1,
    "top_logprobs": 2,
    "best_of": 2,
    "echo": True,
    "skip_special_tokens": False,
}
"""Values that ask for something; other parameters get a word."""


@pytest.mark.parametrize(("path", "table"), TABLES)
async def test_what_is_not_honoured_is_refused_by_name(
    http: httpx2.AsyncClient, path: str, table: dict[str, tuple[Any, ...]]
) -> None:
    """With a neutral value the reply is the one without the parameter."""
    plain = (await http.post(path, json=BODIES[path])).json()["choices"]
    for name, neutral in table.items():
        refusal = await http.post(path, json=BODIES[path] | {name: VALUES.get(name, "word")})
        assert refusal.status_code == 400, name
        error = refusal.json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        for value in neutral:
            answer = await http.post(path, json=BODIES[path] | {name: value})
            assert answer.status_code == 200, (name, value)
            assert answer.json()["choices"] == plain


async def test_what_load_generators_and_clients_send_is_taken(http: httpx2.AsyncClient) -> None:
    """``ignore_eos``, ``stop: null`` and unknown fields are accepted."""
    fields = {
        "ignore_eos": True,
        "stop": None,
        "user": "u",
        "metadata": {"a": "b"},
        "tools": [],
        "tool_choice": "none",
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "nobody_knows": 1,
    }
    for path, body in BODIES.items():
        assert (await http.post(path, json=body | fields)).status_code == 200


def test_true_is_no_one() -> None:
    """JSON's true and 1 differ, 1 and 1.0 do not."""
    assert asks_nothing(1.0, (None, 1))
    assert not asks_nothing(True, (None, 1))
    assert not asks_nothing(0, (None, False))
