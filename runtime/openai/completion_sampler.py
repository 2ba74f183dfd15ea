"""Samples steps on the policy's servers: a request a branch, all of a round at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from runtime.openai.completion_server import COMPLETIONS, CompletionServer, Json
from runtime.openai.openai_search import OpenaiSearch
from runtime.openai.server_dialect import Dialect, cached_tokens
from runtime.openai.step_completion import StepCompletion
from runtime.servers.drawn_step import must_begin_at_the_prompt
from runtime.servers.fleet import Fleet
from runtime.servers.request_costs import Path
from runtime.stop_strings import StopStringTables
from runtime.text import Text
from search.engine import Branch, EngineError, PrefixTooLong, Sampling, Step
from search.tree import ROOT, Finish


class CompletionSampler:
    """Draws children from their parents' token ids, each with a seed of its own.

    What the servers cache they decide themselves; requests of a tree say by routing headers that
    they belong together.
    """

    def __init__(
        self,
        fleet: Fleet[CompletionServer],
        text: Text,
        dialects: Mapping[CompletionServer, Dialect],
        *,
        context: int,
        top: int,
    ) -> None:
        """``dialects``: how each server speaks; ``context``: most tokens of a sequence; ``top``:
        log-probabilities read a token."""
        self.fleet = fleet
        self._dialects = dialects
        self._text = text
        self._context = context
        self._top = top
        self._stops = StopStringTables(text.pieces)

    async def expand(
        self, search: OpenaiSearch, branches: Sequence[Branch], sampling: Sampling
    ) -> list[Step]:
        """A step for each branch, in the order asked."""
        steps = await self.sample(search, branches, sampling)
        search.costs.counters.model_calls += max((len(step.tokens) for step in steps), default=0)
        return [self._finish_step(search, step) for step in steps]

    async def sample(
        self, search: OpenaiSearch, branches: Sequence[Branch], sampling: Sampling
    ) -> list[StepCompletion]:
        """As ``expand``, what was drawn itself; none of it joins the search's paths."""
        if not branches:
            return []
        for branch in branches:
            self._must_fit(branch)
        must_begin_at_the_prompt(branches, sampling)
        try:
            stops = self._stops.of(sampling.stop)
        except ValueError as error:
            raise EngineError(str(error)) from None
        search.begin(branches)
        steps = [StepCompletion(branch, sampling, stops, self._text.eos) for branch in branches]
        await search.together([self._draw(search, step) for step in steps])
        return steps

    async def sum_logprobs(
        self, search: OpenaiSearch, paths: Sequence[Path], start: int
    ) -> list[tuple[float, int]]:
        """Of each path's tokens from position ``start`` on: the sum of their log-probabilities, and
        how many they are."""
        reads = [self._read(search, path, start) for path in paths]
        return await search.together(reads)

    async def _draw(self, search: OpenaiSearch, step: StepCompletion) -> None:
        """The step to its end."""

        async def ask(server: CompletionServer) -> None:
            search.on(server)
            before, dialect = step.path, self._dialects[server]
            body = step.body(self._top, dialect) | search.marks(server)
            answer = await server.ask(COMPLETIONS, body)
            drawn = step.take(answer, self._top, dialect, self._text)
            self._count(search, server, before, answer)
            search.costs.add_decoded(len(before), max(drawn, dialect.drawn_beyond(answer)))

        while step.finish is None:
            await self.fleet.ask(search.tree, search.prompt, ask)

    async def _read(self, search: OpenaiSearch, path: Path, start: int) -> tuple[float, int]:
        """A path's own log-probabilities, which vLLM tells with one more token drawn."""

        async def ask(server: CompletionServer) -> Json:
            search.on(server)
            body = {"prompt": list(path), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            answer = await server.ask(COMPLETIONS, body | search.marks(server))
            self._count(search, server, path, answer)
            return answer

        answer = await self.fleet.ask(search.tree, search.prompt, ask)
        told = answer["choices"][0].get("prompt_logprobs")
        if not told or len(told) != len(path):
            raise EngineError(
                "the server tells no log-probabilities of a prompt: what was drawn elsewhere has "
                "no reward without a reward model"
            )
        own = [told[at][str(path[at])]["logprob"] for at in range(start, len(path))]
        return math.fsum(own), len(own)

    def _count(
        self, search: OpenaiSearch, server: CompletionServer, prefix: Path, answer: Json
    ) -> None:
        """What a request has cost that read a prefix; where the server does not tell what was
        cached, that is what was read before."""
        known = prefix in search.read
        cached = cached_tokens(answer)
        if cached is None:
            cached = (len(prefix) - 1) // server.block * server.block if known else 0
        search.costs.read(len(prefix), cached, known=known, block=server.block)
        search.read.add(prefix)

    def _finish_step(self, search: OpenaiSearch, drawn: StepCompletion) -> Step:
        """A step that is complete, and its path that children may be forked from."""
        branch, path = drawn.branch, drawn.path
        if drawn.told:
            search.logprobs[path] = drawn.logprob, len(drawn.tokens)
        search.costs.counters.retokenized_steps += drawn.retokenized
        if branch.parent == ROOT:
            search.costs.hold(ROOT, branch.tokens, len(branch.tokens))
        if drawn.finish is not Finish.END:
            search.read.add(path)
            search.costs.hold(branch.node, path, len(drawn.tokens))
        return drawn.step(self._text)

    def _must_fit(self, branch: Branch) -> None:
        if len(branch.tokens) + branch.limit > self._context:
            raise PrefixTooLong(
                f"a prefix of {len(branch.tokens)} tokens and a step of up to {branch.limit} "
                f"do not fit the context of {self._context}"
            )
