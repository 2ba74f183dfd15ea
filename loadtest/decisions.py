"""A search's decisions: noted as they are made, and made again without thinking.

The same search with and without its deciding: the difference in time is what the policy costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from search.policies.policy import Policy, Round, Scores
from search.spec import SearchSpec
from search.tree import Node, NodeState, Tree

PolicyOf = Callable[[SearchSpec], Policy]
Answers = Mapping[str, Sequence[Node]]


@dataclass(slots=True)
class Decisions:
    """Of one search: the rounds in order, the seconds that each plan took (the last one, which
    ends the search, included) and how many nodes the tree then had."""

    rounds: list[Round] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


def noting(policy_of: PolicyOf, decisions: Decisions, clock: Callable[[], float]) -> PolicyOf:
    """Makes the same policy, whose plans are noted in ``decisions``.

    One that compares embeddings (``to_embed``, ``uncompared``, ``suited_to``) or looks at answers
    (``plan_knowing``) goes on doing so.
    """

    def noted(made: Callable[[Tree], Round | None], tree: Tree) -> Round | None:
        before = clock()
        plan = made(tree)
        decisions.seconds.append(clock() - before)
        decisions.nodes.append(len(tree))
        if plan is not None:
            decisions.rounds.append(plan)
        return plan

    def watched(policy: Any) -> Policy:
        class Noting:
            scores: ClassVar[Scores] = policy.scores

            def plan(self, tree: Tree) -> Round | None:
                return noted(policy.plan, tree)

        class NotingComparing(Noting):
            def to_embed(self, tree: Tree) -> Sequence[Node]:
                return policy.to_embed(tree)

            def uncompared(self, tree: Tree) -> Round | None:
                return noted(policy.uncompared, tree)

            def suited_to(self, embeds: str | None) -> Policy:
                return watched(policy.suited_to(embeds))

        class NotingKnowing(Noting):
            def plan_knowing(self, tree: Tree, answers: Answers) -> Round | None:
                return noted(lambda tree: policy.plan_knowing(tree, answers), tree)

        if hasattr(policy, "plan_knowing"):
            return NotingKnowing()
        return NotingComparing() if hasattr(policy, "to_embed") else Noting()

    return lambda spec: watched(policy_of(spec))


def replaying(policy_of: PolicyOf, rounds: Sequence[Round]) -> PolicyOf:
    """Makes a policy that repeats ``rounds``, once noted of the policy that ``policy_of`` makes.

    It asks for the same rewards, which are part of the tree, and for nothing else. A tree that has
    become another one, by an engine that is not exact, ends where a round cannot be repeated.
    """

    def make(spec: SearchSpec) -> Policy:
        needed = policy_of(spec).scores
        coming = iter(rounds)

        class Replaying:
            scores: ClassVar[Scores] = needed

            def plan(self, tree: Tree) -> Round | None:
                plan = next(coming, None)
                possible = plan is not None and _possible(plan, tree)
                return plan if possible else None

        return Replaying()

    return make


def _possible(plan: Round, tree: Tree) -> bool:
    """Whether the tree has the nodes that a round expands and prunes, and they may grow."""
    named = (*plan.expand, *plan.prune)
    return all(node < len(tree) and tree[node].state is NodeState.OPEN for node in named)
