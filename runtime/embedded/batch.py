"""Continuous batching of one model: which sequences run, and how many rows of each an iteration.

Sequences have an order. Memory that runs out is taken from evictable prefixes first, then from the
youngest sequence, so the oldest one always gets on. Nothing here can change what a sequence
computes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch

from runtime.accounting import Flops, TrackedSearch, sum_of_contexts
from runtime.embedded.model.batch_plan import Span
from runtime.embedded.prefix_cache import PrefixCache
from runtime.embedded.radix_tree import common_prefix, namespace_of
from runtime.embedded.sequence import DraftChain, TokenSequence, order_of

PREFILL_ROWS = 256
"""Of an iteration, all sequences together, beside those that decode."""
HEADROOM = 4
"""Slots a running sequence is expected to want soon, when another asks to enter."""
PREEMPTIBLE_ROWS = 8
"""Most rows a preemptible sequence may start with: more means that its prefix is not cached."""
WORTH_SHARING = 8
"""Tokens that another sequence is about to publish and that are worth waiting for."""


class Refusal(Enum):
    """Why a sequence may not enter now."""

    FULL = "no place in the batch; the next in line waits too"
    OUT_OF_KV = "no memory; the next in line waits too"
    SHARED = "a running sequence computes much of its prefix"


@dataclass(frozen=True, slots=True)
class Advance:
    """What an iteration did for a sequence: ``rows`` tokens computed after ``start``, and the
    logits (rows from the last committed token on, vocab) once that is reached. ``children``: the
    draft's children that had rows, with the logits of each."""

    sequence: TokenSequence
    start: int
    rows: int
    logits: torch.Tensor | None
    children: tuple[tuple[DraftChain, torch.Tensor], ...] = ()

    @property
    def all_rows(self) -> int:
        """Tokens computed, those of children included."""
        return self.rows + sum(len(logits) for _, logits in self.children)

    def flops(self, cost: Flops) -> float:
        """What this part of the pass cost."""
        contexts = sum_of_contexts(self.start, self.rows)
        logits = 0 if self.logits is None else len(self.logits)
        children = self.all_rows - self.rows
        contexts += children * (self.start + self.rows)
        return cost(self.all_rows, contexts, logits + children)


class Batch:
    """The running sequences of one model."""

    def __init__(
        self,
        forward: Forwards,
        cache: PrefixCache,
        *,
        limit: int,
    ) -> None:
        """At most ``limit`` sequences at once."""
        self.cache = cache
        self.sequences: list[TokenSequence] = []
        self._forward = forward
        self._store = forward.new_store(cache.capacity)
        if cache.evictor.attends:
            self._store.watch()
            cache.evictor.use_attention(self._store.attention)
        self._limit = limit
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
        insort(self.sequences, sequence, key=order_of)
        return None

    @property
    def places(self) -> int:
        """Sequences that may still enter."""
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
        insort(self.sequences, sequence, key=order_of)

    def schedule(self, held: Set[TokenSequence] = frozenset()) -> Iterator[TokenSequence | None]:
        """Decide which rows the next pass has, slots reserved, of sequences not ``held`` back.

        Where KV is short, preemptible sequences are dropped first, then the youngest are preempted;
        a preemptible one without room waits. Each preempted sequence comes out at once, and None
        where one alone does not fit since others' KV may not go: before it goes on, the caller
        requeues the one, or ends a search.
        """
        self._plan = []
        prefilling = [
            sequence
            for sequence in self.sequences
            if not sequence.preemptible and sequence.missing - sequence.draft_count > 1
        ]
        wanted = [(sequence.tree, sequence.missing) for sequence in prefilling]
        budget = dict(zip(prefilling, prefill_budget(wanted, PREFILL_ROWS), strict=True))
        for sequence in list(self.sequences):
            if not sequence.live or sequence in held:
                continue
            if sequence.draft_count and not self.cache.has_free(sequence, sequence.missing):
                self.cache.free_children(sequence.detach_draft().children)
            rows = min(budget.get(sequence, sequence.missing), sequence.missing)
            if rows and not (yield from self._reserve(sequence, rows)):
                continue
            self.cache.allocate_children(sequence)
            if rows or any(child.missing for child in sequence.children):
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
            start, read = sequence.computed, rows - _without_logits(sequence, rows)
            own = logits[at : at + read] if read else None
            at += read
            sequence.computed += rows
            children = []
            for child in [child for child in sequence.children if child.missing]:
                children.append((child, logits[at : at + child.missing]))
                at += child.missing
                child.computed = len(child.tokens)
            advances.append(Advance(sequence, start, rows, own, tuple(children)))
        assert at == len(logits), "the model returned other rows than were asked for"
        return advances

    def drop_preemptible(
        self, sequence: TokenSequence | None = None, rows: int = 0
    ) -> list[TokenSequence]:
        """Drop preemptible sequences, the least likely first and prefills last, until ``sequence``
        finds slots for ``rows`` tokens without an eviction; without one all of them. Returns the
        dropped."""
        droppable = [one for one in self.cache.sequences if one.preemptible]
        droppable.sort(key=lambda one: (one.length < len(one.tokens), one.order), reverse=True)
        dropped = []
        for one in droppable:
            if sequence is not None and self.cache.has_free(sequence, rows):
                break
            self.drop(one)
            dropped.append(one)
        return dropped

    def _refusal(self, sequence: TokenSequence) -> Refusal | None:
        if sequence.preemptible and sequence.missing > PREEMPTIBLE_ROWS:
            return Refusal.OUT_OF_KV
        if not self.sequences:
            return None
        promised = sum(max(0, other.length - other.allocated) for other in self.sequences)
        room = self.cache.unheld_room if sequence.preemptible else self.cache.available
        if room < promised + sequence.missing + HEADROOM * (len(self.sequences) + 1):
            return Refusal.OUT_OF_KV
        if sequence.missing >= WORTH_SHARING and any(
            _overlap(sequence, other) for other in self.sequences
        ):
            return Refusal.SHARED
        return None

    def _reserve(
        self, sequence: TokenSequence, rows: int
    ) -> Generator[TokenSequence | None, None, bool]:
        """Slots for the sequence's next rows; see ``schedule``. False if it has none now."""
        if sequence.preemptible:
            return self.cache.reserve(sequence, rows)
        while True:
            if sequence.computed + rows > sequence.allocated:
                yield from self.drop_preemptible(sequence, rows)
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


