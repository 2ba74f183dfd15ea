"""A search's decisions: noted as they are made, and made again without thinking.

The same search with and without its deciding: the difference in time is what the policy costs.
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
"""What plans a round: for all policies, for those that look at answers, and without embeddings."""


@dataclass(slots=True)
class Decisions:
    """Of one search: the rounds in order, the seconds that each plan took (the last one, which
    ends the search, included) and how many nodes the tree then had."""

    rounds: list[Round] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


def noting(policy_of: PolicyOf, decisions: Decisions, clock: Callable[[], float]) -> PolicyOf:
    """Makes the same policy, whose plans are noted in ``decisions``; all else of it is its own."""

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
    """Makes a policy that repeats ``rounds``, once noted of the policy that ``policy_of`` makes.

    It asks for the same rewards, which are part of the tree, and for nothing else. A tree that has
    become another one, by an engine that is not exact, ends where a round cannot be repeated.
    """

    def make(spec: SearchSpec) -> Any:
        coming = iter(rounds)

        def plan(tree: Tree) -> Round | None:
            next_round = next(coming, None)
            return next_round if next_round is not None and _possible(next_round, tree) else None

        return SimpleNamespace(scores=policy_of(spec).scores, plan=plan)

    return make


def _possible(plan: Round, tree: Tree) -> bool:
    """Whether the tree has the nodes that a round expands and prunes, and they may grow."""
    nodes = (*plan.expand, *plan.prune)
    return all(node < len(tree) and tree[node].state is NodeState.OPEN for node in nodes)
