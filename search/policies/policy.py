"""What a search policy is: a pure function from the tree to the next round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import isqrt
from typing import ClassVar, Protocol, runtime_checkable

from search.engine import RewardMissing
from search.spec import SearchSpec, StopReason
from search.tree import Node, Tree


class Scores(IntEnum):
    """Which new nodes get a reward; a larger value includes the smaller ones."""

    NONE = 0
    FINISHED = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class Round:
    """What happens next: how many children each open node gets, and which nodes are given up.

    ``expand``: node id to a positive number of children. ``prune``: ids of open nodes.
    ``fell_back``: the policy met its own limit and planned by a simpler rule that it documents.
    """

    expand: Mapping[int, int]
    prune: tuple[int, ...] = field(default=())
    fell_back: bool = False


class Policy(Protocol):
    """Decides which branches live. Frozen, built from a spec, without any state of its own."""

    scores: ClassVar[Scores]
    """Which new nodes need a reward before the next plan."""

    def plan(self, tree: Tree) -> Round | None:
        """The next round, or None when there is nothing left to expand.

        Raises RewardMissing when a node that must be compared has no reward.
        """
        ...


@runtime_checkable
class Comparing(Policy, Protocol):
    """A policy that looks at what steps mean, and takes its time: it is asked in a thread."""

    def suited_to(self, embedder: str | None) -> Policy:
        """The policy for embeddings of this kind (``Capabilities.embeds``).

        Raises EngineError if there are none and it cannot do without.
        """
        ...

    def to_embed(self, tree: Tree) -> Sequence[Node]:
        """The nodes whose embeddings the next plan reads; none if it reads none."""
        ...

    def uncompared(self, tree: Tree) -> Round | None:
        """The next round where these embeddings could not be had, by a simpler rule."""
        ...


@runtime_checkable
class Backtracking(Policy, Protocol):
    """A policy that returns to nodes of any depth, and may leave some open when it is done."""

    def frontier(self, tree: Tree) -> Iterable[Node]:
        """The nodes that a later round may expand, in id order.

        A node that is neither here nor above one of these is never visited again.
        """
        ...

    def stopped(self, tree: Tree) -> StopReason | None:
        """Why it plans nothing more although it could, None if that is not so."""
        ...


@runtime_checkable
class Foreseeing(Policy, Protocol):
    """A policy that knows where it would turn next if no reward changed."""

    def outlook(self, tree: Tree) -> Sequence[Node]:
        """Nodes it may expand, the next one first: a round takes its nodes from the front."""
        ...


Outlook = Callable[[Tree], Sequence[Node]]
"""Where a search would turn, the next node first; nothing if that is not known."""


def outlook_of(policy: Policy) -> Outlook:
    """Where a policy would turn, if it knows."""
    return policy.outlook if isinstance(policy, Foreseeing) else unknown_outlook


def unknown_outlook(tree: Tree) -> Sequence[Node]:
    """Nothing."""
    return ()


Frontier = Callable[[Tree], Iterable[Node]]
"""The nodes that may still get children, in id order."""


def frontier_of(policy: Policy) -> Frontier:
    """What a policy may still expand: the open leaves, unless it says otherwise."""
    return policy.frontier if isinstance(policy, Backtracking) else Tree.leaves


def remaining(tree: Tree, width: int) -> int:
    """Trajectories still to be finished: what a round may spend."""
    return width - len(tree.finished())


def share_evenly(total: int, nodes: Sequence[int]) -> dict[int, int]:
    """``total`` children over ``nodes``, as evenly as they go; remainders to the earlier ones.

    The shares add up to ``total`` exactly; there must not be more nodes than children.
    """
    assert 0 < len(nodes) <= total
    share, left = divmod(total, len(nodes))
    return {node: share + (i < left) for i, node in enumerate(nodes)}


def beams_of(spec: SearchSpec) -> int:
    """Leaves kept a round: ``beam_width``, by default the rounded-up root of the width."""
    return spec.beam_width or isqrt(spec.width - 1) + 1


def rewards_of(nodes: Sequence[Node], policy: str) -> list[float]:
    """The nodes' rewards, in order. Raises RewardMissing if one has none."""
    rewards = []
    for node in nodes:
        if node.reward is None:
            raise RewardMissing(f"node {node.id} has no reward; policy {policy} needs one a step")
        rewards.append(node.reward)
    return rewards


def by_reward(nodes: Sequence[Node], policy: str) -> list[Node]:
    """The nodes by falling reward; equal rewards by rising id.

    Raises RewardMissing if one has none.
    """
    rewards = rewards_of(nodes, policy)
    ranked = sorted(zip(rewards, nodes, strict=True), key=lambda pair: (-pair[0], pair[1].id))
    return [node for _, node in ranked]
