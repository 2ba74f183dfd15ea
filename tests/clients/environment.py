"""The clients' own environment: some of their pins clash with this project's."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PINS = HERE / "requirements.txt"


def clients_bin() -> Path:
    """The folder of the environment's commands, made at first use and kept beside this one's.

    Skips the test where the packages cannot be had.
    """
    home = Path(sys.prefix) / "clients"
    mark = home / hashlib.sha256(PINS.read_bytes()).hexdigest()
    if not mark.exists():
        made = [sys.executable, "-m", "venv", "--clear", str(home)]
        subprocess.run(made, check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps"]
        done = subprocess.run([*pip, "-r", str(PINS)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the clients cannot be installed: {done.stderr[-300:]}")
        mark.touch()
    return home / "bin"
