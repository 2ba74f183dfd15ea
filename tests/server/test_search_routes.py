"""``/v1/search``: the document, its events, and searches by id."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from search.digest import tree_digest
from search.tree import Finish, Tree
from search.tree_json import from_json
from server.search_store import SearchStore
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import Call, question

BODY: dict[str, Any] = {"question": "What?", "search": {"policy": "rebase", "width": 6, "seed": 4}}


async def test_the_document_holds_the_whole_search(http: httpx2.AsyncClient) -> None:
    """Answers by falling weight, usage, stats, and a tree whose digest is the one stated."""
    found = (await http.post("/v1/search", json=BODY)).json()
    tree = from_json(found["tree"])
    assert tree_digest(tree, found["answer"]) == found["tree_digest"]
    weights = [answer["weight"] for answer in found["answers"]]
    assert weights == sorted(weights, reverse=True)
    assert found["answers"][0]["answer"] == found["answer"]
    assert found["text"].endswith(f"The answer is {found['answer']}.")
    assert found["stop_reason"] == "answered"
    assert found["usage"]["completion_tokens"] == tree.generated_tokens
    assert found["usage"]["prompt_tokens"] == len("user: What?\n")


async def test_messages_and_question_ask_the_same(http: httpx2.AsyncClient) -> None:
    """A question is one user message; both at once, or neither, is refused."""
    asked = (await http.post("/v1/search", json=BODY)).json()
    body = BODY | {"messages": question("What?"), "model": "sprig"}
    del body["question"]
    assert (await http.post("/v1/search", json=body)).json()["tree_digest"] == asked["tree_digest"]
    for wrong in (BODY | {"messages": question()}, {"search": {}}, BODY | {"quest": 1}):
        assert (await http.post("/v1/search", json=wrong)).status_code == 400


def events_of(text: str) -> list[tuple[int, str, dict[str, Any]]]:
    """Number, name and data of each server-sent event."""
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found


async def test_the_events_tell_the_whole_tree(http: httpx2.AsyncClient) -> None:
    """A client that follows the stream rebuilds the tree that the digest is of."""
    streamed = events_of((await http.post("/v1/search", json=BODY | {"stream": True})).text)
    assert [number for number, _, _ in streamed] == list(range(len(streamed)))
    names = [name for _, name, _ in streamed]
    assert (names[0], names[-2], names[-1]) == ("started", "answer", "done")
    tree = Tree(streamed[0][2]["prompt"])
    for _, name, data in streamed:
        if name == "expanded":
            tree.add(data["parent"], data["tokens"], data["text"], Finish(data["finish"]))
        elif name == "scored":
            tree[data["node"]].reward = data["reward"]
        elif name == "pruned":
            tree.prune(data["node"])
    done = streamed[-1][2]
    assert tree_digest(tree, done["answer"]) == done["tree_digest"]
    whole = (await http.post("/v1/search", json=BODY)).json()
    assert done["tree_digest"] == whole["tree_digest"]
    assert done.keys() == whole.keys() - {"tree"}


async def test_a_finished_search_can_be_read_again_and_deleted(http: httpx2.AsyncClient) -> None:
    """By its id, until it is deleted."""
    found = (await http.post("/v1/search", json=BODY)).json()
    path = f"/v1/search/{found['id']}"
    assert (await http.get(path)).json() == found
    assert (await http.delete(path)).json()["deleted"] is True
    assert (await http.get(path)).status_code == 404
    assert (await http.delete(path)).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_deleting_a_running_search_cancels_it(
    app: FastAPI, http: httpx2.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    """Its tree is let go, and its own client is told instead of left hanging."""
    engine.gate = asyncio.Event()
    call = Call(app, "/v1/search", BODY | {"stream": stream})
    await engine.waiting.wait()
    (name,) = engine.live
    assert (await http.get(f"/v1/search/{name}")).json()["status"] == "running"
    assert (await http.delete(f"/v1/search/{name}")).status_code == 200
    await call.task
    assert b"search_cancelled" in call.body
    assert not engine.live
    assert (await http.get(f"/v1/search/{name}")).status_code == 404


async def test_a_failed_search_is_not_kept(
    app: FastAPI, http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """An engine that is down leaves nothing in the store."""
    engine.fail_at = 1
    assert (await http.post("/v1/search", json=BODY)).status_code == 503
    assert len(app.state.service.store) == 0


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"kept_searches": 2}, ["c", "d"]),
        ({"kept_bytes": 1024}, ["d"]),
        ({"kept_seconds": 2.5}, ["c", "d"]),
        ({}, ["a", "b", "c", "d"]),
    ],
)
def test_the_store_is_bounded_in_number_bytes_and_age(
    limits: dict[str, Any], kept: list[str]
) -> None:
    """Four documents of 600 bytes, a second apart: the oldest go first, running ones never."""
    now = 0.0
    store = SearchStore(Settings(**limits), lambda: now)
    running: Any = asyncio.Future(loop=asyncio.new_event_loop())
    store.begin("running", "me", 0, running)
    for name in "abcd":
        store.begin(name, "me", 0, None)
        store.finish(name, b"x" * 600)
        now += 1.0
    assert [name for name in "abcd" if store.get(name, "me")] == kept
    assert store.get("running", "me") is not None
    assert store.get("running", "you") is None
