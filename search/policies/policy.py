"""A search policy: a pure function from the tree to the next round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import isqrt
from typing import ClassVar, Protocol, runtime_checkable

from search.engine import RewardMissing
from search.policies.restarts import Restarts
from search.spec import SearchSpec, StopReason
from search.tree import ROOT, Node, Tree


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

    @classmethod
    def of(
        cls, leaves: Sequence[Node], shares: Mapping[int, int], *, fell_back: bool = False
    ) -> Round:
        """Give nodes their ``shares``, by id; prune the ``leaves`` that have none."""
        expand = {node: n for node, n in shares.items() if n}
        return cls(expand, tuple(leaf.id for leaf in leaves if leaf.id not in expand), fell_back)


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
class EmbeddingPolicy(Policy, Protocol):
    """A policy that compares the meaning of steps; it may be slow, so it plans in a thread."""

    def suited_to(self, embedder: str | None) -> Policy:
        """The policy for embeddings of this kind (``Capabilities.embeds``).

        Raises EngineError if there are none and the policy needs them.
        """
        ...

    def to_embed(self, tree: Tree) -> Sequence[Node]:
        """The nodes whose embeddings the next plan reads; none if it reads none."""
        ...

    def uncompared(self, tree: Tree) -> Round | None:
        """The next round by a simpler rule, for when these embeddings are not available."""
        ...


@runtime_checkable
class BacktrackingPolicy(Policy, Protocol):
    """A policy that returns to nodes of any depth, and may leave some open when it is done."""

    def frontier(self, tree: Tree) -> Iterable[Node]:
        """The nodes that a later round may expand, in id order.

        A node that is neither here nor above one of these is never visited again.
        """
        ...

    def stopped(self, tree: Tree) -> StopReason | None:
        """Why it stops although it could go on; None if it could not."""
        ...


@runtime_checkable
class AnswerPolicy(Policy, Protocol):
    """A policy that reads the answers of the finished trajectories.

    Its ``plan`` works as if there were no answers.
    """

    def plan_knowing(self, tree: Tree, answers: Mapping[str, Sequence[Node]]) -> Round | None:
        """The next round, as in ``plan``; ``answers``: the finished trajectories by answer."""
        ...


@runtime_checkable
class OrderedPolicy(Policy, Protocol):
    """A policy that knows what it would expand next if no reward changed."""

    def expansion_order(self, tree: Tree) -> Sequence[Node]:
        """Nodes it may expand, the next one first: a round takes its nodes from the front."""
        ...


def expansion_order_of(policy: Policy, tree: Tree) -> Sequence[Node]:
    """The nodes a policy would expand, the next one first; nothing if it does not know."""
    return policy.expansion_order(tree) if isinstance(policy, OrderedPolicy) else ()


def frontier_of(policy: Policy, tree: Tree) -> Iterable[Node]:
    """What a policy may still expand, in id order: the open leaves, unless it says otherwise."""
    return policy.frontier(tree) if isinstance(policy, BacktrackingPolicy) else tree.leaves()


class LevelPolicy(ABC):
    """A policy that expands the open leaves of a level together and spends its whole width."""

    __slots__ = ()
    width: int
    restarts: Restarts | None = None
    """When a tree restarts at the root; None: never."""

    def plan(self, tree: Tree) -> Round | None:
        """Expand the root to the whole width, then the leaves to what remains of it."""
        leaves, spend = list(tree.leaves()), remaining(tree, self.width)
        if not spend:
            return None
        if leaves and leaves[0].id == ROOT:
            return Round({ROOT: spend})
        return self.deal(tree, leaves, spend)

    def deal(self, tree: Tree, leaves: list[Node], spend: int) -> Round | None:
        """Share ``spend`` among the leaves, or restart at the root if the level is hopeless; None
        if it has no leaves and cannot restart."""
        restarts = self.restarts
        places = 0 if restarts is None else restarts.places(tree, leaves, spend, self.width)
        if places:
            return Round({ROOT: places}, tuple(sorted(leaf.id for leaf in leaves)))
        return self.share(tree, leaves, spend) if leaves else None

    @abstractmethod
    def share(self, tree: Tree, leaves: list[Node], spend: int) -> Round:
        """The round that deals ``spend`` children to ``leaves``, all open; neither is empty or 0.

        Raises RewardMissing when a leaf that must be compared has no reward.
        """


def remaining(tree: Tree, width: int) -> int:
    """Trajectories still to be finished: what a round may spend."""
    return width - len(tree.finished())


def share_evenly(total: int, nodes: Sequence[int]) -> dict[int, int]:
    """``total`` children over ``nodes``, as evenly as they go; remainders to the earlier ones.

    The shares add up to ``total`` exactly; there must not be more nodes than children.
    """
    assert 0 < len(nodes) <= total
    share, remainder = divmod(total, len(nodes))
    return {node: share + (i < remainder) for i, node in enumerate(nodes)}


def restarts_of(spec: SearchSpec, default: int = 0) -> Restarts | None:
    """When a tree restarts, as the spec sets it; unset: ``default`` times, 0 as in the papers."""
    most = default if spec.restarts is None else spec.restarts
    return Restarts(most, spec.hopeless_below) if most else None


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
