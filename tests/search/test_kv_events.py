"""Events about an engine's KV: steps evicted and rehydrated, and what is held in each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from search.engine import Branch, KvMoved, Sampling, Step, TellsKv
from search.events import Event, Evicted, KvHeld, Rehydrated, Selected
from search.spec import SearchSpec
from search.stats import KvEvents
from search.tree import Finish, Tree
from tests.search.scripted_engine import ScriptedEngine, grow
from tests.search.test_width import rough, watch


def example_tree() -> Tree:
    """A prompt of 5 tokens; step 1 has 3, step 2 below it has 4, step 3 below the root 2."""
    tree = Tree((9,) * 5)
    tree.add(0, (1, 2, 3), "a", Finish.STEP)
    tree.add(1, (4, 5, 6, 7), "b", Finish.STEP)
    tree.add(0, (8, 9), "c", Finish.STEP)
    return tree


def test_paths_become_steps() -> None:
    """Lengths of cached paths become steps' tokens: node 2's path has 12, its step the last 4."""
    events: list[Event] = []
    kv_events = KvEvents(example_tree(), events.append)
    kv_events.round(1, KvMoved(20, 100, {2: 10}), active=8)
    assert events == [Evicted(1, 2, 2, "room"), KvHeld(1, 8, 12, 100)]
    events.clear()
    kv_events.round(2, KvMoved(9, 100, {0: 4, 1: 6, 2: 6}), active=12)
    assert events == [Evicted(2, 1, 1, "room"), Evicted(2, 2, 0, "room"), KvHeld(2, 9, 0, 100)]
    events.clear()
    kv_events.round(3, KvMoved(14, 100, {1: 8, 2: 11}), active=12)
    assert events == [Rehydrated(3, 1, 3), Rehydrated(3, 2, 3), KvHeld(3, 12, 2, 100)]
    events.clear()
    kv_events.round(4, KvMoved(14, 100, {1: 8}), active=12)
    assert events == [KvHeld(4, 12, 2, 100)]


def test_the_dead_are_told_once_and_only_of_an_engine_that_speaks() -> None:
    """Only once the engine has reported; a step evicted for room is not evicted again when dead."""
    events: list[Event] = []
    kv_events = KvEvents(example_tree(), events.append)
    kv_events.dead(1, [3])
    assert events == []
    kv_events.round(1, KvMoved(20, 100, {2: 8}), active=8)
    events.clear()
    kv_events.dead(2, [2, 3])
    kv_events.dead(3, [3])
    assert events == [Evicted(2, 3, 0, "dead")]


def test_a_node_that_is_not_in_the_tree_yet_is_told_of_when_it_is() -> None:
    """An engine may have drawn ahead: a node's report waits until the node is in the tree."""
    tree, events = example_tree(), list[Event]()
    kv_events = KvEvents(tree, events.append)
    kv_events.round(1, KvMoved(20, 100, {4: 6}), active=8)
    assert events == [KvHeld(1, 8, 12, 100)]
    tree.add(0, (1, 1, 1), "d", Finish.STEP)
    kv_events.round(2, KvMoved(20, 100), active=8)
    assert events[1:] == [Evicted(2, 4, 1, "room"), KvHeld(2, 8, 12, 100)]


class TellingEngine(ScriptedEngine):
    """An engine that reports after every round how much of node 1's path is cached: one token."""

    moved: KvMoved | None = None

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Prepare a report and draw as scripted."""
        self.moved = KvMoved(30, 64, {1: len(branches[0].tokens[:1])})
        return await super().expand(tree, branches, sampling)

    def kv_moved(self, tree: str) -> KvMoved | None:
        """Return the report once."""
        moved, self.moved = self.moved, None
        return moved


@pytest.mark.promise("Events about the KV cache change no tree.")
async def test_a_watched_search_tells_its_kv_and_is_the_same_search() -> None:
    """Every round ends with a KvHeld; the tree is that of an engine without reports."""
    quiet, before = await watch(rough(20, 20, 10), "rebase", 6, 4)
    engine = TellingEngine()
    plain = rough(20, 20, 10)
    engine.say, engine.score_of = plain.say, plain.score_of
    assert isinstance(engine, TellsKv)
    outcome, events = await watch(engine, "rebase", 6, 4)
    kv_events = [e for e in events if isinstance(e, Evicted | Rehydrated | KvHeld)]
    assert [e for e in events if e not in kv_events] == before
    assert replace(outcome.stats, seconds=0, policy_seconds=0) == replace(
        quiet.stats, seconds=0, policy_seconds=0
    )
    assert outcome.digest == quiet.digest
    rounds = {e.round for e in events if isinstance(e, Selected)}
    assert [e.round for e in kv_events if isinstance(e, KvHeld)] == sorted(rounds)
    assert {e.reason for e in kv_events if isinstance(e, Evicted)} == {"room", "dead"}


async def test_an_engine_that_has_nothing_to_say_is_not_spoken_of() -> None:
    """An engine with ``kv_moved`` may return None, which gives no events."""
    engine = TellingEngine()
    engine.kv_moved = lambda tree: None
    _, events = await watch(engine, "rebase", 3, 1)
    assert not [e for e in events if isinstance(e, Evicted | KvHeld)]


async def test_an_engine_is_not_asked_where_nobody_listens() -> None:
    """Without a listener ``kv_moved`` is never called, so the last report is still there."""
    engine = TellingEngine()
    await grow(engine, SearchSpec(width=3, seed=1))
    assert engine.moved is not None
