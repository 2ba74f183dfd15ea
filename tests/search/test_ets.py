"""ETS: which leaves it keeps and prunes, and which steps it embeds."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.clusters import THRESHOLDS
from search.engine import Branch, EmbeddingMissing, EngineDown, EngineError
from search.outcome import Outcome
from search.policies.ets import Ets
from search.policies.policy import EmbeddingPolicy, Round
from search.policies.rebase import Rebase
from search.policies.registry import POLICIES
from search.spec import SearchSpec, StopReason
from search.tree import NodeState, Tree
from tests.search.scripted_engine import ScriptedEngine, dice, grow
from tests.search.test_faults import Clock
from tests.search.test_width import rough
from tests.search.trees import STEP, row, tree_of

KV = Ets(16, 0.2, diversity_weight=0.0)


def two_stems(*rewards: float) -> Tree:
    """Stem 1 with leaves 3 and 4, stem 2 with leaf 5, rewards in that order."""
    tree = tree_of((0, "a", STEP, 0.5), (0, "b", STEP, 0.5))
    for parent, text, reward in zip((1, 1, 2), ("c", "d", "e"), rewards, strict=True):
        tree.add(parent, (ord(text),), text, STEP).reward = reward
    return tree


def with_embeddings(tree: Tree, **vectors: tuple[float, float]) -> Tree:
    """Set each node's embedding by its text, and return the tree."""
    for node in tree.nodes[1:]:
        node.embedding = vectors.get(node.text)
    return tree


def test_a_round_worked_by_hand() -> None:
    """Rewards .9, .8, .8 at T = .2 weigh 16 as 8, 4, 4: .5, .25, .25. Six nodes, each 1/6.

    Leaf 5 alone needs its stem: .25 - 2/6 < 0, so it goes; leaves 3 and 4 share theirs and gain
    .75 - 3/6. REBASE deals 16 anew: 16/1.6065 = 9.96 -> 10, 6.
    """
    assert KV.plan(two_stems(0.9, 0.8, 0.8)) == Round({3: 10, 4: 6}, (5,))


def test_unlike_steps_are_kept() -> None:
    """c and d are alike, e is not: covering e's cluster is worth 1/2, more than e costs, .083."""
    tree = with_embeddings(two_stems(0.9, 0.8, 0.8), c=(1.0, 0.0), d=(1.0, 0.0), e=(0.0, 1.0))
    assert Ets(16, 0.2).plan(tree) == Rebase(16, 0.2).plan(tree)
    assert Ets(16, 0.2, threshold=2.0).plan(tree) == KV.plan(tree)


def test_tokens_cost_what_memory_pays() -> None:
    """Weights .5, .25, .25. By steps leaf 5 is not worth 2/6; by tokens its path is 2 of 44."""
    tree = tree_of((0, "a" * 40, STEP, 0.5), (0, "b", STEP, 0.5))
    for parent, text, reward in ((1, "c", 0.9), (1, "d", 0.8), (2, "e", 0.8)):
        tree.add(parent, (ord(text),), text, STEP).reward = reward
    assert KV.plan(tree) == Round({3: 10, 4: 6}, (5,))
    plan = replace(KV, cost="tokens").plan(tree)
    assert plan is not None
    assert 5 in plan.expand


def test_without_a_price_it_is_rebase(monkeypatch: pytest.MonkeyPatch) -> None:
    """budget_weight 0 keeps every leaf without a solver or embedder."""
    monkeypatch.setattr("search.policies.ets.optimum", None)
    free = Ets(16, 0.2, budget_weight=0.0)
    tree = row(0.1, 0.9, 0.5)
    assert free.plan(tree) == Rebase(16, 0.2).plan(tree) == Round({2: 14, 3: 2}, (1,))
    assert free.to_embed(tree) == []
    assert free.suited_to(None) == free


