"""The embedded engine in its own process: equal bits under any batching, threads and memory."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import pytest_asyncio

from runtime.embedded import pipe
from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.fingerprint import fingerprint
from runtime.embedded.options import EngineOptions
from runtime.embedders.endpoint import EndpointOptions
from runtime.embedders.lexical import embed_texts
from search.counters import Counters
from search.engine import (
    Branch,
    CallFault,
    EngineDown,
    EngineError,
    Hint,
    PrefixTooLong,
    RewardMissing,
    Sampling,
    Step,
    Trajectory,
)
from search.tree import ROOT, Finish, node_seed
from tests.closing import closing
from tests.runtime.inline_engine_loop import Unreadable
from tests.runtime.tiny_models import make_checkpoint, make_tokenizer

LIMIT = 12
SAMPLING = Sampling(temperature=0.8, top_p=0.95, max_step_tokens=LIMIT)
Scored = list[tuple[Step, float]]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """Tiny random models; one branch at a time, one thread, room for everything."""
    folder: Path = tmp_path_factory.mktemp("models")
    return EngineOptions(
        policy=make_checkpoint(folder / "policy", seed=1),
        prm=make_checkpoint(folder / "prm", seed=2),
        kv_tokens=4000,
        prm_kv_tokens=4000,
        batch_limit=1,
        threads=1,
        strict=True,
        embedder="hidden",
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(options: EngineOptions) -> AsyncIterator[EmbeddedEngine]:
    """The engine that most tests share."""
    engine = await EmbeddedEngine.start(options)
    yield engine
    await engine.close()


@cache
def prompt(number: int) -> tuple[int, ...]:
    """A prompt of some forty tokens."""
    text = f"<|user|>Question {number}: what is {number} = 1?<|end|><|assistant|>"
    return tuple(make_tokenizer().encode(text))


async def grow(engine: EmbeddedEngine, tree: str, number: int, rounds: int = 3) -> Scored:
    """Grow a tree by four children a round, keeping the two best leaves; all steps and rewards."""
    ids = prompt(number)
    leaves: list[tuple[int, tuple[tuple[int, ...], ...], tuple[str, ...]]] = [(ROOT, (), ())]
    scored_steps: Scored = []
    for _ in range(rounds):
        branches = [
            Branch(
                node,
                child,
                (*ids, *(t for step in steps for t in step)),
                node_seed(number, "step", (node, child)),
                SAMPLING.max_step_tokens,
                len(scored_steps) + 4 * place + child + 1,
            )
            for place, (node, steps, _) in enumerate(leaves)
            for child in range(4)
        ]
        above = [leaf for leaf in leaves for _ in range(4)]
        fresh = await engine.expand(tree, branches, SAMPLING)
        paths = [
            Trajectory(len(scored_steps) + i + 1, (*steps, step.tokens), (*texts, step.text))
            for i, ((_, steps, texts), step) in enumerate(zip(above, fresh, strict=True))
        ]
        rewards = await engine.score(tree, ids, "", paths)
        scored_steps += zip(fresh, rewards, strict=True)
        ranked = sorted(zip(rewards, paths, fresh, strict=True), key=lambda r: (-r[0], r[1].node))
        alive = [path for _, path, step in ranked if step.finish is not Finish.END][:2]
        dead = {path.node for path in paths} - {path.node for path in alive}
        engine.hint(tree, Hint(dead=tuple(dead)))
        leaves = [(path.node, path.steps, path.texts) for path in alive]
    return scored_steps


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(engine: EmbeddedEngine) -> Scored:
    """Tree 3, grown alone from a cold cache."""
    scored_steps = await grow(engine, "reference", 3)
    await engine.release("reference")
    return scored_steps


async def test_steps_are_well_formed(reference: Scored) -> None:
    """Finishes agree with tokens and texts, and rewards are probabilities."""
    assert len(reference) == 20
    assert len({reward for _, reward in reference}) > 10
    end = make_tokenizer().eos_token_id
    for step, reward in reference:
        assert 0 < len(step.tokens) <= SAMPLING.max_step_tokens
        assert (step.finish is Finish.END) == (step.tokens[-1] == end)
        assert (step.finish is Finish.STEP) == step.text.endswith("\n\n")
        assert step.logprob < 0 < step.entropy
        assert 0 < reward < 1


async def test_a_warm_cache_draws_the_same(engine: EmbeddedEngine, reference: Scored) -> None:
    """With the prompt cached, less is prefilled and the tree is the same."""
    assert await grow(engine, "warm", 3) == reference
    cost = await engine.release("warm")
    assert cost.decoded_tokens == sum(len(step.tokens) for step, _ in reference)
    assert cost.cached_tokens > 0
    assert cost.kv_tokens_peak > len(prompt(3))
    assert cost.model_calls > 0
    assert cost.flops > 0
    assert await engine.release("warm") == Counters()


async def test_a_restarted_engine_draws_the_same(engine: EmbeddedEngine, reference: Scored) -> None:
    """A new process gives the same bits and fingerprint."""
    before, pid = engine.capabilities, engine.pid
    await engine.restart()
    assert engine.pid != pid
    assert engine.capabilities == before
    assert await grow(engine, "again", 3) == reference
    await engine.release("again")


@pytest.mark.promise(
    "A tree's steps and rewards have the same bits alone and beside seven others in one KV pool, "
    "also with evictions."
)
@pytest.mark.parametrize(("kv_tokens", "threads"), [(4000, 2), (300, 1)])
async def test_company_places_threads_and_memory_change_nothing(
    options: EngineOptions, reference: Scored, kv_tokens: int, threads: int
) -> None:
    """A tree has equal bits beside seven others, at 64 places, with two threads, with evictions."""
    crowded = replace(
        options,
        batch_limit=64,
        threads=threads,
        kv_tokens=kv_tokens,
        prm_kv_tokens=kv_tokens,
    )
    async with closing(await EmbeddedEngine.start(crowded)) as engine:
        rounds = (2, 2, 2, 3, 2, 2, 2, 2)
        trees = await asyncio.gather(
            *(grow(engine, f"tree{i}", i, rounds=n) for i, n in enumerate(rounds))
        )
        usage = await engine.usage()
        assert trees[3] == reference
        assert len({tuple(step.tokens for step, _ in tree) for tree in trees}) == 8
        assert (usage.totals.evicted_tokens > 0) == (kv_tokens < 4000)
        for i in range(8):
            await engine.release(f"tree{i}")
        usage = await engine.usage()
        assert usage.kv_tokens_active == usage.prm_kv_tokens_active == 0
        assert usage.kv_tokens_cached > 0


async def test_scores_do_not_depend_on_what_was_scored_before(
    engine: EmbeddedEngine, reference: Scored
) -> None:
    """A path scored at once has the same bits as one scored step by step."""
    ids = prompt(3)
    steps = [step for step, _ in reference[:4]]
    chain = tuple(step.tokens for step in steps)
    texts = tuple(step.text for step in steps)
    slowly = [
        (await engine.score("slowly", ids, "", [Trajectory(n, chain[:n], texts[:n])]))[0]
        for n in range(1, 5)
    ]
    paths = [Trajectory(n, chain[:n], texts[:n]) for n in range(4, 0, -1)]
    assert await engine.score("at once", ids, "", paths) == slowly[::-1]
    await engine.release("slowly")
    await engine.release("at once")


async def test_a_round_in_several_messages_is_the_same_round(
    engine: EmbeddedEngine, reference: Scored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call split into several messages gives the same results in the same order."""
    monkeypatch.setattr(pipe, "MOST_AT_ONCE", 3)
    monkeypatch.setattr(pipe, "MOST_TO_SCORE", 30)
    assert await grow(engine, "oak", 3) == reference
    steps = [step for step, _ in reference]
    paths = [Trajectory(i + 1, (step.tokens,), (step.text,)) for i, step in enumerate(steps)]
    together = await engine.embed("oak", prompt(3), paths)
    assert together == [(await engine.embed("oak", prompt(3), [path]))[0] for path in paths]
    await engine.release("oak")


