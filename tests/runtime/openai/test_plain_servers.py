"""Servers that return less than vLLM: text alone, no seeds, no log-probabilities."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.hostile.completions_stub import LOGPROB, CompletionsStub
from runtime.openai.completion_server import CompletionServer
from runtime.openai.server_dialect import EXTRAS, Dialect, ids_of_text
from runtime.openai.server_trials import dialect_of
from runtime.openai.step_completion import StepCompletion
from runtime.servers import liveness
from runtime.servers.remote_server import ServerTimes
from runtime.servers.server_errors import ReplicaLost, WrongServer
from runtime.stop_strings import StopStringTables
from runtime.text import Text
from search.engine import EngineError, Sampling, Trajectory
from search.tree import Finish
from tests.runtime.mortal_pair import POLICY, PROMPT, QUESTION
from tests.runtime.openai.test_openai_engine import branch, stubs

TEXT = Text(POLICY)
(DELIMITER,) = TEXT.encode("\n\n")
ALONE = ("token_ids", "logprobs")


class GoesOn(CompletionsStub):
    """Draws delimiters even if they do not stop it, as models do."""

    def draw(
        self, ids: Sequence[int], seed: int, most: int, stop: Sequence[str]
    ) -> tuple[list[int], bool]:
        tokens: list[int] = []
        while len(tokens) < most:
            before = [*ids, *tokens]
            more, stopped = super().draw(before, seed, most - len(tokens), ("\n\n", *stop))
            tokens += more
            text = b"".join(self._pieces[token] for token in more).decode()
            if stopped and (tokens[-1] == self._end or text.endswith(tuple(stop))):
                return tokens, True
        return tokens, False


class Recording(CompletionsStub):
    """Adds the body of every completion to ``bodies``."""

    bodies: list[dict[str, Any]]

    def _completed(self, request: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(request)
        return super()._completed(request)


def stub_with(stub: CompletionsStub, **facts: Any) -> CompletionsStub:
    for name, value in facts.items():
        setattr(stub, name, value)
    return stub


async def test_text_alone_is_tokenised_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Steps get the tokenizer's ids; there is one warning, and every such step is counted."""
    stub = stub_with(CompletionsStub.of(TEXT), without=ALONE)
    with caplog.at_level(logging.WARNING):
        async with stubs(stub) as servers:
            able = servers.engine.capabilities
            assert (able.step_logprobs, able.scores, able.reproducible) == (False, True, "seeded")
            outcome = await servers.grow("oak")
            again = await servers.grow("elm")
            counted = (await servers.engine.usage()).totals.retokenized_steps
    nodes = outcome.tree.nodes[1:]
    assert outcome.digest == again.digest
    assert counted == 2 * len(nodes)
    for node in nodes:
        assert (node.logprob, node.entropy) == (None, None)
        bare = [token for token in node.tokens if token not in TEXT.eos]
        assert bare == TEXT.encode_after(TEXT.decode(bare))
        assert (node.tokens[-1] in TEXT.eos) == (node.finish is Finish.END)
    assert caplog.text.count("does not tell token ids") == 1


@pytest.mark.parametrize("trims", [False, True])
async def test_where_a_step_ends_does_not_depend_on_what_is_cut_off(*, trims: bool) -> None:
    """Steps end at the stop string either way; if the server trims it, extra tokens are drawn."""
    stub = stub_with(GoesOn.of(TEXT), without=ALONE, trims=trims)
    async with stubs(stub) as servers:
        sampling = Sampling(stop=("\n\n",), max_step_tokens=60)
        steps = await servers.engine.expand(
            "oak", [branch(60, seed, seed) for seed in range(1, 30)], sampling
        )
        costs = await servers.engine.release("oak")
    assert {step.finish for step in steps} >= {Finish.STEP, Finish.END}
    for step in steps:
        assert step.text.endswith("\n\n") == (step.finish is Finish.STEP)
        assert "\n\n" not in step.text[:-2]
        assert len(step.tokens) <= 60
    step_tokens = sum(len(step.tokens) for step in steps)
    assert costs.retokenized_steps == len(steps)
    assert (costs.decoded_tokens > step_tokens) == trims


async def test_without_log_probabilities_a_reward_model_still_judges() -> None:
    """Without log-probabilities the policy's likelihood gives no rewards, a reward model does."""
    stub = stub_with(CompletionsStub.of(TEXT), without=("logprobs",))
    async with stubs(stub) as servers:
        able = servers.engine.capabilities
        assert (able.step_logprobs, able.scores, able.likelihood) == (False, True, False)
        outcome = await servers.grow("oak")
        assert outcome.answer is not None
        assert outcome.stats.engine.retokenized_steps == 0
    async with stubs(stub, reward_format="none") as servers:
        able = servers.engine.capabilities
        assert (able.step_logprobs, able.scores, able.likelihood) == (False, False, True)
        (step,) = await servers.engine.expand("oak", [branch()], Sampling())
        assert step.logprob is None
        trajectory = Trajectory(1, (step.tokens,), (step.text,))
        stub.without = (*stub.without, "prompt_logprobs")
        with pytest.raises(EngineError, match="tells no log-probabilities of a prompt"):
            await servers.engine.score("oak", PROMPT, QUESTION, [trajectory])


