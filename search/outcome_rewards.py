"""The searches that an outcome model can guide: those that compare only finished replies."""

from __future__ import annotations

from search.policies.policy import Scores
from search.policies.registry import POLICIES
from search.reward_needs import field_in_need
from search.spec import PolicyName, SearchSpec
from search.vote import VOTE_SCORES, vote_name

OUTCOME_POLICY: PolicyName = "best_of_n"
"""The default policy with an outcome model, if a request names none."""


def outcome_policies() -> list[PolicyName]:
    """The policies that need no rewards of single steps."""
    return [
        name
        for name, policy in POLICIES.items()
        if policy(SearchSpec(policy=name)).scores is not Scores.ALL
    ]


def outcome_refusal(spec: SearchSpec) -> tuple[str, str] | None:
    """The field of a spec that needs rewards of single steps, and why it is refused; else None."""
    field = field_in_need(spec, Scores.ALL)
    if field is None:
        return None
    value = vote_name(spec) if field == "vote" else getattr(spec, field)
    rule = "needs a reward for each step, and the reward model scores finished replies alone"
    votes = [name for name, scores in VOTE_SCORES.items() if scores is not Scores.ALL]
    names = {"policy": outcome_policies(), "vote": votes}.get(field, [])
    choices = f"; one of {', '.join(names)} is needed" if names else ""
    return field, f"{value!r} {rule}{choices}"
