"""Record a search's decisions, and replay them without computing them again.

The difference in time between a search and its replay is the cost of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from search.policies.policy import Policy, Round
from search.spec import SearchSpec
from search.tree import Node, NodeState, Tree

PolicyOf = Callable[[SearchSpec], Policy]
Answers = Mapping[str, Sequence[Node]]
PLANS = ("plan", "plan_knowing", "uncompared")
"""Methods that plan a round: of all policies, of those that read answers, without embeddings."""


@dataclass(slots=True)
class Decisions:
    """One search's rounds in order, the seconds that each plan took (also the last one, which
    ends the search) and how many nodes the tree had at the time."""

    rounds: list[Round] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


def noting(policy_of: PolicyOf, decisions: Decisions, clock: Callable[[], float]) -> PolicyOf:
    """Make the same policy, but note its plans in ``decisions``; other methods are unchanged."""

    def note_plans(plan_method: Callable[..., Round | None]) -> Callable[..., Round | None]:
        def plan(tree: Tree, *answers: Answers) -> Round | None:
            before = clock()
            next_round = plan_method(tree, *answers)
            decisions.seconds.append(clock() - before)
            decisions.nodes.append(len(tree))
            if next_round is not None:
                decisions.rounds.append(next_round)
            return next_round

        return plan

    def wrapped(policy: Any) -> Any:
        members = {name: getattr(policy, name) for name in dir(policy) if not name.startswith("_")}
        members |= {name: note_plans(members[name]) for name in PLANS if name in members}
        if "suited_to" in members:
            members["suited_to"] = lambda embeds: wrapped(policy.suited_to(embeds))
        return SimpleNamespace(**members)

    return lambda spec: wrapped(policy_of(spec))


def replaying(policy_of: PolicyOf, rounds: Sequence[Round]) -> PolicyOf:
    """Make a policy that repeats ``rounds``, recorded earlier from the policy of ``policy_of``.

    It asks for the same rewards, which are part of the tree, and for nothing else. If an inexact
    engine grows another tree, the search ends where a round cannot be repeated.
    """

    def make(spec: SearchSpec) -> Any:
        coming = iter(rounds)

        def plan(tree: Tree) -> Round | None:
            next_round = next(coming, None)
            return next_round if next_round is not None and _possible(next_round, tree) else None

        return SimpleNamespace(scores=policy_of(spec).scores, plan=plan)

    return make


def _possible(plan: Round, tree: Tree) -> bool:
    """Whether the tree has all nodes that a round expands and prunes, and they are open."""
    nodes = (*plan.expand, *plan.prune)
    return all(node < len(tree) and tree[node].state is NodeState.OPEN for node in nodes)
