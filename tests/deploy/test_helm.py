"""The chart: linted, and installed by Helm itself into a fake cluster.

The objects that Helm sends are checked against Kubernetes' own schemas, strictly.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.settings import Settings, load_settings
from tests.deploy.kube_api import KubeApi
from tests.deploy.tools import ROOT, python_tools

CHART = ROOT / "deploy" / "helm" / "hedgerow"
HELM = """
import asyncio, json, sys
import helm_sdkpy as helm
action, chart, values, kubeconfig = sys.argv[1:]
config = helm.Configuration(namespace="default", kubeconfig=kubeconfig)
if action == "lint":
    print(json.dumps(asyncio.run(helm.Lint(config).run(chart)), default=str))
else:
    asyncio.run(helm.Install(config).run("tree", chart, json.loads(values), wait=False))
"""
CHECK = """
import json, sys
import kubernetes_validate as kube
for document in json.load(sys.stdin):
    if document["apiVersion"].partition("/")[0] != "monitoring.coreos.com":
        kube.validate(document, "1.34", strict=True)
"""
EVERYTHING = {
    "engine": "sglang",
    "secrets": {"apiKeys": "hedgerow-keys", "metrics": "hedgerow-metrics"},
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls"},
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"team": "maths"}}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
    },
    "sglang": {"modelsClaim": "checkpoints", "pools": {"policy": {"replicas": 3}}},
}

pytestmark = pytest.mark.slow


def helm(action: str, values: dict[str, Any], kubeconfig: str = "") -> str:
    """Run Helm in its own process and return its output; raises ChartRefused."""
    command = [python_tools() / "python", "-c", HELM, action, CHART, json.dumps(values), kubeconfig]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise ChartRefused(process.stderr)
    return process.stdout


class ChartRefused(Exception):
    """Helm failed; the message is its stderr."""


@pytest.fixture
def cluster() -> Iterator[KubeApi]:
    """A fake Kubernetes API server."""
    running = KubeApi()
    yield running
    running.close()


def install(cluster: KubeApi, values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Install the chart; the objects by kind and name, valid by Kubernetes' schemas."""
    helm("install", values, cluster.kubeconfig)
    command = [python_tools() / "python", "-c", CHECK]
    documents = json.dumps(cluster.created)
    process = subprocess.run(command, input=documents, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return {(doc["kind"], doc["metadata"]["name"]): doc for doc in cluster.created}


def environment(deployment: dict[str, Any]) -> dict[str, str]:
    """The server's environment variables that are given as plain values."""
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


def test_helm_lint_finds_nothing() -> None:
    """There are neither errors nor warnings, only information."""
    findings = json.loads(helm("lint", {}))
    assert not findings["Errors"]
    assert all(message["Severity"] <= 1 for message in findings["Messages"])


def test_the_default_is_the_embedded_engine(cluster: KubeApi) -> None:
    """By default there are a Deployment, a Service, a disruption budget and a network policy."""
    objects = install(cluster, {})
    names = [("NetworkPolicy", "tree"), ("PodDisruptionBudget", "tree"), ("Service", "tree")]
    assert sorted(objects) == sorted([*names, ("Deployment", "tree")])
    deployment = objects["Deployment", "tree"]
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert deployment["spec"]["replicas"] == 2
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    variables = environment(deployment)
    assert pod["terminationGracePeriodSeconds"] > int(variables["HEDGEROW_DRAIN_SECONDS"])
    load_settings(variables)
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    for owner in (objects["Service", "tree"]["spec"]["selector"],):
        assert owner.items() <= labels


def test_everything_on_is_valid_and_wired(cluster: KubeApi) -> None:
    """One Service for each pool, each server of a pool by name, an autoscaler, keys, an ingress."""
    objects = install(cluster, EVERYTHING)
    kinds = {kind for kind, _ in objects}
    assert {"StatefulSet", "HorizontalPodAutoscaler", "Ingress", "ServiceMonitor"} <= kinds
    assert {name for kind, name in objects if kind == "Service"} == {
        "tree",
        "tree-policy",
        "tree-reward",
    }
    deployment = objects["Deployment", "tree"]
    assert "replicas" not in deployment["spec"]
    variables = environment(deployment)
    urls = [f"http://tree-policy-{i}.tree-policy:30000" for i in range(3)]
    assert variables["HEDGEROW_POLICY_URLS"] == ",".join(urls)
    assert variables["HEDGEROW_REWARD_URLS"] == "http://tree-reward-0.tree-reward:30000"
    pool = objects["StatefulSet", "tree-policy"]["spec"]
    assert pool["replicas"] == 3
    assert pool["template"]["spec"]["securityContext"]["runAsUser"] > 0
    autoscaler = objects["HorizontalPodAutoscaler", "tree"]["spec"]
    metric = autoscaler["metrics"][0]["pods"]["metric"]["name"]
    adapter = yaml.safe_load((ROOT / "deploy/prometheus/adapter.yaml").read_text())
    assert metric in {rule["name"]["as"] for rule in adapter["rules"]["custom"]}


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_replica_may_have_gpus_of_its_own(cluster: KubeApi, gpus: int) -> None:
    """Both models on one GPU, or one on each: a pod with a cache for downloads, no pools."""
    two = {"launch_memory": "0.88,0.88", "reward_args": "--base-gpu-id 1"} if gpus == 2 else {}
    objects = install(
        cluster,
        {
            "engine": "launch",
            "settings": two | {"reward_format": "qwen2.5-math-prm"},
            "launch": {
                "model": "Qwen/Qwen2.5-Math-1.5B-Instruct",
                "rewardModel": "Qwen/Qwen2.5-Math-PRM-7B",
                "cacheClaim": "hub",
                "resources": {"limits": {"nvidia.com/gpu": gpus}},
            },
        },
    )
    assert "StatefulSet" not in {kind for kind, _ in objects}
    deployment = objects["Deployment", "tree"]
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"].startswith("hedgerow-gpu:")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": gpus}
    assert {"name": "cache", "mountPath": "/cache"} in container["volumeMounts"]
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
    variables = environment(deployment)
    assert variables["HEDGEROW_LAUNCH"] == "on"
    assert variables["HEDGEROW_REWARD_FORMAT"] == "qwen2.5-math-prm"
    names = {name.removeprefix("HEDGEROW_").lower() for name in variables}
    assert names <= Settings.model_fields.keys()


