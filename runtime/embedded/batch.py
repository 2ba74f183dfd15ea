"""Continuous batching of one model: which sequences run, and how many rows each has per iteration.

Sequences have an order. When memory runs out, evictable prefixes are evicted first, then the
youngest sequence is preempted, so the oldest one always makes progress. Nothing here can change
what a sequence computes.
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
"""Most prefill rows of an iteration, over all sequences; rows of decoding sequences come on top."""
HEADROOM = 4
"""Slots that a running sequence is expected to need soon, when another one asks to enter."""
PREEMPTIBLE_ROWS = 8
"""Most rows that a preemptible sequence may start with; more means its prefix is not cached."""
WORTH_SHARING = 8
"""The fewest tokens of a common prefix for which a sequence waits while another computes them."""


class Refusal(Enum):
    """Why a sequence may not enter the batch now."""

    FULL = "no place in the batch; the next in line waits too"
    OUT_OF_KV = "no memory; the next in line waits too"
    SHARED = "a running sequence computes much of its prefix"


@dataclass(frozen=True, slots=True)
class Advance:
    """What an iteration computed of a sequence: ``rows`` tokens after ``start``, and the logits
    (rows from the last committed token on, vocab), None before that token. ``children``: the
    draft's children that had rows, each with its logits."""

    sequence: TokenSequence
    start: int
    rows: int
    logits: torch.Tensor | None
    children: tuple[tuple[DraftChain, torch.Tensor], ...] = ()

    @property
    def all_rows(self) -> int:
        """Tokens computed, including those of the draft's children."""
        return self.rows + sum(len(logits) for _, logits in self.children)

    def flops(self, cost: Flops) -> float:
        """The FLOPs of this part of the pass."""
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
        """``limit``: the most sequences at once."""
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
        """Start a sequence over ``tokens``, or return why not; see ``PrefixCache.open``."""
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
        """Take a sequence out of the batch and cache what it computed."""
        self.pause(sequence)
        self.cache.publish(sequence)

    def drop(self, sequence: TokenSequence) -> None:
        """Take a sequence out of the batch and free what it computed."""
        self.pause(sequence)
        self.cache.drop(sequence)

    def pause(self, sequence: TokenSequence) -> None:
        """Take a sequence out of the batch if it is in it; it keeps its slots."""
        if sequence in self.sequences:
            self.sequences.remove(sequence)

    def resume(self, sequence: TokenSequence) -> None:
        """Put a paused sequence back into the batch."""
        insort(self.sequences, sequence, key=order_of)

    def schedule(self, skip: Set[TokenSequence] = frozenset()) -> Iterator[TokenSequence | None]:
        """Choose the next pass's rows and reserve their slots; sequences in ``skip`` get none.

        Where KV is short, preemptible sequences are dropped first, then the youngest are preempted;
        a preemptible one without room waits. Yields each of these at once, and None where a lone
        sequence does not fit because what searches hold may not be evicted: before it resumes, the
        caller requeues the preempted one, or ends a search.
        """
        self._plan = []
        prefilling = [
            sequence
            for sequence in self.sequences
            if not sequence.preemptible and sequence.missing - sequence.draft_count > 1
        ]
        requests = [(sequence.tree, sequence.missing) for sequence in prefilling]
        budget = dict(zip(prefilling, prefill_budget(requests, PREFILL_ROWS), strict=True))
        for sequence in list(self.sequences):
            if not sequence.live or sequence in skip:
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
        """Run one forward pass over the rows that were scheduled last; empty if there are none."""
        plan = self._plan
        if not plan:
            return []
        self.cache.keep_budget()
        self.cache.note_peaks()
        spans = [span for sequence, rows in plan for span in _spans(sequence, rows)]
        logits = self._forward.run(spans, self._store)
        advances, offset = [], 0
        for sequence, rows in plan:
            start, logit_rows = sequence.computed, rows - _without_logits(sequence, rows)
            sequence_logits = logits[offset : offset + logit_rows] if logit_rows else None
            offset += logit_rows
            sequence.computed += rows
            children = []
            for child in [child for child in sequence.children if child.missing]:
                children.append((child, logits[offset : offset + child.missing]))
                offset += child.missing
                child.computed = len(child.tokens)
            advances.append(Advance(sequence, start, rows, sequence_logits, tuple(children)))
        assert offset == len(logits), "the model returned other rows than were asked for"
        return advances

    def drop_preemptible(
        self, sequence: TokenSequence | None = None, rows: int = 0
    ) -> list[TokenSequence]:
        """Drop preemptible sequences, the least likely first and prefills last, until ``sequence``
        finds slots for ``rows`` tokens without an eviction; without a ``sequence`` all. Returns the
        dropped ones."""
        droppable = [extension for extension in self.cache.sequences if extension.preemptible]
        droppable.sort(key=lambda seq: (seq.length < len(seq.tokens), seq.order), reverse=True)
        dropped = []
        for extension in droppable:
            if sequence is not None and self.cache.has_free(sequence, rows):
                break
            self.drop(extension)
            dropped.append(extension)
        return dropped

    def _refusal(self, sequence: TokenSequence) -> Refusal | None:
        if sequence.preemptible and sequence.missing > PREEMPTIBLE_ROWS:
            return Refusal.OUT_OF_KV
        if not self.sequences:
            return None
        promised_slots = sum(max(0, other.length - other.allocated) for other in self.sequences)
        room = self.cache.unheld_room if sequence.preemptible else self.cache.available
        if room < promised_slots + sequence.missing + HEADROOM * (len(self.sequences) + 1):
            return Refusal.OUT_OF_KV
        if sequence.missing >= WORTH_SHARING and any(
            _overlap(sequence, other) for other in self.sequences
        ):
            return Refusal.SHARED
        return None

    def _reserve(
        self, sequence: TokenSequence, rows: int
    ) -> Generator[TokenSequence | None, None, bool]:
        """Reserve slots for a sequence's next rows, as in ``schedule``; False if it gets none."""
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
    """A model as a batch uses it; ``runtime.embedded.model.forward.Forward`` is one."""

    def new_store(self, slots: int) -> Any:
        """A store for the keys and values of ``slots`` tokens."""
        ...

    def run(self, spans: Sequence[Span], store: Any) -> torch.Tensor:
        """Compute the spans; the logits (rows from ``logits_from`` on, vocab) in span order."""
        ...


