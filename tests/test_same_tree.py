"""Same seed, same tree: no option that saves time or memory changes a digest.

One reference run with every such option off, then each change alone and all of them together, on
the bundled models and in real engine processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from models.tasks import TASKS
from runtime.embedded.choices import KvPolicy
from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.options import EngineOptions
from runtime.text import Text
from search.controller import search
from search.counters import EngineCounters
from search.outcome import Outcome
from search.problem import Problem
from search.spec import SearchSpec, StopReason
from tests.closing import closing

SPRIG = "models/sprig"
OFF = EngineOptions(
    policy=f"{SPRIG}/policy",
    prm=f"{SPRIG}/prm",
    reward_format="math-shepherd",
    kv_tokens=20_000,
    prm_kv_tokens=20_000,
    kv_policy="lru",
    batch_limit=1,
    threads=1,
    exact=True,
    dedup=False,
    strict=True,
)
DRAFT = {"draft": "scheduled", "draft_model": f"{SPRIG}/draft"}
SPECS = tuple(
    spec.model_copy(update={"max_step_tokens": 64})
    for spec in (
        SearchSpec(policy="rebase", width=6, seed=1),
        SearchSpec(policy="beam", width=4, seed=2, temperature=0.8, top_p=0.95),
        SearchSpec(policy="best_of_n", width=2, seed=3),
        SearchSpec(policy="self_consistency", width=2, seed=4),
        SearchSpec(policy="ets", width=6, seed=5),
    )
)
"""Steps are short, so that pools can be small."""
QUESTIONS = tuple(task.questions("dev", 2, seed=5)[1] for task in TASKS.values())
CASES = tuple(zip(cycle(QUESTIONS), SPECS, strict=False))
TEXT = Text(f"{SPRIG}/policy")


async def grow(engine: EmbeddedEngine, question: str, spec: SearchSpec, name: str) -> Outcome:
    """Run one search on the engine."""
    prompt = tuple(TEXT.encode_chat([{"role": "user", "content": question}]))
    return await search(
        Problem(prompt=prompt, question=question),
        spec,
        engine,
        tree_id=name,
        answer_of=lambda reply: reply.strip().splitlines()[-1] if reply.strip() else None,
        clock=time.monotonic,
        context_tokens=engine.capabilities.context_tokens,
    )


Cases = Sequence[tuple[str, SearchSpec]]


async def one_by_one(engine: EmbeddedEngine, cases: Cases = CASES) -> list[str]:
    """The digests of the cases, run one after the other."""
    return [(await grow(engine, q, s, f"case{i}")).digest for i, (q, s) in enumerate(cases)]


async def together(engine: EmbeddedEngine, cases: Cases) -> list[str]:
    """The digests of the cases, run at the same time."""
    searches = (grow(engine, q, s, f"case{i}") for i, (q, s) in enumerate(cases))
    return [outcome.digest for outcome in await asyncio.gather(*searches)]


async def among_others(engine: EmbeddedEngine) -> list[str]:
    """The cases' digests, run together with other searches so that eight run at once."""
    others = [
        grow(engine, q, s.model_copy(update={"seed": 100 + i}), f"other{i}")
        for i, (q, s) in enumerate(CASES[: 8 - len(CASES)])
    ]
    *_, case_digests = await asyncio.gather(*others, together(engine, CASES))
    return case_digests


async def warm(engine: EmbeddedEngine) -> list[str]:
    """The digests of a second pass over one engine, whose cache has every prompt."""
    await one_by_one(engine)
    return await one_by_one(engine)


async def restarted(engine: EmbeddedEngine) -> list[str]:
    """The digests with a restart of the engine's process after each case."""
    case_digests = []
    for i, (question, spec) in enumerate(CASES):
        case_digests.append((await grow(engine, question, spec, f"case{i}")).digest)
        await engine.restart()
    return case_digests


Run = Callable[[EmbeddedEngine], Coroutine[None, None, list[str]]]


async def digests(run: Run, options: EngineOptions) -> list[str]:
    """Run the cases on a new engine; checks that exactly a smaller pool than OFF's evicts."""
    async with closing(await EmbeddedEngine.start(options)) as engine:
        case_digests, usage = await run(engine), await engine.usage()
        assert (usage.totals.evicted_tokens > 0) == (options.kv_tokens < OFF.kv_tokens)
        return case_digests


