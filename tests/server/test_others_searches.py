"""A search belongs to its key, on every route that names one."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from tests.search.scripted_engine import ScriptedEngine

TWO: dict[str, Any] = {"api_keys": "ann:first,bob:second"}
ANN, BOB = ({"authorization": f"Bearer {secret}"} for secret in ("first", "second"))
ROUTES: dict[tuple[str, str], dict[str, Any]] = {
    ("GET", "/v1/search/{search_id}"): {},
    ("DELETE", "/v1/search/{search_id}"): {},
    ("GET", "/v1/search/{search_id}/events"): {"headers": {"last-event-id": "0"}},
    ("POST", "/v1/search/{search_id}/branch"): {"json": {"node": 1}},
}
"""The routes, each with the options of a request to it."""


def test_every_route_that_names_a_search_is_known(app: FastAPI) -> None:
    """A new route must be added to the table."""
    routes = {
        (method, path)
        for path, operations in app.openapi()["paths"].items()
        for method in map(str.upper, operations)
        if "{search_id}" in path
    }
    assert routes == ROUTES.keys()


@pytest.mark.promise("A search belongs to its API key: for any other key no route finds it.")
@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("settings", [TWO], indirect=True)
async def test_to_another_key_it_is_not_there(
    http: httpx2.AsyncClient, engine: ScriptedEngine, route: tuple[str, str], finished: bool
) -> None:
    """A background search, finished or running: another key gets the same answer as for an id that
    never existed, and the owner's search goes on and stays."""
    method, path = route
    engine.still = frozenset() if finished else frozenset({"expand"})
    body = {"question": "a", "background": True, "search": {"width": 2, "max_depth": 2}}
    name = (await http.post("/v1/search", json=body, headers=ANN)).json()["id"]
    if finished:
        await http.get(f"/v1/search/{name}/events", headers=ANN)
    options = ROUTES[route]
    headers = {**options.get("headers", {}), **BOB}
    errors = []
    for search_id in (name, "search-" + "0" * 32):
        address = path.replace("{search_id}", search_id)
        answer = await http.request(method, address, json=options.get("json"), headers=headers)
        assert answer.status_code == 404
        errors.append(answer.json()["error"] | {"request_id": ""})
        errors[-1]["message"] = errors[-1]["message"].replace(search_id, "ID")
    assert errors[0] == errors[1]
    document = (await http.get(f"/v1/search/{name}", headers=ANN)).json()
    assert document["status"] == ("done" if finished else "running")
    assert not engine.aborted
    await http.delete(f"/v1/search/{name}", headers=ANN)


@pytest.mark.parametrize("settings", [{"admin_key": "root"}], indirect=True)
async def test_what_a_path_may_be_asked_by_is_said_whole(
    app: FastAPI, http: httpx2.AsyncClient
) -> None:
    """``Allow`` lists all methods, also where two routes share a path."""
    methods: dict[str, set[str]] = {}
    for path, operations in app.openapi()["paths"].items():
        methods.setdefault(path, set()).update(map(str.upper, operations))
    for path, verbs in methods.items():
        address = path.replace("{search_id}", "x").replace("{name}", "x")
        answer = await http.request("PATCH", address, headers={"authorization": "Bearer root"})
        assert answer.status_code == 405, path
        assert verbs <= set(answer.headers["allow"].split(", ")) <= verbs | {"HEAD"}