async def test_abort_fails_what_is_under_way_and_frees_it(engine: EmbeddedEngine) -> None:
    """The waiting caller gets EngineError, and only the tree's prompt stays cached."""
    branches = [Branch(ROOT, i, prompt(5), i, LIMIT, i + 1) for i in range(64)]
    waiting = asyncio.create_task(engine.expand("oak", branches, SAMPLING))
    await asyncio.sleep(0)
    await engine.abort("oak")
    with pytest.raises(EngineError, match="tree 'oak' was aborted"):
        await waiting
    usage = await engine.usage()
    assert usage.running == usage.waiting == usage.kv_tokens_active == 0
    assert (await engine.usage()).totals.kv_accounting_errors == 0


async def test_a_cancelled_caller_leaves_nothing_after_abort(engine: EmbeddedEngine) -> None:
    """Cancelling a caller frees nothing; the abort afterwards does, and the engine goes on."""
    branches = [Branch(ROOT, i, prompt(6), i, LIMIT, i + 1) for i in range(64)]
    waiting = asyncio.create_task(engine.expand("oak", branches, SAMPLING))
    await asyncio.sleep(0)
    waiting.cancel()
    await engine.abort("oak")
    assert (await engine.usage()).kv_tokens_active == 0
    await engine.health()


async def test_refusals_reach_the_caller_and_hurt_nobody(engine: EmbeddedEngine) -> None:
    """Errors keep their class and message across the process border."""
    with pytest.raises(PrefixTooLong, match=r"600 tokens and a step of up to 12 .* context of 512"):
        await engine.expand("oak", [Branch(ROOT, 0, (1,) * 600, 0, LIMIT, 1)], SAMPLING)
    pid = engine.pid
    with pytest.raises(EngineError, match=r"stop: holds '\\ud800', half a character"):
        await engine.expand("oak", [Branch(ROOT, 0, (1,), 0, 3, 1)], Sampling(stop=("\ud800",)))
    with pytest.raises(EngineError, match="tokens: empty"):
        await engine.expand("oak", [Branch(ROOT, 0, (), 0, LIMIT, 1)], SAMPLING)
    with pytest.raises(EngineError, match="steps: node 7 has an empty one or none"):
        await engine.score("oak", (1,), "", [Trajectory(7, ((1,), ()), ("", ""))])
    with pytest.raises(EngineError, match="steps: token id 9999; ids from 0"):
        await engine.embed("oak", (1,), [Trajectory(1, ((9999,),), ("",))])
    await engine.health()
    assert engine.pid == pid
    assert (await engine.usage()).totals.call_errors == 4


