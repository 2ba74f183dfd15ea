"""Continuous batching of one model: which lanes run, and how many rows of each an iteration.

Lanes have an order. Memory that runs out is taken from evictable prefixes first, then from the
youngest lane, so the oldest one always gets on. Nothing here can change what a lane computes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Generator, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.embedded.checks import ids
from runtime.embedded.draft_tree import DraftBranch
from runtime.embedded.fairness import prefill_budget
from runtime.embedded.model.forward import Span
from runtime.embedded.prefix_cache import PrefixCache
from runtime.embedded.radix_tree import common_prefix, namespace_of
from runtime.embedded.sequence import Order, TokenSequence
from search.engine import EngineError

HEADROOM = 4
"""Slots a lane under way is expected to want soon, when another asks to enter."""
SPARE_ROWS = 8
"""Most rows a spare lane may start with: more means that its prefix is not cached."""
WORTH_SHARING = 8
"""Tokens that another lane is about to publish and that are worth waiting for."""


class Refusal(Enum):
    """Why a lane may not enter now."""

    FULL = "no place in the batch; the next in line waits too"
    STARVED = "no memory; the next in line waits too"
    SHARED = "a lane under way computes much of its prefix"


@dataclass(frozen=True, slots=True)
class Advance:
    """What an iteration did for a lane: ``rows`` tokens computed after ``start``, and the logits
    (rows from the last known token on, vocab) once that is reached. ``beside``: the forks that had
    rows, with the logits of each."""

    lane: TokenSequence
    start: int
    rows: int
    logits: torch.Tensor | None
    beside: tuple[tuple[DraftBranch, torch.Tensor], ...] = ()

    @property
    def all_rows(self) -> int:
        """Tokens computed, those of forks included."""
        return self.rows + sum(len(logits) for _, logits in self.beside)


class Batch:
    """The lanes under way of one model."""

    def __init__(
        self,
        forward: Forwards,
        cache: PrefixCache,
        *,
        lanes: int,
        rows: int,
    ) -> None:
        """At most ``lanes`` at once and ``rows`` of prefill an iteration."""
        self.cache = cache
        self.lanes: list[TokenSequence] = []
        self._forward = forward
        self._store = forward.new_store(cache.capacity)
        if cache.evictor.attends:
            self._store.watch()
            cache.evictor.use_attention(self._store.attention)
        self._limit = lanes
        self._rows = rows
        self._plan: list[tuple[TokenSequence, int]] = []

    def enter(self, sequence: TokenSequence, tokens: np.ndarray, upto: int) -> Refusal | None:
        """Start a sequence over ``tokens``, or say why not; see ``PrefixCache.open``."""
        if self.places <= 0:
            return Refusal.FULL
        self.cache.open(sequence, tokens, upto)
        refusal = self._refusal(sequence)
        if refusal:
            self.cache.drop(sequence)
            return refusal
        insort(self.lanes, sequence, key=_order)
        return None

    @property
    def places(self) -> int:
        """Lanes that may still enter."""
        return self._limit - len(self.lanes)

    def publish(self, lane: TokenSequence) -> None:
        """Take a lane out and cache what it computed."""
        self.pause(lane)
        self.cache.publish(lane)

    def drop(self, lane: TokenSequence) -> None:
        """Take a lane out and forget what it computed."""
        self.pause(lane)
        self.cache.drop(lane)

    def pause(self, lane: TokenSequence) -> None:
        """Take a lane out if it is in; it keeps its slots."""
        if lane in self.lanes:
            self.lanes.remove(lane)

    def resume(self, lane: TokenSequence) -> None:
        """Take a paused lane in again."""
        insort(self.lanes, lane, key=_order)

    def schedule(self, held: Set[TokenSequence] = frozenset()) -> Iterator[TokenSequence | None]:
        """Decide which rows the next pass has, slots reserved, of lanes not ``held`` back.

        Where KV is short, spare lanes are dropped first, then the youngest give way; a spare lane
        without room waits. Each lane that has lost its place comes out at once, and None where one
        alone does not fit since others' KV may not go: before it goes on, the caller requeues the
        one, or ends a search.
        """
        self._plan = []
        asked = [lane for lane in self.lanes if not lane.spare]
        filling = [lane for lane in asked if lane.missing - lane.proposed > 1]
        shares = prefill_budget([(lane.tree, lane.missing) for lane in filling], self._rows)
        portion = dict(zip(filling, shares, strict=True))
        for lane in list(self.lanes):
            if not lane.live or lane in held:
                continue
            if lane.proposed and not self.cache.has_free(lane, lane.missing):
                self.cache.prune(lane.retract().forks)
            rows = min(portion.get(lane, lane.missing), lane.missing)
            if rows and not (yield from self._reserve(lane, rows)):
                continue
            self.cache.fork(lane)
            if rows or any(fork.missing for fork in lane.forks):
                self._plan.append((lane, rows))

    def run(self) -> list[Advance]:
        """One forward pass over the rows last scheduled; empty if there are none."""
        plan = self._plan
        if not plan:
            return []
        self.cache.keep_budget()
        self.cache.note_peaks()
        spans = [span for lane, rows in plan for span in _spans(lane, rows)]
        logits = self._forward.run(spans, self._store)
        advances, at = [], 0
        for lane, rows in plan:
            start, asked = lane.computed, rows - _silent(lane, rows)
            own = logits[at : at + asked] if asked else None
            at += asked
            lane.computed += rows
            beside = []
            for fork in [fork for fork in lane.forks if fork.missing]:
                beside.append((fork, logits[at : at + fork.missing]))
                at += fork.missing
                fork.computed = len(fork.tokens)
            advances.append(Advance(lane, start, rows, own, tuple(beside)))
        assert at == len(logits), "the model returned other rows than were asked for"
        return advances

    def drop_spare(self, lane: TokenSequence | None = None, rows: int = 0) -> list[TokenSequence]:
        """Drop spare lanes, the least likely first and prefills last, until ``lane`` finds slots
        for ``rows`` tokens without an eviction; without one all of them. Returns the dropped."""
        spare = [one for one in self.cache.lanes if one.spare]
        spare.sort(key=lambda one: (one.length < len(one.tokens), one.order), reverse=True)
        dropped = []
        for one in spare:
            if lane is not None and self.cache.has_free(lane, rows):
                break
            self.drop(one)
            dropped.append(one)
        return dropped

    def _refusal(self, lane: TokenSequence) -> Refusal | None:
        if lane.spare and lane.missing > SPARE_ROWS:
            return Refusal.STARVED
        if not self.lanes:
            return None
        promised = sum(max(0, other.length - other.allocated) for other in self.lanes)
        room = self.cache.spare_room if lane.spare else self.cache.available
        if room < promised + lane.missing + HEADROOM * (len(self.lanes) + 1):
            return Refusal.STARVED
        if lane.missing >= WORTH_SHARING and any(_overlap(lane, other) for other in self.lanes):
            return Refusal.SHARED
        return None

    def _reserve(
        self, lane: TokenSequence, rows: int
    ) -> Generator[TokenSequence | None, None, bool]:
        """Slots for the lane's next rows; see ``schedule``. False if it has none now."""
        if lane.spare:
            return self.cache.reserve(lane, rows)
        while True:
            if lane.computed + rows > lane.allocated:
                yield from self.drop_spare(lane, rows)
            if self.cache.reserve(lane, rows):
                return True
            youngest = self.lanes[-1]
            if len(self.lanes) == 1:
                yield None
                if not lane.live:
                    return False
                continue
            self.publish(youngest)
            yield youngest
            if youngest is lane:
                return False


