"""Scores trajectories with another Hedgerow's ``/v1/score``, by any kind of reward there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from runtime.openai.completion_server import CompletionServer, Json
from runtime.openai.openai_search import OpenaiSearch
from runtime.openai.server_trials import ask_trial
from runtime.servers.fleet import Fleet
from runtime.servers.request_costs import Path
from runtime.servers.server_errors import WrongServer
from search.engine import EngineError, Trajectory

ROUTE = "/v1/score"
SEED = 0
"""Seed of a judge's verdicts there, so that equal steps have equal rewards in every round."""
TRIAL = "What is 1 + 1?", ("1 + 1 = 2.\n\n", "The answer is 2.")
Texts = tuple[str, ...]


class ScoreRoute:
    """Scores a round in one request: sends question and steps as texts, gets last steps' rewards.

    ``outcome``: only finished replies have a reward there; ``repeats``: equal steps have equal
    rewards. Both are known once a server was met.
    """

    def __init__(self, fleet: Fleet[CompletionServer]) -> None:
        self._fleet = fleet
        self.outcome = False
        self.repeats = True

    async def try_out(self, server: CompletionServer) -> None:
        """Learn what rewards the server gives. Raises WrongServer if it gives none; EngineDown."""
        question, steps = TRIAL
        answer = await ask_trial(server, ROUTE, _body(question, [steps]))
        try:
            (rewards,) = (item["rewards"] for item in answer["data"])
            self.outcome = rewards[0] is None
            self.repeats &= answer["reproducible"] != "no"
            _scores(answer, 1)
        except (EngineError, LookupError, TypeError, ValueError) as error:
            raise WrongServer(f"{server.url}{ROUTE}: no Hedgerow's answer: {error!r}") from error

    async def score(
        self,
        search: OpenaiSearch,
        prompt: Path,
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """One reward a trajectory; equal steps are sent once."""
        texts = [_texts_of(trajectory) for trajectory in trajectories]
        return await search.ask_once(texts, partial(self._ask, search, prompt, question))

    async def _ask(
        self, search: OpenaiSearch, prompt: Path, question: str, replies: Sequence[Texts]
    ) -> list[float]:
        async def ask(server: CompletionServer) -> Json:
            return await server.ask(ROUTE, _body(question, replies))

        answer = await self._fleet.ask(search.tree, prompt, ask)
        search.costs.counters.model_calls += 1
        search.costs.counters.prm_tokens += int(answer["usage"]["prompt_tokens"])
        return _scores(answer, len(replies))


def _texts_of(trajectory: Trajectory) -> Texts:
    """The texts of a trajectory's steps. A step without text, such as a lone end token, is left
    out; a reply without any text is sent as an empty line."""
    return tuple(text for text in trajectory.texts if text) or ("\n",)


def _body(question: str, replies: Sequence[Texts]) -> dict[str, Any]:
    items = [{"question": question, "steps": list(steps)} for steps in replies]
    return {"items": items, "seed": SEED}


def _scores(answer: Json, count: int) -> list[float]:
    """The scores in the order asked. Raises EngineError for an answer without them."""
    items = sorted(answer["data"], key=lambda item: item["index"])
    scores = [item["score"] for item in items]
    if len(scores) != count or any(not isinstance(s, float | int) for s in scores):
        raise EngineError(f"the reward server answered {scores} for {count} replies")
    return [float(score) for score in scores]