async def test_what_cannot_go_over_the_pipe_is_its_own_calls_error(
    engine: EmbeddedEngine, reference: Scored
) -> None:
    """Messages that cannot be pickled or unpickled fail their own call with CallFault; others go
    over the pipe as before."""
    with pytest.raises(CallFault, match="cannot be sent"):
        await engine.expand("elm", [Branch(ROOT, 0, (1,), lambda: 1, LIMIT, 1)], SAMPLING)  # type: ignore[arg-type]
    with pytest.raises(CallFault, match="cannot be sent"):
        engine.hint("elm", lambda: 1)  # type: ignore[arg-type]
    with pytest.raises(CallFault, match=r"failed at this call \(ValueError\)"):
        await engine.expand("elm", [], Unreadable())  # type: ignore[arg-type]
    engine.hint("elm", Unreadable())  # type: ignore[arg-type]
    await engine.health()
    assert await grow(engine, "sent", 3) == reference
    await engine.release("sent")


async def test_embeddings_depend_on_the_last_step_alone(
    engine: EmbeddedEngine, reference: Scored
) -> None:
    """A step's embedding has the same bits alone, among many, and under any prompt and path."""
    steps = [step for step, _ in reference]
    paths = [Trajectory(i + 1, (step.tokens,), (step.text,)) for i, step in enumerate(steps)]
    together = await engine.embed("oak", prompt(1), paths)
    assert engine.capabilities.embeds == "hidden"
    assert len({len(vector) for vector in together}) == 1
    deeper = Trajectory(9, ((1, 2, 3), steps[0].tokens), ("abc", steps[0].text))
    assert await engine.embed("elm", prompt(2), [deeper]) == together[:1]
    assert await engine.embed("elm", prompt(2), paths[1:2]) == together[1:2]
    cost = await engine.release("elm")
    assert cost == Counters()
    scored_steps = await grow(engine, "oak", 3)
    assert scored_steps == reference
    assert (await engine.usage()).kv_tokens_active > 0
    await engine.release("oak")


