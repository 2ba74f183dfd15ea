"""The compose files: valid by Compose's own schema, and all that they refer to exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from models.catalog import public_policies, public_reward_models
from server.settings import Settings
from tests.deploy.tools import ROOT, debian, python_tools

DEPLOY = ROOT / "deploy"
FILES = ("compose.yaml", "compose.cpu.yaml", "compose.vllm.yaml")
GIVEN = {"GRAFANA_PASSWORD": "secret", "HEDGEROW_POLICY_MODEL": "Qwen/Qwen2.5-Math-1.5B-Instruct"}
PASSED_TO_THE_HUB = {"HF_TOKEN", "HF_HUB_OFFLINE"}
CHECK = """
import json, sys, jsonschema, yaml
schema = json.load(open(sys.argv[1]))
jsonschema.validate(json.loads(sys.argv[2]), schema)
"""


def compose_file(name: str) -> dict[str, Any]:
    """A compose file with its variables at their defaults, or as in ``GIVEN`` if they have none."""
    text = (DEPLOY / name).read_text()
    assert "${GRAFANA_PASSWORD:?" in text
    text = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda match: GIVEN[match[1]], text)
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", r"\2", text)
    assert "${" not in text
    return yaml.safe_load(text)


def variables(name: str) -> dict[str, str]:
    """The environment variables of a file's Hedgerow service that have a value."""
    environment = compose_file(name)["services"]["hedgerow"]["environment"]
    return {key: str(value) for key, value in environment.items() if value not in (None, "")}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_file_is_valid_compose(name: str) -> None:
    """The file passes the schema in Debian's docker-compose."""
    folder = debian("docker-compose") / "usr/lib/python3/dist-packages/compose/config"
    python = python_tools() / "python"
    document = compose_file(name)
    del document["name"]  # newer than that schema
    text = json.dumps(document)
    command = [python, "-c", CHECK, folder / "compose_spec.json", text]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("name", FILES)
def test_what_is_mounted_is_there(name: str) -> None:
    """Every local file that a service mounts exists."""
    for service in compose_file(name)["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith("./") or (DEPLOY / source).exists(), source


@pytest.mark.parametrize("name", FILES)
def test_prometheus_finds_its_targets_and_grafana_prometheus(name: str) -> None:
    """Host names are services, on a network that both sides share."""
    services = compose_file(name)["services"]
    hosts = {("prometheus", 9090, "grafana")}
    mounted = str(services["prometheus"]["volumes"])
    for targets in (DEPLOY / "prometheus" / "targets").iterdir():
        if targets.name in mounted or "/targets:/" in mounted:
            for group in yaml.safe_load(targets.read_text()):
                for target in group["targets"]:
                    host, port = target.split(":")
                    hosts.add((host, int(port), "prometheus"))
    assert len(hosts) == 2
    for host, _, asker in hosts:
        ours, theirs = (services[s].get("networks", ["default"]) for s in (host, asker))
        assert set(ours) & set(theirs), f"{asker} cannot reach {host}"


@pytest.mark.parametrize("name", FILES)
def test_hedgerow_is_started_with_what_it_knows(name: str) -> None:
    """Its variables are settings, its flags exist, and its grace period outlasts its drain."""
    hedgerow = compose_file(name)["services"]["hedgerow"]
    names = hedgerow["environment"].keys() - PASSED_TO_THE_HUB
    assert {key.removeprefix("HEDGEROW_").lower() for key in names} <= Settings.model_fields.keys()
    grace = int(hedgerow["stop_grace_period"].removesuffix("s"))
    assert grace > int(variables(name)["HEDGEROW_DRAIN_SECONDS"])
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
def test_only_this_machine_is_let_in(name: str) -> None:
    """Ports are published on loopback; SGLang's servers listen in Hedgerow's container alone."""
    for service in compose_file(name)["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert service.get("restart") == "unless-stopped"


@pytest.mark.parametrize("name", FILES)
def test_the_engines_kernel_can_be_loaded(name: str) -> None:
    """/tmp is mounted with exec, which is not tmpfs's default; nothing else can be written."""
    hedgerow = compose_file(name)["services"]["hedgerow"]
    assert hedgerow["read_only"]
    assert hedgerow["tmpfs"] == ["/tmp:exec"]


def test_the_example_of_env_names_what_the_file_takes() -> None:
    """.env.example names only variables of compose.yaml (some commented out), and all required."""
    example = (DEPLOY / ".env.example").read_text()
    names = set(re.findall(r"^(?:# )?([A-Z_]+)=", example, re.M))
    text = (DEPLOY / "compose.yaml").read_text()
    assert names <= set(re.findall(r"([A-Z][A-Z_]+)(?=:[-?]|:$)", text, re.M))
    assert set(re.findall(r"\$\{(\w+):\?", text)) <= names


def test_the_models_of_the_example_are_known() -> None:
    """The catalogue knows them, so that their profile and reward format need not be named."""
    example = (DEPLOY / ".env.example").read_text()
    policy, reward = re.findall(r"^HEDGEROW_\w+_MODEL=(\S+)$", example, re.M)
    assert policy == GIVEN["HEDGEROW_POLICY_MODEL"]
    assert any(policy in row.names for row in public_policies())
    assert any(reward in row.names for row in public_reward_models())


def test_pictures_are_pinned_and_the_same_in_all() -> None:
    """Every image has a full version."""
    all_services = [compose_file(name)["services"] for name in FILES]
    for services in all_services:
        for service in services.values():
            assert re.search(r":(v?\d+\.\d+\.\d+|cpu|gpu)$", service["image"])
    for name in ("prometheus", "grafana"):
        assert len({services[name]["image"] for services in all_services}) == 1
        assert Path(DEPLOY / name).is_dir()


def test_vllm_is_the_one_that_is_tried() -> None:
    """Hedgerow's URLs point to the file's servers; these have the version that the tests run, and
    serve the model whose tokenizer Hedgerow reads."""
    services = compose_file("compose.vllm.yaml")["services"]
    version = re.search(r"^VLLM \?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert version is not None
    command = services["hedgerow"]["command"]
    for what in ("policy", "reward"):
        server = services[f"vllm-{what}"]
        assert server["image"] == f"vllm/vllm-openai:v{version[1]}"
        assert f"--{what}-url=http://vllm-{what}:8000" in command
        model = services["hedgerow"]["environment"][f"HEDGEROW_{what.upper()}_MODEL"]
        assert f"--model={model}" in server["command"]
        assert "ports" not in server
    assert "--runner=pooling" in services["vllm-reward"]["command"]
