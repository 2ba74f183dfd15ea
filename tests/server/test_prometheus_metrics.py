"""The metrics are documented, bounded, and repeat what the engine reports."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from search.counters import EngineCounters
from server.prometheus_metrics import Metrics
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import question

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(hedgerow_\w+)` \| (\w+)[^|]* \|([^|]*)\| [^|]+\? ?[^|]*\|$", re.M)
SEARCH = {"model": "sprig", "messages": question(), "search": {"width": 4, "seed": 1}}


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return kind and labels of every series on the page."""
    return {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in ROW.findall(PAGE.read_text())
    }


async def test_the_page_has_every_series_and_no_other(http: httpx2.AsyncClient) -> None:
    """The page has each series with its name, kind, labels and a question."""
    await http.post("/v1/chat/completions", json=SEARCH)
    await http.get("/admin/usage")  # refused
    text = (await http.get("/metrics")).text
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
    series = {}
    for name, kind in kinds.items():
        match = re.search(rf"^{name}(?:_bucket)?\{{(.*)\}} ", text, re.M)
        labels = re.findall(r'(\w+)="', match[1]) if match else []
        series[name] = (kind, tuple(label for label in sorted(labels) if label != "le"))
    assert series == documented()


async def test_names_are_of_one_kind(http: httpx2.AsyncClient) -> None:
    """One prefix, base units, and the suffix ``_total`` for counters only."""
    text = (await http.get("/metrics")).text
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M):
        assert name.startswith("hedgerow_")
        assert not re.search(r"_(ms|us|milliseconds|minutes|kb|mb|percent)(_|$)", name)
        assert name.endswith("_total") == (kind == "counter")


async def test_what_the_engine_gave_up_is_told_by_model_and_state(
    http: httpx2.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10 evicted tokens, 4 were held by a search; the reward model's are counted apart."""
    usage = replace(
        await engine.usage(),
        totals=EngineCounters(evicted_tokens=10, held_evicted_tokens=4, prm_evicted_tokens=7),
        prm_kv_tokens_peak=99,
    )

    async def report() -> object:
        return usage

    monkeypatch.setattr(engine, "usage", report)
    text = (await http.get("/metrics")).text
    name = "hedgerow_evicted_tokens_total"
    assert f'{name}{{model="policy",served="sprig",state="active"}} 4.0' in text
    assert f'{name}{{model="policy",served="sprig",state="cached"}} 6.0' in text
    assert f'{name}{{model="reward",served="sprig",state="active"}} 0.0' in text
    assert f'{name}{{model="reward",served="sprig",state="cached"}} 7.0' in text
    assert 'hedgerow_kv_peak_tokens{model="reward",served="sprig"} 99.0' in text


def test_a_server_says_what_it_is() -> None:
    """Version, model and engine are labels of one series that is always 1."""
    metrics = Metrics()
    metrics.serves("sprig", "embedded", "1.2", "torch")
    line = 'hedgerow_info{engine="embedded",kernel="torch",model="sprig",version="1.2"} 1.0'
    assert line in metrics.text().decode()