async def test_embeddings_are_charged_to_the_search(engine: EmbeddedEngine) -> None:
    """Embedding costs a pass over half of the layers and adds no KV to the search."""
    branch = [Branch(ROOT, 0, prompt(8), 1, LIMIT, 1)]
    for _ in ("cold", "warm"):
        (step,) = await engine.expand("oak", branch, SAMPLING)
        plain = await engine.release("oak")
    await engine.expand("oak", branch, SAMPLING)
    await engine.embed("oak", prompt(8), [Trajectory(1, (step.tokens,), (step.text,))])
    cost = await engine.release("oak")
    assert cost.model_calls == plain.model_calls + 1
    extra = cost.flops - plain.flops
    assert 0 < extra < plain.flops
    assert cost.kv_tokens_peak == plain.kv_tokens_peak


async def test_abort_stops_embedding(engine: EmbeddedEngine) -> None:
    """The waiting caller gets EngineError, and the next call is answered."""
    paths = [Trajectory(i, (tuple(range(1, 200)),), ("",)) for i in range(200)]
    waiting = asyncio.create_task(engine.embed("oak", prompt(5), paths))
    await asyncio.sleep(0)
    await engine.abort("oak")
    with pytest.raises(EngineError, match="tree 'oak' was aborted"):
        await waiting
    assert len(await engine.embed("oak", prompt(5), paths[:1])) == 1
    assert await engine.embed("oak", prompt(5), []) == []


async def test_letters_embed_where_they_are_asked_for(options: EngineOptions) -> None:
    """The engine returns the vectors of ``runtime.embedders.lexical``."""
    async with closing(await EmbeddedEngine.start(replace(options, embedder="lexical"))) as engine:
        path = Trajectory(2, ((1, 2), (3,)), ("first", "13 - 9 = 4"))
        assert await engine.embed("oak", (1,), [path]) == embed_texts(["13 - 9 = 4"])
        assert engine.capabilities.embeds == "lexical"


async def test_what_embeds_is_in_the_fingerprint(options: EngineOptions) -> None:
    """Embedder, layer and endpoint model are in the fingerprint; the endpoint's address is not."""
    endpoint = EndpointOptions("http://one/v1/embeddings", "a")
    changes = [
        {},
        {"embedder": "lexical"},
        {"embedder_layer": 2},
        {"embedder": "endpoint", "endpoint": endpoint},
        {"embedder": "endpoint", "endpoint": replace(endpoint, model="b")},
    ]
    digests = {fingerprint(replace(options, **change), "torch") for change in changes}
    assert len(digests) == len(changes)
    moved = replace(endpoint, url="http://two", key="secret")
    assert fingerprint(replace(options, embedder="endpoint", endpoint=moved), "torch") in digests


async def test_threads_are_in_the_fingerprint_where_bits_may_depend_on_them(
    options: EngineOptions,
) -> None:
    """Exact arithmetic has one fingerprint for any number of threads; the plain forward has not."""
    one, two = replace(options, threads=1), replace(options, threads=2)
    assert fingerprint(one, "torch") == fingerprint(two, "torch") != fingerprint(one, "attention-1")
    plain = replace(one, exact=False), replace(two, exact=False)
    assert fingerprint(plain[0], "torch") != fingerprint(plain[1], "torch")


