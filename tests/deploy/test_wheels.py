"""Both wheels, built from the checkout, installed in new environments and started there.

Nothing is downloaded: a .pth file shows an environment a folder of installed packages, without
following the .pth files in that folder, such as this checkout's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import httpx2
import pytest

from runtime.sglang.launched_server import STUBS
from tests.deploy.test_grafana import free_port
from tests.deploy.tools import ROOT
from tests.runtime.sglang.support import PYTHON

pytestmark = pytest.mark.slow

PACKAGES = ("cli", "server", "search", "kvpolicy", "runtime", "models", "hedgerow_sglang")
IMPORTED = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if "__main__" not in module.name:
            importlib.import_module(module.name)
assert not {"loadtest", "models.train"} & set(sys.modules)
"""
LOADED = """
import sys, hedgerow_sglang, kvpolicy
from sglang.srt.mem_cache.registry import registered_radix_cache_backends
from sglang.srt.plugins import load_plugins
load_plugins()
assert "hedgerow" in registered_radix_cache_backends()
from hedgerow_sglang.search_cache import SearchCache
print(hedgerow_sglang.__file__, kvpolicy.__file__)
"""
"""Check that SGLang finds and registers our plug-in; print the files of it and of kvpolicy."""


def environ() -> dict[str, str]:
    """This process's environment without the variables that could lead into the checkout."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("HEDGEROW_", "PYTHON"))}


def output(*command: str | Path, cwd: Path, **more: str) -> str:
    """Run a command in ``cwd`` and return what it prints."""
    return subprocess.check_output(command, cwd=cwd, env=environ() | more, text=True)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each distribution's wheel by name, built without an index."""
    folder = tmp_path_factory.mktemp("wheels")
    build = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    for source in (ROOT, ROOT / "deploy" / "sglang-plugin"):
        output(*build, "--no-index", "-w", folder, source, cwd=folder)
    return {wheel.name.partition("-")[0]: wheel for wheel in folder.iterdir()}


def environment(folder: Path, python: Path, wheel: Path, packages: str) -> Path:
    """Make an environment with the wheel and the folder ``packages``; returns its ``bin``."""
    output(python, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    interpreter = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", interpreter, "install", "-q", "--no-deps")
    output(*pip, "--no-index", wheel, cwd=folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(packages)
    return folder / "bin"


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin`` of an environment with the main wheel."""
    folder = tmp_path_factory.mktemp("main") / "env"
    return environment(
        folder, Path(sys.executable), wheels["hedgerow"], sysconfig.get_path("purelib")
    )


def test_each_wheel_holds_what_runs_there(wheels: dict[str, Path]) -> None:
    """The main wheel has what serves, without benchmarks and training; the other has the plug-in
    and its eviction order; both have one version."""
    main, plugin = (zipfile.ZipFile(wheels[name]).namelist() for name in sorted(wheels))
    assert {name.split("/")[0] for name in main if ".dist-info" not in name} == set(PACKAGES)
    assert {"runtime/embedded/model/native.c", "models/sprig/policy/config.json"} <= set(main)
    assert not [
        name for name in main if name.startswith(("models/train", "hedgerow_sglang/search"))
    ]
    assert {name.split("/")[0] for name in plugin if ".dist-info" not in name} == {
        "hedgerow_sglang",
        "kvpolicy",
    }
    assert len({wheel.name.split("-")[1] for wheel in wheels.values()}) == 1


def test_the_installed_server_answers(installed: Path, tmp_path: Path) -> None:
    """Help, ``config check`` and ``/health`` work, from the wheel's own modules."""
    python, hedgerow = installed / "python", installed / "hedgerow"
    where = output(python, "-c", "import server; print(server.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))
    assert "serve" in output(hedgerow, "--help", cwd=tmp_path)
    output(hedgerow, "config", "check", cwd=tmp_path)
    port = free_port()
    env = {"HEDGEROW_PORT": str(port), "HEDGEROW_THREADS": "1"}
    process = subprocess.Popen(
        [hedgerow, "serve"], cwd=tmp_path, env=environ() | env, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert any("ready: serving sprig" in line for line in process.stderr)
        httpx2.get(f"http://127.0.0.1:{port}/health", timeout=60).raise_for_status()
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_the_installed_commands_need_no_checkout(installed: Path, tmp_path: Path) -> None:
    """``eval`` and ``calibrate`` have their tasks in the wheel; every module can be imported."""
    measured = output(
        *(installed / "hedgerow", "eval", "--task", "game24", "--limit", "1", "--width", "2"),
        *("--engines", "1", "--json"),
        cwd=tmp_path,
        HEDGEROW_THREADS="1",
    )
    assert '"accuracy"' in measured
    assert "--task" in output(installed / "hedgerow", "calibrate", "--help", cwd=tmp_path)
    output(installed / "python", "-c", IMPORTED, *PACKAGES, cwd=tmp_path)


@pytest.mark.sglang
def test_sglang_finds_the_installed_plugin(wheels: dict[str, Path], tmp_path: Path) -> None:
    """SGLang loads it by its entry point, from the wheel's own modules, with SGLang's packages."""
    packages = output(PYTHON, "-c", "import torch; print(*torch.__path__)", cwd=tmp_path)
    beside = str(Path(packages.strip()).parent)
    bin_folder = environment(tmp_path / "env", PYTHON, wheels["hedgerow_sglang"], beside)
    cpu = {"PYTHONPATH": str(STUBS), "SGLANG_USE_CPU_ENGINE": "1"}
    *_, where = output(bin_folder / "python", "-c", LOADED, cwd=tmp_path, **cpu).splitlines()
    assert all(path.startswith(str(bin_folder.parent)) for path in where.split())
