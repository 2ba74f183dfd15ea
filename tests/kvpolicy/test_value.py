"""The estimator: scores, subsets of signals, boundary confidence, θ files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.block_table import confidence_of_entropy
from kvpolicy.value import (
    UNFITTED,
    Theta,
    ThetaError,
    attention_shares,
    confidence,
    load_theta,
    parse_theta,
    save_theta,
    subsets,
)

NAN = math.nan
THETA = Theta("exact", {"": (0.5,), "v": (-1.0, 3.0), "u": (0.0, 1.0), "vu": (-2.0, 2.0, 1.0)})


def sigmoid(x: float) -> float:
    """The logistic function."""
    return 1 / (1 + math.exp(-x))


def test_a_score_is_the_sigmoid_of_theta_times_signals() -> None:
    """By hand: v 0.5 and u 1 give sigmoid(-2 + 2 * 0.5 + 1) = 0.5."""
    assert THETA.score([0.5], [1.0], [NAN]) == pytest.approx([0.5])


def test_a_missing_signal_takes_the_set_without_it() -> None:
    """Each row is scored by the set of the signals that it has."""
    scores = THETA.score([0.5, 0.5, NAN, NAN], [1.0, NAN, 1.0, NAN], [NAN] * 4)
    expected = [sigmoid(0), sigmoid(-1 + 1.5), sigmoid(1), sigmoid(0.5)]
    assert scores == pytest.approx(expected)


@pytest.mark.parametrize(("number", "name"), list(enumerate(subsets("vua"))))
def test_every_subset_has_a_set_of_its_own(number: int, name: str) -> None:
    """With biases from -4 to 3 and no slopes the score shows which subset was used."""
    sets = {s: (i - 4.0, *[0.0] * len(s)) for i, s in enumerate(subsets("vua"))}
    v, u, a = (0.5 if signal in name else NAN for signal in "vua")
    assert Theta("exact", sets).score([v], [u], [a]) == pytest.approx([sigmoid(number - 4)])


def test_a_signal_it_was_not_fitted_on_is_not_read() -> None:
    """θ without a: the attention mass changes nothing."""
    assert THETA.score([0.5], [1.0], [0.9]) == THETA.score([0.5], [1.0], [NAN])


def test_scores_stay_in_zero_to_one_whatever_theta() -> None:
    """Huge coefficients cause no overflow."""
    steep = Theta("exact", {"": (0.0,), "v": (-1e6, 2e6)})
    with np.errstate(over="raise"):
        assert steep.score([0.0, 1.0], [NAN] * 2, [NAN] * 2) == pytest.approx([0.0, 1.0])


def test_before_any_fit_a_score_rises_with_every_signal() -> None:
    """The unfitted sets rise with every signal, and score 0.5 for a block without signals."""
    low, high = UNFITTED.score([0.2, 0.8], [0.5] * 2, [0.5] * 2)
    assert low < high
    assert UNFITTED.score([NAN], [NAN], [NAN]) == [0.5]
    assert UNFITTED.score([0.5], [0.0], [1.0]) == pytest.approx([sigmoid(4 * 0.5 - 2)])


def test_subsets_of_three_signals_are_eight() -> None:
    """Subsets are ordered by size, then by the order of the letters."""
    assert subsets("vua") == ("", "v", "u", "a", "vu", "va", "ua", "vua")


def test_confidence_by_hand() -> None:
    """Uniform is 0, certain is 1, two of four equally likely have half of the largest entropy."""
    rows = np.log([[0.25] * 4, [0.5, 0.5, 1e-300, 1e-300], [1.0, 1e-300, 1e-300, 1e-300]])
    assert confidence(rows) == pytest.approx([0.0, 0.5, 1.0])
    assert confidence([[0.0, 0.0], [1000.0, 0.0]]) == pytest.approx([0.0, 1.0])


def test_confidence_from_the_likeliest_tokens_and_one_bucket() -> None:
    """p = (0.5, 0.25, 0.125, 0.125), top 2: H = 0.5 ln 2 + 0.25 ln 4 + 0.25 ln 4 = 1.5 ln 2."""
    row = np.log([0.125, 0.5, 0.125, 0.25])
    assert confidence(row, top=2) == pytest.approx(1 - 1.5 * math.log(2) / math.log(4))
    assert confidence(row, top=1) == pytest.approx(1 - math.log(2) / math.log(4))
    assert confidence(row, top=4) == pytest.approx(confidence(row))
    assert confidence(row, top=2) > confidence(row), "a bucket hides entropy"


def test_certainty_is_the_confidence_of_a_known_entropy() -> None:
    """Half of the largest entropy is 0.5; rounding never leads out of [0, 1]."""
    assert confidence_of_entropy(math.log(2), 4) == pytest.approx(0.5)
    assert confidence_of_entropy(math.log(2) / 4, 2) == pytest.approx(0.75)
    row = np.log([0.125, 0.5, 0.125, 0.25])
    entropy = -math.fsum(math.exp(x) * x for x in row)
    assert confidence_of_entropy(entropy, 4) == pytest.approx(float(confidence(row)))
    assert (confidence_of_entropy(-1e-9, 4), confidence_of_entropy(math.log(4) + 1e-9, 4)) == (
        1.0,
        0.0,
    )


def test_an_estimator_may_read_fewer_signals_than_it_has() -> None:
    """Sets with the dropped signals are removed; the other sets score as before."""
    assert THETA.only("v").signals == "v"
    assert THETA.only("va").score([0.5], [1.0], [NAN]) == THETA.score([0.5], [NAN], [NAN])
    assert set(UNFITTED.only("va").sets) == {"", "v", "a", "va"}
    assert THETA.only("").sets == {"": (0.5,)}


@given(
    tokens=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    draws=st.lists(st.floats(0, 1), min_size=72, max_size=72),
    uncached=st.integers(0, 3),
)
def test_shares_of_attention_lie_between_none_and_all(
    tokens: list[int], draws: list[float], uncached: int
) -> None:
    """A share is above 0.5 for more than a part's due mass and below for less, also when cut."""
    read = max(1, sum(tokens) - uncached)
    weights = np.array(draws[:read]) + 1e-6
    weights /= weights.sum()
    shares = attention_shares(weights, tokens)
    parts = [part for part in np.split(weights, np.cumsum(tokens)[:-1]) if len(part)]
    assert len(shares) == len(parts)
    for share, part in zip(shares, parts, strict=True):
        due = len(part) / read
        assert share == pytest.approx(part.sum() / (part.sum() + due))
        assert 0 <= share <= 1
    even = attention_shares(np.full(read, 1 / read), tokens)
    assert even == pytest.approx([0.5] * len(parts))