def test_a_leaf_that_gets_no_child_is_pruned_too() -> None:
    """The solver keeps or prunes twins together; REBASE may still give one of them no child."""
    tree = tree_of((0, "a", STEP, 0.9), (0, "a", STEP, 0.9), (0, "a", STEP, 0.9))
    assert Ets(2, 0.2).plan(tree) == Round({1: 1, 2: 1}, (3,))


def test_where_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root or a single leaf gets all of the width, without solving a program."""
    monkeypatch.setattr("search.policies.ets.optimum", None)
    assert KV.plan(tree_of()) == Round({0: 16})
    assert KV.plan(row(0.1)) == Round({1: 16})


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_cbc_keeps_the_same(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a single optimum both solvers find it, here for three leaves."""
    monkeypatch.setattr("search.leaf_selection.FEW", 0)
    plan = replace(KV, solver=solver).plan(two_stems(0.9, 0.8, 0.8))
    assert plan == Round({3: 10, 4: 6}, (5,))


def test_beyond_the_node_limit_the_round_is_rebases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is REBASE's, marked ``fell_back``."""
    calls: list[object] = []
    monkeypatch.setattr("search.policies.ets.optimum", lambda *dials: calls.append(dials[1:]))
    tree = two_stems(0.9, 0.8, 0.8)
    plan = replace(KV, node_limit=3).plan(tree)
    rebase = Rebase(16, 0.2).plan(tree)
    assert rebase is not None
    assert plan == replace(rebase, fell_back=True)
    assert calls == [("highs", 3)]


def test_what_is_missing_is_an_error() -> None:
    """The error names a node without an embedding."""
    with pytest.raises(EngineError, match=r"node 4 has no embedding; policy ets"):
        Ets(8, 0.2).plan(with_embeddings(two_stems(0.9, 0.8, 0.8), c=(1.0, 0.0)))


def test_what_is_embedded() -> None:
    """The open leaves are, unless all are equal, there is only one, or diversity has no weight."""
    tree = two_stems(0.9, 0.8, 0.8)
    assert [node.id for node in Ets(8, 0.2).to_embed(tree)] == [3, 4, 5]
    assert KV.to_embed(tree) == []
    assert Ets(8, 0.2).to_embed(row(0.5)) == []
    assert len(Ets(8, 0.2).to_embed(row(0.5, 0.5))) == 2
    same = tree_of((0, "a", STEP, 0.9), (0, "a", STEP, 0.9))
    assert Ets(8, 0.2).to_embed(same) == []
    assert Ets(8, 0.2).plan(same) == Round({1: 4, 2: 4})


def test_the_threshold_is_the_embedders_unless_the_spec_names_one() -> None:
    """An unknown embedder has the paper's; without any embedder only ETS-KV can run."""
    plain = Ets.from_spec(SearchSpec(policy="ets"))
    assert isinstance(plain, EmbeddingPolicy)
    for name, threshold in THRESHOLDS.items():
        assert plain.suited_to(name).threshold == threshold
    assert plain.suited_to("script").threshold == 0.05
    explicit = Ets.from_spec(SearchSpec(policy="ets", cluster_threshold=0.4))
    assert explicit.suited_to("hidden").threshold == 0.4
    with pytest.raises(EngineError, match=r"embeds nothing; policy ets with diversity_weight 1\.0"):
        plain.suited_to(None)
    kv = POLICIES["ets_kv"](SearchSpec(policy="ets_kv"))
    assert kv == Ets.from_spec(SearchSpec(policy="ets", diversity_weight=0.0))
    assert isinstance(kv, EmbeddingPolicy)
    assert kv.suited_to(None) == kv


def endless_steps(branch: Branch) -> str:
    """Text of a step that is never the last and seldom repeats."""
    return f"s{branch.child}-{branch.seed % 97}\n\n"


async def run(engine: ScriptedEngine, **dials: object) -> Outcome:
    """Run an ETS search with a clock that stands still."""
    spec = SearchSpec.model_validate(
        {"policy": "ets", "width": 8, "seed": 7, "max_depth": 5} | dials
    )
    return await grow(engine, spec, prompt="Q: ")


