"""The search tree: the one structure that policies, votes, events and digests are functions of.

A node is one reasoning step. Token ids are the truth; text is decoded for people and never
tokenised again. Node 0 is the root: it stands for the prompt and has no step of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

ROOT = 0


class NodeState(StrEnum):
    """What may still happen to a node."""

    OPEN = "open"
    FINISHED = "finished"
    PRUNED = "pruned"


class Finish(StrEnum):
    """Why a step ended.

    ``STEP``: the step delimiter was drawn. ``END``: the model ended its reply. ``LENGTH``: the step
    reached its token limit; it is scored as it stands and a child goes on from there. ``EMPTY``: a
    delimiter with nothing before it. ``LOOP``: the step repeats its parent's tokens. ``LIMIT``: the
    trajectory reached its own token or depth limit without an end.
    """

    STEP = "step"
    END = "end"
    LENGTH = "length"
    EMPTY = "empty"
    LOOP = "loop"
    LIMIT = "limit"


@dataclass(slots=True)
class Node:
    """One reasoning step.

    ``tokens`` are the step's own ids with its delimiter or end token, ``logprob`` the mean natural
    log-probability a token under the sampling distribution's untempered model, ``entropy`` the
    Shannon entropy in nats of the distribution at the step's last token, ``reward`` in [0, 1]
    rounded to 1e-4 or None where the policy asked for no score. ``path`` holds the child indices
    from the root and names the node's random stream. ``first`` is the first node with the same
    steps from the root, often this one. ``embedding``: the step's unit vector, rounded, where the
    policy asked for one; it is derived, so nodes are equal without it.
    """

    id: int
    parent: int
    child: int
    depth: int
    tokens: tuple[int, ...]
    text: str
    finish: Finish
    state: NodeState
    path: tuple[int, ...]
    first: int
    logprob: float = 0.0
    entropy: float = 0.0
    reward: float | None = None
    embedding: tuple[float, ...] | None = field(default=None, compare=False, repr=False)
    children: list[int] = field(default_factory=list)


class Tree:
    """A prompt and the steps grown from it. Nodes are only added, never removed or renumbered."""

    def __init__(self, prompt: Sequence[int]) -> None:
        """``prompt``: the policy model's token ids, chat template included; must not be empty."""
        if not prompt:
            raise ValueError("prompt: empty; at least one token is needed")
        self.prompt: tuple[int, ...] = tuple(prompt)
        root = Node(ROOT, -1, 0, 0, (), "", Finish.STEP, NodeState.OPEN, (), ROOT)
        self.nodes: list[Node] = [root]
        self.generated_tokens = 0
        self._leaves = {ROOT: root}
        self._finished: list[Node] = []
        self._firsts: dict[tuple[int, tuple[int, ...]], int] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, node_id: int) -> Node:
        return self.nodes[node_id]

    def add(
        self,
        parent: int,
        tokens: Sequence[int],
        text: str,
        finish: Finish,
        *,
        logprob: float = 0.0,
        entropy: float = 0.0,
    ) -> Node:
        """Append the next child of ``parent`` and return it.

        Its state follows from ``finish``: END and LIMIT are finished, EMPTY and LOOP pruned, the
        rest open. Raises ValueError if the parent is not open.
        """
        above = self.nodes[parent]
        if above.state is not NodeState.OPEN:
            raise ValueError(f"parent: node {parent} is {above.state}; only open nodes grow")
        child = len(above.children)
        number, step = len(self.nodes), tuple(tokens)
        node = Node(
            id=number,
            parent=parent,
            child=child,
            depth=above.depth + 1,
            tokens=step,
            text=text,
            finish=finish,
            state=_STATE_AFTER[finish],
            path=(*above.path, child),
            first=self._firsts.setdefault((above.first, step), number),
            logprob=logprob,
            entropy=entropy,
        )
        above.children.append(node.id)
        self._leaves.pop(parent, None)
        self.nodes.append(node)
        if node.state is NodeState.OPEN:
            self._leaves[number] = node
        elif node.state is NodeState.FINISHED:
            self._finished.append(node)
        self.generated_tokens += len(node.tokens)
        return node

    def prune(self, node_id: int) -> None:
        """Mark an open node as never to be expanded again."""
        node = self.nodes[node_id]
        if node.state is NodeState.OPEN:
            node.state = NodeState.PRUNED
            self._leaves.pop(node_id, None)

    def chain(self, node_id: int) -> list[Node]:
        """The steps from below the root down to ``node_id`` (empty for the root)."""
        steps = []
        while node_id != ROOT:
            node = self.nodes[node_id]
            steps.append(node)
            node_id = node.parent
        return steps[::-1]

    def tokens(self, node_id: int) -> tuple[int, ...]:
        """The prompt and every step's ids down to and including ``node_id``."""
        return self.prompt + tuple(t for node in self.chain(node_id) for t in node.tokens)

    def text(self, node_id: int) -> str:
        """The reply so far: the texts of the chain, joined."""
        return "".join(node.text for node in self.chain(node_id))

    def leaves(self) -> Iterator[Node]:
        """Open nodes without children, in id order: all that a level-synchronous policy expands."""
        return iter(self._leaves.values())

    def finished(self) -> list[Node]:
        """Finished trajectories, in id order."""
        return self._finished.copy()

    def above(self, nodes: Iterable[Node]) -> set[int]:
        """Ids of the steps on the paths down to ``nodes``, these included; the root is none."""
        found: set[int] = set()
        for node in nodes:
            node_id = node.id
            while node_id != ROOT and node_id not in found:
                found.add(node_id)
                node_id = self.nodes[node_id].parent
        return found


_STATE_AFTER = {
    Finish.STEP: NodeState.OPEN,
    Finish.LENGTH: NodeState.OPEN,
    Finish.END: NodeState.FINISHED,
    Finish.LIMIT: NodeState.FINISHED,
    Finish.EMPTY: NodeState.PRUNED,
    Finish.LOOP: NodeState.PRUNED,
}
