"""Prometheus's configuration and rules, checked and unit-tested by promtool."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from tests.deploy.tools import ROOT, debian_tool

FOLDER = ROOT / "deploy" / "prometheus"


@pytest.fixture(scope="module")
def promtool() -> str:
    """The path of promtool."""
    return debian_tool("prometheus", "promtool")


def run(*command: str) -> str:
    """Run a command, which must succeed, and return its output."""
    process = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.slow
def test_the_configuration_is_one(promtool: str) -> None:
    """promtool accepts it with its rules and the files that name targets."""
    assert "SUCCESS" in run(promtool, "check", "config", "--lint-fatal", "prometheus.yaml")


@pytest.mark.slow
def test_the_rules_do_what_they_say(promtool: str) -> None:
    """rules_test.yaml passes: hand-made series, and the alerts that must and must not fire."""
    assert "SUCCESS" in run(promtool, "test", "rules", "rules_test.yaml")


def test_every_alert_is_tested_and_every_series_documented() -> None:
    """Each alert fires in some test; each name in an expression is in metrics.md or is a rule."""
    rules = [
        rule
        for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    fired = {
        check["alertname"]
        for test in yaml.safe_load((FOLDER / "rules_test.yaml").read_text())["tests"]
        for check in test["alert_rule_test"]
        if check["exp_alerts"]
    }
    assert {rule["alert"] for rule in rules if "alert" in rule} == fired
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`(hedgerow_\w+)`", page))
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for rule in rules:
        for name in re.findall(r"[\w:]*hedgerow_[\w:]+", rule["expr"]):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in recorded or {name, base} & documented, name
