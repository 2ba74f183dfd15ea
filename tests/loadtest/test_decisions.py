"""Recorded and replayed decisions give the same trees; the ceiling policy keeps its width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from loadtest.decisions import Decisions, PolicyOf, noting, replaying
from loadtest.policies import KeepOne
from search.controller import search
from search.outcome import Outcome
from search.policies.policy import Round, Scores
from search.policies.registry import POLICIES
from search.problem import Problem
from search.spec import PolicyName, SearchSpec
from search.tree import Finish, Node, Tree
from tests.search.scripted_engine import ScriptedEngine, answer_of, encode


async def grow(spec: SearchSpec, policy_of: PolicyOf | None = None) -> Outcome:
    """Run a search on the scripted engine."""
    return await search(
        Problem(encode("Q"), "Q"),
        spec,
        ScriptedEngine(),
        tree_id="t",
        answer_of=answer_of,
        clock=lambda: 0.0,
        policy_of=policy_of,
    )


@pytest.mark.promise(
    "A benchmark that replays a search's decisions grows the same tree, so it times what it "
    "compares."
)
@pytest.mark.parametrize("name", sorted(POLICIES))
async def test_repeated_decisions_grow_the_same_tree(name: PolicyName) -> None:
    """Recorded or replayed, a search has the digest of the plain one; the last plan is None."""
    ticks = iter(range(10_000))
    for seed in range(5):
        spec = SearchSpec(policy=name, width=9, seed=seed)
        decisions = Decisions()
        plain = await grow(spec)
        recorded = await grow(spec, noting(POLICIES[name], decisions, lambda: next(ticks)))
        replayed = await grow(spec, replaying(POLICIES[name], decisions.rounds))
        assert plain.digest == recorded.digest == replayed.digest
        assert recorded.stats.kv_tokens_total == plain.stats.kv_tokens_total
        assert recorded.stop_reason == plain.stop_reason
        assert len(decisions.rounds) == plain.stats.rounds
        assert decisions.seconds == [1] * (len(decisions.rounds) + 1)
        assert decisions.nodes[0] == 1
        assert decisions.nodes[-1] == len(plain.tree)


def test_a_tree_that_has_become_another_one_ends() -> None:
    """A replayed round with a node that is missing or finished ends the search."""
    spec, tree = SearchSpec(policy="rebase", width=4), Tree([1])
    tree.add(0, [2], "a", Finish.END)
    for impossible in (Round({7: 1}), Round({1: 1}), Round({0: 1}, prune=(1,))):
        assert replaying(POLICIES["rebase"], [impossible])(spec).plan(tree) is None
    possible = Round({0: 2})
    assert replaying(POLICIES["rebase"], [possible])(spec).plan(tree) == possible


class Looking:
    """A policy that compares embeddings; ``plan`` shows which embedder it was suited to."""

    scores: ClassVar[Scores] = Scores.ALL

    def __init__(self, embeds: str | None = None) -> None:
        self.embeds = embeds

    def plan(self, tree: Tree) -> Round | None:
        """As many children of the root as the embedder's name has letters, then nothing."""
        return Round({0: len(self.embeds or "")}) if len(tree) == 1 else None

    def to_embed(self, tree: Tree) -> Sequence[Node]:
        """All nodes of the tree."""
        return tree.nodes

    def suited_to(self, embeds: str | None) -> Looking:
        """The policy for the embedder ``embeds``."""
        return Looking(embeds)


def test_what_else_a_policy_asks_is_passed_on_but_not_repeated() -> None:
    """A recording policy forwards ``to_embed`` and ``suited_to``; a replaying one has neither."""
    spec, tree, decisions = SearchSpec(), Tree([1]), Decisions()
    policy: Any = noting(lambda _: Looking(), decisions, lambda: 0.0)(spec)
    assert policy.to_embed(tree) == tree.nodes
    assert policy.suited_to("hidden").plan(tree) == Round({0: 6})
    assert decisions.rounds == [Round({0: 6})]
    assert not hasattr(noting(POLICIES["rebase"], Decisions(), lambda: 0.0)(spec), "to_embed")
    repeated = replaying(lambda _: Looking(), [])(spec)
    assert repeated.scores is Scores.ALL
    assert not hasattr(repeated, "to_embed")


def test_one_leaf_is_kept_by_hand() -> None:
    """Width 5, one reply finished: the best of three leaves gets the other 4; ties to lower ids."""
    tree = Tree([1])
    assert KeepOne(5).plan(tree) == Round({0: 5})
    for reward in (0.2, 0.7, 0.7):
        tree.add(0, [2], "a\n\n", Finish.STEP).reward = reward
    tree.add(0, [3], "b", Finish.END).reward = 0.9
    assert KeepOne(5).plan(tree) == Round({2: 4}, (1, 3))
    for leaf in (1, 2, 3):
        tree.prune(leaf)
    assert KeepOne(5).plan(tree) is None


async def test_the_ceiling_keeps_to_its_width_and_holds_less() -> None:
    """Over 20 seeds the ceiling holds less KV in total than REBASE."""
    saved = 0
    for seed in range(20):
        spec = SearchSpec(policy="rebase", width=16, seed=seed)
        rebase = await grow(spec)
        least = await grow(spec, lambda spec: KeepOne(spec.width))
        assert 0 < least.stats.finished <= 16
        saved += rebase.stats.kv_tokens_total - least.stats.kv_tokens_total
    assert saved > 0
