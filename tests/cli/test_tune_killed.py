"""``hedgerow tune`` with the bundled models, killed on its way and started again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes import MarkedProcesses, marked

ROOT = Path(__file__).resolve().parents[2]
WORDS = "--task game24 --policy self_consistency,rebase --width 2,4 --temperature 1 --limit 16"
ENOUGH = 12
"""Rows, of 32 in the first rung alone."""


def start(folder: Path, processes: MarkedProcesses) -> subprocess.Popen[str]:
    """The command, its file in a folder."""
    words = [*WORDS.split(), "--budget", "40000", "--engines", "1", "--json"]
    command = [sys.executable, "-m", "cli", "tune", *words, "--out", str(folder / "tuned.toml")]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=processes.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def report(run: subprocess.Popen[str]) -> dict[str, Any]:
    """What came out, times apart."""
    out, _ = run.communicate()
    assert run.returncode == 0
    found = json.loads(out)
    for row in (found, *found["rows"]):
        row.pop("seconds")
    return found


@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_outcome(tmp_path: Path) -> None:
    """SIGKILL after some rows; the second run keeps these and comes to what an undisturbed one
    comes to."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    rows = cut / "tuned.jsonl"
    with marked() as processes:
        undisturbed = report(start(whole, processes))
        first = start(cut, processes)
        while not rows.exists() or rows.read_text().count("\n") < ENOUGH:
            assert first.poll() is None
            time.sleep(0.01)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        before = rows.read_text()
        assert report(start(cut, processes)) == undisturbed
    assert rows.read_text().startswith(before)
    kept = [len((folder / "tuned.jsonl").read_text().splitlines()) for folder in (cut, whole)]
    assert kept[0] == kept[1]
