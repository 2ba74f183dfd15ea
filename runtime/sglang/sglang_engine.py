"""The SGLang engine: ``search.engine.Engine`` over SGLang servers for policy and reward model."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from runtime.accounting import Flops, no_flops
from runtime.embedded.model.config import ModelConfig, UnsupportedModel
from runtime.judge import Judge
from runtime.reward_format import format_read_here
from runtime.reward_reader import overhead_of
from runtime.servers.fleet import Fleet, wait_for_all
from runtime.servers.policy_scorers import LikelihoodScorer, PolicyJudge
from runtime.servers.request_costs import RequestCosts
from runtime.servers.routing import Routing
from runtime.servers.text_embedder import TextEmbedder
from runtime.sglang.chain_request import say_chains
from runtime.sglang.expected_server import ExpectedServer
from runtime.sglang.launched_server import BY_PREFIX, BY_PRIORITY
from runtime.sglang.plugin_notes import PluginNotes
from runtime.sglang.replica import Json, Replica
from runtime.sglang.search_session import SearchSession
from runtime.sglang.server_metrics import ServerMetrics, fleet_metrics
from runtime.sglang.sglang_options import SglangOptions
from runtime.sglang.sglang_scorer import PrmScorer, RewardRequest
from runtime.sglang.step_request import honoured_params
from runtime.sglang.step_sampler import StepSampler
from runtime.text import Text
from search.counters import Counters, EngineCounters, Usage, combined
from search.engine import Branch, Capabilities, EngineError, Hint, Sampling, Step, Trajectory

log = logging.getLogger(__name__)

Scorer = PrmScorer | PolicyJudge[SearchSession] | LikelihoodScorer[SearchSession]
WATCH_SECONDS = 1.0
"""Between looks at servers that are up."""
LOOKS_AT_KV = 5
"""Looks of which one is at KV, too: a scheduler takes 7 ms and more between two batches to say."""
FAREWELL_SECONDS = 0.1
"""For servers to hear that a search is over, which may come later."""
DRAWS = ("/generate", {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}})
"""What a policy's server must be able to answer."""


