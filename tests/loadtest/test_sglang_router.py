"""Real SGLang workers behind a real SMG: a tree stays on one worker if SMG follows the header."""

from __future__ import annotations

import pytest

from loadtest.sglang_router import DIRECT, KEYS, SMG, measure
from runtime.servers.routing import LEAST_SHARE
from tests.runtime.sglang.support import PYTHON, ROOT


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_trees_are_kept_together_where_the_header_is_heeded() -> None:
    """``manual`` gets Hedgerow's own cache hits; ``round_robin`` does not, and logs a warning."""
    rows = await measure(PYTHON, ROOT / SMG, ("manual", "round_robin"), searches=6)
    assert all(set(row) == set(KEYS) for row in rows)
    direct, manual, in_turn = rows
    assert (direct["policy"], direct["hits"]) == (DIRECT, 1.0)
    assert direct["expected_tokens"] > 1000
    assert manual["of_direct"] >= LEAST_SHARE
    assert not direct["warned"]
    assert not manual["warned"]
    assert in_turn["of_direct"] < manual["of_direct"]
    assert in_turn["warned"]
