"""``POST /v1/score`` over the scripted engine, whose rewards follow from the steps' texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from search.engine import PrefixTooLong, Trajectory
from search.tree import round_reward
from tests.search.scripted_engine import ScriptedEngine, judge
from tests.server.conftest import Call, in_time, question, refusal

SCORE = "/v1/score"
BODY: dict[str, Any] = {"question": "Q", "steps": ["a\n\n", "b"]}


def rewards(*steps: str) -> list[float]:
    """Return the scripted engine's reward of each step, rounded as in a tree."""
    return [round_reward(judge(steps[:n])) for n in range(1, len(steps) + 1)]


async def scores(http: httpx2.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """Post a good request and return its response."""
    return (await http.post(SCORE, json=body)).raise_for_status().json()


async def test_a_reward_a_step(http: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
    """One reply, in vLLM's shape; tokens are characters, including the question's template."""
    reply = await scores(http, BODY | {"seed": 5})
    expected = rewards("a\n\n", "b")
    assert reply["object"] == "list"
    assert reply["data"] == [
        {"index": 0, "object": "score", "score": expected[-1], "rewards": expected}
    ]
    size = len("user: Q\n") + len("a\n\n") + len("b")
    assert reply["usage"] == {"prompt_tokens": size, "completion_tokens": 0, "total_tokens": size}
    assert (reply["model"], reply["seed"], reply["reproducible"]) == ("sprig", 5, "exact")
    assert engine.released == [f"{reply['id']}.0"]
    assert not engine.live


async def test_a_steps_delimiter_need_not_be_sent(http: httpx2.AsyncClient) -> None:
    """A step before another gets the model's delimiter; the last step is left as it is."""
    response = await scores(http, {"question": "Q", "steps": ["a", "b\n\n", "c"]})
    assert response["data"][0]["rewards"] == rewards("a\n\n", "b\n\n", "c")


async def test_many_share_what_they_have_in_common(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """Questions run side by side, one call per level; a step of two replies is read once."""
    items: list[dict[str, Any]] = [
        {"question": "Q", "steps": ["a", "b"]},
        {"question": "Q", "steps": ["a", "c", "d"]},
        {"messages": question("R"), "steps": ["a"]},
        {"messages": question("Q"), "steps": ["a", "b"]},
    ]
    response = await scores(http, {"items": items})
    rewards_by_reply = [row["rewards"] for row in response["data"]]
    assert [row["index"] for row in response["data"]] == [0, 1, 2, 3]
    assert rewards_by_reply == [
        rewards("a\n\n", "b"),
        rewards("a\n\n", "c\n\n", "d"),
        rewards("a"),
        rewards("a\n\n", "b"),
    ]
    calls = sorted([t.texts for t in call] for call in engine.scored)
    assert calls == [
        [("a",)],
        [("a\n\n",)],
        [("a\n\n", "b"), ("a\n\n", "c\n\n")],
        [("a\n\n", "c\n\n", "d")],
    ]
    nodes = [t.node for call in engine.scored for t in call]
    assert (
        len(set(nodes)) == 4
    )  # the larger tree's; the node of the other tree has one of these ids
    alone = [(await scores(http, item))["data"][0]["rewards"] for item in items]
    assert alone == rewards_by_reply


@pytest.mark.parametrize("path", ["/score", SCORE])
@pytest.mark.parametrize(
    ("texts", "replies"),
    [
        ({"text_1": "Q", "text_2": "a\n\nb"}, [["a\n\n", "b"]]),
        ({"text_1": "Q", "text_2": ["a\n\n\n\nb\n\n", " "]}, [["a\n\n", "b\n\n"], [" "]]),
        ({"text_1": ["Q", "R"], "text_2": ["a", "b"]}, [["a"], ["b"]]),
        ({"text_1": ["Q"], "text_2": ["a", "b", "c"]}, [["a"], ["b"], ["c"]]),
    ],
)
async def test_vllms_spelling(
    http: httpx2.AsyncClient, path: str, texts: dict[str, Any], replies: list[list[str]]
) -> None:
    """Questions and replies, one to one, one to many or in pairs; replies are split into steps."""
    response = (await http.post(path, json={"model": "sprig"} | texts)).json()
    assert [row["score"] for row in response["data"]] == [rewards(*steps)[-1] for steps in replies]
    assert [row["rewards"] for row in response["data"]] == [rewards(*steps) for steps in replies]
    assert response["usage"]["total_tokens"] == response["usage"]["prompt_tokens"] > 0


async def test_a_trees_steps_have_the_rewards_of_the_tree(http: httpx2.AsyncClient) -> None:
    """Scoring a search's steps again gives the same rewards, by the same path."""
    body = {"question": "Q", "search": {"policy": "beam", "width": 4, "seed": 3}}
    document = (await http.post("/v1/search", json=body)).json()
    nodes = {node["id"]: node for node in document["tree"]["nodes"]}
    items, expected = [], []
    for node in nodes.values():
        chain = [node]
        while chain[0]["parent"]:
            chain.insert(0, nodes[chain[0]["parent"]])
        items.append({"question": "Q", "steps": [step["text"] for step in chain]})
        expected.append([step["reward"] for step in chain])
    response = await scores(http, {"items": items})
    assert [row["rewards"] for row in response["data"]] == expected


@pytest.mark.parametrize("engine", [ScriptedEngine(outcome=True)])
async def test_an_outcome_models_score_is_the_whole_replys(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """Steps before the last have no reward; only whole replies are read, all in one call."""
    items = [{"question": "Q", "steps": ["a", "b"]}, {"question": "Q", "steps": ["c"]}]
    response = await scores(http, {"items": items})
    whole = [rewards("a\n\n", "b")[-1], rewards("c")[-1]]
    assert [row["score"] for row in response["data"]] == whole
    assert [row["rewards"] for row in response["data"]] == [[None, whole[0]], [whole[1]]]
    assert [len(call) for call in engine.scored] == [2]
    assert response["usage"]["prompt_tokens"] == len("user: Q\n" + "a\n\n" + "b" + "c")


@pytest.mark.parametrize(
    "engine", [ScriptedEngine(scores=False), ScriptedEngine(likelihood=True)], ids=["none", "odds"]
)
async def test_without_a_reward_model_it_is_said(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """No model to score with, or only log-probabilities of drawn steps: not worth a retry."""
    error = await refusal(http, SCORE, BODY)
    assert error["code"] == "no_reward_model"
    assert "--reward-model" in error["message"]
    assert engine.scored == []


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"question": "Q"}, None, "question and steps, or messages and steps, or items, or"),
        (BODY | {"items": [BODY]}, None, "got items, question, steps"),
        ({"items": []}, "items", "at least 1"),
        ({"items": [BODY, {"steps": ["a"]}]}, "items[1]", "got steps"),
        ({"items": [BODY | {"odd": 1}]}, "items[0].odd", "no such field"),
        ({"question": "Q", "steps": "a"}, "steps", "list"),
        ({"question": "Q", "steps": ["a", ""]}, "steps[1]", "at least 1 character"),
        ({"text_1": "Q"}, None, "got text_1"),
        ({"text_1": ["Q", "R"], "text_2": ["a"]}, "text_1", "got 2 for 1"),
        (BODY | {"seed": "5"}, "seed", "integer"),
        (BODY | {"deadline_ms": 0}, "deadline_ms", "greater than or equal to 1"),
        (BODY | {"truncate_prompt_tokens": 8}, "truncate_prompt_tokens", "not supported"),
        (BODY | {"use_activation": False}, "use_activation", "send True"),
        (BODY | {"model": "oak"}, "model", "does not exist"),
        ({"question": "Q", "steps": ["\ud800"]}, "steps[0]", "unicode"),
        ({"text_1": "Q", "text_2": ["b", "a" * 4096]}, "text_2[1]", "maximum context length"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx2.AsyncClient, engine: ScriptedEngine, body: dict[str, Any], param: str, words: str
) -> None:
    """The error has the field, its value and what is needed, before any read."""
    error = await refusal(http, SCORE, body, 404 if param == "model" else 400)
    assert error["param"] == param
    assert words in error["message"]
    assert "known are" not in error["message"]  # a search's fields, which no score has
    assert engine.scored == []


@pytest.mark.parametrize(
    ("body", "param"),
    [(BODY, "steps"), ({"items": [BODY]}, "items"), ({"text_1": "Q", "text_2": "a"}, "text_2")],
)
async def test_a_path_that_the_engine_has_no_room_for_is_named(
    http: httpx2.AsyncClient, engine: ScriptedEngine, body: dict[str, Any], param: str
) -> None:
    """The KV budget may be smaller than the context."""

    def no_room() -> None:
        raise PrefixTooLong("9 tokens exceed the KV budget of 8")

    engine.on_score = no_room
    error = await refusal(http, SCORE, body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "KV budget of 8" in error["message"]


LIMITS = {"max_width": 2, "max_depth": 3, "max_tree_tokens": 40, "max_prompt_tokens": 20}


@pytest.mark.parametrize("settings", [LIMITS], indirect=True)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [BODY, BODY, BODY]}, "items"),
        ({"text_1": "Q", "text_2": ["a", "b", "c"]}, "text_2"),
        ({"question": "Q", "steps": ["a", "b", "c", "d"]}, "steps"),
        ({"items": [BODY, {"question": "Q", "steps": ["a" * 37]}]}, "items[1].steps"),
        ({"question": "Q" * 20, "steps": ["a"]}, "question"),
        ({"messages": question("Q" * 20), "steps": ["a"]}, "messages"),
        ({"items": [BODY, {"question": "Q" * 20, "steps": ["a"]}]}, "items[1].question"),
        ({"text_1": "Q" * 20, "text_2": "a"}, "text_1"),
    ],
)
async def test_a_keys_limits_hold(
    http: httpx2.AsyncClient, body: dict[str, Any], param: str
) -> None:
    """The limits are those on a search's width, depth, tree and prompt."""
    error = await refusal(http, SCORE, body)
    assert error["param"] == param
    assert "at most" in error["message"]
    assert (await http.post(SCORE, json={"items": [BODY, BODY]})).status_code == 200


