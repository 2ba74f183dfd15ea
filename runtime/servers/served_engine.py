"""The common part of engines on servers that run elsewhere: fleets, searches and their end."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Generic, Protocol, Self, TypeVar

from runtime.judge import Judge
from runtime.reward_format import RewardFormat
from runtime.reward_reader import Paths, overhead_of
from runtime.servers.fleet import Fleet, wait_for_all
from runtime.servers.policy_sampler import PolicySampler
from runtime.servers.policy_scorers import PolicyJudge
from runtime.servers.remote_server import RemoteServer
from runtime.servers.routing import Routing
from runtime.servers.served_search import ServedSearch
from runtime.servers.server_metrics import ServerMetrics
from runtime.servers.server_options import ServerOptions
from runtime.servers.text_embedder import TextEmbedder
from runtime.text import Text
from search.counters import Counters, EngineCounters, Usage, combined
from search.engine import Branch, Capabilities, EngineError, Hint, Sampling, Step, Trajectory

WATCH_SECONDS = 1.0
"""Seconds between checks of servers that are up."""

Search = TypeVar("Search", bound=ServedSearch)
Server = TypeVar("Server", bound=RemoteServer)
Sampler = TypeVar("Sampler", bound=PolicySampler[Any, Any])
Asker = TypeVar("Asker", bound=ServedSearch, contravariant=True)


class ServedScorer(Protocol[Asker]):
    """Computes rewards for a search."""

    async def score(
        self,
        search: Asker,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
        /,
    ) -> list[float]:
        """One reward in [0, 1] a trajectory, unrounded."""
        ...


class ServedEngine(ABC, Generic[Search, Server, Sampler]):
    """A client of servers, made with its ``start``. Belongs to the event loop it started in.

    The servers own the KV. A search stays on one server of each kind; when that is lost, it
    continues from its token ids on another one.
    """

    _policy: Fleet[Server]
    _rewards: Fleet[Server]
    _sampler: Sampler
    _scorer: ServedScorer[Search]
    _capabilities: Capabilities

    def __init__(self, options: ServerOptions, form: RewardFormat, text: Text) -> None:
        """``form``: of the rewards; ``text``: the policy's."""
        self._routing = Routing(options.routing)
        self._form = form
        self._text = text
        self._judge = Judge(form, text) if form.reads == "judge" else None
        self._searches: dict[str, Search] = {}
        self._past = Counters()
        self._peak = self._prm_peak = 0
        self._watching: asyncio.Task[None] | None = None
        self._embedder = TextEmbedder(options.embedder, options.encoder, options.endpoint)
        self._start_seconds = options.start_seconds

    async def connect(self) -> Self:
        """Wait until every server has answered and is identified; returns the engine itself.

        Raises ValueError, OSError or RewardMissing for a wrong server, EngineDown for one that does
        not answer in ``start_seconds``.
        """
        try:
            await wait_for_all((self._policy, self._rewards), self._start_seconds)
            await self._embedder.load()
            self._build()
            self._watching = asyncio.create_task(self._watch())
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do; constant once it has started."""
        return self._capabilities

    @property
    def replicas(self) -> Sequence[Server]:
        """The policy's servers, then the reward model's."""
        return *self._policy.replicas, *self._rewards.replicas

    @property
    def moves(self) -> int:
        """How often a search has moved to another server."""
        return self._policy.moves + self._rewards.moves

    @property
    def sent_again(self) -> int:
        """How many requests were sent again because their server was lost."""
        return self._policy.sent_again + self._rewards.sent_again

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw one step for each branch, in the order asked."""
        return await self._sampler.expand(self._search(tree), branches, sampling)

    def hint(self, tree: str, hint: Hint) -> None:
        """Drop the nodes that died from the paths that the search holds."""
        self._search(tree).costs.mark_dead(hint.dead)

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
        return await self._scorer.score(self._search(tree), prompt, question, trajectories)

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """One vector for the last step of each trajectory, from its text."""
        return await self._embedder.embed(trajectories)

    async def release(self, tree: str) -> Counters:
        """Stop all work for a tree; returns what it cost, all zero for an unknown tree."""
        search = self._searches.pop(tree, None)
        if search is None:
            return Counters()
        await self._end(search)
        return search.costs.counters

    async def abort(self, tree: str) -> Counters:
        """Stop all work for a tree: its pending calls raise EngineError."""
        return await self.release(tree)

    async def usage(self) -> Usage:
        """The servers' own counts; where they give none, those of the requests."""
        policy, reward = await asyncio.gather(self._policy.metrics(), self._rewards.metrics())
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

    async def health(self) -> None:
        """Raise EngineDown unless a server of each model is up. Takes about a second: a server that
        does not answer by then counts as busy, and as lost after ``stall_seconds`` of silence."""
        fleets = [fleet for fleet in (self._policy, self._rewards) if fleet.replicas]
        await asyncio.gather(*(fleet.check() for fleet in fleets))

    async def close(self) -> None:
        """Stop all work and close all connections; the servers keep running."""
        if self._watching is not None:
            self._watching.cancel()
        searches = list(self._searches.values())
        self._searches.clear()
        await self._stop(searches)
        await self._policy.close()
        await self._rewards.close()
        await self._embedder.close()

    @abstractmethod
    def _build(self) -> None:
        """Build what depends on the servers. Raises ValueError if they are unsuitable."""

    @abstractmethod
    def _search(self, tree: str) -> Search:
        """The state of a tree's search, made if it is new."""

    @abstractmethod
    async def _end(self, search: Search) -> None:
        """Stop all work for a search, and let its servers free its KV."""

    async def _stop(self, searches: Sequence[Search]) -> None:
        """Stop all work for these searches."""
        await asyncio.gather(*(search.stop() for search in searches))

    def _charge(self, search: Search) -> None:
        """Add the costs of a search that is over to the engine's."""
        self._past += search.costs.counters
        self._routing.check(self._past.expected_tokens, self._past.rehydrated_tokens)

    async def _watch(self) -> None:
        """Check the servers every ``WATCH_SECONDS``, so that one that is stuck is noticed without a
        request."""
        for number in count(1):
            await asyncio.sleep(WATCH_SECONDS)
            with suppress(EngineError):
                await self._look(number)

    async def _look(self, number: int) -> None:
        """Do the ``number``-th check of the servers."""
        await self.health()

    def _totals(self, policy: ServerMetrics, reward: ServerMetrics) -> EngineCounters:
        """The counts of all searches, replaced by the servers' own where they have some."""
        searches = (search.costs.counters for search in self._searches.values())
        totals = EngineCounters.of(
            combined(Counters, (self._past, *searches)),
            verdicts=self._scorer.verdicts if isinstance(self._scorer, PolicyJudge) else 0,
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

    def _overhead(self, paths: Paths | None) -> tuple[int, int]:
        """Tokens that a scorer reads beyond a reply's, once and a step (see ``Capabilities``)."""
        if paths is not None:
            return overhead_of(paths)
        return (0, 0) if self._judge is None else self._judge.overhead()


def fingerprint_of(
    engine: str, options: ServerOptions, form: RewardFormat, facts: Sequence[str]
) -> str:
    """The engine's name and 16 hex digits over what a tree depends on besides its request;
    ``facts``: what the servers say about themselves."""
    parts = [options.version, repr(form), options.embedder, str(options.encoder), *facts]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"{engine}-{digest[:16]}"
