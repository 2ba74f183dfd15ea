"""Run benchmarks as a user does."""

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
    """Run ``python -m loadtest.MODULE`` with the arguments ``words``."""
    command = [sys.executable, "-m", f"loadtest.{module}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def refused(main: Callable[[], None], words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The single line with which a benchmark refuses the arguments ``words``, as on stderr."""
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    with redirect_stderr(io.StringIO()) as stderr, pytest.raises(SystemExit) as error:
        main()
    message = error.value.code if isinstance(error.value.code, str) else stderr.getvalue()
    assert error.value.code == message or error.value.code == 2
    (line,) = message.splitlines()
    return line
