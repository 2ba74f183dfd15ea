"""The engine against real SGLang servers of the bundled models, in float32 on the CPU."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
import pytest_asyncio

from hedgerow_sglang.plugin_protocol import Note, custom_params, plugin_counts
from loadtest.on_sglang import at_work
from loadtest.searches import steps_of
from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.options import EngineOptions
from runtime.sglang import chain_request
from runtime.sglang.launched_server import LaunchedServer
from runtime.sglang.round_gate import RoundGate
from runtime.sglang.sglang_engine import SglangEngine
from runtime.verified_engine import VerifiedEngine, start_verifier
from runtime.verifiers.stated_arithmetic import has_wrong_equation
from runtime.verifiers.verifier import VerifierOptions
from search.engine import (
    Branch,
    EngineDown,
    EngineError,
    Hint,
    LogitsParams,
    PrefixTooLong,
    Sampling,
    Trajectory,
)
from search.outcome import Outcome
from search.stats import path_length
from search.tree import Finish, node_seed
from tests.closing import closing
from tests.runtime.same_on_engines import GREEDY, near_rewards, same_steps
from tests.runtime.sglang.real_searches import (
    POLICY,
    PRM,
    QUESTIONS,
    TEXT,
    grow,
    options,
    prompt_of,
)
from tests.runtime.sglang.support import KV_TOKENS, ON_SERVERS, ROOT, SharedServers

pytestmark = [*ON_SERVERS, pytest.mark.asyncio(loop_scope="session")]


def fork(prefix: tuple[int, ...], children: int, *, parent: int = 0, limit: int = 64):
    return [
        Branch(parent, i, prefix, node_seed(7, "step", (parent, i)), limit, 1 + 100 * parent + i)
        for i in range(children)
    ]


@pytest_asyncio.fixture(loop_scope="session")
async def engine(yard: SharedServers) -> AsyncIterator[SglangEngine]:
    policy, reward = await yard.have("policy", "reward")
    sglang_engine = await SglangEngine.start(options([policy], [reward]))
    yield sglang_engine
    await sglang_engine.close()


async def until_idle(server: LaunchedServer) -> None:
    async with asyncio.timeout(120):
        while await at_work(server):
            await asyncio.sleep(0.1)


async def test_launched_servers_begin_with_the_engine(yard: SharedServers) -> None:
    """``--launch`` on a CPU starts both servers with our plug-in. The yard's fixture checks that
    nothing of them is left afterwards."""
    parts = await yard.launched()
    for server in await yard.have("policy", "reward"):  # other files' tests may have ended them
        await server.health()
    assert parts.engine.capabilities.reproducible == "seeded"
    outcome = await grow(parts.engine, QUESTIONS[0], policy="ets")
    assert (outcome.stats.finished, outcome.reproducible) == (4, "seeded")
    usage = await parts.engine.usage()
    assert (usage.kv_tokens_active, usage.kv_tokens_cached > 0) == (0, True)


@pytest.mark.promise(
    "Greedy steps on SGLang equal the embedded engine's, and rewards agree within 0.02."
)
async def test_greedy_steps_and_rewards_are_the_embedded_engines(engine: SglangEngine) -> None:
    """Greedy steps to the end have equal ids, texts and finishes; rewards agree to 0.02."""
    async with closing(
        await EmbeddedEngine.start(EngineOptions(POLICY, PRM, threads=1))
    ) as embedded:
        for question in QUESTIONS:
            steps = await same_steps(engine, embedded, question)
            for ours, theirs in steps:
                assert ours.entropy == pytest.approx(theirs.entropy, abs=0.05)
            assert steps[-1][0].finish is Finish.END
            await near_rewards(engine, embedded, question, steps, 0.02)


async def test_draws_by_seed_are_the_embedded_engines(engine: SglangEngine) -> None:
    """The plug-in uses the embedded engine's noise: in float32 at most 1 of 32 steps differs."""
    assert (engine.capabilities.exact, engine.capabilities.reproducible) == (False, "seeded")
    prompt, sampling = prompt_of("Use 5 6 7 8 to make 24."), Sampling(temperature=0.8, top_p=0.9)
    async with closing(
        await EmbeddedEngine.start(EngineOptions(POLICY, PRM, threads=1))
    ) as embedded:
        branches = fork(prompt, 32)
        ours = await engine.expand("seeds", branches, sampling)
        theirs = await embedded.expand("seeds", branches, sampling)
        again = await engine.expand("again", branches, sampling)
    assert len({step.tokens for step in ours}) > 4
    assert [step.tokens for step in again] == [step.tokens for step in ours]
    same = sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True))
    assert same >= 31
    first, second = [await grow(engine, QUESTIONS[2]) for _ in range(2)]
    assert steps_of(first) == steps_of(second)


