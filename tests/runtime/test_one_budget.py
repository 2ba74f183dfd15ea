"""One KV budget over all searches: no search starves, none exceeds it, no slot is lost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.embedded.choices import KvPolicy
from runtime.embedded.scheduler import Scheduler
from search.engine import Branch, Hint, Sampling, Step
from search.tree import ROOT, Finish, node_seed
from tests.runtime.scheduler_support import scheduler
from tests.runtime.test_eviction import Endless

LIMIT = 8
STEPS = Sampling(temperature=0.9, top_p=0.95, max_step_tokens=LIMIT)
LONGEST = 80
ROUNDS = 5


@dataclass
class Searching:
    """A search that expands its best open nodes, by random rewards. ``history``: all steps."""

    tree: str
    draw: random.Random
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    above: dict[int, int] = field(default_factory=dict)
    reward: dict[int, float] = field(default_factory=dict)
    open: set[int] = field(default_factory=lambda: {ROOT})
    pending: list[Branch] = field(default_factory=list)
    history: list[tuple[Branch, Step]] = field(default_factory=list)
    rounds: int = 0

    def __post_init__(self) -> None:
        self.paths[ROOT] = tuple(self.draw.choices(range(26), k=12))
        self.above[ROOT], self.reward[ROOT] = -1, 0.5

    def ask(self, engine: Scheduler, call: int, leaves: int = 2) -> bool:
        """Request a round of the ``leaves`` best open nodes; False if no node is open."""
        ahead = sorted(self.open, key=lambda node: (-self.reward[node], node))
        active = ahead[:leaves]
        if not active:
            return False
        live = {node for leaf in self.open for node in self.chain(leaf)}
        dead = tuple(sorted(set(self.above) - live))
        engine.hint(self.tree, Hint(dict(self.reward), tuple(active), dead, tuple(ahead)))
        self.open -= set(active)
        self.pending = []
        for parent in active:
            for child in range(2):
                node = len(self.above)
                self.above[node] = parent
                seed = node_seed(1, self.tree, (parent, child))
                self.pending.append(Branch(parent, child, self.paths[parent], seed, LIMIT, node))
        engine.expand(call, self.tree, self.pending, STEPS)
        return True

    def take(self, steps: list[Step]) -> None:
        """Take the steps drawn for the round, with random rewards."""
        self.rounds += 1
        self.history += zip(self.pending, steps, strict=True)
        for branch, step in zip(self.pending, steps, strict=True):
            self.paths[branch.node] = branch.tokens + step.tokens
            self.reward[branch.node] = round(self.draw.random(), 4)
            if step.finish is not Finish.END and len(self.paths[branch.node]) < LONGEST:
                self.open.add(branch.node)
        self.pending = []

    def chain(self, node: int) -> list[int]:
        """A node and its ancestors."""
        path = [node]
        while path[-1] != ROOT:
            path.append(self.above[path[-1]])
        return path


def must_be_right(engine: Scheduler) -> None:
    """Check the cache, its capacity, and that all slots read by running branches exist."""
    cache = engine.cache
    cache.check()
    assert cache.active_tokens <= cache.capacity
    for sequence in cache.sequences:
        assert (sequence.slots[: sequence.computed] >= 0).all(), "a branch reads what is not there"


def run_eight(kv_tokens: int, kv_policy: KvPolicy) -> tuple[list[list[Step]], list[int]]:
    """Run eight searches at once; their steps, and the rounds of each when the first one ended."""
    engine, _ = scheduler(kv_tokens=kv_tokens, kv_policy=kv_policy, model=Endless())
    searches = [Searching(f"tree{i}", random.Random(i)) for i in range(8)]
    for call, search in enumerate(searches):
        search.ask(engine, call)
    rounds_at_first_end: list[int] = []
    while engine.busy:
        for answer in engine.step():
            search = searches[answer.call]
            search.take(answer.steps)
            if search.rounds == ROUNDS:
                rounds_at_first_end = rounds_at_first_end or [s.rounds for s in searches]
                engine.release(search.tree)
            else:
                assert search.ask(engine, answer.call)
            must_be_right(engine)
        assert engine.cache.active_tokens <= engine.cache.capacity
    return [[step for _, step in search.history] for search in searches], rounds_at_first_end


@pytest.mark.promise(
    "Eight searches in a KV pool for few paths all advance before the first one ends, with the "
    "steps of an ample pool."
)
def test_eight_searches_share_a_budget_and_none_starves() -> None:
    """In little memory the steps are the same, and every search advances before the first ends."""
    roomy, _ = run_eight(20_000, "arborkv")
    for kv_policy in ("arborkv", "lru"):
        tight, rounds = run_eight(400, kv_policy)
        assert tight == roomy
        assert min(rounds) > 0


class Searches(RuleBasedStateMachine):
    """Searches start, draw, backtrack, abort and end in a pool that holds few paths."""

    def __init__(self) -> None:
        super().__init__()
        self.engine, _ = scheduler(kv_tokens=1)
        self.searches: dict[int, Searching] = {}
        self.calls = 0

    @initialize(
        kv_tokens=st.integers(LONGEST + LIMIT, 300),
        kv_policy=st.sampled_from(["arborkv", "lru"]),
        places=st.integers(1, 12),
        share=st.sampled_from([0.1, 0.3, 0.7, 1.0]),
    )
    def begin(self, kv_tokens: int, kv_policy: KvPolicy, places: int, share: float) -> None:
        """Make a pool for at least one path and its next step, and a budget within it."""
        self.engine, _ = scheduler(
            kv_tokens=kv_tokens, kv_policy=kv_policy, batch_limit=places, model=Endless()
        )
        self.engine.cache.budget = int(share * kv_tokens)

    @precondition(lambda self: len(self.searches) < 4)
    @rule(seed=st.integers(0, 5))
    def start(self, seed: int) -> None:
        """Start a search; some have the same prompt."""
        self.calls += 1
        search = Searching(f"tree{self.calls}", random.Random(seed))
        search.ask(self.engine, self.calls)
        self.searches[self.calls] = search

    @rule(steps=st.integers(1, 30), leaves=st.integers(1, 4))
    def draw(self, steps: int, leaves: int) -> None:
        """Run iterations; a search whose round is done asks for the next one or ends."""
        for _ in range(steps):
            for answer in self.engine.step():
                search = self.searches[answer.call]
                search.take(answer.steps)
                branch, step = search.history[-1]
                assert step == naive_step_of(branch)
                if not search.ask(self.engine, answer.call, leaves):
                    self.end(answer.call)
            assert self.engine.cache.active_tokens <= self.engine.cache.capacity

    @precondition(lambda self: self.searches)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort a search at any point."""
        call = data.draw(st.sampled_from(sorted(self.searches)))
        self.engine.abort(self.searches[call].tree)
        self.end(call)

    def end(self, call: int) -> None:
        """Release the search of this call."""
        self.engine.release(self.searches.pop(call).tree)

    @invariant()
    def accounting_is_right(self) -> None:
        """Check cache and budget, and that only live searches hold KV."""
        must_be_right(self.engine)
        cache = self.engine.cache
        assert cache.active_peak <= max(cache.budget, cache.reading_peak)
        held_nodes = {node for node in self.engine.cache.radix.nodes() if node.holders}
        names = {search.tree for search in self.searches.values()}
        assert {name for node in held_nodes for name in node.holders} <= names


def naive_step_of(branch: Branch) -> Step:
    """The step of a branch by the same model, drawn alone from an empty cache."""
    engine, _ = scheduler(model=Endless())
    engine.expand(0, "alone", [branch], STEPS)
    while True:
        for answer in engine.step():
            return answer.steps[0]


Searches.TestCase.settings = settings(max_examples=25, stateful_step_count=15)
TestSearches = pytest.mark.promise(
    "Searches never exceed the KV pool that they share; steps and accounting stay right whatever "
    "is requested, aborted or revisited."
)(Searches.TestCase)
