"""The searches that published tables were measured on, as specs."""

from __future__ import annotations

from search.spec import SearchSpec

CONFIG_S = SearchSpec(
    policy="best_first",
    width=192,
    branch=3,
    expansions=64,
    max_depth=6,
    max_step_tokens=128,
    temperature=0.7,
    top_p=0.9,
)
"""ArborKV's budget sweep (section 5.1): B = 3, D = 6, 64 expansions, 128 tokens a node.

The paper's controller has no width: 192 is the most that 64 expansions can finish.
"""

CONFIG_L = CONFIG_S.model_copy(
    update={"width": 1024, "branch": 5, "expansions": 256, "max_depth": 8}
)
"""ArborKV's scaling test: B = 5, D = 8, 256 expansions; the width is the largest allowed."""


STEP_TOKENS = {"game24": 32, "countdown": 32, "blocksworld": 32, "wordproblem": 96}
"""Tokens per node, enough for the bundled models' longest steps."""


def scaled(config: SearchSpec, task: str, parallel: int, policy: str = "best_first") -> SearchSpec:
    """Adapt a configuration to the bundled models and ``best_first`` or ``mcts``, with as many
    expansions, all of them spent. Raises ValidationError for an unknown policy.

    Their steps are shorter and their paths deeper than the paper's; at temperature 0.7 they repeat
    themselves, and a search of few distinct nodes has no KV to save. ``parallel``: leaves
    expanded a round, where the paper expands one at a time.
    """
    changes = {
        "policy": policy,
        "max_depth": 16,
        "max_step_tokens": STEP_TOKENS[task],
        "temperature": 1.0,
        "top_p": 1.0,
        "enough_answers": config.width,
        "parallel": parallel,
    }
    return SearchSpec.model_validate(config.model_dump() | changes)


def by_levels(policy: str, task: str) -> SearchSpec:
    """The spec of a level-by-level policy, wide enough to hold many trajectories at once."""
    return SearchSpec.model_validate(
        {"policy": policy, "width": 64, "max_step_tokens": STEP_TOKENS[task]}
    )
