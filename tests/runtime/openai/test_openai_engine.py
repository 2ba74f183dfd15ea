"""The engine over OpenAI-compatible servers: its requests, its checks, and failing servers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from loadtest.hostile.completions_stub import LOGPROB, CompletionsStub
from models.bundled import SPRIG_FOLDER
from runtime.openai.completion_server import CompletionServer
from runtime.openai.openai_engine import OpenaiEngine
from runtime.openai.openai_options import OpenaiOptions, ServedModel
from runtime.servers.remote_server import ServerTimes
from runtime.text import Text
from search.engine import (
    Branch,
    EngineDown,
    EngineError,
    Hint,
    PrefixTooLong,
    Sampling,
    Trajectory,
)
from search.spec import StopReason
from search.tree import ROOT, Finish
from tests.runtime.mortal_pair import POLICY, PROMPT, QUESTION, MortalPair, mortal_pair


def stubs(
    policy: CompletionsStub | None = None, reward_format: str = "math-shepherd", **more: Any
) -> AbstractAsyncContextManager[MortalPair]:
    """A policy stub and a reward stub with these options; ``served``: the policy's ServedModel."""

    def start(policy_url: str, reward_url: str) -> Awaitable[OpenaiEngine]:
        served = more.pop("served", {})
        reward = ServedModel(SPRIG_FOLDER / "prm", (reward_url,))
        options = OpenaiOptions(
            policy=ServedModel(POLICY, (f"{policy_url}/v1",), **served),
            reward=None if reward_format == "none" else reward,
            reward_format=reward_format,
            **more,
        )
        return OpenaiEngine.start(options)

    plain = CompletionsStub.of(Text(POLICY))
    return mortal_pair(policy or plain, plain, start)


def branch(limit: int = 16, seed: int = 5, node: int = 1) -> Branch:
    return Branch(ROOT, 0, PROMPT, seed, limit, node)


async def test_the_same_seed_is_the_same_tree() -> None:
    """A search gives the same tree alone and beside another one."""
    async with stubs() as servers:
        assert servers.engine.capabilities.seeded
        assert not servers.engine.capabilities.exact
        alone = await servers.grow("alone")
        both = await asyncio.gather(servers.grow("oak"), servers.grow("elm"))
        assert {outcome.digest for outcome in both} == {alone.digest}
        assert alone.answer


async def test_a_step_ends_where_the_embedded_engine_ends_it() -> None:
    """Steps end at a stop string, the end token, or the limit; log-probabilities are means."""
    async with stubs() as servers:
        sampling = Sampling(stop=("\n\n",), max_step_tokens=200)
        steps = await servers.engine.expand(
            "oak", [branch(200, seed, seed) for seed in range(1, 40)], sampling
        )
        assert {step.finish for step in steps} == {Finish.STEP, Finish.END}
        for step in steps:
            at_stop = step.text.endswith("\n\n")
            assert at_stop == (step.finish is Finish.STEP)
            assert "\n\n" not in step.text[:-2]
            assert step.logprob == pytest.approx(LOGPROB)
            assert step.entropy == pytest.approx(math.log(2))
        (short,) = await servers.engine.expand("elm", [branch(3)], Sampling(stop=()))
        assert (short.finish, len(short.tokens)) == (Finish.LENGTH, 3)


async def test_what_a_server_stopped_too_early_goes_on_with_another_seed() -> None:
    """If a server stops before a step ends, the rest is requested after the ids drawn so far."""

    class Hasty(CompletionsStub):
        requests: list[tuple[int, int]]

        def draw(self, ids: Any, seed: int, most: int, stop: Any) -> tuple[list[int], bool]:
            self.requests.append((len(ids), seed))
            tokens, _ = super().draw(ids, seed, most, stop)
            return tokens[:2], True

    stub = Hasty.of(Text(POLICY))
    stub.requests = []
    async with stubs(stub) as servers:
        stub.requests.clear()
        (step,) = await servers.engine.expand("oak", [branch(6)], Sampling(stop=()))
    assert len(step.tokens) in range(1, 7)
    assert [ids for ids, _ in stub.requests] == [
        len(PROMPT) + count for count in range(0, len(step.tokens), 2)
    ]
    assert len({seed for _, seed in stub.requests}) == len(stub.requests)


