"""The Dockerfile: linted, and its steps run in a folder without a container engine."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import httpx2
import pytest

from tests.deploy.image_steps import Builder, Stage, stages_of
from tests.deploy.test_grafana import free_port
from tests.deploy.tools import ROOT, python_tools

DOCKERFILE = ROOT / "Dockerfile"


@pytest.mark.slow
def test_the_linter_finds_nothing() -> None:
    """hadolint passes with every rule."""
    linter = python_tools() / "hadolint"
    process = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout


def test_images_are_pinned_and_run_as_nobody_special() -> None:
    """Each base has a version; each image that is served has a user, a probe and a start."""
    text = DOCKERFILE.read_text()
    bases = re.findall(r"^ARG \w+_IMAGE=\S+?:(\S+)$", text, re.M)
    assert len(bases) == 2
    assert all(re.match(r"v?\d+\.\d+\.\d+", tag) for tag in bases)
    stages = stages_of(DOCKERFILE)
    for name in ("cpu", "gpu"):
        words = [word for word, _ in stages[name].steps]
        assert {"HEALTHCHECK", "ENTRYPOINT", "CMD", "EXPOSE"} <= set(words)
        [user] = [rest for word, rest in stages[name].steps if word == "USER"]
        assert int(user.split(":")[0]) > 0
        assert "RUN" not in words[words.index("USER") :]


def share_packages(stage: Stage) -> None:
    """Let a stage's environment see this one's packages, so that pip does not download them."""
    for site in stage.root.glob("opt/hedgerow/lib/python*/site-packages"):
        (site / "here.pth").write_text(sysconfig.get_path("purelib"))


@pytest.mark.nightly
@pytest.mark.slow
def test_the_steps_make_a_server_that_answers_its_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed from the copied files alone and started elsewhere, it is healthy and searches."""
    monkeypatch.setenv("TORCH_INDEX", "https://pypi.org/simple")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    stages = stages_of(DOCKERFILE)
    builder = Builder(ROOT, tmp_path, share_packages)
    builder.run(stages["build"])
    image = builder.run(stages["cpu"])
    env = builder.environment(image) | {
        "HEDGEROW_HOST": "127.0.0.1",
        "HEDGEROW_PORT": str(free_port()),
        "HEDGEROW_THREADS": "1",
    }

    def start(command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    where = subprocess.run(
        ["python", "-c", "import server, models; print(server.__file__, models.__file__)"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert all(path.startswith(str(tmp_path)) for path in where)
    process = start(image.start)
    try:
        assert process.stderr is not None
        assert any("ready: serving sprig" in line for line in process.stderr)
        assert subprocess.run(image.probe, env=env, cwd=tmp_path, check=False).returncode == 0
        url = f"http://127.0.0.1:{env['HEDGEROW_PORT']}"
        body = {"question": "Use 4 9 10 13 to make 24.", "search": {"width": 2, "seed": 1}}
        reply = httpx2.post(f"{url}/v1/search", json=body, timeout=120).raise_for_status()
        assert reply.json()["tree_digest"]
        assert "<title>" in httpx2.get(url, timeout=30).text
        version = httpx2.get(f"{url}/metrics", timeout=30).text
        assert 'hedgerow_info{engine="embedded"' in version
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert subprocess.run(image.probe, env=env, check=False, capture_output=True).returncode != 0
