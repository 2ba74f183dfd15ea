"""Scores trajectories on the reward model's servers, a round in one request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from runtime.openai.completion_server import CompletionServer, Json
from runtime.openai.openai_search import OpenaiSearch
from runtime.openai.reward_requests import PathsRequest
from runtime.openai.server_dialect import cached_tokens
from runtime.servers.fleet import Fleet
from runtime.servers.request_costs import Path
from search.engine import EngineError, PrefixTooLong, Trajectory


class ServedRewardModel:
    """Scores each path by a prefill, read at its last token."""

    def __init__(
        self, fleet: Fleet[CompletionServer], request: PathsRequest, *, context: int
    ) -> None:
        """``context``: most tokens of a path."""
        self._fleet = fleet
        self._request = request
        self._context = context

    async def score(
        self,
        search: OpenaiSearch,
        prompt: Path,
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """One reward a trajectory; equal paths are read once. Raises PrefixTooLong."""
        spell = self._request.paths.path
        paths = [spell(prompt, question, t, search.spelt) for t in trajectories]
        for path in paths:
            if len(path) > self._context:
                raise PrefixTooLong(
                    f"a trajectory of {len(path)} tokens does not fit the reward model's context "
                    f"of {self._context}"
                )
        return await search.ask_once(paths, partial(self._ask, search, prompt))

    async def _ask(self, search: OpenaiSearch, prompt: Path, paths: Sequence[Path]) -> list[float]:
        async def ask(server: CompletionServer) -> Json:
            return await server.ask(self._request.route, self._request.body(paths))

        answer = await self._fleet.ask(search.tree, prompt, ask)
        rewards = self._request.rewards(answer)
        if len(rewards) != len(paths):
            raise EngineError(f"the reward server answered {len(rewards)} of {len(paths)} paths")
        cached = cached_tokens(answer) or 0  # for a list, servers count one of its paths
        search.costs.counters.model_calls += 1
        search.costs.counters.prm_tokens += sum(map(len, paths)) - cached
        return rewards
