"""Counters of a search's work and of an engine's, each declared once.

A counter is declared here and incremented where the work is done. The rule for adding up several
searches, the ``engine`` part of a reply's stats, the engine's totals and its Prometheus series
follow from the declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

C = TypeVar("C", bound="Counters")


def counter(help: str, *, zero: float = 0, maximum: bool = False, metric: str | None = "") -> Any:
    """Declare a counter as a dataclass field.

    ``help`` is one sentence for an operator. Values of several searches are added, or the highest
    is taken if ``maximum``. ``metric``: the series' name without ``hedgerow_`` and ``_total``, the
    field's name if empty; None if the counter has no series of its own.
    """
    metadata = {"help": help, "maximum": maximum, "metric": metric}
    return field(default=zero, metadata=metadata)


@dataclass(slots=True)
class Counters:
    """The cost of a search to its engine, or of several searches together.

    Work that the search dropped counts too.
    """

    decoded_tokens: int = counter("Tokens the policy model decoded.")
    prefilled_tokens: int = counter(
        "Tokens the policy model prefilled, prompts and evicted prefixes alike."
    )
    cached_tokens: int = counter("Prefix tokens that were found in the KV cache.")
    expected_tokens: int = counter(
        "Prefix tokens that the search's server had read for it before.",
        metric="prefix_expected_tokens",
    )
    prm_tokens: int = counter("Tokens the reward model read, or a judge read and wrote.")
    model_calls: int = counter("Forward passes, each search's in them counted.")
    flops: float = counter("Multiplications and additions of the forward passes.", zero=0.0)
    kv_tokens_peak: int = counter(
        "Most unique tokens of the policy's KV held at once.", maximum=True, metric=None
    )
    unparsed_verdicts: int = counter("Verdicts of a judge that held no number.")
    rehydrated_tokens: int = counter("Tokens whose KV was evicted and computed again.")
    rehydrations: int = counter("Prefills that brought evicted KV back.")
    target_passes: int = counter(
        "Passes of the policy model that sampled for a branch, each branch's counted."
    )
    drafted_tokens: int = counter("Tokens the draft model proposed and the policy model checked.")
    tested_tokens: int = counter(
        "Proposed tokens that were compared with what the policy model sampled."
    )
    accepted_tokens: int = counter("Proposed tokens that were what the policy model sampled.")
    speculated_used: int = counter(
        "Tokens decoded before a round asked for them.", metric="speculated_used_tokens"
    )
    speculated_wasted: int = counter(
        "Tokens decoded early that no round asked for.", metric="speculated_wasted_tokens"
    )
    held_back_seconds: float = counter(
        "Time that rounds waited for older searches' KV to leave room for theirs.", zero=0.0
    )
    split_chains: int = counter(
        "Chains that no reward steers, drawn round by round: their server does not take them whole."
    )
    retokenized_steps: int = counter(
        "Steps that a server told as text alone, whose ids are the tokenizer's here."
    )
    deduplicated_tokens: int = counter(
        "Decoded tokens that a branch got from the row of another one with equal tokens."
    )

    def __add__(self: C, other: Counters) -> C:
        """The sum of both; ``other`` needs at least this one's fields."""
        return combined(type(self), (self, other))

    def __sub__(self: C, other: Counters) -> C:
        """Subtract the counts of ``other``; maxima stay as they are."""
        return replace(
            self,
            **{
                name: getattr(self, name) - getattr(other, name)
                for name, maximum in _rules(type(self))
                if not maximum
            },
        )


@dataclass(slots=True)
class EngineCounters(Counters):
    """The sums over all searches of an engine, and the counters of the engine as a whole."""

    verdicts: int = counter("Verdicts that a judge gave.")
    evicted_tokens: int = counter("Tokens evicted from the policy's KV.", metric=None)
    held_evicted_tokens: int = counter("Of them, those of searches in flight.", metric=None)
    prm_evicted_tokens: int = counter("Tokens evicted from the reward model's KV.", metric=None)
    prm_held_evicted_tokens: int = counter("Of them, those of searches in flight.", metric=None)
    evictions: int = counter("Times that KV was evicted to make room.")
    kv_policy_seconds: float = counter("Time spent on deciding which KV is evicted.", zero=0.0)
    preemptions: int = counter("Branches that were preempted to free KV, to go on later.")
    draft_pauses: int = counter("Times that drafting did not pay and paused.")
    verifier_calls: int = counter("Times that the operator's verifier was asked.")
    verifier_failures: int = counter("Of them, those that ended their search with an error.")
    verifier_seconds: float = counter("Time that searches waited for the verifier.", zero=0.0)
    call_errors: int = counter("Calls and hints that the engine failed at, by themselves.")
    sent_again: int = counter(
        "Requests sent once more since their server was lost.", metric="requests_sent_again"
    )
    kv_accounting_errors: int = counter("Failed checks of the engine's KV accounting.")

    @classmethod
    def of(cls, searches: Counters, **values: float) -> EngineCounters:
        """Start from the sums of all searches; ``values`` add counters by name or replace sums."""
        sums: dict[str, Any] = {n: getattr(searches, n) for n, _ in _rules(type(searches))}
        sums |= values
        return cls(**sums)


@dataclass(frozen=True, slots=True)
class Usage:
    """The engine's KV at this moment, in tokens of the policy and of the reward model.

    ``active``: held for trees in flight. ``cached``: evictable prefixes that no tree holds.
    ``running`` and ``waiting`` count branches. ``totals``: counted since the engine started.
    """

    kv_tokens_active: int = 0
    kv_tokens_cached: int = 0
    kv_tokens_capacity: int = 0
    kv_tokens_peak: int = 0
    prm_kv_tokens_active: int = 0
    prm_kv_tokens_cached: int = 0
    prm_kv_tokens_capacity: int = 0
    prm_kv_tokens_peak: int = 0
    running: int = 0
    waiting: int = 0
    totals: EngineCounters = field(default_factory=EngineCounters)


def combined(kind: type[C], parts: Iterable[Counters]) -> C:
    """Combine ``parts`` field by field: the sum, or the highest value if it is a maximum."""
    rules = _rules(kind)
    columns = zip(*map(_values(kind), parts), strict=True)
    sums = (max(c) if maximum else sum(c) for (_, maximum), c in zip(rules, columns, strict=False))
    return kind(*sums)


@cache
def _rules(kind: type[Counters]) -> tuple[tuple[str, bool], ...]:
    """Each field's name and whether it is a maximum; cached, as engines add counters often."""
    return tuple((entry.name, entry.metadata["maximum"]) for entry in fields(kind))


@cache
def _values(kind: type[Counters]) -> Callable[[Counters], tuple[float, ...]]:
    """A function that returns the values of all fields."""
    return attrgetter(*(name for name, _ in _rules(kind)))
