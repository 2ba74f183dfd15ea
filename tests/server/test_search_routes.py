"""``/v1/search``: the document, its events, and access to searches by id."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from search.tree import Finish, Tree, tree_digest
from search.tree_json import from_json
from server.kept_searches import SearchStore
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import Call, question, refusal

BODY: dict[str, Any] = {"question": "What?", "search": {"policy": "rebase", "width": 6, "seed": 4}}


async def test_the_document_holds_the_whole_search(http: httpx2.AsyncClient) -> None:
    """Answers by falling weight, usage, stats, and a tree with the stated digest."""
    document = (await http.post("/v1/search", json=BODY)).json()
    tree = from_json(document["tree"])
    assert tree_digest(tree, document["answer"]) == document["tree_digest"]
    weights = [answer["weight"] for answer in document["answers"]]
    assert weights == sorted(weights, reverse=True)
    assert document["answers"][0]["answer"] == document["answer"]
    assert document["text"].endswith(f"The answer is {document['answer']}.")
    assert document["stop_reason"] == "answered"
    assert document["usage"]["completion_tokens"] == tree.generated_tokens
    assert document["usage"]["prompt_tokens"] == len("user: What?\n")


HALVES = ["The answer is 0.5.", "I do not know.", "The answer is 1/2.", r"Then \boxed{2^{2^{99}}}"]


@pytest.mark.parametrize(
    ("settings", "votes", "unread"),
    [
        ({}, {"0.5": 2, "2^{2^{99}}": 1}, 1),
        ({"answers": "text"}, {"0.5": 1, "1/2": 1, "2^{2^{99}}": 1}, 0),
    ],
    indirect=["settings"],
)
async def test_equal_answers_vote_together(
    http: httpx2.AsyncClient, engine: ScriptedEngine, votes: dict[str, int], unread: int
) -> None:
    """One half is one answer in two spellings, except as text; the histogram counts all replies."""
    engine.say = lambda branch: HALVES[branch.child]
    search = {"policy": "best_of_n", "width": 4, "seed": 1, "vote": "majority"}
    document = (await http.post("/v1/search", json={"question": "What?", "search": search})).json()
    assert {a["answer"]: a["count"] for a in document["answers"]} == votes
    assert document["unanswered"] == 1
    assert sum(votes.values()) + 1 == document["stats"]["finished"]
    metrics = (await http.get("/metrics")).text
    assert f"hedgerow_unread_answers_total {unread}.0" in metrics


async def test_a_search_stops_by_consensus_where_it_is_asked_to(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """Three of four agree at once; a value that is neither word nor probability is refused."""
    engine.say = lambda b: "s\n\n" if b.child == 3 else "The answer is 1."
    search = {"policy": "self_consistency", "width": 4, "seed": 1, "consensus": "certain"}
    document = (await http.post("/v1/search", json={"question": "?", "search": search})).json()
    assert (document["stop_reason"], document["stats"]["finished"]) == ("consensus", 3)
    search["consensus"] = "sure"
    answer = await http.post("/v1/search", json={"question": "?", "search": search})
    error = answer.json()["error"]
    assert error["param"] == "search.consensus"
    assert "'certain' or a number between 0.5 and 1, both excluded, got 'sure'" in error["message"]


async def test_messages_and_question_ask_the_same(http: httpx2.AsyncClient) -> None:
    """A question is one user message; both at once, or neither, is refused."""
    first = (await http.post("/v1/search", json=BODY)).json()
    body = BODY | {"messages": question("What?"), "model": "sprig"}
    del body["question"]
    assert (await http.post("/v1/search", json=body)).json()["tree_digest"] == first["tree_digest"]
    for wrong_body in (BODY | {"messages": question()}, {"search": {}}, BODY | {"quest": 1}):
        assert (await http.post("/v1/search", json=wrong_body)).status_code == 400


def events_of(text: str) -> list[tuple[int, str, dict[str, Any]]]:
    """Return number, name and data of each server-sent event."""
    events = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        events.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return events


async def test_the_events_tell_the_whole_tree(http: httpx2.AsyncClient) -> None:
    """A client that follows the stream can rebuild the tree with the stated digest."""
    events = events_of((await http.post("/v1/search", json=BODY | {"stream": True})).text)
    assert [number for number, _, _ in events] == list(range(len(events)))
    names = [name for _, name, _ in events]
    assert (names[0], names[-2], names[-1]) == ("started", "answer", "done")
    tree = Tree(events[0][2]["prompt"])
    for _, name, data in events:
        if name == "expanded":
            tree.add(data["parent"], data["tokens"], data["text"], Finish(data["finish"]))
        elif name == "scored":
            tree[data["node"]].reward = data["reward"]
        elif name == "pruned":
            tree.prune(data["node"])
    document = events[-1][2]
    assert tree_digest(tree, document["answer"]) == document["tree_digest"]
    whole = (await http.post("/v1/search", json=BODY)).json()
    assert document["tree_digest"] == whole["tree_digest"]
    assert document.keys() == whole.keys() - {"tree"}


async def test_a_finished_search_can_be_read_again_and_deleted(http: httpx2.AsyncClient) -> None:
    """It is found by its id until it is deleted."""
    document = (await http.post("/v1/search", json=BODY)).json()
    path = f"/v1/search/{document['id']}"
    assert (await http.get(path)).json() == document
    assert (await http.delete(path)).json()["deleted"] is True
    assert (await http.get(path)).status_code == 404
    assert (await http.delete(path)).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_deleting_a_running_search_cancels_it(
    app: FastAPI, http: httpx2.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    """Its tree is released, and its client gets an error instead of hanging."""
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
    ("limits", "expected"),
    [
        ({"kept_searches": 2}, ["c", "d"]),
        ({"kept_bytes": 1024}, ["d"]),
        ({"kept_seconds": 2.5}, ["c", "d"]),
        ({}, ["a", "b", "c", "d"]),
    ],
)
def test_the_store_is_bounded_in_number_bytes_and_age(
    limits: dict[str, Any], expected: list[str]
) -> None:
    """Four documents of 600 bytes, a second apart: the oldest go first, running ones never."""
    now = 0.0
    store = SearchStore(Settings(**limits), lambda: now)
    loop = asyncio.new_event_loop()
    running: Any = asyncio.Future(loop=loop)
    store.begin("running", "me", 0, running)
    for name in "abcd":
        store.begin(name, "me", 0, None)
        store.finish(name, b"x" * 600)
        now += 1.0
    assert [name for name in "abcd" if store.get(name, "me")] == expected
    assert store.get("running", "me") is not None
    assert store.get("running", "you") is None
    loop.close()


@pytest.mark.parametrize("limits", [{"kept_searches": 3}, {"kept_bytes": 2000}])
def test_no_key_pushes_out_anothers_search(limits: dict[str, Any]) -> None:
    """Your one search stays while mine, of which there are more, make room for each other."""
    store = SearchStore(Settings(**limits), lambda: 0.0)
    for owner, name in (("you", "a"), ("me", "b"), ("me", "c"), ("me", "d"), ("me", "e")):
        store.begin(name, owner, 0, None)
        store.finish(name, b"x" * 600)
    assert store.get("a", "you") is not None
    assert [name for name in "bcde" if store.get(name, "me")] == ["d", "e"]


async def test_a_background_search_goes_on_without_its_client(
    http: httpx2.AsyncClient, engine: ScriptedEngine, app: FastAPI
) -> None:
    """202 at once; its events can be read from any number on, also while it runs; the document is
    that of the same search in the foreground."""
    engine.gate = asyncio.Event()
    answer = await http.post("/v1/search", json=BODY | {"background": True})
    assert (answer.status_code, answer.json()["status"]) == (202, "running")
    path = f"/v1/search/{answer.json()['id']}"
    assert (await http.post(f"{path}/branch", json={"node": 0})).status_code == 409
    assert app.state.service.admission.open == 1
    reader = asyncio.create_task(http.get(f"{path}/events"))
    await engine.waiting.wait()
    engine.gate.set()
    events = events_of((await reader).text)
    assert [number for number, _, _ in events] == list(range(len(events)))
    assert events[-1][1] == "done"
    final = (await http.get(path)).json()
    assert events[-1][2] == {key: value for key, value in final.items() if key != "tree"}
    assert final["tree_digest"] == (await http.post("/v1/search", json=BODY)).json()["tree_digest"]
    later = await http.get(f"{path}/events", headers={"last-event-id": "3"})
    assert events_of(later.text) == events[4:]
    wrong = await http.get(f"{path}/events", headers={"last-event-id": "x"})
    assert wrong.status_code == 400
    assert app.state.service.admission.open == 0


async def test_a_background_stream_survives_its_reader(
    app: FastAPI, http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """The reader leaves after the first event; the search goes on."""
    engine.gate = asyncio.Event()
    call = Call(app, "/v1/search", BODY | {"stream": True, "background": True})
    await call.until(1, b"event: started")
    await engine.waiting.wait()
    call.disconnect.set()
    await call.task
    (tree,) = engine.live
    engine.gate.set()
    answer = await http.get(f"/v1/search/{tree}/events", headers={"last-event-id": "0"})
    assert events_of(answer.text)[-1][1] == "done"
    assert (await http.get(f"/v1/search/{tree}")).json()["status"] == "done"


@pytest.mark.parametrize("deleted", [True, False])
async def test_a_background_search_that_fails_says_why(
    http: httpx2.AsyncClient, engine: ScriptedEngine, app: FastAPI, deleted: bool
) -> None:
    """Readers get an error event; the document says ``failed``, unless it was deleted."""
    engine.gate = asyncio.Event()
    reader = Call(app, "/v1/search", BODY | {"background": True, "stream": True})
    await engine.waiting.wait()
    await reader.until(1, b"event: started")
    (name,) = engine.live
    path = f"/v1/search/{name}"
    if deleted:
        await http.delete(path)
    else:
        engine.fail_at = 1
        engine.gate.set()
    code = "search_cancelled" if deleted else "engine_unavailable"
    await reader.task
    _, name, data = events_of(reader.body.decode())[-1]
    assert (name, data["error"]["code"]) == ("error", code)
    answer = await http.get(path)
    assert answer.status_code == (404 if deleted else 200)
    if not deleted:
        assert (answer.json()["status"], answer.json()["error"]["code"]) == ("failed", code)
        assert (await http.post(f"{path}/branch", json={"node": 0})).status_code == 400
    assert not engine.live
    assert app.state.service.admission.open == 0


async def test_a_branch_goes_on_from_a_node(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """The new tree's prompt ends with the node's steps; the reward model reads them as steps; the
    reply begins with them. The same holds for a branch of a branch."""
    document = (await http.post("/v1/search", json=BODY)).json()
    tree = from_json(document["tree"])
    node = next(n for n in tree.nodes[1:] if n.finish is Finish.STEP)
    engine.scored.clear()
    path = f"/v1/search/{document['id']}/branch"
    branch = (await http.post(path, json={"node": node.id, "search": {"seed": 9}})).json()
    assert branch["spec"] == document["spec"] | {"seed": 9}
    assert branch["text"].startswith(node.text)
    assert branch["text"].endswith(f"The answer is {branch['answer']}.")
    branch_tree = from_json(branch["tree"])
    assert branch_tree.prompt == tree.prompt + node.tokens
    assert all(t.texts[0] == node.text for call in engine.scored for t in call)
    assert branch["branched_from"]["node"] == node.id
    next_node = next((n for n in branch_tree.nodes[1:] if n.finish is Finish.STEP), None)
    assert next_node is not None
    path = f"/v1/search/{branch['id']}/branch"
    second_branch = (await http.post(path, json={"node": next_node.id})).json()
    assert second_branch["text"].startswith(node.text + next_node.text)
    assert from_json(second_branch["tree"]).prompt == branch_tree.prompt + next_node.tokens
    end_node = next(n for n in tree.nodes[1:] if n.finish is Finish.END)
    for wrong in (len(tree), end_node.id):
        error = await refusal(http, f"/v1/search/{document['id']}/branch", {"node": wrong})
        assert error["param"] == "node"


async def test_a_dry_run_says_what_it_may_cost(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """By hand: 6 wide, 2 deep, steps of at most 30 tokens are at most 360; nothing is drawn. The
    typical cost is given once such a search was run."""
    search = BODY["search"] | {"max_depth": 2, "max_step_tokens": 30}
    body = BODY | {"search": search, "dry_run": True}
    first = (await http.post("/v1/search", json=body)).json()
    assert first["most"]["completion_tokens"] == 360
    assert first["prompt_tokens"] == len("user: What?\n")
    assert first["typical"] is None
    assert not engine.expanded
    document = (await http.post("/v1/search", json=BODY | {"search": search})).json()
    second = (await http.post("/v1/search", json=body)).json()
    assert second["typical"]["completion_tokens"] == document["usage"]["completion_tokens"] <= 360


@pytest.mark.parametrize("engine", [ScriptedEngine(step_logprobs=False)])
async def test_a_vote_by_confidence_needs_log_probabilities(http: httpx2.AsyncClient) -> None:
    """It is refused by name if the engine's steps have none."""
    search = {"policy": "self_consistency", "width": 2, "vote": "confidence"}
    error = await refusal(http, "/v1/search", {"question": "?", "search": search})
    assert error["param"] == "search.vote"
    assert "log-probabilities" in error["message"]
