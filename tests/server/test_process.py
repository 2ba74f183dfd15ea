"""The server's own process with the bundled models, and the command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from openai import APIConnectionError, APITimeoutError, OpenAI

from loadtest.served import Served, samples
from models.tasks import TASKS
from server.lifecycle import listen
from server.settings import SettingsError

QUESTION = TASKS["game24"].questions("dev", 1)[0]
COMMAND = [sys.executable, "-m", "cli"]
MESSAGES = [{"role": "user", "content": QUESTION}]
SEARCH = {"model": "sprig", "messages": MESSAGES, "search": {"width": 2, "seed": 11}}


def test_the_listening_socket_answers_at_once() -> None:
    """The socket's protocol is TCP, so that small writes are sent without waiting 40 ms."""
    with listen("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"cannot listen on 127.0.0.1:{port}: "):
            listen("127.0.0.1", port)


class Server(Served):
    """A server process that keeps its log; ``words`` are further command-line words."""

    def __init__(self, *words: str, **settings: str) -> None:
        self.log: list[str] = []
        if "engine" not in settings:
            settings = {"threads": "1"} | settings  # more would wait for cores
        super().__init__(*words, on_line=self.log.append, **settings)

    def stop(self) -> int:
        """Send SIGTERM and wait; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait for the exit and the whole log; return the exit status."""
        status = self.process.wait(timeout=120)
        self._reader.join()
        return status


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One process for all tests of this file."""
    running = Server()
    yield running
    if running.process.poll() is None:
        running.stop()


@pytest.fixture
def http(server: Server) -> Iterator[httpx2.Client]:
    """A plain HTTP client of the server."""
    with httpx2.Client(base_url=server.url, timeout=120) as client:
        yield client


def metric(http: httpx2.Client, name: str, **labels: str) -> float:
    """Return a sample of /metrics; 0 for labels that have not been seen yet."""
    rows = samples(http.get("/metrics").text)
    return next((row.value for row in rows if (row.name, row.labels) == (name, labels)), 0.0)


def until(http: httpx2.Client, name: str, value: float, **labels: str) -> None:
    """Poll a sample until it has this value."""
    while metric(http, name, **labels) != value:
        pass


def test_the_openai_client_searches(server: Server) -> None:
    """The reply is a derivation with its answer; the same seed gives the same tree."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)

    def run_search() -> dict:
        completion = client.chat.completions.create(
            model="sprig",
            messages=[{"role": "user", "content": QUESTION}],
            extra_body={"search": SEARCH["search"]},
        )
        assert completion.choices[0].message.content
        return (completion.model_extra or {})["search"]

    first = run_search()
    assert first["tree_digest"] == run_search()["tree_digest"]
    assert first["stats"]["engine"]["decoded_tokens"] > 0
    assert first["stats"]["finished"] <= 2


def test_health_stays_quick_while_the_engine_works(http: httpx2.Client) -> None:
    """Health, readiness and metrics answer while a wide search is under way."""
    body = SEARCH | {"search": {"width": 256}, "stream": True}
    with (
        httpx2.Client(base_url=http.base_url) as probe,
        http.stream("POST", "/v1/chat/completions", json=body),
    ):
        until(probe, "hedgerow_searches_in_flight", 1, policy="rebase")
        for path in ("/health", "/ready", "/metrics"):
            assert probe.get(path).status_code == 200
        assert metric(probe, "hedgerow_searches_in_flight", policy="rebase") == 1


def test_clients_that_leave_hold_no_kv(server: Server, http: httpx2.Client) -> None:
    """Plain and streamed clients give up at once; the trees are aborted, no KV stays active."""
    impatient = OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=0.2)
    before = metric(http, "hedgerow_disconnects_total")
    for _ in range(3):
        with pytest.raises((APITimeoutError, APIConnectionError)):
            impatient.chat.completions.create(
                model="sprig",
                messages=[{"role": "user", "content": QUESTION}],
                extra_body={"search": {"width": 256}},
            )
    body = SEARCH | {"search": {"width": 256}, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as stream:
        next(stream.iter_lines())
    until(http, "hedgerow_searches_in_flight", 0, policy="rebase")
    until(http, "hedgerow_kv_tokens", 0, served="sprig", model="policy", state="active")
    until(http, "hedgerow_kv_tokens", 0, served="sprig", model="reward", state="active")
    assert metric(http, "hedgerow_disconnects_total") == before + 4
    assert http.post("/v1/chat/completions", json=SEARCH).status_code == 200


def test_streams_whose_clients_close_at_once_do_not_go_on(
    server: Server, http: httpx2.Client
) -> None:
    """Twenty clients send the request and close at once: each search is cancelled, begun or not,
    and none ends otherwise. The log has no unretrieved exception."""
    address = http.base_url.host, http.base_url.port
    search = {"policy": "rebase", "width": 64, "trajectory_tokens": 300}
    content = json.dumps({"question": QUESTION, "stream": True, "search": search}).encode()
    head = f"POST /v1/search HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    head += "content-type: application/json\r\n\r\n"

    def counts() -> dict[str, float]:
        return {
            str(row.labels): row.value
            for row in samples(http.get("/metrics").text)
            if row.name == "hedgerow_searches_total" and row.labels["stop_reason"] != "cancelled"
        }

    before, disconnects = counts(), metric(http, "hedgerow_disconnects_total")
    for _ in range(20):
        with socket.create_connection(address) as client:
            client.sendall(head.encode() + content)
    until(http, "hedgerow_disconnects_total", disconnects + 20)
    until(http, "hedgerow_searches_in_flight", 0, policy="rebase")
    until(http, "hedgerow_kv_tokens", 0, served="sprig", model="policy", state="active")
    assert metric(http, "hedgerow_requests_waiting") == 0
    assert counts() == before
    assert "never retrieved" not in "".join(server.log)


def test_solve_and_replay_over_http(server: Server, http: httpx2.Client, tmp_path: Path) -> None:
    """``--url`` uses the running server, and its chat responses replay."""
    process = subprocess.run(
        [*COMMAND, "solve", QUESTION, "--width", "2", "--seed", "5", "--json", "--url", server.url],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(process.stdout)["seed"] == 5
    record = tmp_path / "chat.json"
    record.write_bytes(http.post("/v1/chat/completions", json=SEARCH).content)
    command = [*COMMAND, "replay", str(record), "--url", server.url]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_killed_engine_is_told_and_comes_back(server: Server, http: httpx2.Client) -> None:
    """A waiting request gets a 503; soon the server is ready again and answers as before."""
    before = http.post("/v1/chat/completions", json=SEARCH).json()["search"]["tree_digest"]
    with ThreadPoolExecutor(1) as pool:
        wide = SEARCH | {"search": {"width": 256}}
        waiting = pool.submit(http.post, "/v1/chat/completions", json=wide)
        until(http, "hedgerow_searches_in_flight", 1, policy="rebase")
        os.kill(server.engine, signal.SIGKILL)
        answer = waiting.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"
    while http.get("/ready").status_code != 200:
        assert http.get("/health").status_code == 200
    after = http.post("/v1/chat/completions", json=SEARCH).json()["search"]["tree_digest"]
    assert after == before
    assert metric(http, "hedgerow_engine_restarts_total", served="sprig") == 1


def test_a_signal_ends_the_server_in_good_order(server: Server) -> None:
    """The exit status is 0 and the log has no traceback."""
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.log)
