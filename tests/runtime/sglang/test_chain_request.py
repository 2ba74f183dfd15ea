"""The request for a chain of steps, and how its answer is cut into steps."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from hedgerow_sglang.plugin_protocol import sampling_seed
from hedgerow_sglang.step_chain import CHAIN, ENDS, StepEnds
from loadtest.hostile.sglang_stub import INFO, MortalStub, Stub
from models.bundled import SPRIG_FOLDER
from runtime.servers.remote_server import ServerTimes
from runtime.sglang.chain_request import (
    ChainLengths,
    chain_body,
    first_draws,
    is_chain,
    next_in_chain,
    open_tails,
    say_chains,
    take_chain,
)
from runtime.sglang.replica import Replica
from runtime.sglang.sglang_engine import SglangEngine
from runtime.sglang.sglang_options import SglangOptions
from runtime.sglang.step_request import StepRequest
from runtime.stop_strings import StopStringTables
from runtime.text import Text
from search.controller import search
from search.engine import Ahead, Branch, Sampling
from search.problem import Problem
from search.spec import SearchSpec
from search.tree import Finish, step_seed

POLICY = SPRIG_FOLDER / "policy"
PIECES = (b"a", b"b", b"\n", b"\n\n", b"<end>")
END = 4
SAMPLING = Sampling(max_step_tokens=3)


def chain(steps: int = 4, room: int = 20) -> StepRequest:
    """A root's child and up to ``steps`` steps after it, with ``room`` tokens in all."""
    ahead = Ahead(seed=7, path=(2,), children=1, room=room, steps=steps)
    branch = Branch(0, 2, (9, 9), step_seed(7, (2,)), min(3, room), 5, ahead)
    return StepRequest(branch, SAMPLING, StopStringTables(PIECES).of(("\n\n",)), frozenset({END}))


def answer(*tokens: int) -> dict:
    """An answer of ``/generate`` with these tokens."""
    logprobs = [[-1.0, token, None] for token in tokens]
    return {
        "meta_info": {
            "prompt_tokens": 2,
            "output_token_logprobs": logprobs,
            "output_top_logprobs": [[entry] for entry in logprobs],
        }
    }


def test_what_is_asked_for() -> None:
    """A chain asks for all tokens it has room for, with the seeds of its steps; the first body of a
    list carries the step ends, and SGLang gets no stop strings."""
    ends = StepEnds.of(PIECES, [b"\n\n"])
    note = {"custom_params": {"hedgerow": "{}"}}
    body = chain_body(chain(2), note, ends, most=99, first=True)
    params = body["sampling_params"]
    assert (params["max_new_tokens"], params["stop"], params["stop_token_ids"]) == (20, [], [END])
    chain_param = json.loads(params["custom_params"][CHAIN])
    seeds = [sampling_seed(step_seed(7, path)) for path in ((2,), (2, 0), (2, 0, 0))]
    assert (chain_param["seeds"], chain_param["most"], chain_param["ends"]) == (seeds, 3, ends.name)
    assert {"hedgerow", ENDS} <= params["custom_params"].keys()
    for most, limit in ((7, 7), (1, 3), (99, 20)):
        params = chain_body(chain(), {}, ends, most=most, first=False)["sampling_params"]
        assert params["max_new_tokens"] == limit
        assert ENDS not in params["custom_params"]


def test_an_answer_is_cut_into_steps() -> None:
    """Steps end by stop string, length or end token, and match what their rounds ask for."""
    first = chain()
    later = take_chain(first, answer(0, 3, 0, 1, 0, 1, END))
    assert (first.tokens, first.finish, first.logprob) == ([0, 3], Finish.STEP, -2.0)
    assert [(step.tokens, step.finish) for step in later] == [
        ([0, 1, 0], Finish.LENGTH),
        ([1, END], Finish.END),
    ]
    assert all(step.acknowledged for step in later)
    branch = Branch(5, 0, (9, 9, 0, 3), step_seed(7, (2, 0)), 3, 6)
    assert later[0].branch.draws_as(branch)
    assert later[1].key == ((9, 9, 0, 3, 0, 1, 0), step_seed(7, (2, 0, 0)))


@pytest.mark.parametrize("part_of_step", [[0], []])
def test_a_last_step_without_an_end_goes_on_later(part_of_step: list[int]) -> None:
    """The step after the last complete one has no finish, and the tokens that were drawn of it."""
    (part,) = take_chain(chain(), answer(0, 3, *part_of_step))
    assert (part.tokens, part.finish) == (part_of_step, None)
    assert part.branch.draws_as(Branch(5, 0, (9, 9, 0, 3), step_seed(7, (2, 0)), 3, 6))


