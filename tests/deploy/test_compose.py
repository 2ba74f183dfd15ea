"""The compose files: valid by Compose's own schema, and what they wire together exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.settings import Settings
from tests.deploy.tools import ROOT, debian, python_tools

DEPLOY = ROOT / "deploy"
FILES = ("compose.yaml", "compose.cpu.yaml")
CHECK = """
import json, sys, jsonschema, yaml
schema = json.load(open(sys.argv[1]))
jsonschema.validate(json.loads(sys.argv[2]), schema)
"""


def read(name: str) -> dict[str, Any]:
    """A file with its variables at their defaults; Grafana's password has none."""
    text = (DEPLOY / name).read_text()
    assert "${GRAFANA_PASSWORD:?" in text
    text = re.sub(r"\$\{GRAFANA_PASSWORD:\?[^}]*\}", "secret", text)
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", r"\2", text)
    text = re.sub(r"\$\{MODELS[^}]*\}", "/srv/models", text)
    assert "${" not in text
    return yaml.safe_load(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_file_is_valid_compose(name: str) -> None:
    """By the schema in Debian's docker-compose."""
    folder = debian("docker-compose") / "usr/lib/python3/dist-packages/compose/config"
    python = python_tools() / "python"
    document = read(name)
    del document["name"]  # newer than that schema
    text = json.dumps(document)
    command = [python, "-c", CHECK, folder / "compose_spec.json", text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", FILES)
def test_what_is_mounted_is_there(name: str) -> None:
    """Every file of ours that a service mounts."""
    for service in read(name)["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith("./") or (DEPLOY / source).exists(), source


@pytest.mark.parametrize("name", FILES)
def test_prometheus_finds_its_targets_and_grafana_prometheus(name: str) -> None:
    """Host names are services, on a network that both are on."""
    services = read(name)["services"]
    hosts = {("prometheus", 9090, "grafana")}
    mounted = str(services["prometheus"]["volumes"])
    for targets in (DEPLOY / "prometheus" / "targets").iterdir():
        if targets.name in mounted or "/targets:/" in mounted:
            for group in yaml.safe_load(targets.read_text()):
                for target in group["targets"]:
                    host, port = target.split(":")
                    hosts.add((host, int(port), "prometheus"))
    assert len(hosts) == (4 if name == "compose.yaml" else 2)
    for host, _, asker in hosts:
        ours, theirs = (services[s].get("networks", ["default"]) for s in (host, asker))
        assert set(ours) & set(theirs), f"{asker} cannot reach {host}"


@pytest.mark.parametrize("name", FILES)
def test_hedgerow_is_started_with_what_it_knows(name: str) -> None:
    """Its variables are settings, its switches switches, its grace outlasts its drain."""
    hedgerow = read(name)["services"]["hedgerow"]
    given = {k.removeprefix("HEDGEROW_").lower(): v for k, v in hedgerow["environment"].items()}
    assert given.keys() <= Settings.model_fields.keys()
    grace = int(hedgerow["stop_grace_period"].removesuffix("s"))
    assert grace > given["drain_seconds"]
    help_text = subprocess.run(
        [sys.executable, "-m", "cli", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"COLUMNS": "200", "PATH": "", "PYTHONPATH": str(ROOT)},
    ).stdout
    for word in hedgerow.get("command", [])[1:]:
        assert word.partition("=")[0] in help_text, word


@pytest.mark.parametrize("name", FILES)
def test_only_this_machine_is_let_in_and_sglang_by_nobody(name: str) -> None:
    """Ports are published on loopback; SGLang's servers have none and an inner network."""
    document = read(name)
    for service in document["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert service.get("restart") == "unless-stopped"
    if name == "compose.yaml":
        for model in ("sglang-policy", "sglang-prm"):
            assert document["services"][model]["networks"] == ["engines"]
            assert "ports" not in document["services"][model]
        assert document["networks"]["engines"]["internal"] is True


def test_pictures_are_pinned_and_the_same_in_both() -> None:
    """No image floats."""
    one, other = (read(name)["services"] for name in FILES)
    for services in (one, other):
        for service in services.values():
            assert re.search(r":(v?\d+\.\d+\.\d+|cpu|gpu)$", service["image"])
    for name in ("prometheus", "grafana"):
        assert one[name]["image"] == other[name]["image"]
        assert Path(DEPLOY / name).is_dir()