async def test_a_judges_verdicts_are_counted(tmp_path: Path) -> None:
    """As many as trajectories times votes, whether or not they hold a number."""
    digits = {"extends": "generative", "pattern": "(5)", "votes": 8}
    form = tmp_path / "digits.json"
    form.write_text(json.dumps(digits))
    async with stubs(CompletionsStub.of(TEXT), reward_format=str(form)) as servers:
        engine = servers.engine
        steps = await engine.expand("oak", [branch(), branch(seed=6, node=2)], Sampling())
        paths = [Trajectory(i, (s.tokens,), (s.text,)) for i, s in enumerate(steps, 1)]
        await engine.score("oak", PROMPT, QUESTION, paths)
        await engine.release("oak")
        totals = (await engine.usage()).totals
    assert totals.verdicts == 2 * 8
    assert 0 < totals.unparsed_verdicts < 16


async def test_text_alone_without_seeds_says_both() -> None:
    """A server without ids and seeds is found not reproducible: one seed gives two texts."""
    stub = stub_with(CompletionsStub.of(TEXT), without=ALONE, seeds=False)
    async with stubs(stub) as servers:
        assert servers.engine.capabilities.reproducible == "no"


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        ({"text": "4\n\n", "finish_reason": "stop"}, [*TEXT.encode_after("4"), DELIMITER]),
        ({"text": "4", "finish_reason": "stop"}, [*TEXT.encode_after("4"), TEXT.end]),
        ({"text": "4", "finish_reason": "length"}, TEXT.encode_after("4")),
        ({"text": "", "finish_reason": "stop"}, [TEXT.end]),
        ({"text": None, "finish_reason": "length"}, []),
        (
            {"text": f"4{TEXT.pieces[TEXT.end].decode()}", "finish_reason": "stop"},
            [*TEXT.encode_after("4"), TEXT.end],
        ),
    ],
)
def test_the_ids_of_a_text(choice: dict[str, Any], ids: list[int]) -> None:
    """The end token is added, once, where nothing else can have stopped the text."""
    assert ids_of_text(choice, ("\n\n",), TEXT) == ids


def server_answering(answer: Any) -> tuple[CompletionServer, list[dict[str, Any]]]:
    """A server that responds by ``answer``, and the list of request bodies it gets."""

    async def fine(server: CompletionServer) -> None:
        del server

    bodies: list[dict[str, Any]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return answer(bodies[-1])

    server = CompletionServer("http://x", ServerTimes(), "m", {}, fine, setting="policy_name")
    server._client._transport = httpx.MockTransport(respond)
    server.up = False  # as before the first contact
    return server, bodies


def completion(text: str) -> httpx.Response:
    choice = {"text": text, "finish_reason": "length"}
    return httpx.Response(200, json={"choices": [choice]})


async def test_a_server_that_refuses_what_is_not_openais() -> None:
    """After a 400 for extra fields only plain OpenAI requests are sent."""

    def answer(body: dict[str, Any]) -> httpx.Response:
        if EXTRAS.keys() & body.keys():
            return httpx.Response(400, json={"error": {"message": "unknown field"}})
        return completion("seven" if body["seed"] < 4 else "eight")

    server, bodies = server_answering(answer)
    dialect = await dialect_of(server, TEXT)
    assert (dialect.extras, dialect.ids, dialect.logprobs) == (False, False, False)
    assert (dialect.seeds, dialect.stops, dialect.cached) == (True, True, False)
    assert not any(EXTRAS.keys() & body.keys() for body in bodies[1:])
    assert bodies[-1]["stop"] == ["s"]
    await server.close()


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "prompt must be text"}}), "must be text"),
        (completion(""), "tell neither token ids nor text"),
    ],
)
async def test_a_server_that_cannot_serve_trees(response: httpx.Response, message: str) -> None:
    """A server that takes no token ids, or returns neither ids nor text, is refused by name."""
    server, _ = server_answering(lambda _: response)
    with pytest.raises(WrongServer, match=f"http://x.*{message}"):
        await dialect_of(server, TEXT)
    await server.close()


async def test_an_answer_without_choices_is_a_fault_of_the_server() -> None:
    """It is asked again or another one is, as after any other fault."""
    server, _ = server_answering(lambda _: httpx.Response(200, json={"object": "error"}))
    server.up = True
    with pytest.raises(ReplicaLost, match="status 200, no choices"):
        await server.ask("/v1/completions", {})
    await server.end_revival()
    await server.close()


async def test_one_given_up_choice_of_many_is_a_fault_of_the_server() -> None:
    """A list of prompts, as rewards are asked for, is asked again as a whole."""
    choices = [{"index": 0, "finish_reason": "length"}, {"index": 1, "finish_reason": "abort"}]
    server, _ = server_answering(lambda _: httpx.Response(200, json={"choices": choices}))
    server.up = True
    with pytest.raises(ReplicaLost, match="finish_reason 'abort'"):
        await server.ask("/v1/completions", {})
    await server.end_revival()
    await server.close()


