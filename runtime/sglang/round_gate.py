"""Holds rounds back while the KV of older searches fills a server's pool."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpolicy.round_admission import may_run
from search.engine import Branch, Step

if TYPE_CHECKING:
    from runtime.sglang.replica import Replica

FIRST_STEP_TOKENS = 64
"""Of a step, before any has been drawn."""


class RoundGate:
    """One server's: what its searches need of the pool, the oldest first, and which of them wait.

    Steps are expected to be as long as those drawn here so far.
    """

    def __init__(self) -> None:
        self.capacity = 0
        """Tokens of the pool; 0 where it is not known, and nothing is held back."""
        self._needs: dict[str, int] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._drawn = self._steps = 0

    def expected(self, branches: Sequence[Branch]) -> int:
        """Tokens that these will draw."""
        mean = -(-self._drawn // self._steps) if self._steps else FIRST_STEP_TOKENS
        return sum(min(branch.limit, mean) for branch in branches)

    async def enter(self, tree: str, need: int) -> None:
        """Wait until a round that comes to so many tokens, live ones and new ones, may run."""
        self._needs[tree] = need
        self._let_in()
        if tree in self._may_run():
            return
        self._waiting[tree] = asyncio.get_running_loop().create_future()
        try:
            await self._waiting[tree]
        finally:
            del self._waiting[tree]

    def add_steps(self, tokens: int, steps: int) -> None:
        """A round has been drawn."""
        self._drawn += tokens
        self._steps += steps

    def hold(self, tree: str, tokens: int) -> None:
        """The search holds so many tokens now."""
        if tree in self._needs:
            self._needs[tree] = tokens
            self._let_in()

    def leave(self, tree: str) -> None:
        """The search is over, or on another server."""
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
    """Those of all servers; a search stands at one of them."""

    def __init__(self) -> None:
        self._gates: defaultdict[str, RoundGate] = defaultdict(RoundGate)
        self._at: dict[str, RoundGate] = {}

    def of(self, server: Replica, tree: str) -> RoundGate:
        """The gate of the server that a search is on."""
        gate = self._gates[server.url]
        gate.capacity = server.kv_tokens * server.schedulers
        before = self._at.get(tree, gate)
        if before is not gate:
            before.leave(tree)
        self._at[tree] = gate
        return gate

    def add_steps(self, tree: str, steps: Sequence[Step]) -> None:
        """A search's round has been drawn."""
        if tree in self._at:
            self._at[tree].add_steps(sum(len(step.tokens) for step in steps), len(steps))

    def hold(self, tree: str, tokens: int) -> None:
        """What a search holds has changed."""
        if tree in self._at:
            self._at[tree].hold(tree, tokens)

    def leave(self, tree: str) -> None:
        """The search is over."""
        if tree in self._at:
            self._at.pop(tree).leave(tree)
