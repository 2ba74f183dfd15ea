"""The weights of equation (2), by which blocks are evicted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpolicy.value import Floats

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Infeasible(Exception):
    """A budget is too small for what must stay. ``needed`` and ``budget`` are in tokens."""

    def __init__(self, needed: int, budget: int, subject: str) -> None:
        super().__init__(f"budget: {budget} tokens; {subject} need {needed}")
        self.needed = needed
        self.budget = budget


@dataclass(frozen=True, slots=True)
class EvictionParams:
    """Equation (2)'s constants: η (``off_path``) in (0, 1], γ (``sharpness``), λd, λΔ.

    γ and λΔ are 0 or more; λd may be negative, which favours deep blocks.
    """

    off_path: float = 0.5
    sharpness: float = 2.0
    depth_decay: float = 0.0
    distance_decay: float = 0.3


SERVING_PARAMS = EvictionParams(distance_decay=0.0)
"""What the engines use. No decay by distance: best-first search returns to the best open node,
however far away, and with the decay it lost to lru."""


def static_weight(score: Floats, depth: Ints, params: EvictionParams) -> Floats:
    """The part of a weight that does not depend on the active leaves: s^γ · e^(-λd·d)."""
    sharp = score**params.sharpness
    return sharp * np.exp(-params.depth_decay * depth) if params.depth_decay else sharp


def eviction_weights(
    static_weights: Floats, off_path: Bools, distance: Ints, params: EvictionParams
) -> Floats:
    """Equation (2) without α and clipping: η^[off path] · s^γ · e^(-λd·d) · e^(-λΔ·Δ).

    ``static_weights``: by ``static_weight``; ``distance``: Δ, edges to the nearest active leaf;
    all (n,).
    """
    weights = static_weights * np.where(off_path, params.off_path, 1.0)
    if params.distance_decay:
        weights *= np.exp(-params.distance_decay * distance)
    return weights