@pytest.mark.promise(
    "`/v1/score` charges its key for the tokens that it reads, and refuses a key that has none "
    "left."
)
@pytest.mark.parametrize("settings", [{"key_tokens_total": 10}], indirect=True)
async def test_what_is_read_is_the_keys(http: httpx2.AsyncClient) -> None:
    """Tokens read are booked as prompt; a key without tokens is refused before its body is read."""
    tokens = (await scores(http, BODY))["usage"]["total_tokens"]
    account = (await http.get("/v1/usage")).json()
    assert account["prompt_tokens"] == account["tokens_today"] == tokens
    assert (account["requests"], account["searches"], account["completion_tokens"]) == (1, 0, 0)
    error = await refusal(http, SCORE, BODY, 429)
    assert error["code"] == "insufficient_quota"
    metrics = (await http.get("/metrics")).text
    assert "hedgerow_scores_total 2.0" in metrics
    assert 'hedgerow_searches_total{policy="score",stop_reason="scored"} 1.0' in metrics


def stall_after(calls: int, engine: ScriptedEngine) -> None:
    """Let the engine answer this many calls to score, and hang in the next."""

    def stop() -> None:
        if len(engine.scored) == calls:
            engine.still = frozenset({"score"})

    engine.on_score = stop


@in_time
async def test_the_deadline_is_said_and_nothing_is_held(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """The answer is a 504 not to be retried; what was read by then is booked."""
    stall_after(1, engine)
    late = await http.post(SCORE, json=BODY | {"deadline_ms": 30})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert late.headers["x-should-retry"] == "false"
    assert len(engine.aborted) == 1
    account = (await http.get("/v1/usage")).json()
    assert account["prompt_tokens"] == len("user: Q\n" + "a\n\n")


@in_time
async def test_a_client_that_leaves_takes_its_work_along(
    app: FastAPI, engine: ScriptedEngine
) -> None:
    """The engine releases every tree; what was read is booked."""
    stall_after(1, engine)
    items = [BODY, {"question": "R", "steps": ["c", "d"]}]
    call = Call(app, SCORE, {"items": items})
    await engine.waiting.wait()
    call.disconnect.set()
    await call.task
    await app.state.service.runner.close()
    assert not call.complete
    assert len(engine.aborted) == 2
    account = app.state.service.quotas.account("anybody")
    assert account["prompt_tokens"] == len("user: Q\n" + "a\n\n" + "user: R\n" + "c\n\n")


class OneFails(ScriptedEngine):
    """Returns invalid rewards for the question R."""

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """Return rewards above 1 for R, else score as scripted."""
        if question == "R":
            return [2.0] * len(trajectories)
        return await super().score(tree, prompt, question, trajectories)


@pytest.mark.parametrize("engine", [OneFails(still=frozenset({"score"}))])
@in_time
async def test_one_questions_fault_ends_all_of_its_request(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """The engine's other work for the request is aborted."""
    error = await refusal(http, SCORE, {"items": [BODY, {"question": "R", "steps": ["a"]}]}, 500)
    assert error["code"] == "reward_missing"
    assert len(engine.aborted) == 2
    assert len(asyncio.all_tasks()) == 1  # only this test