async def test_an_engine_that_loads_is_not_up(options: EngineOptions) -> None:
    """While a restarted engine loads its models, health and calls raise EngineDown."""
    async with closing(await EmbeddedEngine.start(options)) as engine:
        before = engine.pid
        again = asyncio.create_task(engine.restart())
        while engine.pid in (before, None):
            await asyncio.sleep(0.001)
        for call in (engine.health(), engine.usage(), engine.release("oak")):
            with pytest.raises(EngineDown, match="loading"):
                await call
        await again
        await engine.health()


@pytest.mark.promise(
    "The embedded engine is a separate process: if it is killed its calls fail at once, and after "
    "a restart the same tree grows."
)
async def test_a_process_that_says_nothing_is_down_and_a_killed_one_comes_back(
    options: EngineOptions, reference: Scored
) -> None:
    """A stopped process is unhealthy until it continues. When it is killed, pending and later
    calls raise EngineDown at once; after a restart the same tree grows."""
    async with closing(await EmbeddedEngine.start(replace(options, stall_seconds=0.0))) as engine:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        await engine.health()
        with pytest.raises(EngineDown, match="has said nothing"):
            await engine.health()
        os.kill(engine.pid, signal.SIGCONT)
        await engine.release("nothing")
        await engine.health()
        branches = [Branch(ROOT, i, prompt(7), i, LIMIT, i + 1) for i in range(200)]
        waiting = [
            asyncio.create_task(engine.expand("oak", branches, SAMPLING)),
            asyncio.create_task(engine.score("elm", (1, 2), "", [Trajectory(1, ((3,),), ("",))])),
        ]
        await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGKILL)
        for call in waiting:
            with pytest.raises(EngineDown, match="process has ended"):
                await call
        for call in (engine.health(), engine.usage(), engine.release("oak")):
            with pytest.raises(EngineDown, match="not running"):
                await call
        engine.hint("oak", Hint())
        await engine.restart()
        assert await grow(engine, "oak", 3, rounds=1) == reference[:4]


async def test_without_a_reward_model(options: EngineOptions, reference: Scored) -> None:
    """Format `none` scores a step by the mean log-probability of its tokens."""
    async with closing(
        await EmbeddedEngine.start(replace(options, prm=None, reward_format="none"))
    ) as engine:
        assert engine.capabilities.scores
        scored_steps = await grow(engine, "oak", 3, rounds=1)
        assert [step for step, _ in scored_steps] == [step for step, _ in reference[:4]]
        for step, reward in scored_steps:
            assert math.log(reward) == pytest.approx(step.logprob)


async def test_scoring_without_the_model_it_needs(options: EngineOptions) -> None:
    """An engine without its reward model has ``scores`` False, and scoring names the format."""
    async with closing(await EmbeddedEngine.start(replace(options, prm=None))) as engine:
        assert not engine.capabilities.scores
        with pytest.raises(RewardMissing, match="'math-shepherd': no reward model"):
            await engine.score("oak", prompt(1), "", [Trajectory(1, ((3,),), ("",))])


async def test_what_is_wrong_with_a_checkpoint_is_said_at_start(options: EngineOptions) -> None:
    """An error at the process's start is raised with its own class and message."""
    with pytest.raises(ValueError, match=r"checkpoint: /nowhere; a folder with a config\.json"):
        await EmbeddedEngine.start(replace(options, policy="/nowhere"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedder": "encoder"}, "encoder: None; embedder 'encoder' needs one"),
        ({"embedder": "endpoint"}, "endpoint: None; embedder 'endpoint' needs one"),
        ({"draft": "serial"}, "draft_model: None; draft 'serial' needs one"),
    ],
)
async def test_bad_options_are_refused_by_name(
    options: EngineOptions, change: dict, message: str
) -> None:
    """The error names the option, its value and what is allowed; no process is started."""
    with pytest.raises(ValueError, match=message):
        replace(options, **change)
