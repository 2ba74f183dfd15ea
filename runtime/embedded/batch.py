"""Continuous batching of one model: which sequences run, and how many rows of each an iteration.

Lanes have an order. Memory that runs out is taken from evictable prefixes first, then from the
youngest sequence, so the oldest one always gets on. Nothing here can change what a sequence
computes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Generator, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch

from runtime.embedded.draft_tree import DraftBranch
from runtime.embedded.model.forward import Span
from runtime.embedded.prefix_cache import PrefixCache
from runtime.embedded.radix_tree import common_prefix, namespace_of
from runtime.embedded.schedule_order import prefill_budget
from runtime.embedded.sequence import Order, TokenSequence

HEADROOM = 4
"""Slots a sequence under way is expected to want soon, when another asks to enter."""
SPARE_ROWS = 8
"""Most rows a spare sequence may start with: more means that its prefix is not cached."""
WORTH_SHARING = 8
"""Tokens that another sequence is about to publish and that are worth waiting for."""


class Refusal(Enum):
    """Why a sequence may not enter now."""

    FULL = "no place in the batch; the next in line waits too"
    STARVED = "no memory; the next in line waits too"
    SHARED = "a sequence under way computes much of its prefix"


@dataclass(frozen=True, slots=True)
class Advance:
    """What an iteration did for a sequence: ``rows`` tokens computed after ``start``, and the
    logits (rows from the last known token on, vocab) once that is reached. ``beside``: the forks
    that had rows, with the logits of each."""

    sequence: TokenSequence
    start: int
    rows: int
    logits: torch.Tensor | None
    beside: tuple[tuple[DraftBranch, torch.Tensor], ...] = ()

    @property
    def all_rows(self) -> int:
        """Tokens computed, those of forks included."""
        return self.rows + sum(len(logits) for _, logits in self.beside)


class Batch:
    """The sequences under way of one model."""

    def __init__(
        self,
        forward: Forwards,
        cache: PrefixCache,
        *,
        limit: int,
        rows: int,
    ) -> None:
        """At most ``limit`` sequences at once and ``rows`` of prefill an iteration."""
        self.cache = cache
        self.sequences: list[TokenSequence] = []
        self._forward = forward
        self._store = forward.new_store(cache.capacity)
        if cache.evictor.attends:
            self._store.watch()
            cache.evictor.use_attention(self._store.attention)
        self._limit = limit
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
        insort(self.sequences, sequence, key=_order)
        return None

    @property
    def places(self) -> int:
        """Lanes that may still enter."""
        return self._limit - len(self.sequences)

    def publish(self, sequence: TokenSequence) -> None:
        """Take a sequence out and cache what it computed."""
        self.pause(sequence)
        self.cache.publish(sequence)

    def drop(self, sequence: TokenSequence) -> None:
        """Take a sequence out and forget what it computed."""
        self.pause(sequence)
        self.cache.drop(sequence)

    def pause(self, sequence: TokenSequence) -> None:
        """Take a sequence out if it is in; it keeps its slots."""
        if sequence in self.sequences:
            self.sequences.remove(sequence)

    def resume(self, sequence: TokenSequence) -> None:
        """Take a paused sequence in again."""
        insort(self.sequences, sequence, key=_order)

    def schedule(self, held: Set[TokenSequence] = frozenset()) -> Iterator[TokenSequence | None]:
        """Decide which rows the next pass has, slots reserved, of sequences not ``held`` back.

        Where KV is short, spare sequences are dropped first, then the youngest give way; a spare
        sequence without room waits. Each sequence that has lost its place comes out at once, and
        None where one alone does not fit since others' KV may not go: before it goes on, the
        caller requeues the one, or ends a search.
        """
        self._plan = []
        asked = [sequence for sequence in self.sequences if not sequence.spare]
        filling = [sequence for sequence in asked if sequence.missing - sequence.proposed > 1]
        shares = prefill_budget(
            [(sequence.tree, sequence.missing) for sequence in filling], self._rows
        )
        portion = dict(zip(filling, shares, strict=True))
        for sequence in list(self.sequences):
            if not sequence.live or sequence in held:
                continue
            if sequence.proposed and not self.cache.has_free(sequence, sequence.missing):
                self.cache.prune(sequence.retract().forks)
            rows = min(portion.get(sequence, sequence.missing), sequence.missing)
            if rows and not (yield from self._reserve(sequence, rows)):
                continue
            self.cache.fork(sequence)
            if rows or any(fork.missing for fork in sequence.forks):
                self._plan.append((sequence, rows))

    def run(self) -> list[Advance]:
        """One forward pass over the rows last scheduled; empty if there are none."""
        plan = self._plan
        if not plan:
            return []
        self.cache.keep_budget()
        self.cache.note_peaks()
        spans = [span for sequence, rows in plan for span in _spans(sequence, rows)]
        logits = self._forward.run(spans, self._store)
        advances, at = [], 0
        for sequence, rows in plan:
            start, asked = sequence.computed, rows - _silent(sequence, rows)
            own = logits[at : at + asked] if asked else None
            at += asked
            sequence.computed += rows
            beside = []
            for fork in [fork for fork in sequence.forks if fork.missing]:
                beside.append((fork, logits[at : at + fork.missing]))
                at += fork.missing
                fork.computed = len(fork.tokens)
            advances.append(Advance(sequence, start, rows, own, tuple(beside)))
        assert at == len(logits), "the model returned other rows than were asked for"
        return advances

    def drop_spare(
        self, sequence: TokenSequence | None = None, rows: int = 0
    ) -> list[TokenSequence]:
        """Drop spare sequences, the least likely first and prefills last, until ``sequence`` finds
        slots for ``rows`` tokens without an eviction; without one all of them. Returns the
        dropped."""
        spare = [one for one in self.cache.sequences if one.spare]
        spare.sort(key=lambda one: (one.length < len(one.tokens), one.order), reverse=True)
        dropped = []
        for one in spare:
            if sequence is not None and self.cache.has_free(sequence, rows):
                break
            self.drop(one)
            dropped.append(one)
        return dropped

    def _refusal(self, sequence: TokenSequence) -> Refusal | None:
        if sequence.spare and sequence.missing > SPARE_ROWS:
            return Refusal.STARVED
        if not self.sequences:
            return None
        promised = sum(max(0, other.length - other.allocated) for other in self.sequences)
        room = self.cache.spare_room if sequence.spare else self.cache.available
        if room < promised + sequence.missing + HEADROOM * (len(self.sequences) + 1):
            return Refusal.STARVED
        if sequence.missing >= WORTH_SHARING and any(
            _overlap(sequence, other) for other in self.sequences
        ):
            return Refusal.SHARED
        return None

    def _reserve(
        self, sequence: TokenSequence, rows: int
    ) -> Generator[TokenSequence | None, None, bool]:
        """Slots for the sequence's next rows; see ``schedule``. False if it has none now."""
        if sequence.spare:
            return self.cache.reserve(sequence, rows)
        while True:
            if sequence.computed + rows > sequence.allocated:
                yield from self.drop_spare(sequence, rows)
            if self.cache.reserve(sequence, rows):
                return True
            youngest = self.sequences[-1]
            if len(self.sequences) == 1:
                yield None
                if not sequence.live:
                    return False
                continue
            self.publish(youngest)
            yield youngest
            if youngest is sequence:
                return False


