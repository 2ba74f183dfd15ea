"""Programs that are no Python packages: those of the machine, else Debian's, unpacked into a cache.

Nothing is installed and no service is started: a package is downloaded with apt-get and unpacked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "debian"


def debian_tool(package: str, program: str) -> str:
    """The path of a program; the test is skipped where there is none and none can be had."""
    unpacked = CACHE / package
    for folder in ("usr/bin", "usr/sbin"):
        found = shutil.which(program, path=str(unpacked / folder))
        if found:
            return found
    found = shutil.which(program)
    if found:
        return found
    if shutil.which("apt-get") is None:
        pytest.skip(f"{program} is not installed, and there is no apt-get to fetch {package} with")
    _unpack(package, unpacked)
    return debian_tool(package, program)


def _unpack(package: str, into: Path) -> None:
    """Download a package and unpack it; two tests that do so at once do not meet."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        fetched = subprocess.run(
            ["apt-get", "download", package], cwd=name, capture_output=True, text=True, check=False
        )
        archives = list(Path(name).glob("*.deb"))
        if not archives:
            pytest.skip(f"{package} cannot be downloaded: {fetched.stderr.strip()}")
        subprocess.run(["dpkg-deb", "-x", archives[0], f"{name}/out"], check=True)
        if not into.exists():
            os.rename(f"{name}/out", into)
