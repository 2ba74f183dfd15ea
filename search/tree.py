"""The search tree: policies, votes, events and digests are functions of it.

A node is one reasoning step. Token ids are the truth; text is decoded for people and never
tokenised again. Node 0 is the root: it stands for the prompt and has no step of its own. Every
node's noise follows from the request's seed and its path alone; equal digests mean equal trees and
equal answers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

ROOT = 0
DIGEST_FORMAT = b"hedgerow-tree-1"
"""Version of the byte layout; a digest is comparable only with digests of the same format."""
UNITS = 10_000
"""Rewards are whole numbers of 1/UNITS."""


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

    @property
    def dies_at_birth(self) -> bool:
        """Whether the step is dead: it ends no trajectory, and nothing may be drawn below it."""
        return self in (Finish.EMPTY, Finish.LOOP)


@dataclass(slots=True)
class Node:
    """One reasoning step.

    ``tokens`` are the step's own ids with its delimiter or end token, ``logprob`` the mean natural
    log-probability per token under the model's untempered distribution, ``entropy`` the
    Shannon entropy in nats of the distribution at the step's last token (both None where the engine
    does not know them), ``reward`` in [0, 1] rounded to 1e-4 or None where the policy asked for no
    score. ``path`` holds the child indices from the root and names the node's random stream.
    ``first`` is the first node with the same steps from the root, often this one. ``embedding``:
    the step's unit vector, rounded, where the policy asked for one; it is derived, so nodes are
    equal without it.
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
    logprob: float | None = 0.0
    entropy: float | None = 0.0
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
        logprob: float | None = 0.0,
        entropy: float | None = 0.0,
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
        """Ids of the steps on the paths down to ``nodes``, these included, without the root."""
        steps: set[int] = set()
        for node in nodes:
            node_id = node.id
            while node_id != ROOT and node_id not in steps:
                steps.add(node_id)
                node_id = self.nodes[node_id].parent
        return steps


_STATE_AFTER = {
    Finish.STEP: NodeState.OPEN,
    Finish.LENGTH: NodeState.OPEN,
    Finish.END: NodeState.FINISHED,
    Finish.LIMIT: NodeState.FINISHED,
    Finish.EMPTY: NodeState.PRUNED,
    Finish.LOOP: NodeState.PRUNED,
}
_STATES = {NodeState.OPEN: 0, NodeState.FINISHED: 1, NodeState.PRUNED: 2}


def round_reward(reward: float) -> float:
    """A reward as it enters the tree: the nearest multiple of 1e-4."""
    return round(reward * UNITS) / UNITS


def tree_digest(tree: Tree, answer: str | None) -> str:
    """64 hexadecimal digits over ids, parents, token ids, rewards, states and the answer.

    SHA-256 of, little-endian: DIGEST_FORMAT; the prompt (u32 count, u32 a token); the nodes (u32
    count), each as u32 id, i32 parent, u8 state (open 0, finished 1, pruned 2), i32 reward in 1e-4
    (-1: none), u32 count and u32 a token; u8 whether there is an answer, u32 byte count and UTF-8.
    Texts, log-probabilities, entropies and embeddings are not part of it.
    """
    sha = hashlib.sha256(DIGEST_FORMAT)
    sha.update(_ids(tree.prompt))
    sha.update(struct.pack("<I", len(tree)))
    for node in tree.nodes:
        sha.update(_node(node))
    text = (answer or "").encode()
    sha.update(struct.pack("<?I", answer is not None, len(text)) + text)
    return sha.hexdigest()


def combined_digest(digests: Iterable[str]) -> str:
    """One digest over those of several trees, in the order given."""
    sha = hashlib.sha256(DIGEST_FORMAT)
    for digest in digests:
        sha.update(bytes.fromhex(digest))
    return sha.hexdigest()


def _node(node: Node) -> bytes:
    reward = -1 if node.reward is None else round(node.reward * UNITS)
    head = struct.pack("<IiBi", node.id, node.parent, _STATES[node.state], reward)
    return head + _ids(node.tokens)


def _ids(tokens: tuple[int, ...]) -> bytes:
    return struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)


def node_seed(request_seed: int, purpose: str, path: Sequence[int]) -> int:
    """The 64-bit noise seed of the node at ``path`` (child indices from the root).

    ``purpose`` keeps streams apart that share a path, such as drawing a step and judging it.
    """
    name = purpose.encode()
    data = struct.pack(f"<QI{len(path)}I", request_seed, len(name), *path) + name
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def step_seed(request_seed: int, path: Sequence[int]) -> int:
    """The noise seed for drawing the step of the node at ``path``, whenever it is drawn."""
    return node_seed(request_seed, "step", path)