@pytest.mark.promise("ETS embeds each distinct step once, and equal steps share one unit vector.")
async def test_each_distinct_step_is_embedded_once() -> None:
    """In a whole search each distinct step is embedded once; equal steps share its unit vector."""
    engine = rough(5, 10, 20)
    outcome = await run(engine, width=24)
    trajectories = [trajectory for call in engine.embedded for trajectory in call]
    steps = [trajectory.steps[-1] for trajectory in trajectories]
    assert len(steps) == len(set(steps)) > 1
    by_step: dict[tuple[int, ...], object] = {}
    for node in outcome.tree.nodes:
        if node.embedding is not None:
            assert by_step.setdefault(node.tokens, node.embedding) == node.embedding
            assert sum(x * x for x in node.embedding) == pytest.approx(1.0, abs=1e-3)
    assert set(by_step) == set(steps)
    for trajectory in trajectories:
        assert trajectory.steps == tuple(n.tokens for n in outcome.tree.chain(trajectory.node))


async def test_steps_are_embedded_while_they_are_scored() -> None:
    """From the second comparison on both run at once, so that a round waits for the slower one."""
    calls: list[str] = []

    class Telling(ScriptedEngine):
        async def score(self, tree, prompt, question, trajectories):
            calls.append("score")
            await asyncio.sleep(0)
            rewards = await super().score(tree, prompt, question, trajectories)
            calls.append("scored")
            return rewards

        async def embed(self, tree, prompt, trajectories):
            calls.append("embed")
            return await super().embed(tree, prompt, trajectories)

    outcome = await run(Telling(endless_steps))
    assert outcome.digest == (await run(ScriptedEngine(endless_steps))).digest
    first = calls.index("embed")
    assert calls[first - 1] == "scored", "nobody knew that steps would be compared"
    later = [at for at, what in enumerate(calls) if what == "embed" and at > first]
    assert later
    assert all(calls[at - 1 : at + 2] == ["score", "embed", "scored"] for at in later)


async def test_other_policies_embed_nothing() -> None:
    """Neither does ETS without diversity, so that they run on an engine that cannot embed."""
    for dials in ({"policy": "rebase"}, {"policy": "ets_kv"}, {"diversity_weight": 0.0}):
        engine = rough(5, 10, 20)
        engine.embeds = False
        await run(engine, **dials)
        assert engine.embedded == []


async def test_an_engine_without_embeddings_is_refused_at_the_start() -> None:
    """The search is refused before anything is drawn."""
    engine = ScriptedEngine(embeds=False)
    with pytest.raises(EngineError, match="the engine embeds nothing"):
        await run(engine)
    assert engine.expanded == []


@pytest.mark.promise(
    "ETS grows REBASE's tree when embeddings are unfit; it counts each such round and says what "
    "was wrong."
)
@pytest.mark.parametrize(
    ("vectors", "message"),
    [([], "gave 0 embeddings for"), (float("nan"), "not finite"), ("uneven", "one size")],
)
async def test_with_unfit_embeddings_the_search_is_rebases(vectors: object, message: str) -> None:
    """The tree is REBASE's; every round that could not compare steps is counted, with a reason."""

    class Unfit(ScriptedEngine):
        async def embed(self, tree, prompt, trajectories):
            if vectors == "uneven":
                return [(1.0,) * (1 + i % 2) for i in range(len(trajectories))]
            return vectors and [(vectors,)] * len(trajectories)

    outcome = await run(Unfit(endless_steps))
    rebase = await run(ScriptedEngine(endless_steps), policy="rebase")
    assert outcome.digest == rebase.digest
    fault = outcome.stats.embedder_fault
    assert fault is not None
    assert re.search(f"engine: .*{message}", fault)
    assert outcome.stats.embedder_fallbacks == outcome.stats.rounds - 1
    assert (outcome.stats.solver_fallbacks, rebase.stats.embedder_fallbacks) == (0, 0)


