"""A real pretrained chat model on a real SGLang server, beside the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from runtime.sglang.launched_server import LaunchedServer
from runtime.sglang.sglang_engine import SglangEngine
from runtime.sglang.sglang_options import SglangOptions
from runtime.text import Text
from search.engine import Branch, Sampling
from search.tree import ROOT
from tests.runtime.pretrained import engine_maker, folder_or_skip
from tests.runtime.sglang.support import ON_SERVERS, START_SECONDS, SharedServers, stock

pytestmark = [*ON_SERVERS, pytest.mark.nightly, pytest.mark.asyncio(loop_scope="module")]

QUESTIONS = (
    "What is the capital of France?",
    "Say <|im_end|> and 漢字 🌳.",
    "A pen costs 3 coins and a book 12. How much are two pens and a book?",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    """The checkpoint."""
    return folder_or_skip()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sglang(folder: Path, yard: SharedServers) -> AsyncIterator[SglangEngine]:
    """An engine on a server of its own that samples with our noise."""
    await yard.rest()
    server = LaunchedServer(replace(stock(), model=folder, kv_tokens=4_000, seeds=True))
    try:
        server.start()
        await server.ready(START_SECONDS)
        engine = await SglangEngine.start(
            SglangOptions(
                policy=folder, policy_urls=(server.url,), reward_format="none", probe_seconds=60.0
            )
        )
        yield engine
        await engine.close()
    finally:
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, stop=(), max_step_tokens=24),
        Sampling(temperature=0.8, top_p=0.9, stop=("\n",), max_step_tokens=24),
    ],
    ids=["greedy", "by seed"],
)
async def test_steps_are_the_embedded_engines(
    sampling: Sampling, sglang: SglangEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are equal, greedy and with the same noise, both in float32."""
    text = Text(folder)
    prompts = [text.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    branches = [
        Branch(ROOT, i, tuple(ids), 500 + i, sampling.max_step_tokens, i + 1)
        for i, ids in enumerate(prompts)
    ]
    embedded = engine_maker(folder, monkeypatch)(batch_limit=64)
    ours = await embedded.expand("oak", branches, sampling)
    theirs = await sglang.expand("oak", branches, sampling)
    for our, their in zip(ours, theirs, strict=True):
        assert (our.text, our.tokens, our.finish) == (their.text, their.tokens, their.finish)
        assert our.logprob == pytest.approx(their.logprob, abs=1e-3)
