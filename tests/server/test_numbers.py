"""Every number has bounds: the document gives them, and no number beyond them does harm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from tests.server.conftest import question

ODD = ["1" + "0" * 400, str(2**63), "-1", "0", "1e308", "NaN", '"5"']
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "sprig", "messages": question(), "max_tokens": 4},
    "/v1/completions": {"model": "sprig", "prompt": "a", "max_tokens": 4},
    "/v1/responses": {"model": "sprig", "input": "a", "max_output_tokens": 4},
    "/v1/search": {"question": "a", "search": {"width": 4, "max_depth": 2, "seed": 1}},
    "/v1/score": {"question": "a", "steps": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/search/{search_id}/branch": {"node": 1, "search": {"width": 2, "max_depth": 4}},
}
"""Requests that are answered; tests make one field of each odd."""
FIELDS = 4 * 25
"""A lower bound for the count of numbers, most of which are in ``search``."""

Place = tuple[str, ...]


def numbers(schema: dict[str, Any], document: dict[str, Any]) -> Iterator[tuple[Place, Any]]:
    """Yield the place and the schema of every number that a schema allows."""
    if "$ref" in schema:
        yield from numbers(
            document["components"]["schemas"][schema["$ref"].split("/")[-1]], document
        )
    if schema.get("type") in ("integer", "number"):
        yield (), schema
    for kind in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(kind, []):
            yield from numbers(part, document)
    for name, part in schema.get("properties", {}).items():
        for place, bounds in numbers(part, document):
            yield (name, *place), bounds


def body_numbers(app: FastAPI) -> Iterator[tuple[str, Place, Any]]:
    """Yield path, place and schema of every number in a request's body."""
    document = app.openapi()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for kind in operation.get("requestBody", {}).get("content", {}).values():
                for place, bounds in numbers(kind["schema"], document):
                    yield path, place, bounds


def test_every_number_has_a_least_and_a_most(app: FastAPI) -> None:
    """The document bounds every number of bodies and of parameters."""
    fields = list(body_numbers(app))
    assert len(fields) >= FIELDS
    assert {path for path, _, _ in fields} == BODIES.keys()
    for path, operations in app.openapi()["paths"].items():
        for operation in operations.values():
            for parameter in operation.get("parameters", []):
                places = numbers(parameter["schema"], app.openapi())
                fields += [(path, (parameter["name"],), schema) for _, schema in places]
    for path, place, schema in fields:
        for end in ("inimum", "aximum"):
            (bound,) = (schema[k] for k in (f"m{end}", f"exclusiveM{end}") if k in schema)
            assert abs(bound) < 2**65, (path, place)


def odd(body: dict[str, Any], place: Place, value: str) -> bytes:
    """Return the body with a JSON literal at this place."""
    inner = whole = json.loads(json.dumps(body))
    for name in place[:-1]:
        inner = inner.setdefault(name, {})
    inner[place[-1]] = "\0"
    return json.dumps(whole).replace(json.dumps("\0"), value).encode()


@pytest.mark.parametrize("value", ODD, ids=lambda value: value[:6])
async def test_no_number_does_any_harm(app: FastAPI, http: httpx2.AsyncClient, value: str) -> None:
    """Each is taken, or refused by name, or leaves the search no reply (504, as documented); a
    number inside a string is never taken."""
    document = (await http.post("/v1/search", json=BODIES["/v1/search"])).json()
    for path, place, _ in body_numbers(app):
        answer = await http.post(
            path.replace("{search_id}", document["id"]),
            content=odd(BODIES[path], place, value),
            headers={"content-type": "application/json"},
        )
        assert answer.status_code in (200, 202, 400, 504), (path, place, answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] in (None, ".".join(place)), answer.text
        if value == '"5"':
            assert answer.status_code == 400, (path, place)
