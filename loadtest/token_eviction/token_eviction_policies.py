"""What to evict of a tree: by ArborKV's equations (2) and (3), or by policies for one stream.

Three events and nothing else cause work: a boundary (a step closes), a transition (the wave that
decodes next stands elsewhere) and pressure (room runs short).

A stream is the path that is active now, prompt included. A rule gives the positions, ascending, of
the tokens that stay, from the attention paid to each token (n,), the lengths of the thoughts that
they make up (m,), the prompt's first, and a budget in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvpolicy.eviction_order import Bools, EvictionParams, Infeasible, Ints
from kvpolicy.token_allocation import Floors, Variant, allocate, select
from kvpolicy.tree_blocks import TreeBlocks
from kvpolicy.value import UNFITTED, Floats, Theta
from loadtest.token_eviction.token_cache import TokenCache
from search.engine import Hint
from search.tree import ROOT

MARGIN = 0.02
"""δ: the share of the budget that pressure frees beyond what is needed."""
SINKS = 4
LEAST = 4
"""Tokens of a thought that stay, no matter how old it is."""
_ROUNDING = 1e-9


def tail_only(attention: Floats, thoughts: Ints, budget: int) -> Ints:
    """The most recent tokens."""
    return np.arange(max(0, len(attention) - budget), len(attention))


def streaming_llm(attention: Floats, thoughts: Ints, budget: int) -> Ints:
    """Attention sinks and a window: the first ``SINKS`` tokens and the most recent ones."""
    at, sinks = np.arange(len(attention)), min(SINKS, budget)
    return at[(at < sinks) | (at >= len(at) - (budget - sinks))]


def h2o(attention: Floats, thoughts: Ints, budget: int) -> Ints:
    """Heavy hitters: half the budget for the most recent tokens, half for those attended to most.

    An odd token is recent.
    """
    return select(len(attention), min(budget, len(attention)), budget - budget // 2, attention)


def thinkv(attention: Floats, thoughts: Ints, budget: int) -> Ints:
    """Like ThinKV: older thoughts get less.

    The newest stays whole; of the others each one's allowance is half the next one's, but at least
    ``LEAST`` tokens, even beyond the budget; within it those attended to most stay.
    """
    newest = np.arange(len(thoughts)) == len(thoughts) - 1
    least = np.where(newest, thoughts, np.minimum(thoughts, LEAST))
    halves = 0.5 ** np.arange(len(thoughts), dtype=np.float64)[::-1]
    floors = Floors(ratio=0.0, tokens=LEAST, tail=0)
    budget = max(budget, int(least.sum()))
    counts = allocate(halves, thoughts, newest, budget, floors, "share").counts
    each = zip(np.cumsum(thoughts) - thoughts, thoughts, counts, strict=True)
    return np.concatenate([a + select(n, k, 0, attention[a : a + n]) for a, n, k in each])


STREAMS: Mapping[str, Callable[[Floats, Ints, int], Ints]] = {
    "tail_only": tail_only,
    "streaming_llm": streaming_llm,
    "h2o": h2o,
    "thinkv": thinkv,
}


class StreamPolicy:
    """A policy for one stream, in a tree: the path that is active now is the stream (section 5.1).

    Whenever a path becomes active it keeps ``share`` of its tokens, as the rule chooses; what it
    gives up never comes back. Such a policy knows nothing of other paths: if the tree exceeds its
    budget, whole blocks off the active paths go, those longest unused first.
    """

    rehydrates = False

    def __init__(self, cache: TokenCache, name: str, share: float) -> None:
        """``name``: of ``STREAMS``; ``share`` in (0, 1]."""
        self._cache, self._rule, self._share = cache, STREAMS[name], share
        self._used: dict[int, int] = {}
        self._active: set[int] = set()
        self._waves = 0

    def add_block(self, node: int, parent: int, tokens: int, confidence: float) -> None:
        """Note that a new block was used just now."""
        self._used[node] = self._waves

    def add_attention(self, node: int, mass: float, queries: int) -> None:
        """Ignored: rules use the attention of tokens, not of blocks."""

    def transition(self, hint: Hint) -> None:
        """Ignored: the values of nodes do not matter."""

    def enter(self, active: Sequence[int]) -> None:
        """The next wave grows from these blocks: choose what stays of each path, in order."""
        self._waves += 1
        chains = [self._cache.chain(leaf) for leaf in active]
        self._active = {name for chain in chains for name in chain}
        self._used |= dict.fromkeys(self._active, self._waves)
        for leaf, chain in zip(active, chains, strict=True):
            budget = math.ceil(self._share * chain[leaf].end - _ROUNDING)
            blocks = [block for block in chain.values() if len(block.there)]
            if self._share == 1 or not blocks:
                continue
            paid = [(block.later + block.within)[block.there] for block in blocks]
            sizes = np.array([len(each) for each in paid])
            positions = self._rule(np.concatenate(paid), sizes, budget)
            starts = np.cumsum(sizes) - sizes
            parts = np.split(positions, np.searchsorted(positions, starts[1:]))
            for block, part, start in zip(blocks, parts, starts, strict=True):
                block.keep(part - start)

    def fit(self, room: int) -> None:
        """Whole blocks go, those longest unused first, until all hold ``room`` tokens. Raises
        Infeasible."""
        blocks, count = self._cache.blocks, self._cache.count
        target = room - int(MARGIN * self._cache.capacity)
        idle = [n for n, block in blocks.items() if len(block.there) and n not in self._active]
        for name in sorted(idle, key=lambda n: (self._used.get(n, 0), -n)):
            if count <= target:
                break
            count -= len(blocks[name].there)
            blocks[name].keep(np.arange(0))
        if count > room:
            raise Infeasible(count, room, "active paths")

    def reserved(self, paths: set[int]) -> int:
        """Nothing is kept of blocks off these paths."""
        return 0


@dataclass(frozen=True, slots=True)
class ExtractiveParams:
    """How ArborKV's extractive mode decides.

    ``heavy``: in a block the tokens that later ones attend to most stay beside its tail, else the
    most recent ones. ``rehydrate``: whether blocks that a path returns to are made whole. The
    prompt is on every path and so stays whole, the sinks of section 4 (i) included.
    """

    theta: Theta = UNFITTED
    params: EvictionParams = field(default_factory=EvictionParams)
    heavy: bool = True
    rehydrate: bool = True
    variant: Variant = "ratio"


class ExtractivePolicy:
    """ArborKV (sections 3 and 4): active paths whole, of all other blocks some tokens."""

    def __init__(self, cache: TokenCache, how: ExtractiveParams, floors: Floors) -> None:
        self.rehydrates = how.rehydrate
        self._cache, self._how, self._floors = cache, how, floors
        self._blocks = TreeBlocks(cache.blocks[ROOT].end, how.theta.table(), how.params)
        self.add_block = self._blocks.add_block
        self.add_attention = self._blocks.add_attention

    def transition(self, hint: Hint) -> None:
        """Take new values v, outlook and dead ones. Ids are those of blocks, the dead ones gone."""
        self._blocks.set_values(hint.values)
        self._blocks.set_outlook(hint.outlook)
        self._blocks.mark_dead(hint.dead)

    def enter(self, active: Sequence[int]) -> None:
        """Make the paths to these blocks Path*; tokens are evicted for it when room is needed."""
        self._blocks.set_active(active)

    def fit(self, room: int) -> None:
        """Equations (2) and (3) over all blocks, so that they hold ``room`` tokens when active
        paths are whole; retention only falls. Raises Infeasible."""
        blocks = self._cache.blocks
        names = np.array(list(blocks))
        there = np.array([len(block.there) for block in blocks.values()])
        tokens = np.array([len(block.tokens) for block in blocks.values()])
        weights, on_path = self._blocks.own_weights()
        path = on_path[names]
        most = np.where(path, tokens, there) if self.rehydrates else there
        counts = self._counts(weights[names], tokens, path, most, room)
        for name, count in zip(names[counts < there], counts[counts < there], strict=True):
            block = blocks[name]
            attention = block.later[block.there] if self._how.heavy else None
            block.keep(select(len(block.there), count, self._floors.tail, attention))

    def reserved(self, paths: set[int]) -> int:
        """Tokens that blocks off these paths would keep at least: floors."""
        off = [block for name, block in self._cache.blocks.items() if name not in paths]
        floors = self._floors.of(np.array([len(block.tokens) for block in off], dtype=np.int64))
        return int(np.minimum(floors, [len(block.there) for block in off]).sum())

    def _counts(self, weight: Floats, tokens: Ints, path: Bools, most: Ints, room: int) -> Ints:
        """Tokens kept of each block. Floors that do not fit are lowered evenly until they do: the
        paper's loop would not end. Raises Infeasible if the active paths alone do not fit."""
        floors, margin = self._floors, int(MARGIN * self._cache.capacity)
        lower = (Floors(0.0, n, min(n, floors.tail)) for n in range(floors.tokens - 1, -1, -1))
        refused = Infeasible(0, room, "active paths")
        for least, free in ((floors, margin), (floors, 0), *((each, 0) for each in lower)):
            try:
                budget, variant = max(0, room - free), self._how.variant
                return allocate(weight, tokens, path, budget, least, variant, most).counts
            except Infeasible as error:
                refused = error
        raise refused


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


def policy_for(
    name: str, cache: TokenCache, *, share: float, floors: Floors
) -> ExtractivePolicy | StreamPolicy:
    """A policy of ``TOKEN_EVICTION`` by its name, for one tree.

    ``share``: of its tokens that a stream keeps; ``floors``: for the other policies.
    """
    if name in STREAMS:
        return StreamPolicy(cache, name, share)
    return ExtractivePolicy(cache, EXTRACTIVE[name], floors)
