"""SGLang's own benchmark of servers, unchanged, against this server."""

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
    """Every request is a streamed search; all are completed and their tokens counted. The streams
    fill their silence, and the benchmark's parser must cope with that."""
    server = Server(keepalive_seconds="0.001")
    report_file = tmp_path / "told.jsonl"
    options = LaunchOptions(model=SPRIG_FOLDER / "policy", python=PYTHON, device="cpu")
    command = [PYTHON, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"]
    command += ["--base-url", server.url, "--model", SPRIG_FOLDER / "policy"]
    command += ["--served-model-name", "sprig", "--dataset-name", "random-ids"]
    command += ["--random-input-len", "24", "--random-output-len", "48"]
    command += ["--num-prompts", str(PROMPTS), "--output-file", report_file, "--disable-tqdm"]
    command += ["--extra-request-body", json.dumps({"search": {"width": 2, "seed": 3}})]
    try:
        process = subprocess.run(
            command, env=options.environment(), capture_output=True, text=True, check=False
        )
    finally:
        assert server.stop() == 0
    assert process.returncode == 0, process.stderr
    report = json.loads(report_file.read_text())
    assert report["completed"] == PROMPTS
    assert report["total_output_tokens"] > PROMPTS