async def test_an_embedder_that_fails_midway_is_not_asked_again() -> None:
    """Its first round compares, it fails in the second, and all others are REBASE's."""

    class Failing(ScriptedEngine):
        calls = 0

        async def embed(self, tree, prompt, trajectories):
            self.calls += 1
            if self.calls == 2:
                raise EmbeddingMissing("the embedder is away")
            return await super().embed(tree, prompt, trajectories)

    engine = Failing(endless_steps)
    stats = (await run(engine)).stats
    assert engine.calls == 2
    assert stats.embedder_fault == "the embedder is away"
    assert stats.embedder_fallbacks == stats.rounds - 2 > 1


async def test_embeddings_of_another_size_than_before_are_unfit() -> None:
    """An embeddings server may have changed its model between two rounds."""

    class Changing(ScriptedEngine):
        async def embed(self, tree, prompt, trajectories):
            self.embedded.append(list(trajectories))
            return [(1.0,) * (1 + len(self.embedded))] * len(trajectories)

    stats = (await run(Changing(endless_steps))).stats
    assert stats.embedder_fault == "engine: embeddings of [2, 3] numbers in one tree"


async def test_an_engine_that_fails_while_embedding_fails_the_search() -> None:
    """EngineDown while embedding has no fallback, unlike the embedder's own errors."""

    class Down(ScriptedEngine):
        async def embed(self, tree, prompt, trajectories):
            raise EngineDown("gone")

    engine = Down(endless_steps)
    with pytest.raises(EngineDown):
        await run(engine)
    assert engine.aborted == ["t"]


async def test_a_deadline_while_embedding_ends_the_search() -> None:
    """The committed round stays and no other is planned."""
    clock = Clock(0.0)
    engine = ScriptedEngine(
        lambda b: f"s{b.child}\n\n", on_embed=lambda: [clock.tick() for _ in range(10)]
    )
    outcome = await grow(
        engine, SearchSpec(policy="ets", width=4, seed=0), clock=clock, deadline=5.0
    )
    assert outcome.stop_reason is StopReason.DEADLINE
    assert (outcome.stats.rounds, len(engine.expanded)) == (1, 1)


@pytest.mark.promise(
    "ETS grows REBASE's tree when its solver returns no optimum, and counts the rounds that fell "
    "back."
)
async def test_fallbacks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search whose programs are never solved has REBASE's tree and counts its fallbacks."""
    monkeypatch.setattr("search.policies.ets.optimum", lambda *_: None)
    outcome = await run(rough(0, 5, 20), width=12)
    rebase = await run(rough(0, 5, 20), width=12, policy="rebase")
    assert outcome.digest == rebase.digest
    assert outcome.stats.solver_fallbacks > 1
    assert rebase.stats.solver_fallbacks == 0


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), order=st.integers(0, 2**32), tokens=st.booleans())
async def test_same_seed_same_tree(seed: int, order: int, tokens: bool) -> None:
    """The tree is the same in any drawing order, for both costs; every leaf left is open."""
    dials = {"seed": seed, "width": 16, "cost": "tokens" if tokens else "nodes"}

    def shuffled(count: int) -> list[int]:
        return sorted(range(count), key=lambda i: dice(order, i))

    engine = rough(5, 15, 30)
    engine.finish_order = shuffled
    first, second = await run(engine, **dials), await run(rough(5, 15, 30), **dials)
    assert first.digest == second.digest
    states = {node.state for node in first.tree.leaves()}
    assert states <= {NodeState.OPEN}


async def test_a_branch_is_a_thing_of_its_prefix() -> None:
    """ETS and REBASE request the same branches in the first round, where they keep the same."""
    ets, rebase = rough(0, 5, 20), rough(0, 5, 20)
    await run(ets, width=12)
    await run(rebase, width=12, policy="rebase")

    def expanded_calls(engine: ScriptedEngine) -> list[tuple[Branch, ...]]:
        return [tuple(call) for call in engine.expanded]

    assert expanded_calls(ets)[0] == expanded_calls(rebase)[0]
