"""The order in which a round's branches are let in: by hand, and that it changes no step."""

from __future__ import annotations

import asyncio

from runtime.embedded.schedule_order import ScheduleOrder, ranks
from search.engine import Branch
from search.spec import SearchSpec
from tests.runtime.inline_engine import InlineEngine, grow
from tests.runtime.scheduler_support import PROMPTS

SPEC = SearchSpec(
    policy="beam", width=16, seed=5, max_step_tokens=20, max_depth=4, trajectory_tokens=80
)


def branches() -> list[Branch]:
    """Two children of node 3, three of node 5; seeds falling."""
    asked = [(3, 0), (3, 1), (5, 0), (5, 1), (5, 2)]
    return [Branch(p, c, (1,), 50 - i, 8, 10 + i) for i, (p, c) in enumerate(asked)]


def test_orders_by_hand() -> None:
    """Siblings together; first children first; by seed."""
    assert ranks(branches(), "prefix") == [0, 1, 2, 3, 4]
    assert ranks(branches(), "fcfs") == [0, 2, 1, 3, 4]
    assert ranks(branches(), "random") == [4, 3, 2, 1, 0]


def grown(order: ScheduleOrder) -> str:
    """The digest of a search whose pool is too small for a round."""
    engine = InlineEngine(order=order, kv_tokens=150, batch_limit=2, kv_policy="lru")
    digest = asyncio.run(grow(engine, PROMPTS["tree3"], SPEC)).digest
    engine.policy.cache.check()
    assert engine.policy.cache.evicted_tokens > 0
    return digest


def test_every_order_grows_the_same_tree() -> None:
    """Two places and evictions: who comes first changes no step."""
    assert grown("prefix") == grown("fcfs") == grown("random")
