"""Every row of ``docs/models.md`` on real SGLang servers, on the CPU: what transformers computes of
the same checkpoint, on a path of eight steps. ``-rP`` shows how far apart they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from models.catalog import public_policies
from runtime.reward_format import reward_format
from runtime.sglang.launched_server import LaunchedServer
from runtime.sglang.sglang_engine import SglangEngine
from runtime.sglang.sglang_options import SglangOptions
from tests.closing import closing
from tests.runtime.published_models import EIGHT_STEPS, FORMATS, REWARDS, tiny
from tests.runtime.sglang.support import ON_SERVERS, START_SECONDS, SharedServers, stock
from tests.runtime.test_published_models import IDS, PATHS, TOKENS, WITHIN
from tests.runtime.test_reward_models import PROMPT, QUESTION

pytestmark = [*ON_SERVERS, pytest.mark.nightly, pytest.mark.asyncio(loop_scope="session")]

ROWS = [*zip_longest([row.names[0] for row in public_policies()], FORMATS)]
"""Each policy paired with a reward model while there are any, as two servers start in the time
of one."""


@asynccontextmanager
async def serving(folders: list[Path], form: str | None) -> AsyncIterator[list[LaunchedServer]]:
    """Start a server for each folder: the policy's, and the reward model's if ``form`` is given."""
    plain = replace(stock(), kv_tokens=2_000, memory=0.3)
    servers = [LaunchedServer(replace(plain, model=folders[0]))]
    if form is not None:
        reads = reward_format(form).reads_hidden
        servers.append(LaunchedServer(replace(plain, model=folders[1], classifies=reads)))
    try:
        for server in servers:
            server.start()
        await asyncio.gather(*(server.ready(START_SECONDS) for server in servers))
        yield servers
    finally:
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))


async def draw(server: LaunchedServer) -> tuple[list[float], list[int]]:
    """Log-probabilities of the path's tokens and of TOKENS greedy ones after it; the greedy ids."""
    body = {
        "input_ids": IDS,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with httpx.AsyncClient(base_url=server.url, timeout=600.0, trust_env=False) as client:
        answer = (await client.post("/generate", json=body)).raise_for_status().json()
    meta, tokens = answer["meta_info"], answer["output_ids"]
    rows = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    return [row[0] for row in rows], tokens


def greedy(folder: Path) -> tuple[list[float], list[int]]:
    """The same as ``draw`` by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([IDS]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
        )
        logprobs = torch.log_softmax(model(ids).logits[0].double(), -1)
    return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist(), ids[0, len(IDS) :].tolist()


def largest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(our - their) for our, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("policy", "prm"), ROWS)
async def test_a_rows_models_are_transformers(
    policy: str, prm: str | None, yard: SharedServers, tmp_path: Path
) -> None:
    """The policy's log-probabilities along the path and its greedy tokens; the reward model's eight
    rewards, read a step at a time."""
    await yard.rest()
    folders = [tiny(policy, tmp_path), *([tiny(prm, tmp_path)] if prm else [])]
    form = FORMATS[prm] if prm else None
    async with serving(folders, form) as servers:
        (ours, tokens), (theirs, their_tokens) = (await draw(servers[0]), greedy(folders[0]))
        assert tokens == their_tokens
        print(f"{policy}: {largest(ours, theirs):.1e}")
        assert largest(ours, theirs) <= WITHIN
        if prm is None or form is None:
            return
        options = SglangOptions(
            policy=folders[0],
            policy_urls=(servers[0].url,),
            prm=folders[1],
            reward_urls=(servers[1].url,),
            reward_format=form,
            probe_seconds=60.0,
        )
        async with closing(await SglangEngine.start(options)) as engine:
            rewards = await engine.score("oak", PROMPT, QUESTION, PATHS)
        expected = REWARDS[form](folders[1], EIGHT_STEPS)
        print(f"{prm}: {largest(rewards, expected):.1e}")
        assert largest(rewards, expected) <= WITHIN
