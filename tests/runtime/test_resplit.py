"""KV moves between both models' stores as rounds ask for it, and no tree changes."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpolicy.roofline import DevicePeaks, ModelCosts, SplitLoad
from loadtest.in_process import InProcess, Models
from runtime.embedded.drawing.batch import Batch
from runtime.embedded.engine import EmbeddedEngine
from runtime.embedded.kv.cache import Cache
from runtime.embedded.kv.lane import Lane
from runtime.embedded.kv.resplit import Growth, Resplit, Round, load_of
from runtime.embedded.kv.split import Shared
from runtime.embedded.options import EngineOptions
from search.controller import Problem, search
from search.engine import Branch, EngineError, Sampling, Step
from search.outcome import Outcome
from search.spec import SearchSpec
from search.tree import Finish
from tests.runtime.hash_model import HashModel
from tests.runtime.tiny_models import make_pair

DEVICE = DevicePeaks(flops=100.0, bandwidth=100.0)
LIGHT = ModelCosts(token_flops=2.0, pair_flops=0.0, weight_bytes=100.0, kv_bytes=1)
HEAVY = ModelCosts(token_flops=4.0, pair_flops=0.0, weight_bytes=200.0, kv_bytes=2)


def branch(tokens: tuple[int, ...], child: int = 0) -> Branch:
    return Branch(0, child, tokens, child, 20, 1 + child)


def step(tokens: int) -> Step:
    return Step(tuple(range(tokens)), "", Finish.STEP, 0.0, 0.0)


def store(tokens: int) -> Batch:
    """An empty one."""
    ignore: Any = lambda *_: None  # noqa: E731
    return Batch(HashModel(), Cache(tokens), lanes=8, rows=64, give_way=ignore, starve=lambda: None)


def test_what_a_round_is_like_by_hand() -> None:
    """Two siblings of 5 tokens, one of 4 that has three of them, one of 2 of its own: 16 tokens,
    of which 5 + 1 + 2 are distinct."""
    trunk = (1, 2, 3)
    siblings = [branch((*trunk, 4, 5), child) for child in (0, 1)]
    one = Round.of([*siblings, branch((*trunk, 9)), branch((7, 8))])
    assert one == Round(branches=4, tokens=16, distinct=8)
    assert Round.of([branch(trunk), branch((*trunk, 4))]).distinct == 4
    # With steps of 6 tokens: 4 sequences of 4 + 6, of which 2 + 6 are each one's own.
    apart = Growth(step=6.0, own=6.0, lanes=1.0)
    assert load_of([one], apart) == SplitLoad(4, 10, 6, own=8, own_grown=8)
    # Another search beside it, of one branch: 5 sequences, 26 tokens, 18 of them distinct.
    assert load_of([one, Round(1, 10, 10)], apart) == SplitLoad(5, 11, 6, own=10, own_grown=10)
    # Where two of four draw alike, three sequences have 8 + 4 x 5 tokens.
    alike = Growth(step=6.0, own=5.0, lanes=0.75)
    assert load_of([one], alike) == SplitLoad(3, 10, 6, own=10, own_grown=10)
    # Fewer sequences are expected than what they begin with has room in: there are more.
    few = Growth(step=5.0, own=0.5, lanes=0.1)
    assert load_of([Round(8, 80, 80)], few) == SplitLoad(6, 15, 5, own=14, own_grown=14)
    assert load_of([], apart) is None


def test_what_a_round_grew_by_hand() -> None:
    """Of four steps two are equal and a third has two of their three tokens; the fourth follows
    another branch, so that it shares nothing though it says what they say."""
    branches = [branch((1, 2), child) for child in range(3)] + [branch((1, 3))]
    steps = [step(3), step(3), step(2), step(1)]
    grown = Growth.of(branches, steps)
    assert grown == Growth(step=9 / 4, own=4 / 4, lanes=3 / 4)
    expected = Growth(step=4.0, own=4.0, lanes=1.0).towards(grown)
    assert expected == Growth(step=3.125, own=2.5, lanes=0.875)


def distinct(branches: int, tokens: int) -> list[Branch]:
    """Of so many tokens each, none of them alike."""
    first = [100 * number for number in range(branches)]
    return [branch(tuple(range(at, at + tokens)), at) for at in first]


def resplit_of(budget: int, step: float) -> Resplit:
    """Half of the bytes for each; a token of the reward model takes two."""
    shared = Shared(LIGHT, HEAVY, DEVICE, budget=budget, least=(80, 40))
    return Resplit(shared, store(budget // 2), store(budget // 4), step=step)


def test_slots_go_where_they_are_lacking_and_come_back() -> None:
    """400 bytes. Ten branches of 20 tokens and steps of 5 draw at once in 10 x 25 tokens, and 3 x
    25 are left for the verifier. Two of 50 tokens and steps of 10 need 2 x 60 of each, 360 bytes;
    what is left is shared as these are, one to two.
    """
    resplit = resplit_of(400, step=5)
    policy, prm = resplit.stores
    resplit.settle()
    assert (policy.cache.capacity, prm.cache.capacity) == (200, 100)
    resplit.asked("wide", distinct(10, 20))
    resplit.settle()
    assert (policy.cache.capacity, prm.cache.capacity) == (250, 75)
    resplit.settle()
    resplit.drew("wide", [step(5), step(15)] * 5)
    resplit.ended("wide")
    resplit.asked("slim", distinct(2, 50))
    resplit.settle()
    assert (policy.cache.capacity, prm.cache.capacity) == (134, 133)
    assert resplit.moves == 2
    resplit.asked("less", distinct(1, 10))
    resplit.ended("slim")
    resplit.settle()
    assert resplit.moves == 2, "nothing is lacking"


def test_what_is_read_stays_and_the_other_gets_the_rest() -> None:
    """The verifier reads 90 of the 100 tokens of which it is to keep 75."""
    resplit = resplit_of(400, step=5)
    policy, prm = resplit.stores
    lane = prm.enter("t", (0, 0, 0), np.arange(90) % 28, size=90, upto=89)
    assert isinstance(lane, Lane)
    for _ in range(2):
        prm.advance()
    resplit.asked("t", distinct(10, 20))
    resplit.settle()
    assert (policy.cache.capacity, prm.cache.capacity) == (220, 90)
    prm.drop(lane)
    for batch in resplit.stores:
        batch.cache.check()


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """A tiny policy, a reward model with twice the layers, and KV for little."""
    return EngineOptions(
        **make_pair(tmp_path_factory.mktemp("models")),
        kv_tokens=700,
        prm_kv_tokens=700,
        kv_split="roofline",
        kv_load=SplitLoad(2, 20, 5),
        threads=1,
        strict=True,
    )


SPEC = SearchSpec(policy="rebase", width=8, seed=3, max_step_tokens=20, trajectory_tokens=100)


async def grown(engine: Any, prompt: tuple[int, ...], spec: SearchSpec = SPEC) -> Outcome:
    return await search(
        Problem(prompt=prompt, question=""),
        spec,
        engine,
        tree_id=f"{prompt[0]}",
        answer_of=str,
        clock=time.monotonic,
    )


def test_a_tree_is_the_same_however_often_slots_move(options: EngineOptions) -> None:
    """Digest for digest, in stores for less than it would hold."""
    models = Models(replace(options, kv_split="given"))
    prompt = tuple(models.text.encode("One and two"))
    roomy = asyncio.run(grown(InProcess(models, kv_tokens=4_000, prm_kv_tokens=4_000), prompt))
    shared = Shared.of(options, DEVICE)
    assert shared is not None
    shared = replace(shared, least=(130, 130), budget=shared.budget // 2)
    rest = (shared.budget - 130 * shared.prm.kv_bytes) // shared.policy.kv_bytes
    tight = InProcess(models, kv_tokens=rest, prm_kv_tokens=130)
    tight.resplit = Resplit(shared, tight.scheduler.batch, tight.scorer.batch, step=5)
    assert asyncio.run(grown(tight, prompt)).digest == roomy.digest
    assert tight.resplit.moves > 0
    tight.scheduler.check()
    tight.scorer.cache.check()


async def test_how_kv_is_shared_is_said_in_the_log(
    options: EngineOptions, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's process hands its lines over; the level is the server's."""
    with caplog.at_level(logging.INFO):
        engine = await EmbeddedEngine.start(options)
        await engine.close()
    said = [line for line in caplog.records if line.name == "runtime.embedded.kv.split"]
    assert [line.getMessage().split(": policy")[0] for line in said] == ["KV split roofline"]


async def test_an_engine_moves_slots_and_refuses_what_may_not_fit(options: EngineOptions) -> None:
    """Four searches at once in its process; what no split is sure to hold is named."""
    roomy = replace(options, kv_split="given", kv_tokens=9_000, prm_kv_tokens=9_000)
    prompts = [tuple(range(40 + n, 60 + n)) for n in range(4)]
    digests = []
    for each in (roomy, options):
        engine = await EmbeddedEngine.start(each)
        try:
            outcomes = await asyncio.gather(*(grown(engine, prompt) for prompt in prompts))
            digests.append([outcome.digest for outcome in outcomes])
            if each is options:
                with pytest.raises(EngineError, match="320"):
                    await engine.expand("long", [branch(tuple(range(40, 60)) * 16)], Sampling())
                assert engine.counters["kv_splits"] > 0
        finally:
            await engine.close()
    assert digests[0] == digests[1]