async def test_what_a_server_gives_up_is_drawn_again() -> None:
    """vLLM's ``finish_reason`` "abort" is a fault of the server, whatever was drawn until then: the
    tree is the one without it."""

    class GivesUp(CompletionsStub):
        aborts = 0

        def _choice(self, request: dict[str, Any], ids: list[int]) -> dict[str, Any]:
            choice = super()._choice(request, ids)
            if len(choice["token_ids"]) < 2 or not self.aborts:
                return choice
            self.aborts -= 1
            choice["logprobs"]["token_logprobs"] = [LOGPROB]
            return choice | {"token_ids": choice["token_ids"][:1], "finish_reason": "abort"}

    stub = GivesUp.of(TEXT)
    async with stubs(stub) as servers:
        undisturbed = await servers.grow("calm")
        stub.aborts = 3
        assert (await servers.grow("oak")).digest == undisturbed.digest
        assert (stub.aborts, servers.engine.sent_again >= 3) == (0, True)


@pytest.mark.parametrize("server_text", ["a ", "a", "a \N{REPLACEMENT CHARACTER}"])
def test_the_first_byte_of_a_character_has_no_text_yet(server_text: str) -> None:
    """Servers write what a last token begins as U+FFFD or not at all; both are the tokenizer's."""
    *ids, _ = TEXT.encode("a é")
    answer = {"choices": [{"token_ids": ids, "text": server_text}]}
    assert Dialect.of("http://x", [answer] * 3, TEXT, extras=True).ids


async def test_a_server_is_tried_again_whatever_its_answers_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One odd answer does not end the trials: the server is up after the next."""
    monkeypatch.setattr(liveness, "REVIVAL_WAITS", (0.0, 0.0))
    server, _ = server_answering(lambda _: httpx.Response(200))
    answers = iter([KeyError("choices"), True])

    async def works() -> bool:
        answer = next(answers)
        if isinstance(answer, KeyError):
            raise answer
        return answer

    monkeypatch.setattr(server, "works", works)
    server.up = True
    server.lose("status 500")
    async with asyncio.timeout(10):
        await server.until_up()
    assert "it cannot be told whether it works" in caplog.text
    await server.end_revival()
    await server.close()


@pytest.mark.parametrize("metrics", ['{"a": [1, 2]}', "<html>metrics</html>"])
async def test_metrics_of_another_kind_are_none(metrics: str) -> None:
    """A server may have anything under ``/metrics``."""
    server, _ = server_answering(lambda _: httpx.Response(200))
    server._client._transport = httpx.MockTransport(lambda _: httpx.Response(200, text=metrics))
    await server._learn_cache()
    assert (server.vllm, server.kv_tokens) == (False, 0)
    await server.close()


def test_a_step_that_its_server_counts_longer_ends_where_it_is() -> None:
    """The server has used up the limit by its own tokens; by ours the text leaves some."""
    dialect = Dialect(extras=False, ids=False, logprobs=False, seeds=True, cached=False)
    stops = StopStringTables(TEXT.pieces).of(("\n\n",))
    step = StepCompletion(branch(3), Sampling(stop=("\n\n",)), stops, TEXT.eos)
    cut = {"choices": [{"text": "4", "finish_reason": "length"}]}
    assert step.take(cut, dialect, TEXT) == 1
    assert step.finish is None
    assert step.take({"choices": [{"text": "", "finish_reason": "length"}]}, dialect, TEXT) == 0
    assert step.finish is Finish.LENGTH


async def test_older_searches_go_first_on_vllm_alone() -> None:
    """Only vLLM gets ``priority``, where lower is earlier; other servers read it otherwise."""
    bodies: list[dict[str, Any]] = []
    async with stubs(stub_with(Recording.of(TEXT), bodies=bodies)) as servers:
        (replica,) = servers.engine._policy.replicas
        for vllm in (False, True):
            replica.vllm = vllm
            bodies.clear()
            for tree in ("oak", "elm"):
                await servers.engine.expand(f"{vllm}-{tree}", [branch()], Sampling())
            priorities = [body.get("priority") for body in bodies]
            assert priorities == ([2, 3] if vllm else [None, None])


async def test_a_cache_salt_goes_to_servers_that_take_one() -> None:
    """A key's searches carry its salt to vLLM, even if a trial of it failed, and to servers that
    take more than OpenAI's fields; without a key none is sent."""
    bodies: list[dict[str, Any]] = []
    async with stubs(stub_with(Recording.of(TEXT), bodies=bodies)) as servers:
        (replica,) = servers.engine._policy.replicas
        assert replica.dialect is not None
        for vllm, extras in ((False, True), (True, False), (False, False)):
            replica.vllm, replica.dialect = vllm, replace(replica.dialect, extras=extras)
            bodies.clear()
            for tree in ("oak", "alice/oak", "alice/elm", "bob/oak"):
                await servers.engine.expand(f"{tree}-{vllm}-{extras}", [branch()], Sampling())
            salts = [body.get("cache_salt") for body in bodies]
            if vllm or extras:
                assert salts[0] is None
                assert salts[1] == salts[2] != salts[3] is not None
            else:
                assert salts == [None] * 4
