"""Orders of a round, turns between searches and cache namespaces; none changes a token."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.embedded.batch import prefill_budget
from runtime.embedded.choices import ScheduleOrder
from runtime.embedded.queues import fair_order, ranks
from search.engine import Branch
from search.spec import SearchSpec
from tests.runtime.inline_engine import InlineEngine, grow
from tests.runtime.scheduler_support import PROMPTS, SAMPLING, children, finish, scheduler
from tests.runtime.test_reward_scorer import finish as finish_scores
from tests.runtime.test_reward_scorer import random_trajectories, scorer

SPEC = SearchSpec(
    policy="beam", width=16, seed=5, max_step_tokens=20, max_depth=4, trajectory_tokens=80
)


def branches() -> list[Branch]:
    """Two branches of node 3 and three of node 5, with falling seeds."""
    places = [(3, 0), (3, 1), (5, 0), (5, 1), (5, 2)]
    return [Branch(p, c, (1,), 50 - i, 8, 10 + i) for i, (p, c) in enumerate(places)]


@pytest.mark.promise(
    "Prefix order runs siblings next to each other and parents in their own order."
)
def test_orders_by_hand() -> None:
    """Prefix order keeps siblings together, fcfs takes first children first, random is by seed."""
    assert ranks(branches(), "prefix") == [0, 1, 2, 3, 4]
    assert ranks(branches(), "fcfs") == [0, 2, 1, 3, 4]
    assert ranks(branches(), "random") == [4, 3, 2, 1, 0]


def digest_of(order: ScheduleOrder) -> str:
    """The digest of a search whose pool is too small for a round."""
    engine = InlineEngine(order=order, kv_tokens=150, batch_limit=2, kv_policy="lru")
    digest = asyncio.run(grow(engine, PROMPTS["tree3"], SPEC)).digest
    engine.policy.cache.check()
    assert engine.policy.cache.evicted_tokens > 0
    return digest


@pytest.mark.promise(
    "A search grows the same tree in every order of its branches (`prefix`, `fcfs`, `random`), "
    "also with evictions."
)
def test_every_order_grows_the_same_tree() -> None:
    """With two places and evictions every order gives the same tree."""
    assert digest_of("prefix") == digest_of("fcfs") == digest_of("random")


PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def test_the_tree_with_fewest_places_comes_next() -> None:
    """A has two places already, B none, C one, so A's waiting work, though the oldest, is last."""
    waiting = ["A1", "A2", "A3", "B1", "B2", "C1"]
    order = fair_order(waiting, lambda work: work[0], {"A": 2, "C": 1})
    assert order == ["B1", "B2", "C1", "A1", "A2", "A3"]
    assert fair_order(waiting, lambda work: work[0], {}) == ["A1", "B1", "C1", "A2", "B2", "A3"]


@given(
    st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, 9)), unique=True),
    st.dictionaries(st.sampled_from("ABC"), st.integers(0, 99)),
)
def test_nobody_is_lost_and_a_trees_own_order_stays(
    waiting: list[tuple[str, int]], running: dict[str, int]
) -> None:
    """The order has all the work, and keeps the order within each tree."""
    order = fair_order(waiting, lambda work: work[0], running)
    for tree in "ABC":
        expected = [work for work in waiting if work[0] == tree]
        assert [work for work in order if work[0] == tree] == expected
    assert len(order) == len(waiting)


def test_rows_are_shared_by_the_tree() -> None:
    """Of 10 rows B requests 3 in all, so A gets 7, its older sequence first."""
    assert prefill_budget([("A", 6), ("A", 6), ("B", 2), ("B", 1)], 10) == [6, 1, 2, 1]
    assert prefill_budget([("A", 9), ("B", 9), ("C", 9)], 10) == [4, 3, 3]
    assert prefill_budget([("A", 9)], 10) == [9]
    assert prefill_budget([], 10) == []


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, 50))), st.integers(0, 100))
def test_no_row_is_wasted_and_no_tree_gets_more_than_one_that_wants_more(
    requests: list[tuple[str, int]], room: int
) -> None:
    """Rows are shared by max-min fairness, to within one row."""
    granted = prefill_budget(requests, room)
    total = sum(rows for _, rows in requests)
    assert sum(granted) == min(room, total)
    assert all(0 <= share <= rows for share, (_, rows) in zip(granted, requests, strict=True))
    part = {tree: 0 for tree, _ in requests}
    unmet = set()
    for share, (tree, rows) in zip(granted, requests, strict=True):
        part[tree] += share
        if share < rows:
            unmet.add(tree)
    assert all(part[tree] >= max(part.values()) - 1 for tree in unmet)


@pytest.mark.promise(
    "Searches take turns by tree, not by number of branches, and their turns change no step."
)
def test_a_small_search_does_not_wait_for_a_wide_one() -> None:
    """With four places a later search's two branches finish while most of the first one's forty
    still wait; steps are the same as without the overlap."""
    engine, _ = scheduler(batch_limit=4)
    engine.expand(1, "wide", children(PROMPT, 40), SAMPLING)
    for _ in range(3):
        engine.step()
    engine.expand(2, "small", children(PROMPT[:5], 2), SAMPLING)
    answers = {}
    while 2 not in answers:
        answers |= {answer.call: answer.steps for answer in engine.step()}
    assert engine.waiting > 20
    answers |= finish(engine)
    alone, _ = scheduler(batch_limit=4)
    alone.expand(1, "wide", children(PROMPT, 40), SAMPLING)
    alone.expand(2, "small", children(PROMPT[:5], 2), SAMPLING)
    assert answers == finish(alone)


@pytest.mark.promise("One key's cached prefixes never speed up another key's requests.")
def test_one_keys_cache_never_serves_another() -> None:
    """The same branches cost as much in another namespace and nearly nothing in the same one; the
    steps are equal everywhere."""
    engine, model = scheduler()
    costs, steps = [], []
    for call, tree in enumerate(["a/1", "b/1", "a/2", "1", "2"]):
        before = model.rows
        engine.expand(call, tree, children(PROMPT, 3), SAMPLING)
        steps.append(finish(engine)[call])
        engine.release(tree)
        costs.append(model.rows - before)
        engine.cache.check()
    assert costs[0] == costs[1] == costs[3]
    assert costs[2] == costs[4] == costs[0] - (len(PROMPT) - 1)
    assert all(tree_steps == steps[0] for tree_steps in steps)


def test_namespaces_do_not_wait_for_each_others_prefixes() -> None:
    """Concurrent branches of two namespaces each compute their own prefix."""
    engine, model = scheduler()
    engine.expand(1, "a/1", children(PROMPT, 1), SAMPLING)
    engine.expand(2, "b/1", children(PROMPT, 1), SAMPLING)
    engine.step()
    assert model.rows == 2 * len(PROMPT)
    finish(engine)


def test_scores_do_not_depend_on_the_namespace() -> None:
    """The reward model's cache is separate for each namespace too."""
    (trajectories, *_) = random_trajectories(3)
    rewards, rows = [], []
    engine, model = scorer()
    for call, tree in enumerate(["a/1", "b/1", "1"]):
        before = model.rows
        engine.score(call, tree, PROMPT, "Q", trajectories)
        rewards.append(finish_scores(engine)[call])
        rows.append(model.rows - before)
    assert rewards[0] == rewards[1] == rewards[2]
    assert rows[0] == rows[1] == rows[2]
