"""Who goes on drawing early."""

from __future__ import annotations

from runtime.sglang.luck import TRIAL_TOKENS, lucky


def test_a_search_is_tried_first() -> None:
    """Nothing is held against it until enough is known; then a quarter must have been used."""
    assert lucky(0, TRIAL_TOKENS - 1)
    assert not lucky(0, TRIAL_TOKENS)
    assert lucky(250, 750)
    assert not lucky(249, 751)