async def test_a_search_costs_what_it_asked_for() -> None:
    """Costs count drawn tokens once and each prompt read; a released tree costs nothing more."""
    async with stubs() as servers:
        engine = servers.engine
        steps = await engine.expand("oak", [branch(node=1), branch(seed=6, node=2)], Sampling())
        engine.hint("oak", Hint(dead=(1, 2)))
        costs = await engine.release("oak")
        assert costs.decoded_tokens == sum(len(step.tokens) for step in steps)
        assert costs.prefilled_tokens == 2 * len(PROMPT) - 1
        assert costs.rehydrated_tokens == len(PROMPT) - 1  # the stub caches nothing
        assert (await engine.release("oak")).decoded_tokens == 0


async def test_rewards_without_a_reward_model_are_the_policys_likelihood() -> None:
    """The likelihood of steps drawn here is known; that of others is read from the server."""
    async with stubs(reward_format="none") as servers:
        engine = servers.engine
        (step,) = await engine.expand("oak", [branch()], Sampling())
        trajectory = Trajectory(1, (step.tokens,), (step.text,))
        assert await engine.score("oak", PROMPT, QUESTION, [trajectory]) == [
            pytest.approx(math.exp(LOGPROB))
        ]
        (reward,) = await engine.score("elm", PROMPT, QUESTION, [trajectory])
        assert 0 < reward < math.exp(-1)


async def test_ids_may_come_as_names_of_tokens() -> None:
    """Token ids may be given as vLLM's "token_id:N" names."""
    stub = CompletionsStub.of(Text(POLICY))
    stub.without = ("token_ids",)
    async with stubs(stub) as servers:
        named = await servers.grow("oak")
    async with stubs() as servers:
        assert named.digest == (await servers.grow("oak")).digest


async def test_a_server_without_seeds_says_so() -> None:
    """A server that ignores seeds makes the engine not reproducible."""
    stub = CompletionsStub.of(Text(POLICY))
    stub.seeds = False
    async with stubs(stub) as servers:
        assert servers.engine.capabilities.reproducible == "no"


@pytest.mark.parametrize(
    ("models", "name", "message"),
    [
        (("a", "b"), None, "serves a, b: name one by policy_name"),
        (("a", "b"), "c", "serves a, b, not policy_name = 'c'"),
    ],
)
async def test_a_model_that_is_not_there(
    models: tuple[str, ...], name: str | None, message: str
) -> None:
    """The error names the served models and the requested one."""
    stub = CompletionsStub.of(Text(POLICY))
    stub.models = models
    with pytest.raises(ValueError, match=message):
        async with stubs(stub, served={"name": name}):
            pass


async def test_another_tokenizer_is_noticed() -> None:
    """A server whose ids spell other texts than the policy's tokenizer is refused."""
    text = Text(POLICY)
    words = CompletionsStub.of(text)
    strange = CompletionsStub(
        [bytes(reversed(piece)) + b"!" for piece in text.pieces], words._words, words._end
    )
    with pytest.raises(ValueError, match=r"spells the tokens .* name the model"):
        async with stubs(strange):
            pass


async def test_no_server_at_all() -> None:
    """After ``start_seconds`` without an answer EngineDown names the server."""
    options = OpenaiOptions(policy=ServedModel(POLICY, ("http://127.0.0.1:9",)), start_seconds=0.2)
    with pytest.raises(EngineDown, match=r"no policy server: http://127.0.0.1:9"):
        await OpenaiEngine.start(options)


async def test_what_does_not_fit_is_refused() -> None:
    """Overlong prefixes and empty steps are refused before a server is asked."""
    async with stubs() as servers:
        with pytest.raises(PrefixTooLong, match="context of 1024"):
            await servers.engine.expand("oak", [branch(2000)], Sampling())
        with pytest.raises(EngineError, match="has an empty one"):
            await servers.engine.score("oak", PROMPT, QUESTION, [Trajectory(1, ((),), ("",))])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("who", ["policy", "reward"])
