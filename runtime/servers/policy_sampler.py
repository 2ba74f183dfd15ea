"""Samples steps on the policy's servers: the part that all kinds of servers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from runtime.servers.drawn_step import DrawnStep
from runtime.servers.fleet import Fleet
from runtime.servers.remote_server import RemoteServer
from runtime.servers.request_costs import Path
from runtime.servers.served_search import ServedSearch
from runtime.stop_strings import StopStrings, StopStringTables
from runtime.text import Text
from search.engine import Branch, EngineError, PrefixTooLong, Sampling, Step
from search.tree import ROOT, Finish

Search = TypeVar("Search", bound=ServedSearch)
Server = TypeVar("Server", bound=RemoteServer)


class PolicySampler(ABC, Generic[Search, Server]):
    """Draws children from their parents' token ids, each with its own seed, and reads the
    log-probabilities of given paths."""

    def __init__(self, fleet: Fleet[Server], text: Text, *, context: int) -> None:
        """``context``: most tokens of a sequence."""
        self.fleet = fleet
        self._text = text
        self._context = context
        self._stops = StopStringTables(text.pieces)

    @abstractmethod
    async def expand(
        self, search: Search, branches: Sequence[Branch], sampling: Sampling
    ) -> list[Step]:
        """A step for each branch, in the order asked."""

    @abstractmethod
    async def sample(
        self, search: Search, branches: Sequence[Branch], sampling: Sampling
    ) -> Sequence[DrawnStep]:
        """``expand``, but returns the drawn steps, which are not added to the search's paths."""

    @abstractmethod
    async def sum_logprobs(
        self, search: Search, paths: Sequence[Path], start: int
    ) -> list[tuple[float, int]]:
        """For each path: the sum of the log-probabilities of its tokens from position ``start`` on,
        and the number of these tokens."""

    def _stops_of(self, branches: Sequence[Branch], sampling: Sampling) -> StopStrings:
        """The stop strings of these steps. Raises PrefixTooLong; EngineError for what cannot be
        drawn, such as the rest of a reply under a grammar: servers begin it with the request."""
        for branch in branches:
            if len(branch.tokens) + branch.limit > self._context:
                raise PrefixTooLong(
                    f"a prefix of {len(branch.tokens)} tokens and a step of up to {branch.limit} "
                    f"do not fit the context of {self._context}"
                )
        continues = (len(branch.tokens) != sampling.prompt_tokens for branch in branches)
        if sampling.grammar is not None and any(continues):
            raise EngineError("grammar: a reply under one is drawn in one call on this engine")
        try:
            return self._stops.of(sampling.stop)
        except ValueError as error:
            raise EngineError(str(error)) from None

    def _finish(self, search: Search, steps: Sequence[DrawnStep]) -> list[Step]:
        """The complete steps; their paths, from which children may be drawn, join the search."""
        for step in steps:
            branch, path = step.branch, step.path
            if step.has_logprobs:
                search.logprobs[path] = step.logprob, len(step.tokens)
            if branch.parent == ROOT:
                search.costs.hold(ROOT, branch.tokens, len(branch.tokens))
            if step.finish is not Finish.END:
                search.cached_paths.add(path)
                search.costs.hold(branch.node, path, len(step.tokens))
        search.costs.counters.model_calls += max((len(step.tokens) for step in steps), default=0)
        return [step.step(self._text) for step in steps]
