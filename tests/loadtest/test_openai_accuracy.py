"""`python -m loadtest.openai_accuracy`: its document, and stored results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.compare import Results, compare
from loadtest.kept import Result, kept_results, of_search
from loadtest.openai_accuracy import TASK_NAMES, compared, searched, summary
from loadtest.searches import REBASE_8, Method, items_of
from tests.search.scripted_engine import ScriptedEngine

VLLM, EMBEDDED = (Method(name, REBASE_8) for name in ("vllm", "embedded"))
ITEMS = [item for task in TASK_NAMES for item in items_of(task, "test", 2, 0)]


@pytest.fixture
async def right() -> Result:
    """The result of one search, marked correct."""
    (results,) = await compare(ScriptedEngine(), ITEMS[:1], [VLLM])
    return replace(results.results[0], correct=True)


def test_a_document_by_hand(right: Result) -> None:
    """vLLM gains one of two questions of the first task and loses both of the second."""
    wrong = replace(right, correct=False)
    embedded = Results(EMBEDDED, [wrong, right, right, right])
    document = summary(ITEMS, [embedded, Results(VLLM, [right, right, wrong, wrong])])
    accuracies = [(row["task"], row["engine"], row["accuracy"]) for row in document["rows"]]
    first, second = TASK_NAMES
    assert accuracies == [
        (first, EMBEDDED.name, 0.5),
        (first, VLLM.name, 1.0),
        (second, EMBEDDED.name, 1.0),
        (second, VLLM.name, 0.0),
    ]
    assert document["by_task"] == {first: [0.0, 1.0], second: [-1.0, -1.0]}
    low, high = document["accuracy_diff_ci95"]
    assert low == pytest.approx(-1.0)
    assert high <= 0.5


async def test_what_has_ended_is_not_searched_again(right: Result, tmp_path: Path) -> None:
    """No engine is needed where all results are stored."""
    path = tmp_path / "kept.jsonl"
    results = kept_results(path, VLLM.name)
    for item in ITEMS:
        results.put(of_search(item, VLLM), right)
    again = await searched(VLLM.name, None, ITEMS, path)  # type: ignore[arg-type]
    assert again.results == [right] * len(ITEMS)


def test_pairs_by_hand(right: Result) -> None:
    """One pair takes twice as long with two tokens more, one is equal: 1.5 times on average."""
    fast, slow = (
        replace(right, stats=replace(right.stats, generated_tokens=tokens, seconds=seconds))
        for tokens, seconds in ((10, 1.0), (12, 2.0))
    )
    row = compared([slow, fast], [fast, fast])
    assert row["wall_ratio"] == 1.5
    assert row["tokens_diff_ci95"] == [0.0, 2.0]
