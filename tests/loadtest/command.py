"""Benchmarks as people run them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """``python -m loadtest.MODULE`` with these words."""
    command = [sys.executable, "-m", f"loadtest.{module}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def refused(main: Callable[[], None], words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The one line that a benchmark ends with, status 1, where it refuses these words."""
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, str)
    (line,) = ended.value.code.splitlines()
    return line
