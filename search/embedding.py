"""The vectors of a tree's steps: each distinct step is embedded once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from search.clusters import rounded
from search.engine import EmbeddingMissing, Trajectory
from search.tree import Node, Tree


class Embeddings:
    """The vectors of the steps of one tree, by token ids: equal steps share one."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._vectors: dict[tuple[int, ...], tuple[float, ...]] = {}

    @property
    def empty(self) -> bool:
        """Whether no step has been embedded yet."""
        return not self._vectors

    def unknown(self, nodes: Iterable[Node]) -> list[Trajectory]:
        """Paths whose last step has no vector yet: each distinct step once, by its first node."""
        first: dict[tuple[int, ...], Node] = {}
        for node in nodes:
            if node.tokens not in self._vectors:
                first.setdefault(node.tokens, node)
        return [self._trajectory(node) for node in first.values()]

    def new(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The paths whose last step has no vector yet."""
        return [t for t in trajectories if t.steps[-1] not in self._vectors]

    def take(self, trajectories: Sequence[Trajectory], vectors: Sequence[Sequence[float]]) -> None:
        """Store the vectors of the paths' last steps, rounded.

        Raises EmbeddingMissing for a wrong number of vectors, unfit entries or differing sizes.
        """
        if len(vectors) != len(trajectories):
            counts = f"{len(vectors)} embeddings for {len(trajectories)} steps"
            raise EmbeddingMissing(f"engine: gave {counts}")
        try:
            unit_vectors = rounded(vectors)
        except ValueError as error:
            raise EmbeddingMissing(f"engine: {error}") from error
        sizes = {len(vector) for vector in (*unit_vectors[:1], *islice(self._vectors.values(), 1))}
        if len(sizes) > 1:
            raise EmbeddingMissing(f"engine: embeddings of {sorted(sizes)} numbers in one tree")
        for trajectory, vector in zip(trajectories, unit_vectors, strict=True):
            self._vectors[trajectory.steps[-1]] = vector

    def store(self, nodes: Iterable[Node]) -> None:
        """Set the nodes' embeddings, to None where the step has no vector."""
        for node in nodes:
            node.embedding = self._vectors.get(node.tokens)

    def _trajectory(self, node: Node) -> Trajectory:
        chain = self._tree.chain(node.id)
        return Trajectory(
            node.id, tuple(step.tokens for step in chain), tuple(step.text for step in chain)
        )
