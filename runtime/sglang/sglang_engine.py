"""The SGLang engine: ``search.engine.Engine`` over SGLang servers for policy and reward model."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from runtime.accounting import Flops, no_flops
from runtime.embedded.model.config import ModelConfig, UnsupportedModel
from runtime.reward_format import local_reward_format
from runtime.servers.fleet import Fleet
from runtime.servers.policy_scorers import LikelihoodScorer, PolicyJudge
from runtime.servers.request_costs import RequestCosts
from runtime.servers.served_engine import ServedEngine, ServedScorer, fingerprint_of
from runtime.sglang.chain_request import say_chains
from runtime.sglang.expected_server import ExpectedServer
from runtime.sglang.launched_server import BY_PREFIX, BY_PRIORITY
from runtime.sglang.plugin_notes import PluginNotes
from runtime.sglang.replica import Json, Replica
from runtime.sglang.search_session import SearchSession
from runtime.sglang.sglang_options import SglangOptions
from runtime.sglang.sglang_scorer import PrmScorer, RewardRequest
from runtime.sglang.step_request import honoured_params
from runtime.sglang.step_sampler import StepSampler
from runtime.text import Text
from search.engine import Capabilities, Hint

log = logging.getLogger(__name__)

LOOKS_AT_KV = 5
"""One check in so many reads KV too: it costs a scheduler 7 ms or more between two batches."""
FAREWELL_SECONDS = 0.1
"""Most seconds to wait until servers have heard that a search is over."""
DRAWS = ("/generate", {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}})
"""The trial request of a policy's server: a path and a body."""


class SglangEngine(ServedEngine[SearchSession, Replica, StepSampler]):
    """An engine on SGLang servers, with or without our plug-in."""

    def __init__(self, options: SglangOptions) -> None:
        """Raises ValueError or RewardMissing for options that cannot be met."""
        super().__init__(options, local_reward_format(options.reward_format), Text(options.policy))
        self._options = options
        self._flops = flops_of(self._text.checkpoint)
        prm = Text(options.prm) if options.prm and self._form.needs_model else None
        self._prm = prm
        self._reward_request = RewardRequest.of(self._form, prm, self._text) if prm else None
        policy = ExpectedServer("policy", self._text)
        self._policy = self._fleet("policy", options.policy_urls, policy, DRAWS)
        reward = ExpectedServer("reward", prm, self._form) if prm else None
        scores = self._reward_request.trial() if self._reward_request else DRAWS
        self._rewards = self._fleet("reward", options.reward_urls, reward, scores)
        self._names = f"hedgerow-{secrets.token_hex(4)}-"
        self._numbers = count(1)
        self._ending: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, options: SglangOptions) -> SglangEngine:
        """Make an engine and ``connect`` it. Raises what either raises."""
        return await cls(options).connect()

    def hint(self, tree: str, hint: Hint) -> None:
        """Drop dead nodes; servers receive the hint with the search's next requests."""
        super().hint(tree, hint)
        search = self._search(tree)
        search.notes.take(hint)
        self._sampler.extension.mark_dead(search, hint.dead)

    async def _stop(self, searches: Sequence[SearchSession]) -> None:
        await super()._stop(searches)
        await asyncio.gather(*(self._sampler.extension.end(search) for search in searches))
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _end(self, search: SearchSession) -> None:
        await asyncio.shield(self._in_background(self._end_session(search)))

    async def _end_session(self, search: SearchSession) -> None:
        """Stop all work for a search, and tell its servers that it is over."""
        try:
            with self._routing.of(search.tree):
                await search.stop()
                await self._sampler.extension.end(search)
        finally:
            self._sampler.gates.leave(search.tree)  # nothing enters any more
            self._charge(search)
            farewells = [fleet.release(search.tree) for fleet in (self._policy, self._rewards)]
            tasks = [self._in_background(farewell) for farewell in farewells]
            await asyncio.wait(tasks, timeout=FAREWELL_SECONDS)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine to its end even if nobody awaits it."""
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a tree was not let go of: %s", error, exc_info=error)

    async def _look(self, number: int) -> None:
        """Also read KV now and then while searches are in flight, since only we keep its peak."""
        await super()._look(number)
        if self._searches and number % LOOKS_AT_KV == 0:
            await self.usage()

    def _search(self, tree: str) -> SearchSession:
        if tree not in self._searches:
            name = f"{self._names}{next(self._numbers):08x}-"
            self._searches[tree] = SearchSession(
                tree, name, PluginNotes(tree), costs=RequestCosts(self._flops)
            )
        return self._searches[tree]

    def _fleet(
        self,
        kind: str,
        urls: Sequence[str],
        expected: ExpectedServer | None,
        trial: tuple[str, Json],
    ) -> Fleet[Replica]:
        """The servers of a kind; no server if ``expected`` is None."""
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
        return Fleet(kind, replicas, options.recovery_seconds, self._routing)

    def _build(self) -> None:
        options = self._options
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
        context = self._context(self._policy, self._text)
        self._sampler = StepSampler(
            self._policy, self._text, context=context, speculate=options.speculate
        )
        self._scorer, request = self._make_scorer(), self._reward_request
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
            score_tokens=self._overhead(request.paths if request else None),
            scored_tokens=self._context(self._rewards, self._prm) if self._prm else 0,
            outcome=self._form.outcome,
            likelihood=isinstance(self._scorer, LikelihoodScorer),
            logits_params=honoured_params(self._policy.replicas),
        )

    def _say_order(self, replica: Replica) -> None:
        """Log a server's order of admission: by priority or by common prefixes, never both."""
        by = replica.details.get("schedule_policy")
        if self._options.speculate:
            log.info("%s lets in by priority, as work ahead needs, not by prefixes", replica.url)
        elif by != BY_PREFIX[-1]:
            log.info("%s: %s %s; %s reads less again", replica.url, BY_PREFIX[0], by, BY_PREFIX[-1])

    def _make_scorer(self) -> ServedScorer[SearchSession]:
        if self._judge is not None:
            return PolicyJudge(self._sampler, self._judge)
        if self._prm is None or self._reward_request is None:
            return LikelihoodScorer(self._sampler)
        return PrmScorer(
            self._rewards,
            self._reward_request,
            context=self._context(self._rewards, self._prm),
            flops=flops_of(self._prm.checkpoint),
            next_steps=self._sampler.finished_next_steps if self._options.lookahead else None,
        )

    def _context(self, fleet: Fleet[Replica], text: Text) -> int:
        """The most tokens that all servers accept; SGLang reserves a few of the context."""
        longest = [replica.details.get("max_req_input_len") for replica in fleet.replicas]
        return min([text.context, *(int(tokens) - 1 for tokens in longest if tokens)])

    def _fingerprint(self) -> str:
        names = ("version", "model_path", "dtype", "attention_backend", "sampling_backend")
        facts = [str(replica.details.get(name)) for replica in self.replicas for name in names]
        facts += [str(replica.seeds) for replica in self._policy.replicas]
        return fingerprint_of("sglang", self._options, self._form, facts)


def flops_of(checkpoint: str | Path) -> Flops:
    """The cost of a forward pass; zero for an unsupported model."""
    try:
        return ModelConfig.sizes_of(checkpoint).flops
    except UnsupportedModel:
        return no_flops
