"""Samples steps on the policy's servers: one request a branch, all of a round at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from runtime.openai.completion_server import COMPLETIONS, CompletionServer, Json
from runtime.openai.openai_search import OpenaiSearch
from runtime.openai.server_dialect import cached_tokens
from runtime.openai.step_completion import StepCompletion
from runtime.servers.policy_sampler import PolicySampler
from runtime.servers.request_costs import Path
from search.engine import Branch, EngineError, Sampling, Step


class CompletionSampler(PolicySampler[OpenaiSearch, CompletionServer]):
    """Draws steps on servers that decide themselves what they cache; routing headers tell routers
    which requests belong to one tree.
    """

    async def expand(
        self, search: OpenaiSearch, branches: Sequence[Branch], sampling: Sampling
    ) -> list[Step]:
        """A step for each branch, in the order asked."""
        steps = await self.sample(search, branches, sampling)
        search.costs.counters.retokenized_steps += sum(step.retokenized for step in steps)
        return self._finish(search, steps)

    async def sample(
        self, search: OpenaiSearch, branches: Sequence[Branch], sampling: Sampling
    ) -> list[StepCompletion]:
        """``expand``, but returns the drawn steps, which are not added to the search's paths."""
        if not branches:
            return []
        stops = self._stops_of(branches, sampling)
        search.begin(branches)
        steps = [StepCompletion(branch, sampling, stops, self._text.eos) for branch in branches]
        await search.together([self._draw(search, step) for step in steps])
        return steps

    async def sum_logprobs(
        self, search: OpenaiSearch, paths: Sequence[Path], start: int
    ) -> list[tuple[float, int]]:
        """For each path: the sum of the log-probabilities of its tokens from position ``start`` on,
        and the number of these tokens."""
        reads = [self._read(search, path, start) for path in paths]
        return await search.together(reads)

    async def _draw(self, search: OpenaiSearch, step: StepCompletion) -> None:
        """Draw a step to its end, in as many requests as it takes."""

        async def ask(server: CompletionServer) -> None:
            search.on(server)
            before, dialect = step.path, server.dialect
            assert dialect is not None, "a server is asked when it has been met"
            body = step.body(dialect) | search.marks(server)
            answer = await server.ask(COMPLETIONS, body)
            count = step.take(answer, dialect, self._text)
            self._count(search, server, before, answer)
            search.costs.add_decoded(len(before), max(count, dialect.drawn_tokens(answer)))

        while step.finish is None:
            await self.fleet.ask(search.tree, search.prompt, ask)

    async def _read(self, search: OpenaiSearch, path: Path, start: int) -> tuple[float, int]:
        """Sum a path's own log-probabilities, which vLLM returns if one more token is drawn."""

        async def ask(server: CompletionServer) -> Json:
            search.on(server)
            body = {"prompt": list(path), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            answer = await server.ask(COMPLETIONS, body | search.marks(server))
            self._count(search, server, path, answer)
            return answer

        answer = await self.fleet.ask(search.tree, search.prompt, ask)
        entries = answer["choices"][0].get("prompt_logprobs")
        if not entries or len(entries) != len(path):
            raise EngineError(
                "the server tells no log-probabilities of a prompt: what was drawn elsewhere has "
                "no reward without a reward model"
            )
        logprobs = [entries[at][str(path[at])]["logprob"] for at in range(start, len(path))]
        return math.fsum(logprobs), len(logprobs)

    def _count(
        self, search: OpenaiSearch, server: CompletionServer, prefix: Path, answer: Json
    ) -> None:
        """Count the cost of a request that read a prefix; a server that does not say how much was
        cached is taken to have cached what it read before."""
        cached_before = prefix in search.cached_paths
        cached = cached_tokens(answer)
        if cached is None:
            cached = (len(prefix) - 1) // server.block * server.block if cached_before else 0
        search.costs.read(len(prefix), cached, was_cached=cached_before, block=server.block)
        search.cached_paths.add(prefix)
