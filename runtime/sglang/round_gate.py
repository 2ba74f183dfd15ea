"""Delays rounds while the KV of older searches fills a server's pool."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpolicy.round_admission import may_run, tokens_at_once, tokens_of
from search.engine import Branch, Step

if TYPE_CHECKING:
    from runtime.sglang.replica import Replica

Path = tuple[int, ...]

FIRST_STEP_TOKENS = 64
"""Expected tokens of a step before any step was drawn."""


class RoundGate:
    """One server's gate: what its searches need of the pool, oldest first, and which of them wait.

    Steps are expected to be as long as those drawn here so far.
    """

    def __init__(self) -> None:
        self.capacity = 0
        """Tokens of the pool; 0 if it is not known, and then no round is delayed."""
        self._needs: dict[str, int] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._lengths = Counter[int]()

    def need(self, branches: Sequence[Branch]) -> int:
        """Tokens that a round needs: of the paths that it draws from, and those to be drawn."""
        steps = self._lengths.total()
        total = sum(length * count for length, count in self._lengths.items())
        mean = -(-total // steps) if steps else FIRST_STEP_TOKENS
        new = sum(min(branch.limit, mean) for branch in branches)
        return tokens_of(branch.tokens for branch in branches) + new

    def tokens_at_once(self, branches: Sequence[Branch]) -> int:
        """The most tokens to ask for at first for each step of a round."""
        limit = max(branch.limit for branch in branches)
        if not self.capacity:
            return limit
        return tokens_at_once(
            self._lengths,
            draws=len(branches),
            limit=limit,
            pool=self.capacity,
            held_tokens=tokens_of(branch.tokens for branch in branches),
            longest=max(len(branch.tokens) for branch in branches),
        )

    async def enter(self, tree: str, need: int) -> None:
        """Wait until a round that needs ``need`` tokens may run."""
        self._needs[tree] = need
        self._let_in()
        if tree in self._may_run():
            return
        self._waiting[tree] = asyncio.get_running_loop().create_future()
        try:
            await self._waiting[tree]
        finally:
            del self._waiting[tree]

    def record(self, tree: str, branches: Sequence[Branch], steps: Sequence[Path]) -> None:
        """Record a drawn round: its search holds these tokens until its next round."""
        self._lengths.update(map(len, steps))
        below = defaultdict[Path, set[Path]](set)
        for branch, step in zip(branches, steps, strict=True):
            below[branch.tokens].add(step)
        if tree in self._needs:
            self._needs[tree] = tokens_of(below) + sum(map(tokens_of, below.values()))
            self._let_in()

    def leave(self, tree: str) -> None:
        """Forget a search that is over or on another server."""
        self._needs.pop(tree, None)
        self._let_in()

    def _may_run(self) -> set[str]:
        if not self.capacity:
            return set(self._needs)
        may = may_run(list(self._needs.values()), self.capacity)
        return {tree for tree, runs in zip(self._needs, may, strict=True) if runs}

    def _let_in(self) -> None:
        if not self._waiting:
            return
        for tree in self._may_run() & self._waiting.keys():
            if not self._waiting[tree].done():
                self._waiting[tree].set_result(None)


class RoundGates:
    """The gates of all servers; a search is at one of them."""

    def __init__(self) -> None:
        self._gates: defaultdict[str, RoundGate] = defaultdict(RoundGate)
        self._at: dict[str, RoundGate] = {}

    def of(self, server: Replica, tree: str) -> RoundGate:
        """The gate of the server that a search is on; the search leaves its previous gate."""
        gate = self._gates[server.url]
        gate.capacity = server.kv_tokens * server.schedulers
        before = self._at.get(tree, gate)
        if before is not gate:
            before.leave(tree)
        self._at[tree] = gate
        return gate

    def record(self, tree: str, branches: Sequence[Branch], steps: Sequence[Step]) -> None:
        """Record a search's drawn round at its gate."""
        if tree in self._at:
            self._at[tree].record(tree, branches, [step.tokens for step in steps])

    def leave(self, tree: str) -> None:
        """Forget a search that is over."""
        if tree in self._at:
            self._at.pop(tree).leave(tree)