class Forwards(Protocol):
    """What a batch needs of a model: ``runtime.embedded.model.forward.Forward`` is one."""

    def new_store(self, slots: int) -> Any:
        """Room for the keys and values of ``slots`` tokens."""
        ...

    def run(self, spans: Sequence[Span], store: Any) -> torch.Tensor:
        """Logits (rows asked for, vocab) of the spans' new positions, in span order."""
        ...


def must_be_ids(
    field: str, tokens: Sequence[int] | NDArray[np.int64], vocab: int
) -> NDArray[np.int64]:
    """``tokens``, some ids of a model with ``vocab`` of them, as an array. Raises EngineError."""
    found = ids(field, tokens)
    if not len(found):
        raise EngineError(f"{field}: empty; at least one token id is needed")
    for token in (found.min(), found.max()):
        if not 0 <= token < vocab:
            raise EngineError(f"{field}: token id {token}; ids from 0 to {vocab - 1} are needed")
    return found


def _order(lane: TokenSequence) -> Order:
    return lane.order


def _overlap(lane: TokenSequence, other: TokenSequence) -> bool:
    """Whether ``other`` is about to compute a prefix of ``lane`` worth waiting for."""
    if other.missing < WORTH_SHARING or namespace_of(lane.tree) != namespace_of(other.tree):
        return False
    shared = common_prefix(lane.tokens[: lane.length], other.tokens[: other.length])
    return shared - lane.shared >= WORTH_SHARING


def _silent(lane: TokenSequence, rows: int) -> int:
    """How many of the lane's next rows get no logits: those before its last known token."""
    return min(rows, max(0, lane.known - 1 - lane.computed))


def _spans(lane: TokenSequence, rows: int) -> Iterator[Span]:
    """The lane's next rows, then those of its forks."""
    start, end = lane.computed, lane.computed + rows
    if rows:
        yield Span(
            tokens=lane.tokens[start:end],
            start=start,
            slots=lane.slots[:end],
            logits_from=_silent(lane, rows),
        )
    for fork in lane.forks:
        if fork.missing:
            tokens = np.array(fork.tokens[fork.computed :], dtype=np.int64)
            at = lane.known + fork.at + fork.computed
            yield Span(tokens, at, lane.way(fork, fork.depth), 0)
