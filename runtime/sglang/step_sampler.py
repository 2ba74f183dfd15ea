"""Samples steps on the policy's SGLang servers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

from hedgerow_sglang.step_chain import StepEnds
from runtime.servers.fleet import Fleet
from runtime.servers.policy_sampler import PolicySampler
from runtime.sglang.chain_request import (
    ChainLengths,
    chain_body,
    first_draws,
    is_chain,
    next_in_chain,
    open_tails,
    take_chain,
)
from runtime.sglang.replica import Json, Replica
from runtime.sglang.round_gate import RoundGates
from runtime.sglang.search_session import Path, SearchSession
from runtime.sglang.sglang_beam_extension import SglangBeamExtension
from runtime.sglang.step_request import PathRead, StepRequest, forked_prefixes
from runtime.stop_strings import encode_stops
from runtime.text import Text
from search.engine import Branch, Sampling, Step, Trajectory
from search.tree import ROOT, Finish


class StepSampler(PolicySampler[SearchSession, Replica]):
    """Draws a round's children in one request, each with its parent's token ids, its own id and its
    own seed.

    Siblings find their prefix in the server's cache: prefixes that may be missing are read once, in
    one request, before the round.
    """

    def __init__(self, fleet: Fleet[Replica], text: Text, *, context: int, speculate: bool) -> None:
        """``speculate``: idle servers draw steps that rounds may ask for next."""
        super().__init__(fleet, text, context=context)
        self.extension = SglangBeamExtension(fleet, on=speculate)
        self.gates = RoundGates()
        self._chain_lengths = ChainLengths()
        self._ends: dict[tuple[str, ...], StepEnds] = {}

    async def expand(
        self, search: SearchSession, branches: Sequence[Branch], sampling: Sampling
    ) -> list[Step]:
        """A step for each branch, in the order asked; waits until the round's KV has room."""
        at_once = 0
        early = (search.following.get((branch.tokens, branch.seed)) for branch in branches)
        if not all(request and request.finish for request in early):
            (at_once,) = await search.together([self._wait_for_room(search, branches)])
        requests = await self.sample(search, branches, sampling, at_once)
        search.fresh = {request.path for request in requests if request.finish is not Finish.END}
        steps = self._finish(search, requests)
        self.gates.record(search.tree, branches, steps)
        return steps

    async def _wait_for_room(self, search: SearchSession, branches: Sequence[Branch]) -> int:
        """Wait until the KV of older searches on the search's server leaves room for the round;
        returns the most tokens to ask for of each step at first."""
        search.begin(branches)
        gate = self.gates.of(await self.fleet.reach(search.tree, search.prompt), search.tree)
        start = time.monotonic()
        await gate.enter(search.tree, gate.need(branches))
        search.costs.counters.held_back_seconds += time.monotonic() - start
        return gate.tokens_at_once(branches)

    async def sample(
        self,
        search: SearchSession,
        branches: Sequence[Branch],
        sampling: Sampling,
        at_once: int = 0,
    ) -> list[StepRequest]:
        """``expand``, but returns the requests, which are not added to the search's paths.

        ``at_once``: the most tokens that a step's first request asks for; 0 for all.
        """
        if not branches:
            return []
        stops = self._stops_of(branches, sampling)
        requests = [
            StepRequest(branch, sampling, stops, self._text.eos, at_once=at_once)
            for branch in branches
        ]
        search.begin(branches)
        await self.extension.resume(search, requests)
        for request in requests:
            early_request = search.following.pop(request.key, None)
            if early_request is not None and early_request.branch.draws_as(request.branch):
                request.continue_from(early_request)
        whole = [request for request in requests if request.finish is not None]
        await search.together([self._draw(search, requests), self._go_on(search, whole)])
        return requests

    def finished_next_steps(
        self, search: SearchSession, trajectories: Sequence[Trajectory]
    ) -> dict[int, Trajectory]:
        """By node: trajectories extended by a next step that was drawn early and is complete."""
        children = self.extension.finished_children(search)
        longer: dict[int, Trajectory] = {}
        for trajectory in trajectories:
            node, child = trajectory.node, children.get(trajectory.node)
            if child is not None:
                tokens, last = tuple(child.tokens), child.finish is Finish.END
                text = self._text.decode(tokens, child.branch.tokens, last=last)
                steps, texts = (*trajectory.steps, tokens), (*trajectory.texts, text)
                longer[node] = Trajectory(node, steps, texts, trajectory.seed)
        return longer

    async def sum_logprobs(
        self, search: SearchSession, paths: Sequence[Path], start: int
    ) -> list[tuple[float, int]]:
        """``PolicySampler.sum_logprobs``, by one request that draws nothing."""
        reads = [PathRead(path, start - 1) for path in paths]

        async def ask(replica: Replica) -> list[Json]:
            return await self._read(search, replica, reads)

        if not reads:
            return []
        (answers,) = await search.together([self.fleet.ask(search.tree, search.prompt, ask)])
        return list(map(_sum_of, answers))

    async def _read(
        self, search: SearchSession, replica: Replica, reads: Sequence[PathRead]
    ) -> list[Json]:
        answers: dict[int, Json] = {}
        search.on(replica)
        bodies = [self._body_of(search, replica, read) for read in reads]
        await search.send_list(replica, bodies, answers.__setitem__)
        for place, read in enumerate(reads):
            search.count_prefix(read.path, answers[place])
        return [answers[place] for place in range(len(reads))]

    async def _draw(self, search: SearchSession, requests: Sequence[StepRequest]) -> None:
        """Draw every step to its end. Steps that were drawn early are read once more, so that a
        server with our plug-in learns which nodes they belong to."""
        reads = [
            PathRead(request.path, -1, request.branch.parent, request.branch.step)
            for request in requests
            if request.finish not in (None, Finish.END) and not request.acknowledged
        ]

        async def ask(replica: Replica) -> None:
            search.on(replica)
            open_requests = [request for request in requests if request.finish is None]
            open_requests.sort(key=lambda request: request.branch.tokens)
            await self._read_forks(search, replica, open_requests)
            draws = open_requests
            if replica.chains and open_requests:
                draws = first_draws([*draws, *open_tails(requests, search.following)])
            await self._draw_list(search, replica, draws, reads if replica.plugged else [])
            reads.clear()

        while reads or any(request.finish is None for request in requests):
            await self.fleet.ask(search.tree, search.prompt, ask)

    async def _go_on(self, search: SearchSession, whole: Sequence[StepRequest]) -> None:
        """Let steps that are complete already have children drawn early, too."""
        for request in whole:
            self.extension.enqueue(search, request)

    async def _read_forks(
        self, search: SearchSession, replica: Replica, requests: Sequence[StepRequest]
    ) -> None:
        """Read once each prefix that several requests share and that may not be cached."""
        begins = (request.branch.tokens for request in requests if not request.tokens)
        forks = forked_prefixes(begins, search.fresh)
        parents = {request.branch.tokens: request.branch.parent for request in requests}
        if forks:
            await self._read(search, replica, [PathRead(p, -1, parents[p]) for p in forks])
            search.fresh.update(forks)

    async def _draw_list(
        self,
        search: SearchSession,
        replica: Replica,
        requests: Sequence[StepRequest],
        reads: Sequence[PathRead],
    ) -> None:
        """Send these draws and reads as one list, and take the answers."""

        unsteered = [request for request in requests if is_chain(request)]
        chains = set(unsteered) if replica.chains else set[StepRequest]()
        if not chains:
            roots = sum(request.branch.parent == ROOT for request in unsteered)
            search.costs.counters.split_chains += roots
        ends = await self._ends_of(requests[0].sampling.stop) if chains else None
        first = True

        def take(place: int, answer: Json) -> None:
            if place >= len(requests):
                search.count_prefix(reads[place - len(requests)].path, answer)
                return
            request = requests[place]
            self._take(search, replica, request, answer, chain=request in chains)

        bodies: list[dict[str, Any]] = []
        for request in requests:
            if ends is not None and request in chains:
                note = search.notes.on(replica, len(search.prompt), None)
                most = self._chain_lengths.most
                body = chain_body(request, note, ends, most=most, first=first)
                first = False
            else:
                body = request.body(self._note(search, replica, request.branch))
            bodies.append(body | search.notes.priority(replica, request.branch.parent))
        bodies += [self._body_of(search, replica, read) for read in reads]
        if bodies:
            await search.send_list(replica, bodies, take)

    def _take(
        self,
        search: SearchSession,
        replica: Replica,
        request: StepRequest,
        answer: Json,
        *,
        chain: bool,
    ) -> None:
        """Take the tokens of a step, and with ``chain`` of those after it."""
        before = request.path
        if chain:
            following = take_chain(request, answer)
            drawn_tokens = len(answer["meta_info"]["output_token_logprobs"])
            self._chain_lengths.record(drawn_tokens)
        else:
            drawn_tokens = request.take(answer)
            child = next_in_chain(request) if replica.chains else None
            following = [child] if child is not None else []
        search.following |= {step.key: step for step in following}
        search.cached_paths.add([request, *following][-1].path)
        if request.finish is not None:
            self.extension.enqueue(search, request)
        search.count_step(before, answer, drawn_tokens)

    async def _ends_of(self, stop: tuple[str, ...]) -> StepEnds:
        """The ``StepEnds`` of these stop strings, made once."""
        if stop not in self._ends:
            stops = encode_stops(stop)
            self._ends[stop] = await asyncio.to_thread(StepEnds.of, self._text.pieces, stops)
        return self._ends[stop]

    def _body_of(self, search: SearchSession, replica: Replica, read: PathRead) -> dict[str, Any]:
        note = search.notes.on(replica, len(search.prompt), read.step)
        ranked = {} if read.node is None else search.notes.priority(replica, read.node)
        return read.body(note) | ranked

    def _note(self, search: SearchSession, replica: Replica, branch: Branch) -> dict[str, Any]:
        """The note of a branch's request, without a node for a chain's later step; empty for a
        verdict, which is not the search's step."""
        early = branch.parent < ROOT
        if branch.node < ROOT and not early:
            return {}
        return search.notes.on(replica, len(search.prompt), None if early else branch.step)


def _sum_of(answer: Json) -> tuple[float, int]:
    entries = answer["meta_info"]["input_token_logprobs"]
    logprobs = [logprob for logprob, *_ in entries if logprob is not None]
    return math.fsum(logprobs), len(logprobs)
