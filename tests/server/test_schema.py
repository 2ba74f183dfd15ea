"""Any request, by the OpenAPI document or against it, gets an answer or a 4xx, never a 5xx."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    ensure_resource_availability,
    ignored_auth,
    missing_required_header,
    negative_data_rejection,
    not_a_server_error,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
    use_after_free,
)

from search.engine import LOGITS_PARAMS
from server.app import create_app
from server.service import create_service
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import PlainText, client_over

AT_LENGTH = "SCHEMA_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "4"))
"""Per operation; 650 make some 5,200 cases in all (six operations have one case each)."""

LIMITS = {"max_width": 8, "max_depth": 6, "admin_key": "root", "deadline_seconds": 5}
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    unsupported_method,
    negative_data_rejection,
    positive_data_acceptance,
    missing_required_header,
    ignored_auth,
    use_after_free,
    ensure_resource_availability,
)
"""All checks of schemathesis by the document: good data is accepted, bad data refused."""
UNTOLD = (
    *("on this server", "goes with votes that count", "the body may have at most"),
    *("as many questions as replies", "token ids are from", "one at a time is searched for"),
    *("cannot be compiled", "leave it out with", "as a reply has no more tokens"),
    *("this model's chat template", "there are no tools to call", "one of the tools"),
    *("each name is there once", "the assistant's messages have them", "as JSON text"),
)
"""Refusals that the document does not describe: a key's limits, dials, schemas."""


def make_app() -> Any:
    """Return an app over the scripted engine with everything that an engine may support."""
    engine = ScriptedEngine(grammar=True, logits_params=LOGITS_PARAMS)
    return create_app(create_service(Settings(**LIMITS), engine, PlainText()))


schema = schemathesis.openapi.from_asgi("/openapi.json", make_app())
schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
# Tests every bound of every field: 6,200 cases, which take a minute whenever tests are collected.
schema.config.phases.coverage.enabled = AT_LENGTH


@pytest.mark.promise(
    "Any request gets a documented reply or a clear 4xx, or a 504 if its search runs out of time."
)
@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_every_operation_keeps_to_the_document(case: Any) -> None:
    """Statuses, content types and bodies are as documented, for good and bad data; 504 is a search
    that could not finish within the budgets that were drawn."""
    response = case.call(headers={"authorization": "Bearer root"})
    if response.status_code != 504:
        limited = any(words in response.text for words in UNTOLD)
        skipped = {positive_data_acceptance} if limited else set()
        if response.status_code == 413:  # also a refusal
            skipped.add(negative_data_rejection)
        checks = [check for check in CHECKS if check not in skipped]
        case.validate_response(response, checks=checks)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["code"]
        assert error["request_id"] == response.headers["x-request-id"][0]


def deep(depth: int) -> Any:
    """Return nested lists of this depth."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


HUGE = [10**400, -(10**400), 1e308, float("nan"), float("inf"), 2**64, -(2**63) - 1]
ODD = (
    st.sampled_from(
        [*HUGE, deep(100), "\ud800", "\x00", "", True, None, {}, [], {"\ud800": "\udfff"}]
    )
    | st.text(st.characters(exclude_categories=()), max_size=30)
    | st.floats()
    | st.integers()
)
NESTED = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "sprig", "messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"model": "sprig", "prompt": "a"},
    "/v1/search": {"question": "a", "search": {"width": 2}},
    "/v1/score": {"question": "a", "steps": ["b"]},
}
FIELDS = [*{**GOOD["/v1/chat/completions"], **GOOD["/v1/completions"], **GOOD["/v1/search"]}]
FIELDS += ["seed", "n", "stop", "max_tokens", "temperature", "top_p", "stream_options", "stream"]
FIELDS += ["steps", "items", "text_1", "text_2", "deadline_ms"]
FIELDS += ["tools", "metadata", "reasoning_effort", "background", "dry_run", "logit_bias", "user"]
SEARCH_FIELDS = ["policy", "width", "seed", "temperature", "max_depth", "max_tokens", "vote"]


@given(
    st.sampled_from(sorted(GOOD)),
    st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), NESTED, max_size=5),
    st.none() | st.dictionaries(st.sampled_from(SEARCH_FIELDS), ODD, max_size=3),
)
@settings(max_examples=80)
def test_odd_values_are_refused_by_name(
    path: str, change: dict[str, Any], search: dict[str, Any] | None
) -> None:
    """Huge numbers, NaN, lone surrogates and deep nesting, in every field and in unknown fields: a
    reply or a 4xx in OpenAI's shape."""
    body = GOOD[path] | change | ({} if search is None else {"search": search})
    answer = asyncio.run(post(path, json.dumps(body).encode()))
    assert answer.status_code < 500 or answer.status_code == 504
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code", "request_id"}
        assert error["code"]
        assert error["message"]


@pytest.mark.parametrize("path", sorted(GOOD))
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        json.dumps(deep(900)).encode(),
        b'{"model": ' + b"9" * 100_000 + b"}",
        b'{"model": "' + b"x" * (10 << 20) + b'"}',
        b'{"x": 1e999999999}',
        b"\x00",
        b"nul",
        b'"' + b"\xed\xa0\x80" + b'"',
    ],
    ids=[
        "lists",
        "objects",
        "nested",
        "digits",
        "10 MB",
        "1e999999999",
        "nul byte",
        "nul",
        "bytes",
    ],
)
def test_monstrous_bodies_are_refused(path: str, body: bytes) -> None:
    """Huge and malformed bodies get a 4xx in OpenAI's shape."""
    answer = asyncio.run(post(path, body))
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["code"]


async def post(path: str, body: bytes) -> httpx2.Response:
    """Send one request to a server of its own."""
    async with client_over(make_app()) as client:
        headers = {"content-type": "application/json"}
        return await client.post(path, content=body, headers=headers)
