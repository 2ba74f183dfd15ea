"""Requests to a reward model's server and rewards from its answers, without a server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from runtime.accounting import no_flops
from runtime.reward_format import REWARD_FORMATS
from runtime.reward_reader import PolicyIds, Softmax
from runtime.servers.fleet import Fleet
from runtime.servers.remote_server import ServerTimes
from runtime.sglang.replica import Json, Replica
from runtime.sglang.search_session import PluginNotes, SearchSession
from runtime.sglang.sglang_scorer import PrmScorer, RewardRequest
from search.engine import EngineError, Trajectory

GOOD, BAD, TAG = 1, 2, 9
PROMPT = (5, 6)
VERDICTS = RewardRequest(PolicyIds(TAG), REWARD_FORMATS["math-shepherd"], Softmax(GOOD, BAD))
HEAD = RewardRequest(PolicyIds(TAG), REWARD_FORMATS["skywork"])


def reward_of(path: Sequence[int]) -> float:
    """A stand-in reward that depends on the sum of the path's ids."""
    return 1 / (1 + sum(path))


def odds(path: Sequence[int]) -> list[list[Any]]:
    good = reward_of(path)
    return [[math.log(good), GOOD, None], [math.log(1 - good), BAD, None]]


class ScriptedServer(Replica):
    """A server that answers like SGLang, with ``reward_of`` as its model. ``paths``: those read."""

    def __init__(self) -> None:
        super().__init__("http://told", ServerTimes(1, 1, 1, 30))
        self.routed = True
        self.paths: list[list[int]] = []

    async def generate(self, body: Json, *, early: bool = False) -> Json:
        ids, start = body["input_ids"], body["logprob_start_len"]
        self.paths.append(ids)
        before = ids if start < 0 else ids[: start + 1]
        meta = {"output_token_ids_logprobs": [odds(ids)], "cached_tokens": len(before) - 1}
        if start >= 0:
            ends = range(start + 1, len(ids))
            meta["input_token_ids_logprobs"] = [None, *(odds(ids[:end]) for end in ends)]
        return {"meta_info": meta}

    async def classify(self, body: Json) -> list[Json]:
        self.paths += body["input_ids"]
        values = [-math.log(1 / reward_of(ids) - 1) for ids in body["input_ids"]]
        return [{"embedding": [value], "meta_info": {}} for value in values]


def trajectory(node: int, *steps: tuple[int, ...]) -> Trajectory:
    return Trajectory(node, steps, ("",) * len(steps))


def scorer(
    server: Replica, request: RewardRequest, ahead: Mapping[int, Trajectory] | None = None
) -> PrmScorer:
    fleet = Fleet("reward", [server])
    early = None if ahead is None else lambda *_: ahead
    return PrmScorer(fleet, request, context=12, flops=no_flops, next_steps=early)


def searching() -> SearchSession:
    return SearchSession("a", "a-", PluginNotes("a"), prompt=PROMPT)


@pytest.mark.parametrize("request_", [VERDICTS, HEAD], ids=["verdicts", "head"])
async def test_a_step_drawn_early_is_scored_with_the_one_before(request_: RewardRequest) -> None:
    """Both steps get the reward of their own path; scoring the second one later sends nothing, and
    a third step is requested as usual."""
    server, search = ScriptedServer(), searching()
    first, both = trajectory(1, (3,)), trajectory(1, (3,), (4, 4))
    judge = scorer(server, request_, {1: both})
    path = [*PROMPT, 3, TAG]
    assert await judge.score(search, PROMPT, "", [first]) == pytest.approx([reward_of(path)])
    longer = [*path, 4, 4, TAG]
    expected = [longer] if request_ is VERDICTS else [path, longer]
    assert server.paths == expected
    second = trajectory(2, *both.steps)
    assert await judge.score(search, PROMPT, "", [second]) == pytest.approx([reward_of(longer)])
    assert server.paths == expected
    third = trajectory(3, *both.steps, (7,))
    rewards = await judge.score(search, PROMPT, "", [third, second])
    assert rewards == pytest.approx([reward_of([*longer, 7, TAG]), reward_of(longer)])
    assert server.paths == [*expected, [*longer, 7, TAG]]
    read = search.costs.counters.prm_tokens
    assert read == (4 + 1 if request_ is VERDICTS else len(path) + len(longer) + len(longer) + 2)
    await server.close()


async def test_what_cannot_be_read_along_is_left() -> None:
    """A next step is not read along if it exceeds the context or its path is another one."""
    server, search = ScriptedServer(), searching()
    ahead = {1: trajectory(1, (3,), (4,) * 8), 2: trajectory(2, (8,), (4,))}
    judge = scorer(server, VERDICTS, ahead)
    await judge.score(search, PROMPT, "", [trajectory(1, (3,)), trajectory(2, (7,))])
    assert server.paths == [[*PROMPT], [*PROMPT, 3, TAG], [*PROMPT, 7, TAG]]
    assert not search.early_rewards
    await server.close()


async def test_an_answer_without_the_first_verdict_is_an_error() -> None:
    """A missing first verdict is an error rather than some other reward."""
    with pytest.raises(EngineError, match="no log-probabilities of the verdicts"):
        VERDICTS.reward_before({"meta_info": {"input_token_ids_logprobs": [None]}})
