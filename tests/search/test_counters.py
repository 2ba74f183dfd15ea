"""A counter is declared once: sums, a reply's stats and Prometheus series follow from that."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from search.counters import Counters, EngineCounters, Usage, combined, counter
from server.prometheus_metrics import EngineSeries


@dataclass(slots=True)
class MoreCounters(EngineCounters):
    """The engine's counters and two more, which are only declared."""

    merged_tokens: int = counter("Tokens that were merged.")
    longest_prefix: int = counter("Longest prefix that was computed again.", maximum=True)


def test_a_counter_is_one_declaration() -> None:
    """A counter is combined by its rule, is in ``asdict`` by its name, and has a series."""
    first = MoreCounters(decoded_tokens=1, merged_tokens=2, longest_prefix=9)
    both = first + MoreCounters(decoded_tokens=4, merged_tokens=5, longest_prefix=3)
    assert both == MoreCounters(decoded_tokens=5, merged_tokens=7, longest_prefix=9)
    assert asdict(both)["merged_tokens"] == 7
    series = EngineSeries(MoreCounters)
    series.note_usage("sprig", Usage(totals=both))
    families = {family.name: family for family in series.collect()}
    for name, kind, value in (
        ("hedgerow_merged_tokens", "counter", 7),
        ("hedgerow_longest_prefix", "gauge", 9),
    ):
        assert families[name].type == kind
        [sample] = families[name].samples
        assert (sample.labels, sample.value) == ({"served": "sprig"}, value)


def test_counters_of_searches_add_up() -> None:
    """No counters add up to zeros; peaks take the maximum; subtraction keeps the peak."""
    assert combined(Counters, ()) == Counters()
    several = [Counters(prm_tokens=n, flops=0.5, kv_tokens_peak=n) for n in (3, 7, 5)]
    total = combined(Counters, several)
    assert total == Counters(prm_tokens=15, flops=1.5, kv_tokens_peak=7)
    assert total - several[1] == Counters(prm_tokens=8, flops=1.0, kv_tokens_peak=7)
    integers = {name for name, value in asdict(total).items() if isinstance(value, int)}
    assert asdict(total).keys() - integers == {"flops", "held_back_seconds"}


def test_an_engine_counts_what_its_searches_do() -> None:
    """It has all of a search's counters and its own; each has a help sentence."""
    totals = EngineCounters.of(Counters(decoded_tokens=4), evictions=2, decoded_tokens=5)
    assert totals == EngineCounters(decoded_tokens=5, evictions=2)
    assert all(field.metadata["help"].endswith(".") for field in fields(EngineCounters))
