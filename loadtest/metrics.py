"""What a server says of itself at ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples(text: str) -> Iterator[Sample]:
    """Every sample of Prometheus's text format."""
    for family in text_string_to_metric_families(text):
        yield from family.samples


def values(text: str, name: str, **labels: str) -> list[float]:
    """The samples of this name that bear these labels, whatever others they bear."""
    return [
        sample.value
        for sample in samples(text)
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
