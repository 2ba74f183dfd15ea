"""What a tree gives up: ArborKV by equations (2) and (3), and policies that know one stream alone.

Three events and nothing else cause work: a boundary (a step closes), a transition (the wave that
decodes next stands elsewhere) and pressure (slots run short).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from kvpolicy.eviction_order import EvictionParams, Infeasible
from kvpolicy.token_allocation import Allocation, Floors, Variant, allocate, select
from kvpolicy.tree_blocks import TreeBlocks
from kvpolicy.value import UNFITTED, Theta
from loadtest.token_eviction.token_cache import TokenCache
from loadtest.token_eviction.token_eviction_baselines import STREAMS, Stream, lru

MARGIN = 0.02
"""δ: the share of the budget that pressure frees beyond what is wanted."""
_ROUNDING = 1e-9


class TokenEvictionPolicy(Protocol):
    """Hears what becomes of one tree's blocks and cuts them. ``rehydrates``: whether what a path
    is missing is computed again before a step is drawn from it."""

    rehydrates: bool

    def add_block(self, block: int, parent: int, tokens: int, confidence: float) -> None:
        """Boundary: a new block; ``confidence``: equation (1) after its last token."""
        ...

    def add_attention(self, block: int, mass: float, queries: int) -> None:
        """So many later tokens paid so much attention to a block."""
        ...

    def transition(
        self, values: Mapping[int, float], outlook: Sequence[int], dead: Iterable[int]
    ) -> None:
        """The search moved on; blocks in place of nodes, the dead ones are gone already."""
        ...

    def enter(self, active: Sequence[int]) -> None:
        """Transition: the next wave grows from these blocks."""
        ...

    def fit(self, room: int) -> None:
        """Pressure: cut until ``room`` slots are free beside what the active paths are to hold.

        Raises Infeasible.
        """
        ...

    def reserved(self, paths: set[int]) -> int:
        """Tokens that blocks off these paths would keep at least."""
        ...


@dataclass(frozen=True, slots=True)
class ExtractiveParams:
    """How ArborKV's extractive mode decides.

    ``heavy``: within a block those that later tokens attend to stay beside its tail, else the most
    recent ones. ``rehydrate``: blocks that a path comes back to are made whole, or never. The
    prompt is on every path and so stays whole, the sinks of section 4 (i) included.
    """

    theta: Theta = UNFITTED
    params: EvictionParams = field(default_factory=EvictionParams)
    floors: Floors = field(default_factory=Floors)
    heavy: bool = True
    rehydrate: bool = True
    variant: Variant = "ratio"


class ExtractivePolicy:
    """ArborKV (sections 3 and 4): active paths whole, of all other blocks some tokens.

    Floors that do not fit the budget are lowered evenly until they do (``lowered`` counts how
    often): the paper's loop would not end.
    """

    def __init__(self, held: TokenCache, how: ExtractiveParams) -> None:
        self.rehydrates = how.rehydrate
        self.lowered = 0
        self._held, self._how = held, how
        self._blocks = TreeBlocks(held.length(0), how.theta.table(), how.params)
        margin, floors = int(MARGIN * held.pool.capacity), how.floors
        lower = (Floors(0.0, n, min(n, floors.tail)) for n in range(floors.tokens - 1, -1, -1))
        self._tries = ((floors, margin), (floors, 0), *((each, 0) for each in lower))

    def add_block(self, block: int, parent: int, tokens: int, confidence: float) -> None:
        """Score it; it stands on an active path, so nothing of it goes."""
        self._blocks.add_block(block, parent, tokens, confidence)

    def add_attention(self, block: int, mass: float, queries: int) -> None:
        """The running mass a."""
        self._blocks.add_attention(block, mass, queries)

    def transition(
        self, values: Mapping[int, float], outlook: Sequence[int], dead: Iterable[int]
    ) -> None:
        """New values v."""
        self._blocks.set_values(values)
        self._blocks.set_outlook(outlook)
        self._blocks.mark_dead(dead)

    def enter(self, active: Sequence[int]) -> None:
        """Path* is where they stand; what must go for it goes when room is asked for."""
        self._blocks.set_active(active)

    def fit(self, room: int) -> None:
        """Equations (2) and (3) over all blocks; retention only falls."""
        held = self._held
        names = np.array(list(held.blocks))
        there = np.array([block.held for block in held.blocks.values()])
        tokens = np.array([len(block.tokens) for block in held.blocks.values()])
        weights, on_path = self._blocks.own_weights()
        path = on_path[names]
        most = np.where(path, tokens, there) if self.rehydrates else there
        left = held.pool.available + int(there.sum()) - room
        counts = self._allocate(weights[names], tokens, path, most, left).counts
        for name, count in zip(names[counts < there], counts[counts < there], strict=True):
            block = held[int(name)]
            attention = block.later[block.there] if self._how.heavy else None
            held.keep(block, select(block.held, int(count), self._how.floors.tail, attention))

    def reserved(self, paths: set[int]) -> int:
        """Floors."""
        off = [block for name, block in self._held.blocks.items() if name not in paths]
        floors = self._how.floors.of(np.array([len(block.tokens) for block in off], np.int64))
        return sum(min(block.held, int(floor)) for block, floor in zip(off, floors, strict=True))

    def _allocate(
        self, weight: np.ndarray, tokens: np.ndarray, path: np.ndarray, most: np.ndarray, left: int
    ) -> Allocation:
        """Raises Infeasible if the active paths alone do not fit."""
        refused = Infeasible(0, left, "")
        for number, (floors, margin) in enumerate(self._tries):
            try:
                kept = allocate(
                    weight, tokens, path, max(0, left - margin), floors, self._how.variant, most
                )
            except Infeasible as error:
                refused = error
                continue
            self.lowered += number > 1
            return kept
        raise refused


class StreamPolicy:
    """A policy for one stream, in a tree: the path that is active now is the stream (section 5.1).

    Whenever a path becomes active it keeps ``share`` of its tokens, as the policy chooses; what it
    gives up never comes back. Such a policy knows nothing of other paths: if the tree exceeds its
    budget, whole blocks off the active paths go, those longest unused first.
    """

    rehydrates = False

    def __init__(self, held: TokenCache, name: str, share: float) -> None:
        """``name``: of ``STREAMS``; ``share`` in (0, 1]."""
        self._held, self._select, self._share = held, STREAMS[name], share
        self._margin = int(MARGIN * held.pool.capacity)
        self._used: dict[int, int] = {}
        self._active: set[int] = set()
        self._waves = 0

    def add_block(self, block: int, parent: int, tokens: int, confidence: float) -> None:
        """It was used just now."""
        self._used[block] = self._waves

    def add_attention(self, block: int, mass: float, queries: int) -> None:
        """Tokens alone count, not blocks."""

    def transition(
        self, values: Mapping[int, float], outlook: Sequence[int], dead: Iterable[int]
    ) -> None:
        """What the search thinks does not matter."""

    def enter(self, active: Sequence[int]) -> None:
        """Choose what stays of each path, in order."""
        self._waves += 1
        chains = [self._held.chain(leaf) for leaf in active]
        self._active = {block for chain in chains for block in chain}
        self._used |= dict.fromkeys(self._active, self._waves)
        if self._share < 1:
            for leaf, chain in zip(active, chains, strict=True):
                budget = math.ceil(self._share * self._held.length(leaf) - _ROUNDING)
                self._choose(chain, budget)

    def fit(self, room: int) -> None:
        """Whole blocks, those longest unused first."""
        held = self._held
        names = sorted(held.blocks)
        there = np.array([held[name].held for name in names])
        used = np.array([self._used.get(name, 0) for name in names])
        locked = np.array([name in self._active for name in names])
        left = held.pool.available + int(there.sum()) - room
        needed = int(there[locked].sum())
        if needed > left:
            raise Infeasible(needed, left, "active paths")
        kept = lru(there, used, locked, max(needed, left - self._margin))
        for name, gone in zip(names, kept < there, strict=True):
            if gone:
                held.drop(held[name], held[name].there)

    def reserved(self, paths: set[int]) -> int:
        """Nothing."""
        return 0

    def _choose(self, chain: Sequence[int], budget: int) -> None:
        blocks = [self._held[name] for name in chain if self._held[name].held]
        if not blocks:
            return
        paid = [(block.later + block.within)[block.there] for block in blocks]
        sizes = np.array([len(each) for each in paid], dtype=np.int64)
        kept = self._select(Stream(np.concatenate(paid), sizes), budget)
        ends = np.cumsum(sizes)
        for block, end, size in zip(blocks, ends, sizes, strict=True):
            mine = kept[(kept >= end - size) & (kept < end)]
            self._held.keep(block, mine - (end - size))


_WHOLE = ExtractiveParams()
_EXTRACTIVE: dict[str, ExtractiveParams] = {
    "extractive": _WHOLE,
    "extractive_no_value": replace(_WHOLE, theta=UNFITTED.only("ua")),
    "extractive_no_confidence": replace(_WHOLE, theta=UNFITTED.only("va")),
    "extractive_no_attention": replace(_WHOLE, theta=UNFITTED.only("vu")),
    "extractive_no_estimator": replace(_WHOLE, params=EvictionParams(sharpness=0.0)),
    "extractive_no_distance": replace(_WHOLE, params=EvictionParams(distance_decay=0.0)),
    "extractive_no_siblings": replace(_WHOLE, params=EvictionParams(off_path=1.0)),
    "extractive_tail": replace(_WHOLE, heavy=False),
    "extractive_share": replace(_WHOLE, variant="share"),
}
"""The extractive mode, its ablations (tables 3 and 7) and the other reading of its allocation."""

EXTRACTIVE = _EXTRACTIVE | {
    f"{name}_never": replace(how, rehydrate=False) for name, how in _EXTRACTIVE.items()
}
"""The same with and without rehydration (table 4)."""

TOKEN_EVICTION = (*EXTRACTIVE, *STREAMS)
"""The names of all policies here."""


def policy_for(name: str, held: TokenCache, *, share: float, floors: Floors) -> TokenEvictionPolicy:
    """A policy of ``TOKEN_EVICTION`` by its name, for one tree.

    ``share``: of a stream that a policy of streams keeps; ``floors``: of the others.
    """
    if name in STREAMS:
        return StreamPolicy(held, name, share)
    return ExtractivePolicy(held, replace(EXTRACTIVE[name], floors=floors))
