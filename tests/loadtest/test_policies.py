"""`python -m loadtest.policies`: its switches, and a small run with real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import policies
from loadtest.cluster_threshold import SWEEP, best
from tests.loadtest.command import refused, run
from tests.loadtest.test_policy_rows import KEYS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "dfs"], "--policy: dfs: known are"),
        (["--task", "chess"], "--task: chess: known are"),
        (["--width", "4,x"], "--width: 4,x: must be numbers"),
        (["--pool", "0"], "--pool: 0: must be values above 0"),
        (["--keep", "/nowhere/x.jsonl"], "there is no folder /nowhere"),
        (["--limit", "0"], "--limit: 0: must be at least 1"),
        (["--choose", "threshold", "--engine", "sglang"], "--choose threshold: the embedded"),
        (["--embedder", "lexical", "--engine", "sglang"], "--embedder lexical: the embedded"),
    ],
)
def test_a_wrong_switch_is_one_line(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The switch, its value and what is allowed; nothing on stdout."""
    assert said in refused(policies.main, words, monkeypatch)
    assert capsys.readouterr().out == ""


def test_a_refusal_is_a_line_on_stderr() -> None:
    """As people see it: in a process of its own."""
    done = run("policies", "--limit", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == ["loadtest.policies: --limit: 0: must be at least 1"]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_small_run_in_real_engines() -> None:
    """Every key, JSON alone on stdout, and in every pool the trees of the untimed comparison."""
    words = "--task game24 --width 4 --limit 2 --timed 2 --repeats 1 --at-once 2 --threads 1"
    done = run("policies", *words.split(), "--policy", "beam", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    cells = {(r["policy"], r["width"], r["pool"]) for r in rows}
    assert cells == {(p, 4, s) for p in ("rebase", "beam") for s in (0.5, 1.0)}
    for row in rows:
        assert row.keys() >= KEYS
        assert row["same_trees"]
        assert row["problems_per_second"] > 0
        if row["policy"] == "rebase":
            assert row["kv_reduction_vs_rebase"] == row["throughput_vs_rebase"] == 1.0


@pytest.mark.nightly
@pytest.mark.slow
def test_a_comparison_without_times(tmp_path: Path) -> None:
    """The same keys, of which those about time say nothing; what is kept is not searched again."""
    kept = tmp_path / "kept.jsonl"
    words = f"--task game24 --width 4 --limit 2 --timed 0 --policy beam --keep {kept} --threads 1"
    first, again = (run("policies", *words.split(), "--json") for _ in range(2))
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    rows = json.loads(first.stdout)["rows"]
    assert [(r["policy"], r["pool"], r["timed"]) for r in rows] == [
        ("rebase", None, None),
        ("beam", None, None),
    ]
    assert all(row.keys() >= KEYS for row in rows)
    assert json.loads(again.stdout)["rows"] == rows
    assert len(kept.read_text().splitlines()) == 6, "with the ceiling, three of each question"


@pytest.mark.slow
@pytest.mark.nightly
def test_thresholds_are_swept_for_both_embedders() -> None:
    """A row each, one chosen for every embedder, beside REBASE's KV."""
    words = "--choose threshold --task game24,blocksworld --width 4 --limit 2 --threads 1 --json"
    done = run("policies", *words.split())
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {(r["embedder"], r["threshold"]) for r in rows} == {
        (name, value) for name, values in SWEEP.items() for value in values
    }
    for row in rows:
        assert row["accuracies"].keys() == row["kv_reductions"].keys() == {"game24", "blocksworld"}
    assert [r["embedder"] for r in rows if r["chosen"]] == list(SWEEP)


def test_the_best_threshold_is_the_most_accurate_or_the_smallest_such() -> None:
    """0.82 beats 0.8; of two with 0.8 the one that tells more steps apart."""
    assert best({0.02: 0.77, 0.05: 0.82, 0.1: 0.8}) == 0.05
    assert best({0.1: 0.79, 0.4: 0.8, 0.2: 0.8}) == 0.2