def _overlap(sequence: TokenSequence, other: TokenSequence) -> bool:
    """Whether ``other`` is about to compute a prefix of ``sequence`` worth waiting for."""
    if other.missing < WORTH_SHARING or namespace_of(sequence.tree) != namespace_of(other.tree):
        return False
    shared = common_prefix(sequence.tokens[: sequence.length], other.tokens[: other.length])
    return shared - sequence.shared >= WORTH_SHARING


def _without_logits(sequence: TokenSequence, rows: int) -> int:
    """How many of the sequence's next rows get no logits: those before its last committed token."""
    return min(rows, max(0, sequence.committed - 1 - sequence.computed))


def _spans(sequence: TokenSequence, rows: int) -> Iterator[Span]:
    """The sequence's next rows, then those of its draft's children."""
    start, end = sequence.computed, sequence.computed + rows
    if rows:
        yield Span(
            tokens=sequence.tokens[start:end],
            start=start,
            slots=sequence.slots[:end],
            logits_from=_without_logits(sequence, rows),
        )
    for child in sequence.children:
        if child.missing:
            tokens = np.array(child.tokens[child.computed :], dtype=np.int64)
            at = sequence.committed + child.at + child.computed
            yield Span(tokens, at, sequence.slots_along(child, child.depth), 0)


def charge_pass(
    searches: Mapping[str, TrackedSearch], advances: Sequence[Advance], cost: Flops
) -> None:
    """Charge a forward pass to the searches that had rows in it."""
    for tree in {advance.sequence.tree for advance in advances}:
        searches[tree].counters.model_calls += 1
    for advance in advances:
        searches[advance.sequence.tree].counters.flops += advance.flops(cost)


def prefill_budget(wanted: Sequence[tuple[str, int]], room: int) -> list[int]:
    """How many of ``room`` rows each of these gets: (tree, rows wanted), oldest first.

    Trees get equal parts, what one does not want going to the others; odd rows and, within a tree,
    all rows go to the older ones.
    """
    totals: dict[str, int] = {}
    for tree, rows in wanted:
        totals[tree] = totals.get(tree, 0) + rows
    left = _equal_parts(totals, room)
    budgets = []
    for tree, rows in wanted:
        budgets.append(min(rows, left[tree]))
        left[tree] -= budgets[-1]
    return budgets


def _equal_parts(totals: Mapping[str, int], room: int) -> dict[str, int]:
    """Equal parts of ``room``, none more than its total."""
    part = dict.fromkeys(totals, 0)
    unmet = [tree for tree in totals if totals[tree]]
    while unmet and room:
        each = max(1, room // len(unmet))
        for tree in unmet:
            more = min(totals[tree] - part[tree], each, room)
            part[tree] += more
            room -= more
        unmet = [tree for tree in unmet if part[tree] < totals[tree]]
    return part
