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
GIVEN = 1_000


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """A tiny policy, and a reward model with twice the layers."""
    return EngineOptions(
        **make_pair(tmp_path_factory.mktemp("models")),
        kv_tokens=GIVEN,
        prm_kv_tokens=GIVEN,
        threads=1,
        kv_load=SplitLoad(8, 100, 50),
    )


def each(options: EngineOptions) -> tuple[int, int]:
    """KV bytes of a token of the policy and of the reward model."""
    paths = (options.policy, options.prm)
    sizes = [footprint(ModelConfig.from_checkpoint(path), 4).kv_bytes for path in paths if path]
    return sizes[0], sizes[1]


def shared_out(options: EngineOptions) -> EngineOptions:
    """On a GPU."""
    return split_pools(options, GPU)


def test_even_halves_are_of_bytes(options: EngineOptions) -> None:
    """A reward model with twice the KV a token: 3,000 units are 1,500 tokens and 750."""
    found = shared_out(replace(options, kv_split="even"))
    assert (found.kv_tokens, found.prm_kv_tokens) == (1_500, 750)


def test_the_roofline_gives_out_the_same_bytes(options: EngineOptions) -> None:
    """All of them but less than a token's, and room in each pool for a sequence of 320."""
    policy, prm = each(options)
    found = shared_out(replace(options, kv_split="roofline"))
    budget = GIVEN * (policy + prm)
    assert budget - prm - policy < found.kv_tokens * policy + found.prm_kv_tokens * prm <= budget
    assert found.kv_tokens >= 320 <= found.prm_kv_tokens
    assert found.kv_tokens >= 8 * (100 + 50), "all eight sequences decode at once"


def test_what_is_given_stays(options: EngineOptions) -> None:
    """As set, or where there is no reward model to share with."""
    assert shared_out(options) is options
    alone = replace(options, prm=None, reward_format="none", kv_split="roofline")
    assert shared_out(alone) is alone


def test_too_little_to_share_is_said(options: EngineOptions) -> None:
    """Not one sequence of each fits."""
    tight = replace(options, kv_tokens=100, prm_kv_tokens=50, kv_split="even")
    with pytest.raises(TooLittleMemory, match="one sequence needs"):
        shared_out(tight)


@pytest.mark.promise("However KV is shared between the models, the tree is the same")
def test_trees_are_the_same_by_every_split(options: EngineOptions) -> None:
    """Digest for digest, in pools for less than the search would hold."""
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
        found = shared_out(replace(tight, kv_split=split))
        pools.add((found.kv_tokens, found.prm_kv_tokens))
    assert len(pools) >= 3
    assert len({asyncio.run(grow(*sizes)) for sizes in pools}) == 1
