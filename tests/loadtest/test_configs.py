"""The papers' configurations, as they are printed."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from loadtest.configs import CONFIG_L, CONFIG_S, scaled
from search.spec import SearchSpec


def shape(spec: SearchSpec) -> tuple[int, int, int, int]:
    """Branching, depth, expansions and tokens a node of a spec."""
    return spec.branch, spec.max_depth, spec.expansions, spec.max_step_tokens


def test_arborkvs_two_searches() -> None:
    """Section 5.1: branching, depth, expansions, tokens a node; temperature 0.7, top-p 0.9."""
    assert shape(CONFIG_S) == (3, 6, 64, 128)
    assert shape(CONFIG_L) == (5, 8, 256, 128)
    for config in (CONFIG_S, CONFIG_L):
        assert SearchSpec.model_validate(config.model_dump()) == config
        assert (config.policy, config.temperature, config.top_p) == ("best_first", 0.7, 0.9)


def test_either_backtracking_policy_takes_them() -> None:
    """Branching and expansions stay; an unknown policy is refused by name."""
    assert shape(scaled(CONFIG_S, "blocksworld", 1, "mcts")) == (3, 16, 64, 32)
    assert scaled(CONFIG_S, "blocksworld", 4, "mcts").policy == "mcts"
    with pytest.raises(ValidationError, match="policy"):
        scaled(CONFIG_S, "blocksworld", 1, "mtcs")