class SglangEngine:
    """A client of SGLang servers; make it with ``start``. Belongs to the event loop it started in.

    The servers own the KV: a search stays on one of each kind, and goes on from its token ids on
    another one when that is lost.
    """

    def __init__(self, options: SglangOptions) -> None:
        """Raises ValueError or RewardMissing for options that cannot be met."""
        self._options = options
        self._routing = Routing(options.routing)
        self._form = format_read_here(options.reward_format)
        self._text = Text(options.policy)
        self._flops = known_flops(self._text.checkpoint)
        self._judge = Judge(self._form, self._text) if self._form.reads == "judge" else None
        prm = Text(options.prm) if options.prm and self._form.needs_model else None
        self._prm = prm
        self._reward_request = RewardRequest.of(self._form, prm, self._text) if prm else None
        policy = ExpectedServer("policy", self._text)
        self._policy = self._fleet("policy", options.policy_urls, policy, DRAWS)
        reward = ExpectedServer("reward", prm, self._form) if prm else None
        scores = self._reward_request.trial() if self._reward_request else DRAWS
        self._rewards = self._fleet("reward", options.reward_urls, reward, scores)
        self._searches: dict[str, SearchSession] = {}
        self._names = f"hedgerow-{secrets.token_hex(4)}-"
        self._numbers = count(1)
        self._past = Counters()
        self._peak = self._prm_peak = 0
        self._ending: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._embedder = TextEmbedder(options.embedder, options.encoder, options.endpoint)

    @classmethod
    async def start(cls, options: SglangOptions) -> SglangEngine:
        """Wait until every server answers, and read what it is.

        Raises what is wrong with the options or a server: ValueError, OSError, RewardMissing;
        EngineDown for a server that does not answer in ``start_seconds``.
        """
        engine = cls(options)
        try:
            await engine._meet()
            engine._watching = asyncio.create_task(engine._watch())
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do; constant while it lives."""
        return self._capabilities

    @property
    def replicas(self) -> Sequence[Replica]:
        """The policy's servers, then the reward model's."""
        return *self._policy.replicas, *self._rewards.replicas

    @property
    def moves(self) -> int:
        """How often a search has gone on at another server."""
        return self._policy.moves + self._rewards.moves

    @property
    def sent_again(self) -> int:
        """How many requests were sent anew since their server was lost."""
        return self._policy.sent_again + self._rewards.sent_again

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw one step for each branch, in the order asked."""
        return await self._sampler.expand(self._session(tree), branches, sampling)

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """One reward in [0, 1] a trajectory, unrounded."""
        for trajectory in trajectories:
            trajectory.check_steps()
        return await self._scorer.score(self._session(tree), prompt, question, trajectories)

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """One vector for the last step of each trajectory, from its text."""
        return await self._embedder.embed(trajectories)

    def hint(self, tree: str, hint: Hint) -> None:
        """What died is not held any more; servers hear of it with the search's next requests."""
        search = self._session(tree)
        search.costs.mark_dead(hint.dead)
        search.notes.take(hint)
        self._sampler.extension.mark_dead(search, hint.dead)

    async def release(self, tree: str) -> Counters:
        """Stop what is under way for a tree; what it cost, all zero for one never seen."""
        search = self._searches.pop(tree, None)
        if search is None:
            return Counters()
        self._sampler.gates.leave(tree)
        await asyncio.shield(self._going_on(self._end_session(tree, search)))
        return search.costs.counters

    async def abort(self, tree: str) -> None:
        """Stop everything under way for a tree: those calls raise EngineError."""
        await self.release(tree)

    async def usage(self) -> Usage:
        """The servers' own reports; without ``--enable-metrics`` there, what was asked of them."""
        policy, reward = await asyncio.gather(
            fleet_metrics(self._policy.replicas), fleet_metrics(self._rewards.replicas)
        )
        self._policy.up()
        self._peak = max(self._peak, policy.held)
        self._prm_peak = max(self._prm_peak, reward.held)
        return Usage(
            kv_tokens_active=policy.held,
            kv_tokens_cached=policy.cached,
            kv_tokens_capacity=policy.capacity or self._policy.kv_tokens,
            kv_tokens_peak=self._peak,
            prm_kv_tokens_active=reward.held,
            prm_kv_tokens_cached=reward.cached,
            prm_kv_tokens_capacity=reward.capacity or self._rewards.kv_tokens,
            running=policy.running,
            waiting=policy.waiting,
            prm_kv_tokens_peak=self._prm_peak,
            totals=self._totals(policy, reward),
        )

    def _totals(self, policy: ServerMetrics, reward: ServerMetrics) -> EngineCounters:
        """All searches together; what the servers count themselves, they know better."""
        searches = (search.costs.counters for search in self._searches.values())
        totals = EngineCounters.of(
            combined(Counters, (self._past, *searches)),
            evicted_tokens=policy.evicted,
            prm_evicted_tokens=reward.evicted,
            kv_policy_seconds=policy.evicting,
            sent_again=self.sent_again,
        )
        if policy.prompt > 0:
            totals.decoded_tokens = policy.generated
            totals.prefilled_tokens = policy.prompt - policy.hit
            totals.cached_tokens = policy.hit
        if reward.prompt > 0:
            totals.prm_tokens = reward.prompt - reward.hit
        return totals

    async def health(self) -> None:
        """Raise EngineDown unless a server of each model is there. In a second it answers, or is
        busy, or has stood still for ``stall_seconds`` and is lost."""
        fleets = [fleet for fleet in (self._policy, self._rewards) if fleet.replicas]
        await asyncio.gather(*(fleet.check() for fleet in fleets))

    async def close(self) -> None:
        """Stop what is under way and close all connections; the servers go on."""
        if self._watching is not None:
            self._watching.cancel()
        searches = list(self._searches.values())
        self._searches.clear()
        await asyncio.gather(*(search.stop() for search in searches))
        await asyncio.gather(*(self._sampler.extension.end(search) for search in searches))
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._policy.close()
        await self._rewards.close()
        await self._embedder.close()

    async def _end_session(self, tree: str, search: SearchSession) -> None:
        """Stop what is under way for a tree; its servers are to let go of it."""
        try:
            with self._routing.of(tree):
                await search.stop()
                await self._sampler.extension.end(search)
        finally:
            self._past += search.costs.counters
            self._routing.check(self._past.expected_tokens, self._past.rehydrated_tokens)
            farewells = [self._policy.release(tree), self._rewards.release(tree)]
            tasks = [self._going_on(farewell) for farewell in farewells]
            await asyncio.wait(tasks, timeout=FAREWELL_SECONDS)

    def _going_on(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """It comes to its end though nobody waits for it."""
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._went_on)
        return task

    def _went_on(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a tree was not let go of: %s", error, exc_info=error)

    async def _watch(self) -> None:
        """Look at the servers now and then, so that one that stands still is noticed whoever asks;
        while searches are in flight, at their KV too, whose peak nobody else keeps."""
        for look in count():
            await asyncio.sleep(WATCH_SECONDS)
            with suppress(EngineError):
                await self.health()
            if self._searches and look % LOOKS_AT_KV == 0:
                with suppress(EngineError):
                    await self.usage()

    def _session(self, tree: str) -> SearchSession:
        if tree not in self._searches:
            name = f"{self._names}{next(self._numbers):08x}-"
            self._searches[tree] = SearchSession(
                tree, name, PluginNotes(tree), costs=RequestCosts(self._flops)
            )
        return self._searches[tree]

    def _fleet(
        self,
        what: str,
        urls: Sequence[str],
        expected: ExpectedServer | None,
        trial: tuple[str, Json],
    ) -> Fleet[Replica]:
        """The servers of a kind; none where none is needed."""
        options = self._options
        replicas = [
            Replica(
                url,
                options.times,
                expected=expected,
                trial=trial,
                routed=self._routing.header is not None,
            )
            for url in urls
            if expected is not None
        ]
        return Fleet(what, replicas, options.recovery_seconds, self._routing)

    async def _meet(self) -> None:
        """Wait for the servers, and build what depends on what they are."""
        options = self._options
        await wait_for_all((self._policy, self._rewards), options.start_seconds)
        for replica in self._policy.replicas:
            if options.speculate and not replica.schedules:
                raise ValueError(
                    f"speculate: True; {replica.url} does not let in by priority; it is to run "
                    f"with {' '.join(BY_PRIORITY)}"
                )
            self._say_order(replica)
            say_chains(replica)
        if not all(replica.seeds for replica in self._policy.replicas):
            log.warning("a policy server is without our plug-in: it does not heed seeds")
        await self._embedder.load()
        context = self._context(self._policy, self._text)
        self._sampler = StepSampler(
            self._policy,
            self._text,
            context=context,
            top=options.top,
            speculate=options.speculate,
        )
        self._scorer = self._make_scorer()
        self._capabilities = Capabilities(
            logprobs=True,
            grammar=all(replica.has_grammars for replica in self._policy.replicas),
            grammar_at_once=True,
            engine="sglang",
            models={"policy": str(options.policy)}
            | ({"prm": str(options.prm)} if options.prm else {}),
            exact=False,
            seeded=all(replica.seeds for replica in self._policy.replicas),
            scores=True,
            embeds=options.embedder,
            context_tokens=context,
            fingerprint=self._fingerprint(),
            score_tokens=self._overhead(),
            scored_tokens=self._context(self._rewards, self._prm) if self._prm else 0,
            outcome=self._form.outcome,
            likelihood=isinstance(self._scorer, LikelihoodScorer),
            logits_params=honoured_params(self._policy.replicas),
        )

    def _say_order(self, replica: Replica) -> None:
        """A server lets in by priority or by common prefixes: not by both."""
        by = replica.details.get("schedule_policy")
        if self._options.speculate:
            log.info("%s lets in by priority, as work ahead needs, not by prefixes", replica.url)
        elif by != BY_PREFIX[-1]:
            log.info("%s: %s %s; %s reads less again", replica.url, BY_PREFIX[0], by, BY_PREFIX[-1])

    def _make_scorer(
        self,
    ) -> PrmScorer | PolicyJudge[SearchSession] | LikelihoodScorer[SearchSession]:
        if self._judge is not None:
            return PolicyJudge(self._sampler, self._judge)
        if self._prm is None or self._reward_request is None:
            return LikelihoodScorer(self._sampler)
        return PrmScorer(
            self._rewards,
            self._reward_request,
            context=self._context(self._rewards, self._prm),
            flops=known_flops(self._prm.checkpoint),
            next_steps=self._sampler.finished_next_steps if self._options.lookahead else None,
        )

    def _overhead(self) -> tuple[int, int]:
        if self._reward_request is not None:
            return overhead_of(self._reward_request.paths)
        if self._judge is not None:
            return self._judge.overhead()
        return 0, 0

    def _context(self, fleet: Fleet[Replica], text: Text) -> int:
        """The most tokens that all servers take; SGLang keeps a few of the context for itself."""
        longest = [replica.details.get("max_req_input_len") for replica in fleet.replicas]
        return min([text.context, *(int(tokens) - 1 for tokens in longest if tokens)])

    def _fingerprint(self) -> str:
        """``sglang-`` and 16 hex digits over what a tree depends on besides its request."""
        options = self._options
        named = [options.version, repr(self._form), options.embedder, str(options.encoder)]
        for replica in self.replicas:
            names = ("version", "model_path", "dtype", "attention_backend", "sampling_backend")
            named += [str(replica.details.get(name)) for name in names]
        named += [str(replica.seeds) for replica in self._policy.replicas]
        digest = hashlib.sha256("\0".join(named).encode()).hexdigest()
        return f"sglang-{digest[:16]}"


def known_flops(checkpoint: str | Path) -> Flops:
    """What a forward pass costs, where the model's shape is one that is known."""
    try:
        return ModelConfig.sizes_of(checkpoint).flops
    except UnsupportedModel:
        return no_flops