class Forwards(Protocol):
    """What a batch needs of a model: ``runtime.embedded.model.forward.Forward`` is one."""

    def new_store(self, slots: int) -> Any:
        """Room for the keys and values of ``slots`` tokens."""
        ...

    def run(self, spans: Sequence[Span], store: Any) -> torch.Tensor:
        """Logits (rows asked for, vocab) of the spans' new positions, in span order."""
        ...


def _order(sequence: TokenSequence) -> Order:
    return sequence.order


def _overlap(sequence: TokenSequence, other: TokenSequence) -> bool:
    """Whether ``other`` is about to compute a prefix of ``sequence`` worth waiting for."""
    if other.missing < WORTH_SHARING or namespace_of(sequence.tree) != namespace_of(other.tree):
        return False
    shared = common_prefix(sequence.tokens[: sequence.length], other.tokens[: other.length])
    return shared - sequence.shared >= WORTH_SHARING


def _silent(sequence: TokenSequence, rows: int) -> int:
    """How many of the sequence's next rows get no logits: those before its last known token."""
    return min(rows, max(0, sequence.known - 1 - sequence.computed))


def _spans(sequence: TokenSequence, rows: int) -> Iterator[Span]:
    """The sequence's next rows, then those of its forks."""
    start, end = sequence.computed, sequence.computed + rows
    if rows:
        yield Span(
            tokens=sequence.tokens[start:end],
            start=start,
            slots=sequence.slots[:end],
            logits_from=_silent(sequence, rows),
        )
    for fork in sequence.forks:
        if fork.missing:
            tokens = np.array(fork.tokens[fork.computed :], dtype=np.int64)
            at = sequence.known + fork.at + fork.computed
            yield Span(tokens, at, sequence.way(fork, fork.depth), 0)