@pytest.mark.promise(
    "Chains drawn in one request on SGLang have the steps, answer and decoded tokens of chains "
    "drawn in rounds."
)
async def test_chains_are_whole_in_one_request(engine: SglangEngine) -> None:
    """Without rewards that steer or a deadline, chains in one request give the tree of rounds, with
    fewer cached reads."""
    for policy in ("self_consistency", "best_of_n"):
        chains = await grow(engine, QUESTIONS[1], policy=policy, width=8)
        rounds = await grow(engine, QUESTIONS[1], policy=policy, width=8, deadline_ms=600_000)
        assert steps_of(chains) == steps_of(rounds)
        assert chains.answer == rounds.answer
        cost, by_rounds = chains.stats.engine, rounds.stats.engine
        assert cost.decoded_tokens == by_rounds.decoded_tokens == chains.stats.generated_tokens
        assert cost.cached_tokens < by_rounds.cached_tokens


async def test_chains_in_several_requests_are_chains_in_one(
    engine: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of any lengths that go on together, at most 20 tokens at once, give the same tree."""
    spec: dict[str, object] = {
        "policy": "self_consistency",
        "width": 8,
        "temperature": 2,
        "max_step_tokens": 10,
        "trajectory_tokens": 100,
    }
    whole = await grow(engine, QUESTIONS[0], "one request", **spec)
    monkeypatch.setattr(chain_request, "FEWEST_TOKENS", 20)
    monkeypatch.setattr(chain_request, "SPARE", 0)
    parts = await grow(engine, QUESTIONS[0], "several requests", **spec)
    assert steps_of(parts) == steps_of(whole)
    leaves = [node for node in parts.tree.nodes if not node.children]
    assert len({path_length(parts.tree, leaf.id) for leaf in leaves}) > 4
    assert parts.stats.engine.cached_tokens > whole.stats.engine.cached_tokens
    assert parts.stats.engine.rehydrated_tokens == 0


@pytest.mark.promise(
    "A step drawn in two requests on SGLang equals the step drawn in one, with the same KV peak "
    "and nothing recomputed."
)
async def test_a_step_in_two_requests_is_the_step_in_one(
    engine: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requesting three tokens first and then the rest gives the same tree, with the same KV peak
    and no recomputation."""
    whole = await grow(engine, QUESTIONS[1], "two/whole", width=8)
    monkeypatch.setattr(RoundGate, "tokens_at_once", lambda gate, branches: 3)
    parts = await grow(engine, QUESTIONS[1], "two/parts", width=8)
    assert steps_of(parts) == steps_of(whole)
    assert min(len(node.tokens) for node in whole.tree.nodes[1:]) > 3
    cost, at_once = parts.stats.engine, whole.stats.engine
    assert cost.rehydrated_tokens == at_once.rehydrated_tokens == 0
    assert cost.cached_tokens > at_once.cached_tokens
    assert cost.kv_tokens_peak == at_once.kv_tokens_peak


async def test_steps_end_where_they_are_to_end(engine: SglangEngine) -> None:
    """Steps end at the limit or a stop string of several tokens; overlong prefixes are refused."""
    prompt = prompt_of(QUESTIONS[0])
    (cut,) = await engine.expand("ends", fork(prompt, 1, limit=3), GREEDY)
    assert (len(cut.tokens), cut.finish) == (3, Finish.LENGTH)
    odd = Sampling(temperature=0.0, stop=("(le",), max_step_tokens=64)
    (early,) = await engine.expand("ends", fork(prompt, 1), odd)
    assert early.finish is Finish.STEP
    assert "(le" in early.text
    assert "(le" not in TEXT.decode(early.tokens[:-1])
    (free,) = await engine.expand(
        "ends", fork(prompt, 1, limit=40), Sampling(temperature=0.0, stop=(), max_step_tokens=40)
    )
    assert len(free.tokens) == 40 or free.finish is Finish.END
    with pytest.raises(PrefixTooLong):
        await engine.expand("ends", fork(prompt * 95, 1), GREEDY)
    await engine.release("ends")


@pytest.mark.promise(
    "Every fork on SGLang finds its prefix in the cache, except for the last token."
)
async def test_every_fork_hits_its_prefix(engine: SglangEngine) -> None:
    """All but a prefix's last token comes from the cache, on the policy's and the reward server."""
    prompt, sampling = prompt_of("Use 2 3 5 12 to make 24."), Sampling()
    first = await engine.expand("fork", fork(prompt, 8), sampling)
    second = await engine.expand("fork", fork(prompt + first[0].tokens, 8, parent=1), sampling)
    paths = [Trajectory(i, (step.tokens,), (step.text,)) for i, step in enumerate(first)]
    await engine.score("fork", prompt, "", paths)
    deeper = [Trajectory(9, (first[0].tokens, s.tokens), (first[0].text, s.text)) for s in second]
    rewards = await engine.score("fork", prompt, "", deeper)
    assert all(0 <= reward <= 1 for reward in rewards)
    cost = await engine.release("fork")
    assert cost.prefilled_tokens <= len(prompt)  # once, or 0 if an earlier test has read it
    assert cost.rehydrated_tokens == 0
    prefixes = 8 * (len(prompt) - 1) + 8 * (len(prompt + first[0].tokens) - 1)
    assert cost.cached_tokens >= prefixes
    steps = sum(len(s.tokens) + 1 for s in (*first, *second))
    assert cost.prm_tokens <= len(prompt) + steps + 16


@pytest.mark.promise(
    "Steps drawn early on SGLang change no tree, and each is used or counted as wasted."
)
async def test_steps_drawn_early_leave_trees_alone(
    engine: SglangEngine, yard: SharedServers
) -> None:
    """Early steps are used or counted as wasted, none stays at work, and trees do not change."""
    policy, reward = await yard.have("policy", "reward")
    async with closing(
        await SglangEngine.start(options([policy], [reward], speculate=True))
    ) as early:
        outcomes = [await grow(early, question, width=8) for question in QUESTIONS[:2]]
        usage = await early.usage()
        assert usage.totals.speculated_used > 0
        cost = sum(outcome.stats.engine.decoded_tokens for outcome in outcomes)
        generated = sum(outcome.stats.generated_tokens for outcome in outcomes)
        assert cost == generated + usage.totals.speculated_wasted
        await until_idle(policy)
    for outcome, question in zip(outcomes, QUESTIONS[:2], strict=True):
        plain = await grow(engine, question, width=8)
        assert steps_of(outcome) == steps_of(plain)


async def test_a_step_drawn_early_is_scored_with_the_one_before(
    engine: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step and its early next step are scored as one item, with the rewards they have alone."""
    prompt = prompt_of(QUESTIONS[1])
    (step,) = await engine.expand("plain", fork(prompt, 1), GREEDY)
    (child,) = await engine.expand("plain", fork(prompt + step.tokens, 1, parent=1), GREEDY)
    first = Trajectory(1, (step.tokens,), (step.text,))
    both = Trajectory(2, (step.tokens, child.tokens), (step.text, child.text))
    alone = [(await engine.score("plain", prompt, "", [path]))[0] for path in (first, both)]
    monkeypatch.setattr(engine._scorer, "_next_steps", lambda *_: {1: replace(both, node=1)})
    list_sizes: list[int] = []

    async def look(request: httpx.Request) -> None:
        list_sizes.append(len(json.loads(request.content)["input_ids"]))

    (server,) = engine._rewards.replicas
    server._client.event_hooks["request"].append(look)
    try:
        early = [(await engine.score("early", prompt, "", [path]))[0] for path in (first, both)]
    finally:
        server._client.event_hooks["request"].remove(look)
        await asyncio.gather(engine.release("plain"), engine.release("early"))
    assert early == pytest.approx(alone, abs=1e-4)
    assert list_sizes == [1]


async def test_namespaces_do_not_share_their_cache(engine: SglangEngine) -> None:
    """A prompt cached for one key's trees is read again for another key's."""
    prompt = prompt_of("Use 2 2 6 9 to make 24.")
    for tree in ("alice/1", "bob/1"):
        await engine.expand(tree, fork(prompt, 2), GREEDY)
        assert (await engine.release(tree)).prefilled_tokens == len(prompt)
    await engine.expand("bob/2", fork(prompt, 2), GREEDY)
    assert (await engine.release("bob/2")).prefilled_tokens <= 1


@pytest.mark.promise("An abort leaves no request running in SGLang.")
async def test_an_abort_frees_the_servers(engine: SglangEngine, yard: SharedServers) -> None:
    """An abort ends sixteen long steps here and in SGLang, also those of a cancelled caller."""
    policy, _ = await yard.have("policy", "reward")
    prompt = prompt_of(QUESTIONS[0])
    to_the_end = LogitsParams(min_tokens=900)  # else the model ends its steps after 34 tokens
    long = Sampling(stop=(), max_step_tokens=900, logits=to_the_end, prompt_tokens=len(prompt))
    branches = fork(prompt, 16, limit=900)
    for cancelled in (False, True):
        call = asyncio.create_task(engine.expand("long", branches, long))
        async with asyncio.timeout(120):
            while await at_work(policy) < 2:  # the rest may still be on their way
                assert not call.done()
                await asyncio.sleep(0.01)
        if cancelled:
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await engine.abort("long")
        if not cancelled:
            with pytest.raises(EngineError, match="aborted"):
                await call
        await until_idle(policy)


async def test_a_search_and_what_it_cost(engine: SglangEngine) -> None:
    """The statistics of a whole search, and the usage read from SGLang's metrics."""
    outcome = await grow(engine, QUESTIONS[0])
    assert outcome.stats.finished == 4
    assert all(node.reward is not None for node in outcome.tree.nodes[1:])
    usage = await engine.usage()
    assert usage.kv_tokens_capacity == usage.prm_kv_tokens_capacity == KV_TOKENS
    assert usage.totals.decoded_tokens >= outcome.stats.generated_tokens
    assert usage.totals.prm_tokens > 0
    assert usage.totals.cached_tokens > 0
    await engine.health()


async def test_hints_and_unknown_trees_do_no_harm(engine: SglangEngine) -> None:
    """Hints, aborts and releases of an unknown tree do nothing; empty steps are refused."""
    engine.hint("nobody", Hint(dead=(1, 2)))
    await engine.abort("nobody")
    assert (await engine.release("nobody")).decoded_tokens == 0
    with pytest.raises(EngineError, match="node 4 has an empty one"):
        await engine.score("nobody", (1,), "", [Trajectory(4, ((),), ("",))])


async def test_rewards_without_a_reward_model(yard: SharedServers) -> None:
    """Mean log-probabilities are the same known or read; a judge on the policy gives rewards."""
    policy, _ = await yard.have("policy", "reward")
    prompt = prompt_of(QUESTIONS[0])
    async with closing(await SglangEngine.start(options([policy], []))) as engine:
        steps = await engine.expand("drawn", fork(prompt, 4), Sampling())
        paths = [Trajectory(i + 1, (s.tokens,), (s.text,)) for i, s in enumerate(steps)]
        drawn_rewards = await engine.score("drawn", prompt, "", paths)
        read_rewards = await engine.score("read", prompt, "", paths)
        assert drawn_rewards == pytest.approx(read_rewards, abs=1e-3)
    async with closing(
        await SglangEngine.start(options([policy], [], reward_format="generative"))
    ) as judging:
        rewards = await judging.score("judged", prompt, QUESTIONS[0], paths[:2])
        assert all(0 <= reward <= 1 for reward in rewards)
        cost = await judging.release("judged")
        assert (cost.decoded_tokens, cost.prm_tokens > 0) == (0, True)


async def test_a_verifier_judges_what_servers_draw(engine: SglangEngine) -> None:
    """A verifier multiplies the reward model's rewards: a wrong sum gives 0, other steps keep their
    rewards. It is called once a round."""
    prompt, wrong = prompt_of(QUESTIONS[0]), "13 - 9 = 5 (left: 4 5 10)\n\n"
    async with closing(await start_verifier(VerifierOptions("arithmetic"))) as verifier:
        checked = VerifiedEngine(engine, verifier, alone=False)
        steps = await checked.expand("oak", fork(prompt, 4), Sampling(stop=("\n\n",)))
        pairs = [(step.tokens, step.text) for step in steps] + [(tuple(TEXT.encode(wrong)), wrong)]
        paths = [Trajectory(i + 1, (ids,), (text,)) for i, (ids, text) in enumerate(pairs)]
        model_rewards = await engine.score("elm", prompt, QUESTIONS[0], paths)
        rewards = await checked.score("oak", prompt, QUESTIONS[0], paths)
        factors = [0.0 if has_wrong_equation(text) else 1.0 for _, text in pairs]
        assert factors[-1] == rewards[-1] == 0.0 < model_rewards[-1]
        assert 1.0 in factors
        products = [reward * factor for reward, factor in zip(model_rewards, factors, strict=True)]
        assert rewards == pytest.approx(products, abs=2e-4)
        outcome = await grow(checked, QUESTIONS[1])
        assert all(
            node.reward == 0.0 for node in outcome.tree.nodes[1:] if has_wrong_equation(node.text)
        )
        usage = await checked.usage()
        assert usage.totals.verifier_calls == 1 + outcome.stats.rounds
        assert usage.totals.verifier_failures == 0


async def test_the_command_line_on_running_servers(yard: SharedServers) -> None:
    """``hedgerow solve --engine sglang`` with ETS, which compares steps by their letters."""
    policy, reward = await yard.have("policy", "reward")
    ran = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", "solve", QUESTIONS[0], "--engine", "sglang"),
        *("--policy-url", policy.url, "--reward-url", reward.url),
        *("--policy", "ets", "--width", "4", "--seed", "1", "--json"),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await ran.communicate()
    assert ran.returncode == 0
    document = json.loads(output)
    assert document["stop_reason"] == "answered"
    assert document["stats"]["finished"] == 4


async def test_a_server_that_ends_comes_back_and_its_searches_go_on(
    engine: SglangEngine, yard: SharedServers
) -> None:
    """A killed reward server is reported down, a search waits until it is restarted, and ends with
    the undisturbed tree."""
    _, reward = await yard.have("policy", "reward")
    undisturbed = await grow(engine, QUESTIONS[1])
    await reward.health()
    assert reward.process is not None
    os.killpg(reward.process.pid, signal.SIGKILL)
    reward.process.wait()
    with pytest.raises(EngineDown, match="ended with -9"):
        await reward.health()
    search = asyncio.create_task(grow(engine, QUESTIONS[1]))
    with pytest.raises(EngineDown, match="reward server"):
        await engine.health()
    await reward.restart()
    outcome = await search
    assert [node.tokens for node in outcome.tree.nodes] == [
        node.tokens for node in undisturbed.tree.nodes
    ]
    await engine.health()


async def test_a_stock_server_passes_over_what_our_plug_in_is_told(yard: SharedServers) -> None:
    """A stock server ignores notes and seeds, and its info has no plug-in figures."""
    (stock,) = (await yard.have("policy", "stock"))[1:]
    note = Note("ash", 8, node=1, parent=0, turn=1)
    params = {"max_new_tokens": 4, "sampling_seed": 3, "custom_params": custom_params(note)}
    body = {"input_ids": list(range(20, 28)), "sampling_params": params}
    async with httpx.AsyncClient(base_url=stock.url, timeout=300.0, trust_env=False) as client:
        answer = (await client.post("/generate", json=body)).raise_for_status().json()
        figures = plugin_counts((await client.get("/server_info")).json())
    assert len(answer["output_ids"]) == 4
    assert figures is None
    with pytest.raises(ValueError, match=r"speculate: .* --enable-priority-scheduling"):
        await SglangEngine.start(options([stock], [], speculate=True))


@pytest.mark.promise("A search finishes on another SGLang server when the one it was on is killed.")
async def test_searches_go_on_when_one_of_two_servers_is_killed(yard: SharedServers) -> None:
    """All searches finish on the surviving server, and nothing stays at work there."""
    survivor, victim = await yard.have("policy", "stock")
    async with closing(await SglangEngine.start(options([survivor, victim], []))) as engine:
        assert engine.capabilities.reproducible == "no"  # one of them is without our plug-in
        questions = [f"Use {a} 9 10 13 to make 24." for a in range(1, 9)]
        spec = {"policy": "rebase", "width": 8}
        searches: list[asyncio.Task[Outcome]] = []
        async with asyncio.timeout(120):
            while not await at_work(victim):
                if all(search.done() for search in searches):  # before the server said so
                    searches += [asyncio.create_task(grow(engine, q, **spec)) for q in questions]
                await asyncio.sleep(0.02)
        assert victim.process is not None
        os.killpg(victim.process.pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*searches)
        assert all(outcome.stats.finished == 8 for outcome in outcomes)
        assert engine.moves > 0
        await until_idle(survivor)
