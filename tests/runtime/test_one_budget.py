"""One KV budget over all searches: nobody starves, it is never exceeded, no slot is lost."""

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
    """A search that expands its best open nodes, two at a time, by rewards it makes up."""

    tree: str
    draw: random.Random
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    above: dict[int, int] = field(default_factory=dict)
    reward: dict[int, float] = field(default_factory=dict)
    open: set[int] = field(default_factory=lambda: {ROOT})
    asked: list[Branch] = field(default_factory=list)
    drawn: list[tuple[Branch, Step]] = field(default_factory=list)
    rounds: int = 0

    def __post_init__(self) -> None:
        self.paths[ROOT] = tuple(self.draw.choices(range(26), k=12))
        self.above[ROOT], self.reward[ROOT] = -1, 0.5

    def ask(self, engine: Scheduler, call: int, leaves: int = 2) -> bool:
        """Ask for a round; False if nothing is open."""
        ahead = sorted(self.open, key=lambda node: (-self.reward[node], node))
        active = ahead[:leaves]
        if not active:
            return False
        live = {node for leaf in self.open for node in self.chain(leaf)}
        dead = tuple(sorted(set(self.above) - live))
        engine.hint(self.tree, Hint(dict(self.reward), tuple(active), dead, tuple(ahead)))
        self.open -= set(active)
        self.asked = []
        for parent in active:
            for child in range(2):
                node = len(self.above)
                self.above[node] = parent
                seed = node_seed(1, self.tree, (parent, child))
                self.asked.append(Branch(parent, child, self.paths[parent], seed, LIMIT, node))
        engine.expand(call, self.tree, self.asked, STEPS)
        return True

    def take(self, steps: list[Step]) -> None:
        """What was drawn for the round."""
        self.rounds += 1
        self.drawn += zip(self.asked, steps, strict=True)
        for branch, step in zip(self.asked, steps, strict=True):
            self.paths[branch.node] = branch.tokens + step.tokens
            self.reward[branch.node] = round(self.draw.random(), 4)
            if step.finish is not Finish.END and len(self.paths[branch.node]) < LONGEST:
                self.open.add(branch.node)
        self.asked = []

    def chain(self, node: int) -> list[int]:
        """A node and those above it."""
        found = [node]
        while found[-1] != ROOT:
            found.append(self.above[found[-1]])
        return found


def must_be_right(engine: Scheduler) -> None:
    """Every slot in one place, the budget kept, what running branches read all there."""
    cache = engine.cache
    cache.check()
    assert cache.active_tokens <= cache.capacity
    for sequence in cache.sequences:
        assert (sequence.slots[: sequence.computed] >= 0).all(), "a branch reads what is not there"


def grown(kv_tokens: int, kv_policy: KvPolicy) -> tuple[list[list[Step]], list[int]]:
    """Eight searches at once: their steps, and each one's rounds when the first ended."""
    engine, _ = scheduler(kv_tokens=kv_tokens, kv_policy=kv_policy, model=Endless())
    searches = [Searching(f"tree{i}", random.Random(i)) for i in range(8)]
    for call, search in enumerate(searches):
        search.ask(engine, call)
    when_first_ended: list[int] = []
    while engine.busy:
        for drawn in engine.step():
            search = searches[drawn.call]
            search.take(drawn.steps)
            if search.rounds == ROUNDS:
                when_first_ended = when_first_ended or [s.rounds for s in searches]
                engine.release(search.tree)
            else:
                assert search.ask(engine, drawn.call)
            must_be_right(engine)
        assert engine.cache.active_tokens <= engine.cache.capacity
    return [[step for _, step in search.drawn] for search in searches], when_first_ended


def test_eight_searches_share_a_budget_and_none_starves() -> None:
    """Room for little more than one path each: the same steps, and all get on meanwhile."""
    roomy, _ = grown(20_000, "arborkv")
    for kv_policy in ("arborkv", "lru"):
        tight, rounds = grown(400, kv_policy)
        assert tight == roomy
        assert min(rounds) > 0


class Searches(RuleBasedStateMachine):
    """Searches begin, draw, go back, are aborted and end, in a pool that holds few paths."""

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
        """A pool that holds one path and its next step, at least, and a budget within it."""
        self.engine, _ = scheduler(
            kv_tokens=kv_tokens, kv_policy=kv_policy, batch_limit=places, model=Endless()
        )
        self.engine.cache.budget = int(share * kv_tokens)
        self.engine.cache.least = LONGEST + LIMIT

    @precondition(lambda self: len(self.searches) < 4)
    @rule(seed=st.integers(0, 5))
    def start(self, seed: int) -> None:
        """A new search; some have the same prompt."""
        self.calls += 1
        search = Searching(f"tree{self.calls}", random.Random(seed))
        search.ask(self.engine, self.calls)
        self.searches[self.calls] = search

    @rule(steps=st.integers(1, 30), leaves=st.integers(1, 4))
    def draw(self, steps: int, leaves: int) -> None:
        """Some iterations; a search whose round is done goes on, or ends."""
        for _ in range(steps):
            for drawn in self.engine.step():
                search = self.searches[drawn.call]
                search.take(drawn.steps)
                branch, step = search.drawn[-1]
                assert step == naive_step_of(branch)
                if not search.ask(self.engine, drawn.call, leaves):
                    self.end(drawn.call)
            assert self.engine.cache.active_tokens <= self.engine.cache.capacity

    @precondition(lambda self: self.searches)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A search is stopped wherever it is."""
        call = data.draw(st.sampled_from(sorted(self.searches)))
        self.engine.abort(self.searches[call].tree)
        self.end(call)

    def end(self, call: int) -> None:
        """Let go."""
        self.engine.release(self.searches.pop(call).tree)

    @invariant()
    def accounting_is_right(self) -> None:
        """The engine's own check, and that active paths are whole."""
        must_be_right(self.engine)
        cache = self.engine.cache
        assert cache.active_peak <= max(cache.budget, cache.reading_peak)
        held = {node for node in self.engine.cache.radix.nodes() if node.holders}
        names = {search.tree for search in self.searches.values()}
        assert {name for node in held for name in node.holders} <= names


def naive_step_of(branch: Branch) -> Step:
    """The step of a branch by the same model, drawn alone, nothing cached."""
    engine, _ = scheduler(model=Endless())
    engine.expand(0, "alone", [branch], STEPS)
    while True:
        for drawn in engine.step():
            return drawn.steps[0]


Searches.TestCase.settings = settings(max_examples=25, stateful_step_count=15)
TestSearches = pytest.mark.promise(
    "One KV budget over all searches: never exceeded, nobody starves, the engine's accounting is "
    "right whatever is asked, dropped or gone back to"
)(Searches.TestCase)
