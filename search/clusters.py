"""Compare steps by cosine distance of embeddings: average-linkage clusters, or soft shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

UNITS = 10_000
"""Embeddings have unit length; their entries are whole multiples of 1/UNITS."""

PAPER_THRESHOLD = 0.05
"""The threshold of the ETS reference code, chosen for a sentence encoder."""

THRESHOLDS: Mapping[str, float] = {
    "hidden": 0.05,
    "lexical": 0.2,
    "encoder": PAPER_THRESHOLD,
    "endpoint": PAPER_THRESHOLD,
}
"""The default threshold by kind of embedder; the first two were chosen on dev questions."""


def rounded(vectors: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Scale the vectors to unit length and round them to 1e-4; a vector of zeros stays unchanged.

    Raises ValueError if they differ in length or have an entry that is not finite.
    """
    sizes = sorted({len(vector) for vector in vectors})
    if len(sizes) != 1:
        raise ValueError(f"embeddings: of {sizes} numbers; one size is needed")
    table = np.array(vectors, dtype=np.float64)
    if not np.isfinite(table).all():
        raise ValueError("embeddings: not finite; finite numbers are needed")
    _, exponent = np.frexp(np.abs(table).max(axis=1, keepdims=True, initial=0.0))
    table = np.ldexp(table, -exponent)  # exact, and squares then neither vanish nor overflow
    length = np.sqrt((table * table).sum(axis=1, keepdims=True))
    units = np.rint(table / np.where(length > 0, length, 1.0) * UNITS)
    return [tuple(row) for row in (units / UNITS).tolist()]


def cluster(embeddings: Sequence[tuple[float, ...]], threshold: float) -> list[int]:
    """The cluster of each embedding, numbered from 0 by first appearance.

    Agglomerative, average linkage, cut at cosine distance ``threshold``. Equal embeddings are one
    point and share a cluster. The embeddings must come from ``rounded``: their dot products are
    then sums of whole numbers, exact in any order.
    """
    places: dict[tuple[float, ...], int] = {}
    point = [places.setdefault(embedding, len(places)) for embedding in embeddings]
    if len(places) < 2:
        return point
    distances = _cosine_distances(np.array(list(places)))
    labels = fcluster(linkage(distances, "average"), threshold, criterion="distance")
    numbers: dict[int, int] = {}
    return [numbers.setdefault(int(labels[place]), len(numbers)) for place in point]


def uniqueness(embeddings: Sequence[tuple[float, ...]], temperature: float) -> list[float]:
    """Each embedding's own share, in (0, 1], of the softmax of its cosine similarities to all of
    them, itself included. k equal ones far from all others have 1/k each.

    The embeddings must come from ``rounded``; equal ones, also of zeros, have similarity 1.
    """
    count = Counter(embeddings)
    points = list(count)
    place = {point: i for i, point in enumerate(points)}
    distances = squareform(_cosine_distances(np.array(points)))
    company = np.exp(-distances / temperature) @ np.array([count[point] for point in points])
    return [1.0 / float(company[place[embedding]]) for embedding in embeddings]


def _cosine_distances(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 - cosine for every pair of ``points`` (n, size), in SciPy's condensed order.

    A vector of zeros is at distance 1 from all others.
    """
    units = np.rint(points * UNITS)
    products = units @ units.T
    length = np.sqrt(np.diagonal(products))
    length = np.where(length > 0, length, 1.0)
    left, right = np.triu_indices(len(points), 1)
    cosine = products[left, right] / (length[left] * length[right])
    return np.maximum(1.0 - cosine, 0.0)
