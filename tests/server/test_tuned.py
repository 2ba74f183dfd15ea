"""The file of ``hedgerow tune``: what is written can be read, and a wrong field is named."""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.spec import PolicyName, SearchSpec, VoteName
from server.settings import Settings, SettingsError, load_settings
from server.tuned import TunedSearch, TunedSearches, read_tuned, tuned_toml

SHARE = st.floats(0, 1)
NAME = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SEARCH = st.builds(
    lambda **fields: SearchSpec.model_validate({k: v for k, v in fields.items() if v is not None}),
    policy=st.sampled_from(get_args(PolicyName)),
    width=st.integers(1, 1024),
    vote=st.none() | st.sampled_from(get_args(VoteName)),
    temperature=st.none() | st.floats(0, 5),
    soft_start=st.none() | st.booleans(),
    consensus=st.none() | st.just("certain"),
)
TUNED = st.builds(
    TunedSearch,
    search=SEARCH.map(lambda spec: spec.model_dump(exclude_unset=True)),
    accuracy=st.none() | SHARE,
    accuracy_ci95=st.none() | st.lists(SHARE, min_size=2, max_size=2),
    tokens=st.none() | st.floats(0, 1e12),
    questions=st.none() | st.integers(1, 10**6),
)
WHOLE = st.builds(
    TunedSearches,
    date=st.none() | st.dates(),
    data=st.none() | NAME,
    policy_model=st.none() | NAME,
    auto=st.none() | TUNED,
    reasoning_effort=st.dictionaries(st.sampled_from(["low", "medium", "high", "xhigh"]), TUNED),
)


@given(WHOLE)
def test_what_is_written_is_read(tuned: TunedSearches) -> None:
    """This holds for any names, and for fields that were not set."""
    tables = tomllib.loads(tuned_toml(tuned))
    reread = TunedSearches.model_validate(tables)
    assert reread == tuned
    if tuned.auto is not None:
        assert reread.auto is not None
        assert reread.auto.fields == tuned.auto.fields


def test_a_file_by_hand(tmp_path: Path) -> None:
    """A file needs only the searches."""
    path = tmp_path / "tuned.toml"
    path.write_text(
        'date = 2026-01-02\n[reasoning_effort.low.search]\npolicy = "beam"\nwidth = 4\n'
    )
    tuned = read_tuned(path)
    assert tuned.date == datetime.date(2026, 1, 2)
    assert tuned.auto is None
    assert tuned.reasoning_effort["low"].fields == {"policy": "beam", "width": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto = 3", "auto = 3: must be a valid dictionary"),
        ("[auto]", "auto.search: Field required"),
        ('[auto.search]\npolicy = "rebase"', "auto.search: width is missing"),
        (
            '[auto.search]\npolicy = "auto"\nwidth = 4',
            "auto.search.policy = 'auto': must be 'best_of_n'",
        ),
        (
            '[auto.search]\npolicy = "rebase"\nwidth = 0',
            "auto.search.width = 0: must be greater than or equal to 1",
        ),
        (
            '[auto.search]\npolicy = "rebase"\nwidth = 4\nwarmth = 1',
            "auto.search.warmth = 1: Extra inputs are not permitted",
        ),
        (
            '[auto.search]\npolicy = "rebase"\nwidth = 4\nseed = 1',
            "auto.search: seed: a request's own",
        ),
        (
            '[reasoning_effort.most.search]\npolicy = "rebase"\nwidth = 4',
            "reasoning_effort.most = 'most': must be 'low', 'medium', 'high' or 'xhigh'",
        ),
        ("policy_model = 3", "policy_model = 3: must be a valid string"),
        ("[auto", "Expected ']'"),
    ],
)
def test_a_bad_file_is_refused_by_field(tmp_path: Path, text: str, message: str) -> None:
    """The error has the setting's name, the field, its value and what is allowed."""
    path = tmp_path / "tuned.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as error:
        load_settings({"HEDGEROW_TUNED": str(path)})
    assert str(error.value).startswith(f"HEDGEROW_TUNED = '{path}': {message}")


def test_the_setting() -> None:
    """It is None by default; a file that does not exist is named."""
    assert Settings().tuned is None
    assert load_settings({"HEDGEROW_TUNED": "none"}).tuned is None
    with pytest.raises(SettingsError, match=r"HEDGEROW_TUNED = '/no/such': there is no such file"):
        load_settings({"HEDGEROW_TUNED": "/no/such"})


def test_models_that_differ() -> None:
    """All three models are compared; a file that names none was written by hand."""
    models: dict[str, Any] = {"policy_model": "a", "reward_model": None, "verifier": None}
    assert TunedSearches(policy_model="a").others_than(models) == []
    assert TunedSearches().others_than(models) == []
    other_models = TunedSearches(policy_model="a", reward_model="b")
    assert other_models.others_than(models) == ["reward_model: None, not b"]