def _overlap(sequence: TokenSequence, other: TokenSequence) -> bool:
    """Whether ``other`` is computing a prefix of ``sequence`` that is worth waiting for."""
    if other.missing < WORTH_SHARING or namespace_of(sequence.tree) != namespace_of(other.tree):
        return False
    overlap = common_prefix(sequence.tokens[: sequence.length], other.tokens[: other.length])
    return overlap - sequence.shared >= WORTH_SHARING


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
            position = sequence.committed + child.at + child.computed
            yield Span(tokens, position, sequence.slots_along(child, child.depth), 0)


def charge_pass(
    searches: Mapping[str, TrackedSearch], advances: Sequence[Advance], cost: Flops
) -> None:
    """Charge a forward pass to the searches that had rows in it."""
    for tree in {advance.sequence.tree for advance in advances}:
        searches[tree].counters.model_calls += 1
    for advance in advances:
        searches[advance.sequence.tree].counters.flops += advance.flops(cost)


def prefill_budget(requests: Sequence[tuple[str, int]], room: int) -> list[int]:
    """Share ``room`` rows among ``requests``: pairs (tree, rows), oldest first. The rows of each.

    Trees get equal parts, and what one tree does not need goes to the others. Odd rows, and all
    rows within a tree, go to the older ones first.
    """
    totals: dict[str, int] = {}
    for tree, rows in requests:
        totals[tree] = totals.get(tree, 0) + rows
    remaining = _equal_parts(totals, room)
    budgets = []
    for tree, rows in requests:
        budgets.append(min(rows, remaining[tree]))
        remaining[tree] -= budgets[-1]
    return budgets


def _equal_parts(totals: Mapping[str, int], room: int) -> dict[str, int]:
    """Share ``room`` equally among trees, none getting more than its total."""
    parts = dict.fromkeys(totals, 0)
    unmet = [tree for tree in totals if totals[tree]]
    while unmet and room:
        share = max(1, room // len(unmet))
        for tree in unmet:
            extra = min(totals[tree] - parts[tree], share, room)
            parts[tree] += extra
            room -= extra
        unmet = [tree for tree in unmet if parts[tree] < totals[tree]]
    return parts
