"""What a token-eviction policy takes to decide, event by event, at 1,000 blocks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvpolicy.token_allocation import Floors
from loadtest.policy_events import (
    ACTIVE,
    BLOCKS,
    BRANCH,
    DEPTH,
    ROUNDS,
    SHARE,
    STEP_TOKENS,
    medians_us,
)
from loadtest.token_eviction.token_cache import CachedBlock, TokenCache
from loadtest.token_eviction.token_eviction_policies import TokenEvictionPolicy, policy_for
from search.tree import ROOT

FLOORS = Floors(tokens=1, tail=1)


@dataclass(slots=True)
class TokenPolicyTimer:
    """A random best-first search, as in `loadtest.policy_events`, under a token-eviction policy."""

    held: TokenCache
    policy: TokenEvictionPolicy
    draw: random.Random
    depth: dict[int, int] = field(default_factory=lambda: {ROOT: 0})
    value: dict[int, float] = field(default_factory=lambda: {ROOT: 0.5})
    open: set[int] = field(default_factory=lambda: {ROOT})
    fresh: dict[int, float] = field(default_factory=dict)
    transitions: list[float] = field(default_factory=list)
    pressures: list[float] = field(default_factory=list)
    boundaries: list[float] = field(default_factory=list)

    def round(self) -> None:
        """Expand the best open nodes, noting what each event takes."""
        ahead = sorted(self.open, key=lambda node: (-self.value[node], node))
        active = sorted(ahead[:ACTIVE])
        self.open -= set(active)
        moving = _seconds(lambda: self.policy.transition(self.fresh, ahead, ()))
        moving += _seconds(lambda: self.policy.enter(active))
        self.fresh = {}
        if self.policy.rehydrates:
            chains = {b: self.held[b] for leaf in active for b in self.held.chain(leaf)}
            if sum(len(block.missing) for block in chains.values()) > self.held.pool.available:
                moving += _seconds(lambda: self.policy.fit(0))
            for block in chains.values():
                self.held.restore(block, block.missing)
        self.transitions.append(moving)
        for parent in active:
            for _ in range(BRANCH):
                self.grow(parent)

    def grow(self, parent: int) -> None:
        """A step of random tokens below a node."""
        node = len(self.depth)
        if self.held.pool.available < STEP_TOKENS:
            self.pressures.append(_seconds(lambda: self.policy.fit(STEP_TOKENS)))
        tokens = np.array(self.draw.choices(range(900), k=STEP_TOKENS), dtype=np.int64)
        block = CachedBlock.of(parent, self.held.length(parent), tokens)
        block.later[:] = [self.draw.random() for _ in tokens]
        self.held.restore(block, np.arange(STEP_TOKENS))
        assert self.held.add(node, block), "two random steps are equal"
        self.depth[node] = self.depth[parent] + 1
        self.value[node] = self.fresh[node] = round(self.draw.betavariate(2, 2), 4)
        confidence = self.draw.random()
        self.boundaries.append(
            _seconds(lambda: self.policy.add_block(node, parent, STEP_TOKENS, confidence))
        )
        if self.depth[node] < DEPTH:
            self.open.add(node)


def event_us(policy: str, seed: int = 0) -> dict[str, float]:
    """As ``loadtest.policy_events.event_us``, for a policy of ``TOKEN_EVICTION``."""
    capacity = int(SHARE * (BLOCKS + ROUNDS * ACTIVE * BRANCH) * STEP_TOKENS)
    draw = random.Random(seed)
    held = TokenCache(
        capacity, np.array(draw.choices(range(900), k=4 * STEP_TOKENS), dtype=np.int64)
    )
    held.restore(held[ROOT], held[ROOT].missing)
    chosen = policy_for(policy, held, share=SHARE, floors=FLOORS)
    return medians_us(TokenPolicyTimer(held, chosen, draw))


def _seconds(event: Callable[[], object]) -> float:
    before = time.perf_counter()
    event()
    return time.perf_counter() - before
