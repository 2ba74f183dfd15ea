"""What engines on other people's servers have in common: fleets, searches under way, their end."""

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
"""Between looks at servers that are up."""

Search = TypeVar("Search", bound=ServedSearch)
Server = TypeVar("Server", bound=RemoteServer)
Sampler = TypeVar("Sampler", bound=PolicySampler[Any, Any])
Asker = TypeVar("Asker", bound=ServedSearch, contravariant=True)


class ServedScorer(Protocol[Asker]):
    """Gives a search its rewards."""

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

    The servers own the KV. A search stays on one of each kind, and goes on from its token ids on
    another one when that is lost.
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
        """Itself, when every server has answered and it is known what each is.

        Raises what is wrong with a server: ValueError, OSError, RewardMissing; EngineDown for one
        that does not answer in ``start_seconds``.
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
        """What this engine can do; constant while it lives."""
        return self._capabilities

    @property
    def replicas(self) -> Sequence[Server]:
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
        return await self._sampler.expand(self._search(tree), branches, sampling)

    def hint(self, tree: str, hint: Hint) -> None:
        """What died is not held any more."""
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
        """Stop what is under way for a tree; what it cost, all zero for one never seen."""
        search = self._searches.pop(tree, None)
        if search is None:
            return Counters()
        await self._end(search)
        return search.costs.counters

    async def abort(self, tree: str) -> None:
        """Stop everything under way for a tree: those calls raise EngineError."""
        await self.release(tree)

    async def usage(self) -> Usage:
        """The servers' own reports; where they give none, what was asked of them."""
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
        await self._stop(searches)
        await self._policy.close()
        await self._rewards.close()
        await self._embedder.close()

    @abstractmethod
    def _build(self) -> None:
        """What depends on what the servers are. Raises ValueError where they do not serve."""

    @abstractmethod
    def _search(self, tree: str) -> Search:
        """What is known of a tree, which may be new."""

    @abstractmethod
    async def _end(self, search: Search) -> None:
        """Stop what is under way for a search, which its servers may let go of."""

    async def _stop(self, searches: Sequence[Search]) -> None:
        """Give up what is under way for them."""
        await asyncio.gather(*(search.stop() for search in searches))

    def _charge(self, search: Search) -> None:
        """A search is over: what it cost is the engine's."""
        self._past += search.costs.counters
        self._routing.check(self._past.expected_tokens, self._past.rehydrated_tokens)

    async def _watch(self) -> None:
        """Look at the servers now and then, so that one that stands still is noticed whoever
        asks."""
        for number in count(1):
            await asyncio.sleep(WATCH_SECONDS)
            with suppress(EngineError):
                await self._look(number)

    async def _look(self, number: int) -> None:
        """The ``number``th look."""
        await self.health()

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

    def _overhead(self, paths: Paths | None) -> tuple[int, int]:
        """Tokens that a scorer reads besides a reply's own, once and a step (``Capabilities``)."""
        if paths is not None:
            return overhead_of(paths)
        return (0, 0) if self._judge is None else self._judge.overhead()


def fingerprint_of(
    engine: str, options: ServerOptions, form: RewardFormat, facts: Sequence[str]
) -> str:
    """The engine's name and 16 hex digits over what a tree depends on besides its request;
    ``served``: what the servers say of themselves."""
    parts = [options.version, repr(form), options.embedder, str(options.encoder), *facts]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"{engine}-{digest[:16]}"
