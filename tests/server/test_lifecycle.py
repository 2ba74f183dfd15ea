"""The server's process from the first signal to the last line of its log."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from cli.main import app as command
from server.api_errors import request_id
from server.lifecycle import JsonLines, TextLines
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import Call, question
from tests.server.test_process import QUESTION, Server

CHAT = "/v1/chat/completions"
WIDE = {
    "model": "sprig",
    "messages": [{"role": "user", "content": QUESTION}],
    "search": {"width": 128, "seed": 1},
    "stream": True,
}


def in_flight(http: httpx2.Client) -> bool:
    """Return whether a search is under way."""
    return 'hedgerow_searches_in_flight{policy="rebase"} 1.0' in http.get("/metrics").text


@pytest.mark.promise(
    "The server drains at the first signal: running requests finish, and new ones get a 503 that "
    "says when to retry."
)
@pytest.mark.slow
def test_the_first_signal_drains() -> None:
    """Running requests finish, new ones are told to go elsewhere, readiness turns red, health does
    not; then the server exits with status 0. Its log is JSON, every line of a request has its id,
    and none holds the prompt."""
    server = Server(log_format="json", drain_seconds="120")
    with httpx2.Client(base_url=server.url, timeout=120) as http:
        name = {"x-request-id": "the-wide-one"}
        with http.stream("POST", CHAT, json=WIDE, headers=name) as stream:
            lines = stream.iter_lines()
            next(lines)
            with httpx2.Client(base_url=server.url, timeout=120) as probe:
                while not in_flight(probe):
                    pass
                server.process.send_signal(signal.SIGTERM)
                _until_draining(server.url)
                assert probe.get("/ready").json()["error"]["code"] == "shutting_down"
                assert probe.get("/health").status_code == 200
                answer = probe.post(CHAT, json=WIDE)
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "shutting_down"
                assert int(answer.headers["retry-after"]) > 0
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.wait() == 0
    log = [json.loads(line) for line in server.log]
    (access_line,) = [line for line in log if line.get("request_id") == "the-wide-one"]
    assert (access_line["route"], access_line["status"]) == (CHAT, 200)
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in log)
    assert QUESTION not in "".join(server.log)


@pytest.mark.promise(
    "A second signal ends the server, its streams and its engine, and so does a drain that takes "
    "too long, with an error in each stream."
)
@pytest.mark.slow
@pytest.mark.parametrize("twice", [True, False])
def test_nobody_is_left_without_an_end(twice: bool) -> None:
    """A second signal ends the server and its engine at once. Where a drain takes too long, the
    stream ends with an error event and a cut body."""
    server = Server(drain_seconds="120" if twice else "1")
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    blocks = {"role": "user", "content": "Blocks c d a b. Reach b d c a in 10 moves."}
    body = WIDE | {"messages": [blocks], "search": {"width": 1024, "seed": 1}}
    received: list[str] = []
    cut = False
    with (
        httpx2.Client(base_url=server.url, timeout=120) as http,
        http.stream("POST", CHAT, json=body) as stream,
    ):
        try:
            for line in stream.iter_lines():
                if not received:
                    server.process.send_signal(signal.SIGTERM)
                    _until_draining(server.url)
                    if twice:
                        server.process.send_signal(signal.SIGTERM)
                received.append(line)
        except httpx2.HTTPError:
            cut = True
    assert cut
    assert server.wait() == (-signal.SIGTERM if twice else 0)
    assert any("shutting_down" in line for line in received) is not twice
    assert "data: [DONE]" not in received
    deadline = time.monotonic() + 30
    while any(alive(int(pid)) for pid in children.split()):
        assert time.monotonic() < deadline, "the engine's process is still there"
        time.sleep(0.05)


def _until_draining(url: str) -> None:
    with httpx2.Client(base_url=url, timeout=60) as http:
        while http.get("/ready").status_code == 200:
            pass


def alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def test_a_request_that_ran_long_is_not_tried_again_by_itself(
    app: FastAPI, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI's clients repeat a 5xx twice; after a long search the response forbids that."""
    now = 0.0
    monkeypatch.setattr("server.middleware.time.monotonic", lambda: now)

    def fail() -> None:
        nonlocal now
        now += 60.0
        engine.down = True

    engine.on_expand = fail
    body = {"model": "sprig", "messages": question(), "search": {"width": 2}}
    slow = Call(app, CHAT, body)
    await slow.task
    quick = Call(app, CHAT, body)
    await quick.task
    for call, retry in ((slow, False), (quick, True)):
        assert call.messages[0]["status"] == 503
        assert ((b"x-should-retry", b"false") in call.messages[0]["headers"]) is not retry


