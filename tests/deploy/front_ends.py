"""Front ends behind a real nginx with ``deploy/nginx/hedgerow.conf``, and what they survive."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

import httpx2
import pytest

from models.tasks import TASKS
from tests.deploy.test_grafana import free_port
from tests.deploy.tools import ROOT, debian_tool
from tests.server.test_process import Server, metric

CONF = ROOT / "deploy" / "nginx" / "hedgerow.conf"
SEARCH = "/v1/search"
QUESTION = TASKS["blocksworld"].questions("dev", 1)[0]
SHORT = {"question": QUESTION, "search": {"policy": "rebase", "width": 2, "seed": 5}}
LONG = {"question": QUESTION, "search": {"policy": "rebase", "width": 32, "seed": 5}}

Pause = Callable[[Server], AbstractContextManager[None]]


@contextmanager
def front_ends(*settings: Mapping[str, str]) -> Iterator[list[Server]]:
    """Start one front end for each of ``settings``; kill those that still run at the end."""
    with ThreadPoolExecutor(len(settings)) as pool:
        running = list(pool.map(lambda each: Server(**each), settings))
    try:
        yield running
    finally:
        for front in running:
            if front.process.poll() is None:
                front.process.kill()
            front.wait()


class Nginx:
    """An nginx on a free port before two front ends; use it as a context manager."""

    def __init__(self, folder: Path, fronts: list[Server]) -> None:
        program = debian_tool("nginx", "nginx")
        port = free_port()
        text = CONF.read_text().replace("listen 8000;", f"listen 127.0.0.1:{port};")
        for address, front in zip(("127.0.0.1:8001", "127.0.0.1:8002"), fronts, strict=True):
            assert address in text
            text = text.replace(address, front.url.removeprefix("http://"))
        (folder / "hedgerow.conf").write_text(text)
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = "".join(f"{kind}_temp_path {folder / kind};\n" for kind in kinds)
        (folder / "nginx.conf").write_text(
            f"daemon off;\nuser root;\npid {folder / 'pid'};\nerror_log {folder / 'log'};\n"
            "events {}\nhttp {\naccess_log off;\n"
            f"{paths}include {folder / 'hedgerow.conf'};\n}}\n"
        )
        command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
        self.process = subprocess.Popen(command)
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=240)
        while not self._listens():
            assert self.process.poll() is None, "nginx did not start"

    def _listens(self) -> bool:
        try:
            return self.http.get("/health").is_success
        except httpx2.ConnectError:
            return False

    def search(self, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        """Run a search and return its document."""
        answer = self.http.post(SEARCH, json=body, headers=headers)
        assert answer.status_code == httpx2.codes.OK, answer.text
        return answer.json()

    def stream(
        self, body: dict[str, Any], headers: dict[str, str]
    ) -> AbstractContextManager[httpx2.Response]:
        """Start a search and return the response that streams its events."""
        return self.http.stream("POST", SEARCH, json=body | {"stream": True}, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(timeout=30)


def metric_of(front: Server, name: str, **labels: str) -> float:
    """The value of one metric of a front end."""
    with httpx2.Client(base_url=front.url, timeout=120) as http:
        return metric(http, name, **labels)


def busy(front: Server) -> float:
    """The number of searches that a front end is running."""
    return metric_of(front, "hedgerow_searches_in_flight", policy="rebase")


def callers(nginx: Nginx, fronts: list[Server]) -> list[dict[str, str]]:
    """For each front end, the headers of a caller that nginx always sends there."""
    headers_by_front: dict[int, dict[str, str]] = {}
    route = {"route": "/v1/models", "status": "200"}

    def request_counts() -> list[float]:
        return [metric_of(front, "hedgerow_request_seconds_count", **route) for front in fronts]

    for number in count():
        headers = {"authorization": f"Bearer key-{number}"}
        before = request_counts()
        for _ in range(3):
            nginx.http.get("/v1/models", headers=headers).raise_for_status()
        while sum(after := request_counts()) < sum(before) + 3:
            pass  # a request is counted once its answer has gone
        counts = [late - early for early, late in zip(before, after, strict=True)]
        assert sorted(counts) == [0, 3]
        headers_by_front[counts.index(3)] = headers
        if len(headers_by_front) == 2:
            return [headers_by_front[0], headers_by_front[1]]
    raise AssertionError


def until_expanded(lines: Iterator[str]) -> None:
    """Read a stream of events up to the first ``expanded``."""
    assert any(line == "event: expanded" for line in lines)


def outlive(
    nginx: Nginx, fronts: list[Server], pause: Pause
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check streams, a client that leaves and a killed front end: only its streams are lost.

    While a front end is paused its searches cannot end. Returns the documents of one search grown
    twice: streamed by the front end that stays, and requested from the other, which is killed.
    """
    mine, theirs = callers(nginx, fronts)
    assert nginx.http.get("/metrics").status_code == httpx2.codes.NOT_FOUND

    # Any caller finds a stored search again: its id names the front end. A wrong name finds none.
    url = f"{SEARCH}/{nginx.search(SHORT, mine)['id']}"
    assert nginx.http.get(url, headers=mine).is_success
    assert url.endswith("-a")
    assert nginx.http.get(url, headers=theirs).json()["id"] == url.rpartition("/")[2]
    branch = {"node": 0, "search": {"width": 2}}
    assert nginx.http.post(f"{url}/branch", json=branch, headers=theirs).is_success
    assert nginx.http.get(f"{url[:-1]}b", headers=mine).status_code == httpx2.codes.NOT_FOUND

    # Events arrive while the search runs; when the client leaves, the search is cancelled.
    with nginx.stream(LONG, mine) as stream:
        lines = stream.iter_lines()  # kept alive: the stream closes with its iterator
        until_expanded(lines)
        with pause(fronts[0]):
            under_way = busy(fronts[0]), busy(fronts[1])
            assert under_way == (1, 0), under_way
            stream.close()
            while not metric_of(fronts[0], "hedgerow_disconnects_total"):
                pass
    while busy(fronts[0]):
        pass

    with ThreadPoolExecutor(1) as pool, ExitStack() as streams:
        event_lines: list[Iterator[str]] = []
        with ExitStack() as paused:
            for front, headers in zip(fronts, (mine, theirs), strict=True):
                event_lines.append(streams.enter_context(nginx.stream(LONG, headers)).iter_lines())
                until_expanded(event_lines[-1])
                paused.enter_context(pause(front))
            waiting = pool.submit(nginx.search, LONG, mine)
            while busy(fronts[0]) < 2:
                assert not waiting.done()
            assert (busy(fronts[0]), busy(fronts[1])) == (2, 1)
            fronts[0].process.kill()
        with pytest.raises(httpx2.RemoteProtocolError):
            list(event_lines[0])
        rest = [line for line in event_lines[1] if line]
        document = waiting.result()
    assert "event: error" not in rest
    assert rest[-2] == "event: done"
    done_event = json.loads(rest[-1].removeprefix("data: "))
    assert nginx.http.get("/v1/models", headers=mine).is_success  # its callers have moved
    streamed = nginx.http.get(f"{SEARCH}/{done_event['id']}", headers=theirs)
    return streamed.raise_for_status().json(), document
