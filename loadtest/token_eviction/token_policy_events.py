"""What a token-eviction policy takes to decide, event by event, at 1,000 blocks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import torch

from kvpolicy.token_allocation import Floors
from loadtest.policy_events import (
    ACTIVE,
    BLOCKS,
    BRANCH,
    ROUNDS,
    SHARE,
    STEP_TOKENS,
    RandomSearch,
    medians_us,
)
from loadtest.token_eviction.token_cache import CachedBlock, TokenCache
from loadtest.token_eviction.token_eviction_policies import policy_for

FLOORS = Floors(tokens=1, tail=1)


class SearchInTokenCache:
    """A random search, as in `loadtest.policy_events`, under a token-eviction policy."""

    def __init__(self, policy: str, capacity: int, search: RandomSearch) -> None:
        """The prompt alone."""
        self.search = search
        self.held = TokenCache(capacity, self.block(-1, 0, 4 * STEP_TOKENS))
        self.policy = policy_for(policy, self.held, share=SHARE, floors=FLOORS)

    def block(self, parent: int, start: int, count: int) -> CachedBlock:
        """Random tokens without keys and values."""
        tokens = self.search.tokens(count)
        return CachedBlock(parent, start, tokens, torch.empty(count, 0), np.zeros(count))

    def round(self) -> None:
        """Expand the best open nodes, noting what each event takes."""
        hint, held, policy = self.search.move(), self.held, self.policy
        active = sorted(hint.active)
        moving = _seconds(lambda: policy.transition(hint)) + _seconds(lambda: policy.enter(active))
        if policy.rehydrates:
            paths = {name: block for leaf in active for name, block in held.chain(leaf).items()}
            if held.count + sum(block.missing for block in paths.values()) > held.capacity:
                moving += _seconds(lambda: policy.fit(held.capacity))
            for block in paths.values():
                block.put(np.arange(block.start, block.end), torch.empty(block.end, 0))
        self.search.transitions.append(moving)
        for parent in active:
            for _ in range(BRANCH):
                self.grow(parent)

    def grow(self, parent: int) -> None:
        """A step of random tokens below a node."""
        block = self.block(parent, self.held.blocks[parent].end, STEP_TOKENS)
        block.later[:] = [self.search.draw.random() for _ in block.tokens]
        node, left = self.search.add(parent), self.held.capacity - STEP_TOKENS
        if self.held.count > left:
            self.search.pressures.append(_seconds(lambda: self.policy.fit(left)))
        assert self.held.add(node, block), "two random steps are equal"
        closed = node, parent, STEP_TOKENS, self.search.draw.random()
        self.search.boundaries.append(_seconds(lambda: self.policy.add_block(*closed)))


def event_us(policy: str, seed: int = 0) -> dict[str, float]:
    """As ``loadtest.policy_events.event_us``, for a policy of ``TOKEN_EVICTION``."""
    capacity = int(SHARE * (BLOCKS + ROUNDS * ACTIVE * BRANCH) * STEP_TOKENS)
    search = RandomSearch(random.Random(seed))
    return medians_us(search, SearchInTokenCache(policy, capacity, search).round)


def _seconds(event: Callable[[], object]) -> float:
    before = time.perf_counter()
    event()
    return time.perf_counter() - before
