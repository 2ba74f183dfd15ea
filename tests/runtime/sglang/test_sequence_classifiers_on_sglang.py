"""Transformers' sequence classifiers on launched SGLang servers: the head's outputs are the same,
at every start. SGLang's own classes of Qwen draw a bias that no checkpoint holds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from runtime.sglang.launched_server import LaunchedServer
from tests.runtime.sglang.support import ON_SERVERS, START_SECONDS, SharedServers, stock
from tests.runtime.test_published_models import WITHIN
from tests.runtime.tiny_models import make_checkpoint

pytestmark = [*ON_SERVERS, pytest.mark.nightly, pytest.mark.asyncio(loop_scope="session")]

IDS = [5, 9, 12, 3, 7, 40, 22, 31]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
async def test_outputs_are_those_of_transformers(
    name: str, yard: SharedServers, tmp_path: Path
) -> None:
    """Two classes, read at the last token."""
    await yard.rest()
    make_checkpoint(tmp_path, name, seed=9)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=2)
    classifier.config.pad_token_id = 0
    classifier.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = classifier.eval()(torch.tensor([IDS])).logits[0].tolist()
    options = replace(stock(), model=tmp_path, kv_tokens=2_000, memory=0.3, classifies=True)
    server = LaunchedServer(options)
    try:
        server.start()
        await server.ready(START_SECONDS)
        async with httpx.AsyncClient(timeout=600.0, trust_env=False) as client:
            reply = await client.post(f"{server.url}/encode", json={"input_ids": IDS})
    finally:
        await asyncio.to_thread(server.stop)
    assert reply.raise_for_status().json()["embedding"] == pytest.approx(expected, abs=WITHIN)
