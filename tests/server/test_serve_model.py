"""``hedgerow serve MODEL`` with a user's own model, in its own process."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI

from tests.runtime.tiny_models import make_checkpoint
from tests.server.test_process import MESSAGES, Server

pytestmark = pytest.mark.slow


def test_a_folder_is_served_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default: a chat model, embedded, no reward model; one log line says so."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = make_checkpoint(tmp_path / "tiny-qwen", "qwen2")
    server = Server(str(folder))
    try:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        assert client.models.list().data[0].id == "tiny-qwen"
        plain = client.chat.completions.create(
            model="tiny-qwen", messages=MESSAGES, max_tokens=8, seed=1
        )
        assert plain.usage is not None
        assert 0 < plain.usage.completion_tokens <= 8
        search = {"search": {"policy": "best_of_n", "width": 2, "max_depth": 2}}
        search_reply = client.chat.completions.create(
            model="tiny-qwen", messages=MESSAGES, max_tokens=8, seed=1, extra_body=search
        )
        assert search_reply.search["tree_digest"]
    finally:
        server.stop()
    (line,) = [line for line in server.log if "not set, so taken" in line]
    for words in ("Qwen2ForCausalLM, context 512", "--profile chat", "--reward-model none"):
        assert words in line
