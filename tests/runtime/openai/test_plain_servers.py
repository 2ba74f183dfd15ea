"""Servers that tell less than vLLM: text alone, no seeds, no log-probabilities, fewer fields."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from loadtest.hostile.completions_stub import CompletionsStub
from runtime.openai.completion_server import CompletionServer
from runtime.openai.server_dialect import EXTRAS, ids_of_text
from runtime.openai.server_trials import dialect_of
from runtime.servers.remote_server import ServerTimes
from runtime.servers.server_errors import WrongServer
from runtime.text import Text
from search.engine import EngineError, Sampling, Trajectory
from search.tree import Finish
from tests.runtime.mortal_pair import POLICY, PROMPT, QUESTION
from tests.runtime.openai.test_openai_engine import branch, stubs

TEXT = Text(POLICY)
(DELIMITER,) = TEXT.encode("\n\n")
ALONE = ("token_ids", "logprobs")


class GoesOn(CompletionsStub):
    """Draws delimiters whether or not they stop it, as models do."""

    def draw(
        self, ids: Sequence[int], seed: int, most: int, stop: Sequence[str]
    ) -> tuple[list[int], bool]:
        drawn: list[int] = []
        while len(drawn) < most:
            before = [*ids, *drawn]
            more, stopped = super().draw(before, seed, most - len(drawn), ("\n\n", *stop))
            drawn += more
            said = b"".join(self._pieces[token] for token in more).decode()
            if stopped and (drawn[-1] == self._end or said.endswith(tuple(stop))):
                return drawn, True
        return drawn, False


def told(stub: CompletionsStub, **facts: Any) -> CompletionsStub:
    for name, value in facts.items():
        setattr(stub, name, value)
    return stub


async def test_text_alone_is_tokenised_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Ids are the tokenizer's from then on; the warning comes once, the counter has every step."""
    stub = told(CompletionsStub.of(TEXT), without=ALONE)
    with caplog.at_level(logging.WARNING):
        async with stubs(stub) as servers:
            able = servers.engine.capabilities
            assert (able.step_logprobs, able.scores, able.reproducible) == (False, True, "seeded")
            outcome = await servers.grown("oak")
            again = await servers.grown("elm")
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
    """A server that does not tell what stopped it draws on; the step is cut here, the rest paid."""
    stub = told(GoesOn.of(TEXT), without=ALONE, trims=trims)
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
    kept = sum(len(step.tokens) for step in steps)
    assert costs.retokenized_steps == len(steps)
    assert (costs.decoded_tokens > kept) == trims


async def test_without_log_probabilities_a_reward_model_still_judges() -> None:
    """Ids come back; what needs the policy's likelihood has no rewards and says so."""
    stub = told(CompletionsStub.of(TEXT), without=("logprobs",))
    async with stubs(stub) as servers:
        able = servers.engine.capabilities
        assert (able.step_logprobs, able.scores, able.likelihood) == (False, True, False)
        outcome = await servers.grown("oak")
        assert outcome.answer is not None
        assert outcome.stats.engine.retokenized_steps == 0
    async with stubs(stub, reward_format="none") as servers:
        able = servers.engine.capabilities
        assert (able.step_logprobs, able.scores, able.likelihood) == (False, False, True)
        (step,) = await servers.engine.expand("oak", [branch()], Sampling())
        assert step.logprob is None
        drawn = Trajectory(1, (step.tokens,), (step.text,))
        stub.without = (*stub.without, "prompt_logprobs")
        with pytest.raises(EngineError, match="tells no log-probabilities of a prompt"):
            await servers.engine.score("oak", PROMPT, QUESTION, [drawn])


async def test_text_alone_without_seeds_says_both() -> None:
    """By its texts, which differ under one seed."""
    stub = told(CompletionsStub.of(TEXT), without=ALONE, seeds=False)
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
    """With the end token where nothing else can have stopped it, once."""
    assert ids_of_text(choice, ("\n\n",), TEXT) == ids


def asked_of(answer: Any) -> tuple[CompletionServer, list[dict[str, Any]]]:
    """A server whose answers are made here, and the bodies that it gets."""

    async def fine(server: CompletionServer) -> None:
        del server

    bodies: list[dict[str, Any]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return answer(bodies[-1])

    server = CompletionServer("http://x", ServerTimes(), "m", {}, fine, setting="policy_name")
    server._client._transport = httpx.MockTransport(respond)
    server.up = False  # it has not been met
    return server, bodies


def said(text: str) -> httpx.Response:
    choice = {"text": text, "finish_reason": "length"}
    return httpx.Response(200, json={"choices": [choice]})


async def test_a_server_that_refuses_what_is_not_openais() -> None:
    """It is asked again in plain words, and only in these from then on."""

    def answer(body: dict[str, Any]) -> httpx.Response:
        if EXTRAS.keys() & body.keys():
            return httpx.Response(400, json={"error": {"message": "unknown field"}})
        return said("seven" if body["seed"] < 4 else "eight")

    server, bodies = asked_of(answer)
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
        (said(""), "tell neither token ids nor text"),
    ],
)
async def test_a_server_that_cannot_serve_trees(response: httpx.Response, message: str) -> None:
    """Token ids are no prompt to it, or nothing comes back: refused by name."""
    server, _ = asked_of(lambda _: response)
    with pytest.raises(WrongServer, match=f"http://x.*{message}"):
        await dialect_of(server, TEXT)
    await server.close()


async def test_older_searches_go_first_on_vllm_alone() -> None:
    """By ``priority``, where lower is earlier; servers that read it otherwise do not get it."""
    bodies: list[dict[str, Any]] = []

    class Heard(CompletionsStub):
        def _completed(self, asked: dict[str, Any]) -> dict[str, Any]:
            bodies.append(asked)
            return super()._completed(asked)

    async with stubs(Heard.of(TEXT)) as servers:
        (replica,) = servers.engine._policy.replicas
        for vllm in (False, True):
            replica.vllm = vllm
            bodies.clear()
            for tree in ("oak", "elm"):
                await servers.engine.expand(f"{vllm}-{tree}", [branch()], Sampling())
            got = [body.get("priority") for body in bodies]
            assert got == ([2, 3] if vllm else [None, None])
