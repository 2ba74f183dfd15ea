"""The dashboard: every panel asks a question that a real Prometheus over a real server answers."""

from __future__ import annotations

import json
import math
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from models.tasks import TASKS
from tests.deploy.tools import ROOT, debian_tool
from tests.server.test_process import Server

GRAFANA = ROOT / "deploy" / "grafana"
BOARD = json.loads((GRAFANA / "dashboards" / "hedgerow.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def free_port() -> int:
    """A port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_board_has_its_rows_and_says_what_panels_mean() -> None:
    """Rows for users, search, KV and engine; a description and a query in each panel."""
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Users", "Search", "KV", "Engine"]
    assert all(panel["description"] and panel["targets"] for panel in PANELS)
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_what_is_provisioned_is_what_the_board_asks() -> None:
    """The data source has the id that the panels name; the board is where Grafana looks for it."""
    folder = GRAFANA / "provisioning"
    [source] = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    uids = {panel["datasource"]["uid"] for panel in PANELS}
    uids |= {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
    assert uids == {source["uid"]}
    [provider] = yaml.safe_load((folder / "dashboards" / "hedgerow.yaml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


class Prometheus:
    """A real Prometheus on a free port of this machine that scrapes one target every second."""

    def __init__(self, folder: Path, target: str) -> None:
        rules = ROOT / "deploy" / "prometheus" / "rules.yaml"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "hedgerow", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        port = free_port()
        command = [
            debian_tool("prometheus", "prometheus"),
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        while not self._ready():
            assert self.process.poll() is None, (folder / "log").read_text()

    def _ready(self) -> bool:
        try:
            return self.http.get("/-/ready").is_success
        except httpx2.ConnectError:
            return False

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of an expression."""
        reply = self.http.post("/api/v1/query", data={"query": expression}).json()
        assert reply["status"] == "success", f"{expression}: {reply}"
        return reply["data"]["result"]

    def until(self, expression: str) -> None:
        """Repeat the query until it returns a sample."""
        while not self.ask(expression):
            pass

    def close(self) -> None:
        """Stop the process."""
        self.http.close()
        self.process.terminate()
        self.process.wait(timeout=30)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server with so little KV that searches compete for it."""
    running = Server(kv_tokens="900", threads="1")
    yield running
    running.stop()


@pytest.fixture
def prometheus(server: Server, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the server."""
    running = Prometheus(tmp_path, server.url.removeprefix("http://"))
    yield running
    running.close()


def load(url: str, seed: int) -> None:
    """Send a little of everything: searches by two policies, a plain reply, a refused request."""
    question = TASKS["game24"].questions("dev", 2)[seed % 2]
    body = {"model": "sprig", "messages": [{"role": "user", "content": question}], "seed": seed}
    with httpx2.Client(base_url=url, timeout=120) as http:
        for search in ({"policy": "rebase", "width": 8}, {"policy": "ets", "width": 8}):
            http.post("/v1/chat/completions", json=body | {"search": search}).raise_for_status()
        http.post("/v1/chat/completions", json=body | {"max_tokens": 8}).raise_for_status()
        assert http.get("/admin/usage").status_code == httpx2.codes.NOT_FOUND


@pytest.mark.slow
def test_every_panel_has_data(server: Server, prometheus: Prometheus) -> None:
    """After two scrapes under load each query of each panel returns a finite number."""
    total = "sum(hedgerow_searches_total)"
    load(server.url, 1)
    prometheus.until(f"{total} == 3")
    load(server.url, 2)
    prometheus.until(f"{total} == 6")
    prometheus.until("instance_policy:hedgerow_policy_seconds:ratio5m")
    silent = {}
    for panel in PANELS:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
            samples = prometheus.ask(query)
            if not any(math.isfinite(float(sample["value"][1])) for sample in samples):
                silent[panel["title"]] = query
    assert silent == {}
    assert prometheus.ask('ALERTS{alertname="HedgerowEngineDown"}') == []
