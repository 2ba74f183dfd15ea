"""Which rewards a search needs, by the field that needs them."""

from __future__ import annotations

import pytest

from search.policies.policy import Scores
from search.reward_needs import field_in_need, needed_scores
from search.spec import SearchSpec


@pytest.mark.parametrize(
    ("fields", "needed", "any_field", "all_field"),
    [
        ({"policy": "self_consistency", "vote": "majority"}, Scores.NONE, None, None),
        (
            {"policy": "self_consistency", "vote": "weighted_majority"},
            Scores.FINISHED,
            "vote",
            None,
        ),
        ({"policy": "self_consistency", "vote": "best_min"}, Scores.ALL, "vote", "vote"),
        ({"policy": "best_of_n", "vote": "best_min"}, Scores.ALL, "policy", "vote"),
        ({"policy": "rebase", "vote": "majority"}, Scores.ALL, "policy", "policy"),
    ],
)
def test_needs_are_the_policys_and_the_votes(
    fields: dict[str, str], needed: Scores, any_field: str | None, all_field: str | None
) -> None:
    """The search needs the larger of the two; the first field that needs so much is named."""
    spec = SearchSpec.model_validate(fields)
    assert needed_scores(spec) is needed
    assert field_in_need(spec, Scores.FINISHED) == any_field
    assert field_in_need(spec, Scores.ALL) == all_field
