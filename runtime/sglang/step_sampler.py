"""Samples steps on the policy's servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from runtime.sglang.fleet import Fleet
from runtime.sglang.replica import Json, Replica
from runtime.sglang.search_session import Path, SearchSession
from runtime.sglang.sglang_beam_extension import SglangBeamExtension
from runtime.sglang.step_request import StepRequest
from runtime.stop_strings import StopStrings, StopStringTables
from runtime.text import Text
from search.engine import Branch, EngineError, PrefixTooLong, Sampling, Step
from search.tree import ROOT, Finish


class StepSampler:
    """One request a child, with its parent's token ids and an id and a seed of its own.

    Siblings find their prefix in the server's cache: one that may not be there any more is read
    once for all of them before they start.
    """

    def __init__(
        self,
        fleet: Fleet,
        text: Text,
        *,
        context: int,
        top: int,
        speculate: bool = False,
    ) -> None:
        """``context``: most tokens of a sequence; ``top``: log-probabilities read a token;
        ``speculate``: idle places draw what rounds may ask for next."""
        self.fleet = fleet
        self.extension = SglangBeamExtension(fleet, top=top, on=speculate)
        self._text = text
        self._context = context
        self._top = top
        self._stops = StopStringTables(text.pieces)

    async def expand(
        self, search: SearchSession, branches: Sequence[Branch], sampling: Sampling
    ) -> list[Step]:
        """A step for each branch, in the order asked."""
        requests = await self.sample(search, branches, sampling)
        search.fresh.clear()
        steps = [self._finish_step(search, request) for request in requests]
        search.costs.counters.model_calls += max((len(step.tokens) for step in steps), default=0)
        return steps

    async def sample(
        self, search: SearchSession, branches: Sequence[Branch], sampling: Sampling
    ) -> list[StepRequest]:
        """As ``expand``, the requests themselves; none of them joins the search's paths."""
        if not branches:
            return []
        for branch in branches:
            self._must_fit(branch)
        stops = self._stops_of(sampling.stop)
        requests = [StepRequest(branch, sampling, stops, self._text.eos) for branch in branches]
        search.prompt = search.prompt or min((branch.tokens for branch in branches), key=len)
        await self.extension.resume(search, requests)
        forks: dict[Path, list[StepRequest]] = defaultdict(list)
        for request in requests:
            if request.finish is None:
                forks[request.branch.tokens].append(request)
        whole = [request for request in requests if request.finish is not None]
        await search.together(
            [self._sample_siblings(search, *fork) for fork in forks.items()]
            + [self._complete(search, request) for request in whole]
        )
        return requests

    async def read(
        self,
        search: SearchSession,
        path: Path,
        start: int,
        node: int | None = None,
        step: tuple[int, int] | None = None,
    ) -> Json:
        """A path's own log-probabilities from position ``start`` on, with nothing drawn.

        ``node``: where it ends, if children are to be drawn from there; ``step``: the node and its
        parent, if the server is to hear that its step is drawn.
        """

        async def ask(replica: Replica) -> Json:
            with search.request(replica) as rid:
                return await replica.generate(
                    {
                        **search.common(rid),
                        **({} if node is None else search.notes.priority(replica, node)),
                        "input_ids": list(path),
                        "return_logprob": True,
                        "logprob_start_len": start,
                        "sampling_params": {
                            "max_new_tokens": 0,
                            **search.notes.on(replica, len(search.prompt), step),
                        },
                    }
                )

        answer = await self.fleet.ask(search.tree, search.prompt, ask)
        search.count_prefix(path, answer)
        return answer

    async def _sample_siblings(
        self, search: SearchSession, prefix: Path, requests: Sequence[StepRequest]
    ) -> None:
        search.on(self.fleet.place(search.tree, search.prompt))
        if len(requests) > 1 and prefix not in search.fresh:
            await self.read(search, prefix, -1, requests[0].branch.parent)
        await search.together([self._sample(search, request) for request in requests])

    async def _sample(self, search: SearchSession, request: StepRequest) -> None:
        async def ask(replica: Replica) -> Json:
            with search.request(replica) as rid:
                note = self._note(search, replica, request.branch)
                search.on(replica)
                body = request.body(self._top, note) | search.common(rid)
                ranked = search.notes.priority(replica, request.branch.parent)
                return await replica.generate(body | ranked)

        while request.finish is None:
            before = request.path
            answer = await self.fleet.ask(search.tree, search.prompt, ask)
            request.take(answer)
            search.count_step(before, answer, len(request.path) - len(before))
        self.extension.enqueue(search, request)

    async def _complete(self, search: SearchSession, request: StepRequest) -> None:
        """A step that was drawn early to its end: a server with our plug-in hears whose it is."""
        branch, server = request.branch, self.fleet.place(search.tree, search.prompt)
        if server.plugged and request.finish is not Finish.END:
            search.on(server)
            step = branch.node, branch.parent
            await self.read(search, request.path, -1, branch.parent, step)
        self.extension.enqueue(search, request)

    def _note(self, search: SearchSession, replica: Replica, branch: Branch) -> dict[str, Any]:
        """What the server is told of the search; nothing for a verdict, which is no step of it."""
        if branch.node < ROOT:
            return {}
        return search.notes.on(replica, len(search.prompt), (branch.node, branch.parent))

    def _finish_step(self, search: SearchSession, request: StepRequest) -> Step:
        """A step that is complete, and its path that children may be forked from."""
        branch, tokens, finish = request.branch, tuple(request.tokens), request.finish
        assert finish is not None, "a request is complete"
        path = (*branch.tokens, *tokens)
        search.logprobs[path] = request.logprob, len(tokens)
        if branch.parent == ROOT:
            search.costs.hold(ROOT, branch.tokens, len(branch.tokens))
        if finish is not Finish.END:
            search.read.add(path)
            search.fresh.add(path)
            search.costs.hold(branch.node, path, len(tokens))
        text = self._text.decode(tokens, branch.tokens, last=finish is Finish.END)
        return Step(tokens, text, finish, request.logprob / len(tokens), request.entropy)

    def _stops_of(self, stop: tuple[str, ...]) -> StopStrings:
        try:
            return self._stops.of(stop)
        except ValueError as error:
            raise EngineError(str(error)) from None

    def _must_fit(self, branch: Branch) -> None:
        if len(branch.tokens) + branch.limit > self._context:
            raise PrefixTooLong(
                f"a prefix of {len(branch.tokens)} tokens and a step of up to {branch.limit} "
                f"do not fit the context of {self._context}"
            )