def test_chains_go_on_together() -> None:
    """When one chain needs more tokens, the others go on in the same request, if theirs end too:
    partial steps first, then chains."""
    first, second, third = chain(), chain(), chain()
    following = {}
    for request, tokens in ((first, (0, 3, 0)), (second, (1, 3)), (third, (0, 1, 3, END))):
        following |= {step.key: step for step in take_chain(request, answer(*tokens))}
    part, fresh = open_tails([first, second, third], following)
    assert (part.path, fresh.path) == ((9, 9, 0, 3, 0), (9, 9, 1, 3))
    assert first_draws([part, fresh]) == [part]
    part.take(answer(3))
    child = next_in_chain(part)
    assert child is not None
    following[child.key] = child
    together = open_tails([first, second, third], following)
    assert together == [child, fresh]
    assert first_draws(together) == together
    assert all(map(is_chain, together))


def test_what_is_not_asked_for_is_dropped() -> None:
    """Tokens after the last step or beyond the room are dropped."""
    (last,) = take_chain(chain(steps=1), answer(0, 3, 1, 3, 1, 3))
    assert (last.tokens, next_in_chain(last)) == ([1, 3], None)
    (short,) = take_chain(chain(room=4), answer(0, 3, 0, 0))
    assert (short.branch.limit, short.finish) == (2, Finish.LENGTH)


def test_how_much_is_asked_for_at_once() -> None:
    """At most three times the average length, but at least 256 tokens, are requested at once."""
    lengths = ChainLengths()
    assert lengths.most == 256
    for tokens in (100, 100, 400):
        lengths.record(tokens)
    assert lengths.most == 600


def test_which_steps_are_chains() -> None:
    """A request is a chain if its round has steps ahead and nothing of it is drawn yet."""
    half = chain()
    half.tokens.append(0)
    alone = StepRequest(replace(half.branch, ahead=None), SAMPLING, half.stops, frozenset({END}))
    assert [is_chain(request) for request in (chain(), chain(steps=0), half, alone)] == [
        *(True, False, False, False)
    ]


def described(**figures: int) -> dict[str, Any]:
    """``/server_info`` of a server with our plug-in and these figures."""
    (state,) = INFO["internal_states"]
    return INFO | {"internal_states": [state | {"hedgerow": {"seeds": 1} | figures}]}


class Plugged(Stub):
    """A server whose plug-in figures say whether it takes chains."""

    chains = 0

    def _said(self, path: str, body: bytes) -> list[bytes]:
        if path == "/server_info":
            return [json.dumps(described(chains=self.chains)).encode()]
        return super()._said(path, body)


@pytest.mark.parametrize("policy", ["self_consistency", "rebase"])
async def test_a_server_that_overlaps_gets_chains_round_by_round(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning at start names the server, and each split chain is counted once."""
    server = MortalStub(Plugged.of(Text(POLICY)))
    await server.start()
    options = SglangOptions(policy=POLICY, policy_urls=(server.url,), reward_format="none")
    engine = await SglangEngine.start(options)
    try:
        outcome = await search(
            Problem((5, 6, 7), "?", "\n\n"),
            SearchSpec(policy=policy, width=6, seed=1, vote="majority"),
            engine,
            tree_id="oak",
            answer_of=lambda text: text,
            clock=time.monotonic,
        )
    finally:
        await engine.close()
        await server.kill()
    assert len(outcome.tree.nodes) > 2 * 6  # several rounds
    assert outcome.stats.engine.split_chains == (6 if policy == "self_consistency" else 0)
    (message,) = [line for line in caplog.messages if "--disable-overlap-schedule" in line]
    assert server.url in message


def test_a_server_with_several_schedulers_gets_no_chains(caplog: pytest.LogCaptureFixture) -> None:
    """Its schedulers share a list's items, and only one item says how steps end."""
    server = Replica("http://nowhere", ServerTimes(connect=1, answer=1, probe=1, stall=30))
    info = described(chains=1)
    server.learn(info)
    assert server.chains
    server.learn(info | {"internal_states": info["internal_states"] * 2})
    assert not server.chains
    say_chains(server)
    assert not caplog.messages


def test_only_a_server_that_could_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """No warning for a server that takes chains, nor for one without our plug-in."""
    server = Replica("http://nowhere", ServerTimes(connect=1, answer=1, probe=1, stall=30))
    for info in (described(chains=1), dict(INFO)):
        server.learn(info)
        say_chains(server)
    assert not caplog.messages
