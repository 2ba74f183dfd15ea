"""The capability table of ``docs/engines.md`` agrees with the engines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import get_args

import pytest

from loadtest.hostile.completions_stub import CompletionsStub
from loadtest.hostile.sglang_stub import MortalStub, Stub
from models.bundled import SPRIG_FOLDER
from runtime.embedded import choices
from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.options import EngineOptions
from runtime.openai.openai_engine import OpenaiEngine
from runtime.openai.openai_options import OpenaiOptions, ServedModel
from runtime.openai.reward_requests import reward_request
from runtime.reward_format import REWARD_FORMATS, local_reward_format, reward_format
from runtime.servers import text_embedder
from runtime.sglang.sglang_engine import SglangEngine
from runtime.sglang.sglang_options import SglangOptions
from runtime.sglang.sglang_scorer import RewardRequest
from runtime.text import Text
from search.engine import LOGITS_PARAMS, Capabilities, RewardMissing
from search.spec import SearchSpec

POLICY = SPRIG_FOLDER / "policy"
TEXT = Text(POLICY)
ENGINES = ("embedded", "sglang", "openai")
MOST_TEMPERATURE = SearchSpec.model_json_schema()["properties"]["temperature"]["maximum"]
PAGE = Path("docs/engines.md")


class Vllm(CompletionsStub):
    """A stub whose ``/metrics`` has vLLM's cache configuration."""

    def _said(self, path: str, body: bytes) -> list[bytes]:
        if path != "/metrics":
            return super()._said(path, body)
        return [b'vllm:cache_config_info{block_size="16",num_gpu_blocks="8"} 1.0\n']


def rows() -> dict[str, Mapping[str, str]]:
    """The table's cells, by row and engine."""
    table = PAGE.read_text(encoding="utf-8").partition("\n\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| ")
    ]
    assert cells[0][1:] == list(ENGINES)
    return {name: dict(zip(ENGINES, row, strict=True)) for name, *row in cells[1:]}


def spans(cell: str) -> set[str]:
    """The code spans of a cell."""
    return set(re.findall(r"`([^`]+)`", cell))


async def capabilities() -> dict[str, Capabilities]:
    """Each engine's capabilities on the bundled policy; the openai engine is on a vLLM stub."""
    async with AsyncExitStack() as ends:
        stubs = {"sglang": MortalStub(Stub.of(TEXT)), "openai": MortalStub(Vllm.of(TEXT))}
        for stub in stubs.values():
            await stub.start()
            ends.push_async_callback(stub.kill)
        served = ServedModel(POLICY, (stubs["openai"].url,))
        native = SglangOptions(POLICY, (stubs["sglang"].url,), reward_format="none")
        engines = (
            await EmbeddedEngine.start(EngineOptions(str(POLICY), threads=1)),
            await SglangEngine.start(native),
            await OpenaiEngine.start(OpenaiOptions(policy=served)),
        )
        for engine in engines:
            ends.push_async_callback(engine.close)
        return {engine.capabilities.engine: engine.capabilities for engine in engines}


@pytest.mark.slow
async def test_what_the_engines_say_of_themselves() -> None:
    """Rows on seeds, sampling, log-probabilities and schemas are true; the page names this file."""
    table, able = rows(), await capabilities()
    parameters = "[sampling parameters](api.md) beside temperature and top-p"
    for engine in ENGINES:
        claims = able[engine]
        assert claims.reproducible in spans(table["same seed, same tree"][engine])
        assert ("exact" in spans(table["same seed, same tree"][engine])) == claims.exact
        cell = table[parameters][engine]
        honoured = set() if cell.startswith("none") else set(LOGITS_PARAMS) - spans(cell)
        assert honoured == set(claims.logits_params)
        assert (table["`logprobs` of a reply"][engine] == "yes") == claims.logprobs
        cell = table["[structured output](api.md#structured-output)"][engine]
        assert (cell == "yes") == claims.grammar  # these stubs have no backend
        assert cell == "yes" or cell.startswith("where")
        assert claims.step_logprobs
        most = min(claims.most_temperature, MOST_TEMPERATURE)
        assert table["the highest `search.temperature`"][engine] == f"{most:g}"
    assert Path(__file__).name in PAGE.read_text(encoding="utf-8")


def test_embedders() -> None:
    """The table's embedders are those that each engine's options take."""
    cells = rows()["embedders"]
    assert spans(cells["embedded"]) == set(get_args(choices.EmbedderName))
    for engine in ("sglang", "openai"):
        assert spans(cells[engine]) == set(get_args(text_embedder.EmbedderName))


@pytest.mark.parametrize("name", REWARD_FORMATS)
def test_reward_formats(name: str) -> None:
    """A cell of reward formats names those that its engine refuses."""
    refused = {engine: name in spans(cell) for engine, cell in rows()["reward formats"].items()}
    form = reward_format(name)
    if form.by_score_route:
        assert refused == {"embedded": True, "sglang": True, "openai": False}
        with pytest.raises(ValueError, match="--engine openai alone"):
            local_reward_format(name)
        return
    mean = form.reads == "mean"
    assert refused == {"embedded": False, "sglang": mean, "openai": mean}
    if mean:
        for ask in (RewardRequest.of, reward_request):
            with pytest.raises(RewardMissing, match="use the embedded engine"):
                ask(form, TEXT, TEXT)
