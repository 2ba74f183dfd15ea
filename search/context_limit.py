"""The limit on a trajectory's length: the engine's context less what scoring adds to the path."""

from __future__ import annotations

from search.engine import Capabilities
from search.policies.policy import Scores
from search.reward_needs import needed_scores
from search.spec import SearchSpec


def context_for(spec: SearchSpec, engine: Capabilities) -> int:
    """Most tokens of prompt and reply together: the context less what a reward format adds to them.

    It depends on the spec and the model alone, so the tree does too.
    """
    if needed_scores(spec) is Scores.NONE:
        return engine.context_tokens
    fixed, per_step = engine.score_tokens
    room = scored_context(engine) - fixed - spec.max_depth * per_step
    return max(1, min(engine.context_tokens, room))


def scored_context(engine: Capabilities) -> int:
    """Most tokens that the reward model reads for a path, the tags of its format included."""
    return engine.scored_tokens or engine.context_tokens
