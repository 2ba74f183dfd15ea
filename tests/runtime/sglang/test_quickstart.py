"""The quickstart's commands, with tiny checkpoints and SGLang on the CPU instead of a GPU."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tests.runtime.sglang.support import MEMORY, PYTHON, ROOT
from tests.runtime.test_reward_models import QWEN, QWEN_SPECIALS, make_qwen
from tests.runtime.tiny_models import make_checkpoint, make_tokenizer

PAGE = (ROOT / "docs" / "quickstart-gpu.md").read_text()
ON_THIS_MACHINE = [
    *("--engine", "sglang", "--launch", "--port", "0"),
    *("--launch-memory", f"{MEMORY},{MEMORY}", "--kv-tokens", "8000", "--prm-kv-tokens", "8000"),
]
"""Options that the page's command does not need, for a machine without a GPU."""


def serve_line() -> list[str]:
    """The arguments of the page's ``hedgerow serve`` command."""
    [line] = re.findall(r"^hedgerow serve .*$", PAGE, re.M)
    return shlex.split(line)


def request_body() -> dict[str, Any]:
    """The body of the page's request."""
    [body] = re.findall(r"-d '(\{.*?\})'", PAGE, re.S)
    return json.loads(body)


def tiny(names: list[str], folder: Path) -> list[Path]:
    """Tiny checkpoints of the named models' classes, in folders with their names."""
    policy, reward = (folder / name.rpartition("/")[2] for name in names)
    make_checkpoint(policy, "qwen2", vocab_size=320)
    make_tokenizer(QWEN_SPECIALS, QWEN).save_pretrained(policy)
    return [policy, make_qwen(reward)]


def test_the_page_is_short_and_names_one_model_throughout() -> None:
    """The page has at most fifteen lines to type; the request names the served model."""
    typed = "".join(re.findall(r"^```\n(.*?)^```$", PAGE, re.S | re.M))
    assert len(typed.splitlines()) <= 15
    assert serve_line()[2] == request_body()["model"]
    example = (ROOT / "deploy" / ".env.example").read_text()
    assert re.findall(r"^HEDGEROW_\w+_MODEL=(\S+)$", example, re.M) == serve_line()[2::2]


@pytest.mark.nightly
@pytest.mark.sglang
def test_the_lines_lead_to_a_searched_answer(tmp_path: Path) -> None:
    """Only the two folders are named: classes, profile, reward format and served name are read from
    the checkpoints."""
    program, command, policy, flag, reward = serve_line()
    assert (program, flag) == ("hedgerow", "--reward-model")
    paths = tiny([policy, reward], tmp_path)
    assert AutoTokenizer.from_pretrained(paths[0]).chat_template == QWEN
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", command, paths[0], flag, paths[1], *ON_THIS_MACHINE],
        env=os.environ | {"HEDGEROW_LAUNCH_PYTHON": str(PYTHON), "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"ready: serving (\S+) on (http://[^\s\"]+)", line):
                break
        else:
            pytest.fail("".join(lines[-20:]))
        assert match[1] == paths[0].name  # the folder's; a model from the hub keeps its whole name
        body = request_body() | {"model": match[1]}
        body["search"]["width"] = 4
        answer = httpx.post(f"{match[2]}/v1/chat/completions", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        search = answer.json()["search"]
        assert search["reproducible"] == "seeded"
        assert search["stats"]["finished"] == 4
        assert search["stats"]["engine"]["prm_tokens"] > 0
    finally:
        process.terminate()
        process.communicate(timeout=120)
