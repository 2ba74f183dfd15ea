"""`python -m loadtest.instrumentation`: the same trees from a record, watched and not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from loadtest.goodput import GoodputCell
from loadtest.in_process import ModelsInProcess
from loadtest.instrumentation import COLUMNS, SIDES, measure
from runtime.embedded.options import EngineOptions
from tests.runtime.tiny_models import make_checkpoint


def test_a_small_run(tmp_path: Path) -> None:
    """Every side; there were events and spans, and no side grew another tree."""
    size: dict[str, Any] = {"max_position_embeddings": 272, "num_hidden_layers": 1}
    policy = make_checkpoint(tmp_path / "policy", seed=1, **size)
    prm = make_checkpoint(tmp_path / "prm", seed=2, **size)
    models = ModelsInProcess(EngineOptions(policy=policy, prm=prm, threads=1))
    cells = [GoodputCell("equal", "game24", "beam", 3, 1.0)]
    rows = asyncio.run(measure(models, cells, questions=1, blocks=2, times=1))
    assert [row["side"] for row in rows] == list(SIDES)
    for row in rows:
        assert row.keys() >= set(COLUMNS)
        assert row["seconds"] > 0
        assert row["events"] > 5
        assert row["spans"] > 5
