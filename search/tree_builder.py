"""Turn a planned round into branches to expand, and generated steps into nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from search.engine import Ahead, Branch, EngineError, Hint, Sampling, Step, Trajectory
from search.events import Event, Expanded, Finished, Pruned, Scored, Selected
from search.policies.policy import Policy, Round, Scores, expansion_order_of, frontier_of
from search.spec import SearchSpec
from search.stats import path_length
from search.stop import may_end_early
from search.tree import ROOT, Finish, Node, NodeState, Tree, node_seed, round_reward, step_seed


@dataclass(frozen=True, slots=True)
class PendingNode:
    """A generated step that is not in the tree yet.

    ``finish``: as judged here, which may differ from the step's own. ``duplicate_of``: the first
    node with the same steps from the root, its own id if there is none.
    """

    branch: Branch
    step: Step
    finish: Finish
    duplicate_of: int

    @property
    def id(self) -> int:
        """The id of the node that it becomes."""
        return self.branch.node


class TreeBuilder:
    """Grows one tree.

    Ids are consecutive in the order of the branches, which is by parent id and child index; the
    order in which an engine draws them does not matter.
    """

    def __init__(
        self,
        tree: Tree,
        spec: SearchSpec,
        policy: Policy,
        delimiter: str,
        context_tokens: int,
        scores: Scores,
        listen: Callable[[Event], None],
    ) -> None:
        """Start from an empty ``tree``.

        ``scores``: which nodes get a reward. ``context_tokens``: most tokens of a whole path.
        ``delimiter``: what ends a step, unless the spec cuts steps by length.
        """
        self.tree = tree
        self.round = 0
        assert spec.seed is not None, "a search has a seed"
        self._seed = spec.seed
        self._delimiter = delimiter
        self._scores = scores
        self._listen = listen
        self._policy = policy
        self._max_depth = spec.max_depth
        self._chains = scores is not Scores.ALL and not may_end_early(spec)
        self._max_tokens = spec.max_tokens
        stop = () if spec.step_tokens else (delimiter,)
        self._step_tokens = spec.step_tokens or spec.max_step_tokens
        self.sampling = Sampling(
            spec.temperature,
            spec.top_p,
            stop,
            self._step_tokens,
            spec.logits_params,
            len(tree.prompt),
        )
        self._ignore_eos = spec.ignore_eos
        self._path_tokens = min(spec.trajectory_tokens, context_tokens - len(tree.prompt))
        self._duplicate_of = {ROOT: ROOT}
        self._first: dict[tuple[int, tuple[int, ...]], int] = {}
        self._hinted = 1
        self._dead: set[int] = set()

    def select(self, plan: Round) -> Hint:
        """Begin a round: prune the nodes that the plan gives up, and return the engine's hint.

        The hint holds the rewards that are new since the last one, the nodes about to grow, and the
        nodes that died: neither they nor any node below them may still grow.
        """
        self.round += 1
        for node in sorted(plan.expand):
            self._listen(Selected(self.round, node, plan.expand[node]))
        for node in plan.prune:
            self.tree.prune(node)
            self._listen(Pruned(self.round, node, "policy"))
        return self._hint(plan)

    def branches(self, plan: Round) -> list[Branch]:
        """The children to draw, by rising parent id and child index.

        The branching factor for ``potentials`` is the round's mean, rounded up.
        """
        branches: list[Branch] = []
        nodes = sorted(plan.expand)
        rewards = [self.tree[node].reward for node in nodes]
        mean = -(-sum(plan.expand.values()) // max(1, len(nodes)))
        ahead = potentials(rewards, max(1, mean))
        for node, children in zip(nodes, ahead, strict=True):
            first_id = len(self.tree) + len(branches)
            branches += self._children_of(node, plan.expand[node], first_id, children)
        return branches

    def pending(self, branches: Sequence[Branch], steps: Sequence[Step]) -> list[PendingNode]:
        """Judge the drawn steps, and keep the first of them that fit into ``max_tokens``.

        Raises EngineError for a wrong number of steps, or a step of a wrong length.
        """
        if len(steps) != len(branches):
            raise EngineError(f"engine: drew {len(steps)} steps for {len(branches)} branches")
        pending: list[PendingNode] = []
        total = self.tree.generated_tokens
        for branch, step in zip(branches, steps, strict=True):
            if not 0 < len(step.tokens) <= branch.limit:
                allowed = f"1 to {branch.limit} were asked"
                raise EngineError(f"engine: drew a step of {len(step.tokens)} tokens; {allowed}")
            total += len(step.tokens)
            if self._max_tokens is not None and total > self._max_tokens:
                break
            key = self._duplicate_of[branch.parent], step.tokens
            duplicate_of = self._duplicate_of[branch.node] = self._first.setdefault(
                key, branch.node
            )
            pending.append(PendingNode(branch, step, self._judge(branch, step), duplicate_of))
        return pending

    def to_score(self, pending: Sequence[PendingNode]) -> list[Trajectory]:
        """The paths that need a reward: each distinct one once, under its first node's id."""
        return [
            self._trajectory(node)
            for node in pending
            if node.duplicate_of == node.id and self._needs_reward(node)
        ]

    def to_compare(self, pending: Sequence[PendingNode]) -> list[Trajectory]:
        """One path that may grow for each distinct last step; none if there is only one of them."""
        first: dict[tuple[int, ...], PendingNode] = {}
        for node in pending:
            if node.finish in (Finish.STEP, Finish.LENGTH):
                first.setdefault(node.step.tokens, node)
        return [self._trajectory(node) for node in first.values()] if len(first) > 1 else []

    def commit(self, pending: Sequence[PendingNode], rewards: dict[int, float]) -> list[Node]:
        """Add a round to the tree; ``rewards``: unrounded, by the ids of ``to_score``."""
        nodes = []
        for pending_node in pending:
            step = pending_node.step
            node = self.tree.add(
                pending_node.branch.parent,
                step.tokens,
                step.text,
                pending_node.finish,
                logprob=step.logprob,
                entropy=step.entropy,
            )
            assert node.id == pending_node.id
            assert node.child == pending_node.branch.child
            if pending_node.duplicate_of != pending_node.id:
                node.reward = self.tree[pending_node.duplicate_of].reward
            elif pending_node.id in rewards:
                node.reward = round_reward(rewards[pending_node.id])
            nodes.append(node)
            self._report(node)
        return nodes

    def _hint(self, plan: Round) -> Hint:
        alive = self.tree.above(frontier_of(self._policy, self.tree))
        dead = {node.id for node in self.tree.nodes[1:]} - alive - self._dead
        new_nodes = self.tree.nodes[self._hinted :]
        self._hinted = len(self.tree)
        self._dead |= dead
        values = {node.id: node.reward for node in new_nodes if node.reward is not None}
        order = tuple(node.id for node in expansion_order_of(self._policy, self.tree))
        return Hint(values, tuple(sorted(plan.expand)), tuple(sorted(dead)), order)

    def _children_of(
        self, parent: int, children: int, first_id: int, potential: int
    ) -> list[Branch]:
        node = self.tree[parent]
        prefix = self.tree.tokens(parent)
        room = self._path_tokens - path_length(self.tree, parent)
        limit = min(self._step_tokens, room)
        branches = []
        for child in range(len(node.children), len(node.children) + children):
            path = (*node.path, child)
            after = self._max_depth - node.depth - 1
            steps = after if self._chains else 0
            ahead = Ahead(self._seed, path, potential, room, steps) if after > 0 else None
            seed = step_seed(self._seed, path)
            child_id = first_id + len(branches)
            branches.append(Branch(parent, child, prefix, seed, limit, child_id, ahead))
        return branches

    def _judge(self, branch: Branch, step: Step) -> Finish:
        """How a step really ended: a delimited one may be empty or a loop; any may hit a limit.

        Steps cut by length are neither empty nor loops, as they are only pieces of thoughts. With
        ``ignore_eos`` a step that the model ended is treated as such a piece.
        """
        if step.finish is Finish.END and not self._ignore_eos:
            return Finish.END
        parent = self.tree[branch.parent]
        if step.finish is Finish.STEP:
            if not step.text.removesuffix(self._delimiter).strip():
                return Finish.EMPTY
            if step.tokens == parent.tokens:
                return Finish.LOOP
        length = path_length(self.tree, parent.id) + len(step.tokens)
        if parent.depth + 1 >= self._max_depth or length >= self._path_tokens:
            return Finish.LIMIT
        return Finish.LENGTH if step.finish is Finish.END else step.finish

    def _trajectory(self, node: PendingNode) -> Trajectory:
        above = self.tree.chain(node.branch.parent)
        tokens = (*(node.tokens for node in above), node.step.tokens)
        texts = (*(node.text for node in above), node.step.text)
        path = (*self.tree[node.branch.parent].path, node.branch.child)
        return Trajectory(node.id, tokens, texts, node_seed(self._seed, "judge", path))

    def _needs_reward(self, node: PendingNode) -> bool:
        if node.finish.dies_at_birth:
            return False
        if self._scores is Scores.FINISHED:
            return node.finish in (Finish.END, Finish.LIMIT)
        return self._scores is Scores.ALL

    def _report(self, node: Node) -> None:
        self._listen(
            Expanded(
                self.round,
                node.id,
                node.parent,
                node.child,
                node.depth,
                node.tokens,
                node.text,
                node.finish.value,
                node.logprob,
                node.entropy,
            )
        )
        if node.reward is not None:
            self._listen(Scored(self.round, node.id, node.reward))
        if node.state is NodeState.FINISHED:
            length = path_length(self.tree, node.id)
            self._listen(Finished(self.round, node.id, node.finish.value, length))
        elif node.state is NodeState.PRUNED:
            self._listen(Pruned(self.round, node.id, node.finish.value))


def potentials(rewards: Sequence[float | None], branching: int) -> list[int]:
    """How many children each live beam may draw ahead, by its previous reward.

    The rewards' range is cut into ``branching`` bins of equal width; a beam in the j-th from the
    top gets ``branching`` - j + 1. Where all are equal, all are in the top bin; a beam without a
    reward gets one.
    """
    scored = [reward for reward in rewards if reward is not None]
    low, high = min(scored, default=0.0), max(scored, default=0.0)
    return [1 if r is None else _potential(r, low, high, branching) for r in rewards]


def _potential(reward: float, low: float, high: float, branching: int) -> int:
    if high == low:
        return branching
    from_bottom = int((reward - low) / (high - low) * branching)
    return min(from_bottom, branching - 1) + 1
