"""Benchmarks as people run them."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """``python -m loadtest.MODULE`` with these words."""
    command = [sys.executable, "-m", f"loadtest.{module}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def refused(main: Callable[[], None], words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The one line that a benchmark ends with where it refuses these words, on stderr."""
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    with redirect_stderr(io.StringIO()) as heard, pytest.raises(SystemExit) as ended:
        main()
    told = ended.value.code if isinstance(ended.value.code, str) else heard.getvalue()
    assert ended.value.code == told or ended.value.code == 2
    (line,) = told.splitlines()
    return line