async def test_a_search_outlives_its_only_server(who: str) -> None:
    """A search whose server is killed repeatedly ends with the undisturbed tree."""
    async with stubs() as servers:
        undisturbed = await servers.grow("calm")
        victim, growing = servers.victim(who), asyncio.create_task(servers.grow("oak"))
        fleets = servers.engine._policy, servers.engine._rewards
        kills = 0
        while kills < 3 or sum(fleet.sent_again for fleet in fleets) == 0:  # one during a request
            before = victim.asked
            while victim.asked == before:
                assert not growing.done()
                await asyncio.sleep(0.001)
            await victim.kill()
            kills += 1
            while sum(fleet.waiting for fleet in fleets) == 0:
                await asyncio.sleep(0.001)
            await victim.start()
        assert (await growing).digest == undisturbed.digest
        assert (await servers.engine.usage()).totals.sent_again > 0
        await servers.engine.health()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("who", ["policy", "reward"])
async def test_a_deadline_is_kept_though_a_server_stands_still(who: str) -> None:
    """The search ends by its deadline and leaves nothing in the engine."""
    async with stubs(stall_seconds=60) as servers:
        victim = servers.victim(who)
        victim.still = True
        outcome = await servers.grow("oak", deadline=0.3)
        assert outcome.stop_reason is StopReason.DEADLINE
        assert not servers.engine._searches
        victim.still = False


async def test_an_aborted_tree_fails_its_calls() -> None:
    """An abort fails the calls of its tree and of no other."""
    async with stubs() as servers:
        servers.policy.still = True
        waiting = asyncio.create_task(servers.engine.expand("oak", [branch()], Sampling()))
        while not servers.policy.asked:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        await servers.engine.abort("oak")
        with pytest.raises(EngineError, match="tree 'oak' was aborted"):
            await waiting
        servers.policy.still = False
        assert len(await servers.engine.expand("elm", [branch()], Sampling())) == 1


@pytest.mark.parametrize(("status", "up"), [(200, True), (429, True), (503, False)])
async def test_who_says_too_many_of_its_health_is_there(status: int, *, up: bool) -> None:
    """A health check with status 429 counts as up: the front end only limits rates."""

    async def fine(server: CompletionServer) -> None:
        del server

    server = CompletionServer("http://x", ServerTimes(), None, {}, fine, setting="policy_name")
    server._client._transport = httpx.MockTransport(lambda _: httpx.Response(status))
    await server.check()
    assert server.up == up
    await server.close()


async def test_a_full_server_is_asked_again_when_it_says() -> None:
    """Retries wait for ``Retry-After``, or longer if it is sooner than they would come anyway; all
    waits together take at most the answer's time limit."""
    waits: list[float] = []

    class Full(CompletionServer):
        async def wait_full(self, seconds: float) -> None:
            waits.append(seconds)

    async def fine(server: CompletionServer) -> None:
        del server

    server = Full("http://x", ServerTimes(answer=60), None, {}, fine, setting="policy_name")
    answers = [
        httpx.Response(429, headers={"retry-after": "7"}),
        httpx.Response(503, headers={"retry-after": "1e9"}),
        httpx.Response(429, headers={"retry-after": "0"}),
        httpx.Response(429, headers={"retry-after": "3600"}),
        httpx.Response(200, json={"choices": [{}]}),
    ]
    server._client._transport = httpx.MockTransport(lambda _: answers.pop(0))
    assert await server.ask("/v1/completions", {}) == {"choices": [{}]}
    assert waits == pytest.approx([7.0, 0.2, 0.4, 52.4])
    full = httpx.Response(429, headers={"retry-after": "3600"})
    server._client._transport = httpx.MockTransport(lambda _: full)
    waits.clear()
    with pytest.raises(EngineDown, match="is full"):
        await server.ask("/v1/completions", {})
    assert waits == [60.0]
    await server.close()
