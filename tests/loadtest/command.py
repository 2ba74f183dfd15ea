"""Benchmarks as people run them: in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """``python -m loadtest.MODULE`` with these words."""
    command = [sys.executable, "-m", f"loadtest.{module}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def refused(module: str, *words: str) -> str:
    """The one line in which it refuses these words; nothing is on stdout."""
    done = run(module, *words)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line