def test_lines_carry_the_request_they_belong_to() -> None:
    """The id is in brackets in text, ``request_id`` in JSON, and left out outside of requests."""
    record = logging.LogRecord("hedgerow.x", logging.INFO, "", 0, "said %s", ("it",), None)
    record.fields = {"status": 200}
    assert TextLines().format(record).endswith("INFO hedgerow.x: said it")
    token = request_id.set("abc")
    assert TextLines().format(record).endswith("INFO hedgerow.x [abc]: said it")
    line = json.loads(JsonLines().format(record))
    request_id.reset(token)
    assert (line["request_id"], line["message"], line["status"]) == ("abc", "said it", 200)


@pytest.mark.parametrize(
    ("settings", "count"), [({}, 0), ({"log_prompts": True}, 3)], indirect=["settings"]
)
async def test_prompts_are_logged_only_if_the_operator_asks(
    http: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """The setting covers prompts of chats, texts and searches."""
    caplog.set_level("DEBUG")
    await http.post(CHAT, json={"model": "sprig", "messages": question("pssst")})
    await http.post("/v1/completions", json={"model": "sprig", "prompt": "pssst"})
    await http.post("/v1/search", json={"question": "pssst", "search": {"width": 2}})
    records = [r for r in caplog.records if "pssst" in str(vars(r))]
    assert len(records) == count


async def test_errors_name_their_request(http: httpx2.AsyncClient) -> None:
    """The id is in the body as in the header, so a screenshot is enough."""
    answer = await http.get("/nope", headers={"x-request-id": "abc-1"})
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"] == "abc-1"


@pytest.mark.parametrize("settings", [{"root_path": "/tree"}], indirect=True)
@pytest.mark.parametrize("stripped", [True, False])
async def test_a_proxy_may_strip_the_root_path_or_not(
    http: httpx2.AsyncClient, stripped: bool
) -> None:
    """Routes are matched and checked with and without the prefix."""
    prefix = "" if stripped else "/tree"
    assert (await http.get(f"{prefix}/health")).status_code == 200
    body = {"model": "sprig", "messages": question()}
    assert (await http.post(f"{prefix}{CHAT}", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("environ", "status", "words"),
    [
        ({"HEDGEROW_API_KEYS": "ann:hush"}, 0, "keys: ann"),
        ({"HEDGEROW_PROFILE": "oak"}, 2, "HEDGEROW_PROFILE = 'oak'"),
        ({"HEDGEROW_REWARD_FORMAT": "stars"}, 2, "stars"),
        ({"HEDGEROW_API_KEYS": "hush"}, 2, "HEDGEROW_API_KEYS"),
        ({"HEDGEROW_PORT": "x"}, 2, "HEDGEROW_PORT"),
        ({"HEDGEROW_VERIFIER": "json:dumps"}, 0, "json:dumps"),
        ({"HEDGEROW_VERIFIER": "json:dump_it"}, 2, "'json:dump_it' does not start: AttributeError"),
        ({"HEDGEROW_VERIFIER": "no.such:one"}, 2, "does not start: ModuleNotFoundError"),
        ({"HEDGEROW_VERIFIER": "http://127.0.0.1:9/"}, 0, "http://127.0.0.1:9/"),
    ],
)
def test_config_check_says_what_a_start_would(
    environ: dict[str, str], status: int, words: str
) -> None:
    """Exit 0 and every setting, or exit 2 and one clear line; secrets are hidden."""
    unset = {name: None for name in os.environ if name.startswith("HEDGEROW_")}
    invocation = CliRunner(env=unset).invoke(command, ["config", "check"], env=environ)
    assert invocation.exit_code == status, invocation.output
    assert words in invocation.output
    assert "hush" not in invocation.output
