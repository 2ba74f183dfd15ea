"""The hashes of a tree: each node's noise seed, and the fingerprint of the whole.

Every node's noise follows from the request's seed and its path alone; equal digests mean equal
trees and equal answers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from search.tree import Node, NodeState, Tree

FORMAT = b"hedgerow-tree-1"
"""Version of the byte layout; a digest is comparable only with digests of the same format."""
UNITS = 10_000
"""Rewards are whole numbers of 1/UNITS."""
_STATES = {NodeState.OPEN: 0, NodeState.FINISHED: 1, NodeState.PRUNED: 2}


def round_reward(reward: float) -> float:
    """A reward as it enters the tree: the nearest multiple of 1e-4."""
    return round(reward * UNITS) / UNITS


def tree_digest(tree: Tree, answer: str | None) -> str:
    """64 hexadecimal digits over ids, parents, token ids, rewards, states and the answer.

    SHA-256 of, little-endian: FORMAT; the prompt (u32 count, u32 a token); the nodes (u32 count),
    each as u32 id, i32 parent, u8 state (open 0, finished 1, pruned 2), i32 reward in 1e-4 (-1:
    none), u32 count and u32 a token; u8 whether there is an answer, u32 byte count and UTF-8.
    Texts, log-probabilities, entropies and embeddings are not part of it.
    """
    sha = hashlib.sha256(FORMAT)
    sha.update(_ids(tree.prompt))
    sha.update(struct.pack("<I", len(tree)))
    for node in tree.nodes:
        sha.update(_node(node))
    text = (answer or "").encode()
    sha.update(struct.pack("<?I", answer is not None, len(text)) + text)
    return sha.hexdigest()


def combined_digest(digests: Iterable[str]) -> str:
    """One digest over those of several trees, in the order given."""
    sha = hashlib.sha256(FORMAT)
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
    """The noise seed by which the step of the node at ``path`` is drawn, whenever that is."""
    return node_seed(request_seed, "step", path)
