"""SGLang's own benchmark of servers, unchanged, against this one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from models.bundled import SPRIG_FOLDER
from runtime.sglang.launched_server import LaunchOptions
from tests.runtime.sglang.support import PYTHON
from tests.server.test_process import Server

pytestmark = [pytest.mark.sglang, pytest.mark.nightly, pytest.mark.timeout(600)]

PROMPTS = 8


def test_bench_serving(tmp_path: Path) -> None:
    """Every request is a search that streams; all are completed and their tokens counted. The
    streams fill their silence, which its parser has to get over."""
    server = Server(keepalive_seconds="0.001")
    told = tmp_path / "told.jsonl"
    options = LaunchOptions(model=SPRIG_FOLDER / "policy", python=PYTHON, device="cpu")
    command = [PYTHON, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"]
    command += ["--base-url", server.url, "--model", SPRIG_FOLDER / "policy"]
    command += ["--served-model-name", "sprig", "--dataset-name", "random-ids"]
    command += ["--random-input-len", "24", "--random-output-len", "48"]
    command += ["--num-prompts", str(PROMPTS), "--output-file", told, "--disable-tqdm"]
    command += ["--extra-request-body", json.dumps({"search": {"width": 2, "seed": 3}})]
    try:
        done = subprocess.run(
            command, env=options.environment(), capture_output=True, text=True, check=False
        )
    finally:
        assert server.stop() == 0
    assert done.returncode == 0, done.stderr
    found = json.loads(told.read_text())
    assert found["completed"] == PROMPTS
    assert found["total_output_tokens"] > PROMPTS
