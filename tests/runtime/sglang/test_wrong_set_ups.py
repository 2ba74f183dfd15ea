"""Wrong set-ups against real SGLang servers: each is refused at start, and the server lives on.

Three of them would have crashed the server if requests had been sent anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from runtime.sglang.launched_server import LaunchedServer
from runtime.sglang.sglang_engine import SglangEngine
from runtime.sglang.sglang_options import SglangOptions
from tests.runtime.sglang.support import ON_SERVERS, START_SECONDS, SharedServers, stock
from tests.runtime.test_reward_models import QWEN, QWEN_SPECIALS
from tests.runtime.tiny_models import make_checkpoint, make_reward_model

pytestmark = [*ON_SERVERS, pytest.mark.asyncio(loop_scope="module")]


HEAD = {"v_head.summary.weight": (1, 64), "v_head.summary.bias": (1,)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints, of which ``text`` and ``head`` are served. ``twin`` has the tokenizer and sizes
    of ``text``, ``wide`` more ids; ``head`` has one output and all tokens of head formats."""
    root = tmp_path_factory.mktemp("models")
    return {
        "text": make_checkpoint(root / "text", "qwen3"),
        "twin": make_checkpoint(root / "twin", "qwen2"),
        "wide": make_checkpoint(root / "wide", "qwen3", vocab_size=512),
        "head": make_reward_model(
            root / "head", HEAD, "Qwen2ForPrmModel", specials=QWEN_SPECIALS, template=QWEN
        ),
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(
    folders: dict[str, Path], yard: SharedServers
) -> AsyncIterator[dict[str, LaunchedServer]]:
    """A generation server and an embedding server."""
    await yard.rest()
    plain = replace(stock(), kv_tokens=2_000, memory=0.3)
    launched = {
        "text": LaunchedServer(replace(plain, model=folders["text"])),
        "head": LaunchedServer(replace(plain, model=folders["head"], classifies=True)),
    }
    try:
        for server in launched.values():
            server.start()
        await asyncio.gather(*(server.ready(START_SECONDS) for server in launched.values()))
        yield launched
    finally:
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in launched.values()))


def options(
    servers: dict[str, LaunchedServer], policy: Path, prm: Path | None, form: str
) -> SglangOptions:
    return SglangOptions(
        policy=policy,
        policy_urls=(servers["text"].url,),
        prm=prm,
        reward_urls=(servers["head"].url,) if prm else (),
        reward_format=form,
        probe_seconds=60.0,
    )


async def alive(server: LaunchedServer) -> bool:
    """Whether the server's process runs and it still generates."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120.0, trust_env=False) as client:
        return server.exit_status is None and (await client.get("/health_generate")).is_success


CASES_OF_WRONG = {
    "verdicts of an embedding server": (
        ("text", "head", "math-shepherd"),
        "reward_urls: .* is an embedding server .* reward format 'math-shepherd' reads",
    ),
    "a larger vocabulary": (
        ("wide", None, "none"),
        "policy_urls: .* serves another model .*: vocab_size 266 instead of 512; start it with",
    ),
    "another model with the same tokenizer": (
        ("twin", None, "none"),
        "policy_urls: .*class Qwen3ForCausalLM instead of Qwen2ForCausalLM; start it with",
    ),
    "one output for two": (
        ("text", "head", "qwen2.5-math-prm"),
        "reward_urls: .* its head has 1 output, reward format 'qwen2.5-math-prm' reads class 1",
    ),
}


@pytest.mark.parametrize("case", CASES_OF_WRONG)
async def test_it_is_refused_and_the_server_lives(
    case: str, servers: dict[str, LaunchedServer], folders: dict[str, Path]
) -> None:
    """The error names both sides and the remedy, and both servers survive."""
    (policy, prm, form), message = CASES_OF_WRONG[case]
    set_up = options(servers, folders[policy], folders[prm] if prm else None, form)
    with pytest.raises(ValueError, match=message):
        await SglangEngine.start(set_up)
    assert all([await alive(server) for server in servers.values()])


async def test_the_right_set_up_is_ready(
    servers: dict[str, LaunchedServer], folders: dict[str, Path]
) -> None:
    """The right set-up on the same servers is healthy."""
    engine = await SglangEngine.start(options(servers, folders["text"], folders["head"], "skywork"))
    await engine.health()
    await engine.close()
