"""``hedgerow tune`` with the bundled models: killed halfway and started again."""

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
"""Rows to wait for; the first rung alone has 32."""


def start(folder: Path, processes: MarkedProcesses) -> subprocess.Popen[str]:
    """Start the command with its file in this folder."""
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
    """Return the printed report without its times."""
    out, _ = run.communicate()
    assert run.returncode == 0
    document = json.loads(out)
    for row in (document, *document["rows"]):
        row.pop("seconds")
    return document


@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_outcome(tmp_path: Path) -> None:
    """SIGKILL after some rows; the second run keeps these rows and ends with the same report as an
    undisturbed run."""
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
    counts = [len((folder / "tuned.jsonl").read_text().splitlines()) for folder in (cut, whole)]
    assert counts[0] == counts[1]
