"""`python -m loadtest.policies`: its switches, and a small run with real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loadtest.test_policy_rows import KEYS

ROOT = Path(__file__).parent.parent.parent


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """The benchmark in a process of its own."""
    command = [sys.executable, "-m", "loadtest.policies", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "dfs"], "--policy dfs: known are"),
        (["--task", "chess"], "--task chess: known are"),
        (["--width", "4,x"], "--width 4,x: must be numbers"),
        (["--pool", "0"], "--pool 0: must be one or more values above 0"),
        (["--plot", "/nowhere/x.png"], "there is no folder /nowhere"),
        (["--keep", "/nowhere/x.jsonl"], "there is no folder /nowhere"),
        (["--limit", "0"], "--limit 0: must be at least 1"),
    ],
)
def test_a_wrong_switch_is_one_line(words: list[str], said: str) -> None:
    """The switch, its value and what is allowed; nothing on stdout."""
    done = run(*words)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.slow
def test_a_small_run_in_real_engines(tmp_path: Path) -> None:
    """Every key, JSON alone on stdout, and in every pool the trees of the untimed comparison."""
    plot = tmp_path / "figure.png"
    words = "--task game24 --width 4 --limit 2 --timed 2 --repeats 1 --at-once 2 --threads 1"
    done = run(*words.split(), "--policy", "beam", "--json", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = document["rows"]
    cells = {(r["policy"], r["width"], r["pool"]) for r in rows}
    assert cells == {(p, 4, s) for p in ("rebase", "beam") for s in (0.5, 1.0)}
    for row in rows:
        assert row.keys() >= KEYS
        assert row["same_trees"]
        assert row["problems_per_second"] > 0
        if row["policy"] == "rebase":
            assert row["kv_reduction_vs_rebase"] == row["throughput_vs_rebase"] == 1.0
    assert len(document["figure_2"]) == 2
    assert plot.read_bytes().startswith(b"\x89PNG")