def digests_on(
    run: Callable[[EmbeddedEngine, Cases], Coroutine[None, None, list[str]]],
    options: EngineOptions,
    cases: Cases,
) -> list[str]:
    """The digests of ``cases`` on a new engine."""

    async def on_an_engine() -> list[str]:
        async with closing(await EmbeddedEngine.start(options)) as engine:
            return await run(engine, cases)

    return asyncio.run(on_an_engine())


ALL_SIGNALS = "tests/kvpolicy/all_signals.json"
"""Coefficients that use every signal, attention included."""
AHEAD = {"speculate": True, "lookahead": True, "batch_limit": 64}
DEDUP = {"dedup": True}

CHANGES: dict[str, tuple[Run, dict]] = {
    "batch limit 64": (one_by_one, {"batch_limit": 64}),
    "deduplicated, a few places": (among_others, DEDUP | {"batch_limit": 4}),
    "two threads": (one_by_one, DEDUP | {"threads": 2, "batch_limit": 64}),
    "beside seven others": (among_others, DEDUP | {"batch_limit": 64}),
    "warm cache": (warm, DEDUP),
    "engine restarted": (restarted, DEDUP),
    "a small pool by age": (among_others, DEDUP | {"batch_limit": 16, "kv_tokens": 450}),
    "a small pool by worth": (among_others, DEDUP | {"kv_policy": "arborkv", "kv_tokens": 380}),
    "a small pool by all signals": (
        among_others,
        {"kv_policy": "arborkv", "kv_tokens": 380, "kv_theta": ALL_SIGNALS},
    ),
    "drafts one after another": (one_by_one, DRAFT | {"draft": "serial", "batch_limit": 64}),
    "drafts, checked two at a time, in a small pool": (
        among_others,
        DRAFT | {"verify_batch": 2, "batch_limit": 64, "kv_tokens": 450, "draft_kv_tokens": 450},
    ),
    "two candidates a draft": (among_others, DRAFT | {"k_config": (2, 2, 1), "batch_limit": 64}),
    "drafts, deduplicated": (among_others, DRAFT | DEDUP | {"draft_tokens": 4, "batch_limit": 64}),
    "two candidates a draft, deduplicated, in a small pool": (
        among_others,
        DRAFT
        | DEDUP
        | {"k_config": (2, 2, 1), "draft_tokens": 3, "batch_limit": 16}
        | {"kv_tokens": 450, "draft_kv_tokens": 450},
    ),
    "speculative expansion": (one_by_one, AHEAD | {"batch_limit": 16}),
    "speculative expansion in a small pool": (among_others, AHEAD | DEDUP | {"kv_tokens": 450}),
    "everything": (
        among_others,
        DRAFT
        | AHEAD
        | DEDUP
        | {"batch_limit": 64, "threads": 2, "kv_policy": "arborkv", "kv_tokens": 380}
        | {"kv_theta": ALL_SIGNALS},
    ),
}


@pytest.fixture(scope="module")
def bare() -> list[str]:
    """Digests with one branch at a time, one thread, a cold cache and room for all. The last one is
    of the first case with another seed."""
    question, spec = CASES[0]

    async def run(engine: EmbeddedEngine) -> list[str]:
        case_digests = await one_by_one(engine)
        outcome = await grow(engine, question, spec.model_copy(update={"seed": 99}), "other")
        return [*case_digests, outcome.digest]

    return asyncio.run(digests(run, OFF))


@pytest.fixture
def reference(bare: list[str]) -> list[str]:
    """The expected digest of each case."""
    return bare[: len(CASES)]


SLOW = {
    "batch limit 64",
    "a small pool by age",
    "drafts, checked two at a time, in a small pool",
    "engine restarted",
    "warm cache",
    "a small pool by worth",
    "a small pool by all signals",
    "two candidates a draft, deduplicated, in a small pool",
    "speculative expansion in a small pool",
    "two threads",
    "beside seven others",
    "drafts, deduplicated",
    "everything",
}
"""Changes whose tests are slow."""
NIGHTLY = {"two candidates a draft", "drafts one after another", "speculative expansion"}
"""Changes that other ones include."""


