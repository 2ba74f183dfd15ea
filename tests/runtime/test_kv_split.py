"""`--kv-split`: both models' pools are sized at the start, and no tree changes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from kvpolicy.roofline import DevicePeaks, SplitLoad, TooLittleMemory
from loadtest.in_process import InProcess, ModelsInProcess
from runtime.embedded.kv_split import split_pools
from runtime.embedded.model.config import ModelConfig, footprint
from runtime.embedded.options import EngineOptions
from search.controller import search
from search.problem import Problem
from search.spec import SearchSpec
from tests.runtime.tiny_models import make_pair

GPU = DevicePeaks(flops=1e14, bandwidth=1e12)
POOL_TOKENS = 1_000


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """A tiny policy, and a reward model with twice the layers."""
    return EngineOptions(
        **make_pair(tmp_path_factory.mktemp("models")),
        kv_tokens=POOL_TOKENS,
        prm_kv_tokens=POOL_TOKENS,
        threads=1,
        kv_load=SplitLoad(8, 100, 50),
    )


def token_bytes(options: EngineOptions) -> tuple[int, int]:
    """The KV bytes of one token of the policy and of the reward model."""
    paths = (options.policy, options.prm)
    sizes = [footprint(ModelConfig.from_checkpoint(path), 4).kv_bytes for path in paths if path]
    return sizes[0], sizes[1]


def split_on_gpu(options: EngineOptions) -> EngineOptions:
    """The options with pools split for a GPU."""
    return split_pools(options, GPU)


def test_even_halves_are_of_bytes(options: EngineOptions) -> None:
    """With twice the KV a token in the reward model, 3,000 units are 1,500 and 750 tokens."""
    sized = split_on_gpu(replace(options, kv_split="even"))
    assert (sized.kv_tokens, sized.prm_kv_tokens) == (1_500, 750)


def test_the_roofline_gives_out_the_same_bytes(options: EngineOptions) -> None:
    """The split uses the bytes up to a rest, and each pool has room for a sequence of 320."""
    policy, prm = token_bytes(options)
    sized = split_on_gpu(replace(options, kv_split="roofline"))
    budget = POOL_TOKENS * (policy + prm)
    assert budget - prm - policy < sized.kv_tokens * policy + sized.prm_kv_tokens * prm <= budget
    assert sized.kv_tokens >= 320 <= sized.prm_kv_tokens
    assert sized.kv_tokens >= 8 * (100 + 50), "all eight sequences decode at once"


def test_what_is_given_stays(options: EngineOptions) -> None:
    """With kv_split "given", or without a reward model, the pools stay as set."""
    assert split_on_gpu(options) is options
    alone = replace(options, prm=None, reward_format="none", kv_split="roofline")
    assert split_on_gpu(alone) is alone


def test_too_little_to_share_is_said(options: EngineOptions) -> None:
    """Pools for less than one sequence of each model are refused."""
    tight = replace(options, kv_tokens=100, prm_kv_tokens=50, kv_split="even")
    with pytest.raises(TooLittleMemory, match="one sequence needs"):
        split_on_gpu(tight)


@pytest.mark.promise(
    "A search grows the same tree however the KV budget is split between policy and reward model."
)
def test_trees_are_the_same_by_every_split(options: EngineOptions) -> None:
    """Every split gives the same digest, in pools smaller than the search would fill."""
    tight = replace(options, kv_tokens=400, prm_kv_tokens=400, kv_load=SplitLoad(4, 60, 20))
    models = ModelsInProcess(tight)
    prompt = tuple(models.text.encode("One and two"))
    spec = SearchSpec(policy="beam", width=6, seed=3, max_step_tokens=20, trajectory_tokens=60)

    async def grow(kv_tokens: int, prm_kv_tokens: int) -> str:
        engine = InProcess(models, kv_tokens=kv_tokens, prm_kv_tokens=prm_kv_tokens)
        problem = Problem(prompt=prompt, question="")
        outcome = await search(
            problem, spec, engine, tree_id="t", answer_of=str, clock=time.monotonic
        )
        return outcome.digest

    pools = {(4_000, 4_000)}
    for split in ("given", "even", "roofline"):
        sized = split_on_gpu(replace(tight, kv_split=split))
        pools.add((sized.kv_tokens, sized.prm_kv_tokens))
    assert len(pools) >= 3
    assert len({asyncio.run(grow(*sizes)) for sizes in pools}) == 1
