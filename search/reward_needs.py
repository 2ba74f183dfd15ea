"""Which rewards a search needs: those that its policy and its vote compare."""

from __future__ import annotations

from collections.abc import Mapping

from search.policies.policy import Scores
from search.policies.registry import POLICIES
from search.spec import SearchSpec
from search.vote import VOTE_SCORES, vote_name


def reward_needs(spec: SearchSpec) -> Mapping[str, Scores]:
    """The nodes whose rewards a field of the spec compares, by its name. A dial that compares
    rewards has a line here."""
    return {
        "policy": POLICIES[spec.policy](spec).scores,
        "vote": VOTE_SCORES[vote_name(spec)],
    }


def needed_scores(spec: SearchSpec) -> Scores:
    """The nodes that need a reward in a search by this spec."""
    return max(reward_needs(spec).values())


def field_in_need(spec: SearchSpec, least: Scores) -> str | None:
    """The first field of the spec that needs rewards of at least these nodes; else None."""
    return next((name for name, need in reward_needs(spec).items() if need >= least), None)
