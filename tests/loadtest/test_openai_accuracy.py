"""`python -m loadtest.openai_accuracy`: its document, and what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.openai_accuracy import TASK_NAMES, KeptSearches, Searched, compared, summary
from loadtest.searches import Item

VLLM, EMBEDDED = "vllm", "embedded"
RIGHT, WRONG = (Searched(right, 10, 5, 5, 1.0) for right in (True, False))
ITEMS = [Item(task, "?", seed) for task in TASK_NAMES for seed in (1, 2)]


def test_a_document_by_hand() -> None:
    """Of the first task vLLM gains one of two, of the second it loses both."""
    document = summary(
        ITEMS, {EMBEDDED: [WRONG, RIGHT, RIGHT, RIGHT], VLLM: [RIGHT, RIGHT, WRONG, WRONG]}
    )
    accuracies = [(row["task"], row["engine"], row["accuracy"]) for row in document["rows"]]
    first, second = TASK_NAMES
    assert accuracies == [
        (first, EMBEDDED, 0.5),
        (first, VLLM, 1.0),
        (second, EMBEDDED, 1.0),
        (second, VLLM, 0.0),
    ]
    assert document["by_task"] == {first: [0.0, 1.0], second: [-1.0, -1.0]}
    low, high = document["accuracy_diff_ci95"]
    assert low == pytest.approx(-1.0)
    assert high <= 0.5


async def test_what_has_ended_is_not_searched_again(tmp_path: Path) -> None:
    """No engine is asked where all is kept."""
    path = tmp_path / "kept.jsonl"
    first = KeptSearches(path)
    for item in ITEMS:
        first._lines.put(f"{VLLM} {item.task} {item.seed}", RIGHT)
    again = KeptSearches(path)
    assert await again.run(VLLM, None, ITEMS) == [RIGHT] * len(ITEMS)  # type: ignore[arg-type]


def test_pairs_by_hand() -> None:
    """Twice as long and two tokens more, then the same: 1.5 times as long on average."""
    fast, slow = Searched(False, 10, 5, 5, 1.0), Searched(True, 12, 5, 5, 2.0)
    row = compared([slow, fast], [fast, fast])
    assert row["wall_ratio"] == 1.5
    assert row["tokens_diff_ci95"] == [0.0, 2.0]
