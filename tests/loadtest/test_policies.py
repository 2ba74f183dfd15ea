"""`python -m loadtest.policies`: its options, and a small run with real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import policies
from tests.loadtest.command import refused, run
from tests.loadtest.test_policy_rows import KEYS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "dfs"], "--policy: dfs: known are"),
        (["--task", "chess"], "--task: chess: known are"),
        (["--width", "4,x"], "--width: 4,x: must be numbers"),
        (["--pool", "0"], "--pool: 0: must be values above 0"),
        (["--keep", "/nowhere/x.jsonl"], "there is no folder /nowhere"),
        (["--limit", "0"], "--limit: 0: must be at least 1"),
    ],
)
def test_a_wrong_switch_is_one_line(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message names the option, its value and what is allowed; stdout is empty."""
    assert message in refused(policies.main, words, monkeypatch)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_refusal_is_a_line_on_stderr() -> None:
    """Run in a process, the benchmark prints the message alone and exits with 2."""
    process = run("policies", "--limit", "0")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.splitlines() == ["loadtest.policies: --limit: 0: must be at least 1"]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_small_run_in_real_engines() -> None:
    """Rows have every key, stdout is only JSON, every pool has the untimed comparison's trees."""
    words = "--task game24 --width 4 --limit 2 --timed 2 --repeats 1 --at-once 2 --threads 1"
    process = run("policies", *words.split(), "--policy", "beam", "--json")
    assert process.returncode == 0, process.stderr
    rows = json.loads(process.stdout)["rows"]
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
    """Rows have the same keys, those about time are null; stored results are not searched again."""
    path = tmp_path / "kept.jsonl"
    words = f"--task game24 --width 4 --limit 2 --timed 0 --policy beam --keep {path} --threads 1"
    first, again = (run("policies", *words.split(), "--json") for _ in range(2))
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    rows = json.loads(first.stdout)["rows"]
    assert [(r["policy"], r["pool"], r["timed"]) for r in rows] == [
        ("rebase", None, None),
        ("beam", None, None),
    ]
    assert all(row.keys() >= KEYS for row in rows)
    assert json.loads(again.stdout)["rows"] == rows
    assert len(path.read_text().splitlines()) == 6, "with the ceiling, three of each question"