def test_a_theta_file_comes_back_as_it_was(tmp_path: Path) -> None:
    """A saved θ file loads as an equal Theta."""
    save_theta(THETA, tmp_path / "theta.json")
    assert load_theta(tmp_path / "theta.json") == THETA


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema: 2; 1"),
        ({"mode": "fast"}, "mode: 'fast'; one of exact, paper"),
        ({"sets": {"": [0.0], "vu": [0.0, 1.0, 1.0]}}, "one for every subset"),
        ({"sets": {}}, "one for every subset"),
        ({"sets": {"": [0.0], "x": [0.0, 1.0]}}, "one for every subset"),
        ({"sets": {"": [0.0, 1.0]}}, "sets['']: [0.0, 1.0]; 1 finite numbers"),
        ({"sets": {"": [math.inf]}}, "sets['']: [inf]"),
        ({"sets": {"": ["0"]}}, "sets['']: ['0']; a list of numbers"),
        ({"sets": {"": 0.0}}, "sets['']: 0.0; a list of numbers"),
        ({"sets": [1]}, "sets: [1]; an object"),
        ({"theta": 1}, "theta: unknown"),
    ],
)
def test_a_wrong_theta_file_is_refused_by_name(tmp_path: Path, change: dict, message: str) -> None:
    """The error names the file, the field, the value and what is allowed."""
    document = json.dumps(THETA.as_dict() | change)
    (tmp_path / "theta.json").write_text(document)
    with pytest.raises(ThetaError) as error:
        load_theta(tmp_path / "theta.json")
    assert message in str(error.value)
    assert "theta.json" in str(error.value)


def test_a_theta_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    """Broken JSON and a JSON list are refused."""
    with pytest.raises(ThetaError, match="an object is needed"):
        parse_theta([])
    (tmp_path / "theta.json").write_text("{")
    with pytest.raises(ThetaError, match="not JSON"):
        load_theta(tmp_path / "theta.json")