def marked(change: str) -> Any:
    """A change as a parameter with its marks, slow and nightly."""
    long = [pytest.mark.slow] if change in SLOW | NIGHTLY else []
    return pytest.param(change, marks=long + [pytest.mark.nightly] * (change in NIGHTLY))


@pytest.mark.promise(
    "Optimisations change time and memory, never the tree: digests are equal with all of them off, "
    "some on and all on."
)
@pytest.mark.parametrize("change", [marked(change) for change in CHANGES])
def test_same_seed_same_tree(change: str, reference: list[str]) -> None:
    """With each change, and with all of them, the digests equal those with everything off."""
    run, options = CHANGES[change]
    assert asyncio.run(digests(run, replace(OFF, **options))) == reference


@pytest.mark.promise(
    "Sampling parameters act on a branch's own path, so drafts, sharing and a small KV pool change "
    "no tree."
)
@pytest.mark.slow
def test_penalties_grow_the_same_tree() -> None:
    """Penalties count a trajectory's own steps only, wherever these are drawn."""
    penalties = {"top_k": 20, "min_p": 0.001, "presence_penalty": 0.3, "frequency_penalty": 0.1}
    changes = penalties | {"repetition_penalty": 1.05, "min_tokens": 30, "logit_bias": {5: 0.5}}
    cases = [(q, s.model_copy(update=changes)) for q, s in CASES]
    everything = DRAFT | AHEAD | DEDUP | {"kv_tokens": 700, "kv_policy": "arborkv"}
    crowded = replace(OFF, **everything | {"k_config": (2, 2, 1)})
    assert digests_on(together, crowded, cases) == digests_on(one_by_one, OFF, cases)


JUDGED = replace(OFF, prm=None, reward_format="generative")


@pytest.mark.promise(
    "A search whose policy judges its own steps grows the same tree alone and beside another in a "
    "small KV pool."
)
@pytest.mark.slow
def test_a_judged_tree_is_the_same_tree() -> None:
    """The policy as its own judge gives the same verdicts alone and amid other searches."""
    specs = [SearchSpec(policy="tot_bfs", width=3, max_depth=4, seed=seed) for seed in (1, 2)]
    cases = [(QUESTIONS[0], spec) for spec in specs]
    crowded = replace(JUDGED, batch_limit=64, threads=2, kv_tokens=1_200)
    assert digests_on(together, crowded, cases) == digests_on(one_by_one, JUDGED, cases)


@pytest.mark.promise(
    "A search grows the same tree in a KV pool of any size above one path, by age (`lru`) or by "
    "worth (`arborkv`)."
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_policy", "kv_tokens"),
    [
        ("lru", 360),
        ("lru", 450),
        ("lru", 600),
        ("arborkv", 360),
        ("arborkv", 380),
        ("arborkv", 400),
    ],
)
def test_same_seed_same_tree_in_a_pool_of_any_size(
    kv_policy: KvPolicy, kv_tokens: int, reference: list[str]
) -> None:
    """Pools from little above one path to nearly enough evict KV and compute it again."""
    options = replace(OFF, batch_limit=64, kv_policy=kv_policy, kv_tokens=kv_tokens)
    assert asyncio.run(digests(among_others, options)) == reference


def test_another_seed_is_another_tree(bare: list[str]) -> None:
    """Another seed gives another digest, so that the comparisons above can fail."""
    assert bare[-1] != bare[0]


GOING_BACK = tuple(
    SearchSpec(
        policy=policy,
        width=60,
        seed=6,
        expansions=32,
        enough_answers=60,
        max_step_tokens=32,
        trajectory_tokens=160,
    )
    for policy in ("best_first", "mcts")
)

SMALL_POOL = 300
"""Tokens: one path and its next step fit, all open paths do not."""