def test_nobody_but_hedgerow_and_monitoring_reaches_sglang(cluster: KubeApi) -> None:
    """The network policy selects both pools and admits two peers, but no egress."""
    objects = install(cluster, EVERYTHING)
    policy = objects["NetworkPolicy", "tree-sglang"]["spec"]
    [rule] = policy["ingress"]
    server = objects["Deployment", "tree"]["spec"]["selector"]["matchLabels"]
    assert rule["from"][0]["podSelector"]["matchLabels"] == server
    assert len(rule["from"]) == 2
    assert policy.get("egress", []) == []
    [selected] = policy["podSelector"]["matchExpressions"]
    assert set(selected["values"]) == {"policy", "reward"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": "vllm"}, "engine"),
        ({"replicas": 0}, "replicas"),
        ({"setings": {}}, "setings"),
        ({"settings": {"api_keys": "a:b"}}, "api_keys"),
        ({"engine": "sglang"}, "sglang.modelsClaim"),
        ({"engine": "launch"}, "launch.model"),
        (
            EVERYTHING
            | {"sglang": {"pools": {"policy": {"args": ["--enable-custom-logit-processor"]}}}},
            "args",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(
    cluster: KubeApi, values: dict[str, Any], message: str
) -> None:
    """The schema refuses them before anything is sent; keys belong into Secrets."""
    with pytest.raises(ChartRefused, match=re.escape(message)):
        helm("install", values, cluster.kubeconfig)
    assert cluster.created == []


def test_the_chart_is_of_this_version() -> None:
    """The version stands in pyproject.toml; the chart's must equal it."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((Path(CHART) / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version