async def search_once(options: EngineOptions, spec: SearchSpec) -> tuple[Outcome, EngineCounters]:
    """Search one blocksworld plan; the outcome, and the engine's totals after its release."""
    async with closing(await EmbeddedEngine.start(options)) as engine:
        question = TASKS["blocksworld"].questions("dev", 1, seed=3)[0]
        outcome = await grow(engine, question, spec, "back")
        usage = await engine.usage()
        assert usage.kv_tokens_active == usage.prm_kv_tokens_active == 0
        return outcome, usage.totals


@pytest.mark.promise(
    "A search that goes back to a step whose KV was evicted draws what it would have drawn with "
    "that KV kept."
)
@pytest.mark.slow
@pytest.mark.parametrize("spec", GOING_BACK, ids=lambda spec: spec.policy)
async def test_going_back_to_what_was_dropped_is_the_same_tree(spec: SearchSpec) -> None:
    """A pool that cannot hold all open paths evicts old ones and prefills them on return."""
    roomy, roomy_totals = await search_once(OFF, spec)
    small = replace(OFF, kv_tokens=SMALL_POOL, prm_kv_tokens=SMALL_POOL, batch_limit=8)
    tight, tight_totals = await search_once(small, spec)
    assert tight.digest == roomy.digest
    assert roomy.stats.engine.rehydrated_tokens == roomy_totals.held_evicted_tokens == 0
    assert tight.stats.engine.rehydrated_tokens > 0
    assert tight_totals.held_evicted_tokens > 0
    assert tight_totals.prm_evicted_tokens > roomy_totals.prm_evicted_tokens == 0
    assert roomy_totals.kv_accounting_errors == tight_totals.kv_accounting_errors == 0
    assert tight.stats.engine.kv_tokens_peak <= SMALL_POOL < roomy.stats.engine.kv_tokens_peak


LEVELS = (
    SearchSpec(policy="dvts", width=6, seed=6, beam_width=2),
    SearchSpec(policy="particle_filter", width=6, seed=7),
    SearchSpec(policy="rebase", width=6, seed=8, vote="majority", consensus="certain"),
    SearchSpec(policy="particle_filter", width=6, seed=9, ess_threshold=0.5, soft_start=True),
    SearchSpec(policy="rebase", width=6, seed=10, mass=0.5, floor_levels=2, vote="lineages"),
    SearchSpec(policy="dora", width=6, seed=11),
    SearchSpec(policy="adaptive", width=6, seed=12),
    SearchSpec(policy="rebase", width=6, seed=13, restarts=2, hopeless_below=1.0),
)


@pytest.mark.promise(
    "A search that full retention must end for lack of KV completes under `arborkv`, with its "
    "digest unchanged."
)
@pytest.mark.slow
def test_what_full_retention_must_end_arborkv_completes() -> None:
    """All open steps take more than the pool: full retention ends the search, ``arborkv``
    completes it."""
    spec, question = GOING_BACK[0], TASKS["blocksworld"].questions("dev", 1, seed=3)[0]

    async def alone(kv_policy: KvPolicy, kv_tokens: int) -> Outcome:
        options = replace(OFF, batch_limit=64, kv_policy=kv_policy, kv_tokens=kv_tokens)
        async with closing(await EmbeddedEngine.start(options)) as engine:
            return await grow(engine, question, spec, "open")

    roomy = asyncio.run(alone("full", 20_000))
    assert roomy.stats.engine.kv_tokens_peak > SMALL_POOL
    assert asyncio.run(alone("full", SMALL_POOL)).stop_reason is StopReason.KV
    small = asyncio.run(alone("arborkv", SMALL_POOL))
    assert small.digest == roomy.digest
    assert small.stats.engine.rehydrations > 0
    assert small.stats.engine.kv_tokens_peak <= SMALL_POOL


@pytest.mark.slow
def test_other_policies_grow_the_same_trees() -> None:
    """Further policies: each alone with OFF, and all at once on two threads in a small pool."""
    cases = [(QUESTIONS[0], spec) for spec in LEVELS]
    crowded = replace(OFF, batch_limit=64, threads=2, kv_tokens=1_200, prm_kv_tokens=1_200)
    alone = digests_on(one_by_one, OFF, cases)
    assert digests_on(together, crowded, cases) == alone
    assert len(set(alone)) == len(LEVELS)
