"""Which cells of the grid go on, and which one is chosen: by hand, and as properties."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.successive_halving import (
    Cell,
    beaten,
    first_questions,
    front,
    gain95,
    going_on,
    most_accurate,
    next_questions,
    paired,
    shortfall,
    tree_key,
    worth_it,
)
from search.spec import SearchSpec


def spec(policy: str = "rebase", width: int = 4, **fields: Any) -> SearchSpec:
    """Return a search of the grid."""
    return SearchSpec.model_validate({"policy": policy, "width": width, **fields})


def cell(width: int, right: int, tokens: float, questions: int = 8, **fields: Any) -> Cell:
    """Return a cell whose first ``right`` questions are right."""
    flags = tuple(i < right for i in range(questions))
    return Cell(spec(width=width, **fields), flags, questions, tokens)


def names(cells: list[Cell]) -> list[int]:
    """Return the widths of these cells."""
    return [candidate.spec.width for candidate in cells]


CELLS = st.lists(
    st.builds(
        lambda width, vote, flags, tokens: Cell(spec(width=width, vote=vote), flags, 6, tokens),
        st.integers(1, 12),
        st.sampled_from(["majority", "weighted_majority", "best_last"]),
        st.tuples(*[st.booleans()] * 6),
        st.integers(1, 9).map(float),
    ),
    min_size=1,
    max_size=14,
)


def test_seeds_of_a_question_are_averaged() -> None:
    """Two questions, two seeds, seed by seed: (1, 0), then (1, 1)."""
    both = Cell(spec(), (True, False, True, True), 2, 10.0)
    assert both.by_question == [1.0, 0.5]
    assert both.accuracy == 0.75


def test_a_gain_by_hand() -> None:
    """Eight questions, three won and none lost; a half win and a half loss added, and two
    questions: a mean of .3, and a variance of (3 + 1) / 10 - .09 = .31 over ten."""
    mean, error = paired(cell(4, 5, 1), cell(4, 2, 1))
    assert mean == pytest.approx(0.3)
    assert error == pytest.approx(math.sqrt(0.031))
    low, high = gain95(cell(4, 5, 1), cell(4, 2, 1))
    assert (low, high) == pytest.approx((-0.0451, 0.6451), abs=1e-4)


def test_few_questions_that_agree_prove_nothing() -> None:
    """The interval of four equal answers is wide; that of four hundred is narrow."""
    wide = gain95(cell(4, 4, 1, questions=4), cell(8, 4, 2, questions=4))
    narrow = gain95(cell(4, 400, 1, questions=400), cell(8, 400, 2, questions=400))
    assert wide == pytest.approx((-0.3267, 0.3267), abs=1e-4)
    assert narrow == pytest.approx((-0.0049, 0.0049), abs=1e-4)


def test_the_front_by_hand() -> None:
    """A cell that is dearer and no better is off the front; cells equal in both are on it."""
    cells = [cell(1, 2, 10), cell(2, 5, 40), cell(3, 5, 50), cell(4, 4, 20), cell(5, 5, 40)]
    assert names(front(cells)) == [1, 2, 4, 5]
    assert [shortfall(candidate, cells) for candidate in cells] == [0, 0, 0, 0, 0]
    assert shortfall(cell(6, 3, 45), cells) == 0.25


def test_a_rung_by_hand() -> None:
    """Six trees: three on the front, and the nearest of the other three. With seven, two of the
    other four go on: one is two answers below the front, three are one; the cheaper of these."""
    cells = [
        cell(1, 2, 10),
        cell(2, 5, 40),
        cell(3, 7, 90),
        cell(4, 4, 50),
        cell(5, 5, 95),
        cell(6, 1, 30),
    ]
    assert names(going_on(cells)) == [1, 2, 3, 6]
    assert names(going_on([*cells, cell(7, 4, 45)])) == [1, 2, 3, 6, 7]


def test_what_the_budget_can_carry_goes_on_too() -> None:
    """Beside the front (1) and the nearer half of the rest (2), the next nearest go on while all
    together cost no more than the budget; the first that does not fit ends it."""
    cells = [cell(1, 8, 10), cell(2, 8, 20), cell(3, 7, 30), cell(4, 7, 60), cell(5, 6, 40)]
    assert names(going_on(cells)) == [1, 2, 3]
    assert names(going_on(cells, 119)) == [1, 2, 3]
    assert names(going_on(cells, 120)) == [1, 2, 3, 4]
    assert names(going_on(cells, 160)) == [1, 2, 3, 4, 5]


def test_who_is_surely_beaten_goes_even_where_there_is_room() -> None:
    """Ten of ten against none, for fewer tokens: the whole interval is above 0."""
    good, bad, other = cell(1, 10, 10, 10), cell(2, 0, 20, 10), cell(3, 9, 30, 10)
    assert beaten(bad, [good, bad])
    assert not beaten(other, [good, other])
    assert names(going_on([good, bad, other, cell(4, 9, 30, 10)])) == [1, 3]


def test_votes_of_a_tree_go_on_together_unless_they_are_beaten() -> None:
    """More votes on one tree cost nothing; a vote that is surely worse is dropped all the same."""
    votes = [
        cell(4, right, 20, questions=20, vote=vote)
        for vote, right in (("majority", 16), ("weighted_majority", 14), ("best_last", 3))
    ]
    survivors = going_on([*votes, cell(8, 2, 70, questions=20)])
    assert [candidate.spec.vote for candidate in survivors] == ["majority", "weighted_majority"]


def test_questions_of_the_rungs() -> None:
    """The first rung takes half of the budget, eight questions at most; each next rung twice as
    many questions, or as many as the remaining tokens pay for."""
    assert first_questions(100_000, 1_000, 400) == 8
    assert first_questions(12_999, 1_000, 400) == 6
    assert first_questions(100_000, 1_000, 5) == 5
    with pytest.raises(ValueError, match="1,000 tokens over the whole grid: at least 8,000"):
        first_questions(7_999, 1_000, 400)
    assert next_questions(8, 100_000, 1_000, 400) == 16
    assert next_questions(8, 3_999, 1_000, 400) == 11
    assert next_questions(8, 999, 1_000, 400) == 8
    assert next_questions(8, -5, 1_000, 400) == 8
    assert next_questions(300, 1e9, 1_000, 400) == 400


def test_choices_by_hand() -> None:
    """Of a hundred questions 50, 80, 83 and 84 right. The last is the most accurate: it is 4/102
    ahead of the second, more than the error of .0215, and 1/102 of the third, within .0138."""
    cells = [
        cell(1, 50, 10, 100),
        cell(2, 80, 40, 100),
        cell(3, 83, 90, 100),
        cell(4, 84, 160, 100),
    ]
    assert most_accurate(cells).spec.width == 4
    assert most_accurate(cells, 159).spec.width == 3
    assert most_accurate(cells, 40).spec.width == 2
    assert most_accurate(cells, 5).spec.width == 1
    assert paired(cells[3], cells[1]) == pytest.approx((4 / 102, 0.0215), abs=1e-4)
    assert paired(cells[3], cells[2]) == pytest.approx((1 / 102, 0.0138), abs=1e-4)
    assert worth_it(cells).spec.width == 3
    assert worth_it([cells[0], *cells[2:], cell(5, 83, 40, 100)]).spec.width == 5


def test_equal_trees_have_one_key() -> None:
    """Votes share a tree, except for unscored chains and for votes that may end the search."""
    assert tree_key(spec(vote="majority")) == tree_key(spec(vote="best_min"))
    assert tree_key(spec(vote="majority")) != tree_key(spec(vote="majority", temperature=0.5))
    alone, scored = spec("self_consistency"), spec("self_consistency", vote="best_last")
    assert tree_key(alone) != tree_key(scored)
    majority, lineages = (spec(vote=v, consensus="certain") for v in ("majority", "lineages"))
    assert tree_key(majority) != tree_key(lineages)


def test_any_of_the_most_accurate_is_compared_with() -> None:
    """Two cells have five right and four tokens. A third has three right and one token: it is
    within the error of the one that it shares few right replies with, but not of the other."""
    cheap = Cell(spec(width=1), (True, True, True, False, False, False), 6, 1.0)
    near = Cell(spec(width=2), (True, True, True, True, True, False), 6, 4.0)
    far = Cell(spec(width=3), (False, True, True, True, True, True), 6, 4.0)
    assert worth_it([cheap, far]) == cheap
    assert worth_it([cheap, near]) == near
    assert worth_it([cheap, near, far]) == worth_it([cheap, far, near]) == cheap


@given(CELLS)
def test_the_front_goes_on_and_half_of_the_others_at_most(cells: list[Cell]) -> None:
    """No cell of the front is dropped, so no rung ends without a cell."""
    survivors, best = going_on(cells), front(cells)
    assert best
    assert all(candidate in survivors for candidate in best)
    trees, of_front = ({tree_key(c.spec) for c in part} for part in (cells, best))
    surviving_trees = {tree_key(c.spec) for c in survivors}
    assert len(surviving_trees) <= len(of_front) + (len(trees) - len(of_front)) // 2
    assert [candidate for candidate in cells if candidate in survivors] == survivors


@given(CELLS)
def test_nothing_dominates_what_is_chosen(cells: list[Cell]) -> None:
    """More tokens never buy less accuracy; ``worth_it`` costs no more than the best."""
    limits = sorted(candidate.tokens for candidate in cells)
    choices = [most_accurate(cells, tokens) for tokens in limits]
    assert all(candidate in front(cells) for candidate in [*choices, worth_it(cells)])
    for cheaper, dearer in pairwise(choices):
        assert cheaper.accuracy <= dearer.accuracy
        assert cheaper.tokens <= dearer.tokens
    assert worth_it(cells).tokens <= most_accurate(cells).tokens


@given(CELLS, st.randoms())
def test_the_order_of_the_cells_decides_ties_alone(cells: list[Cell], dice: Any) -> None:
    """With the cells in another order, the choice has the same accuracy and tokens."""
    shuffled = dice.sample(cells, len(cells))
    for choose in (most_accurate, worth_it):
        best, other = choose(cells), choose(shuffled)
        assert (best.accuracy, best.tokens) == (other.accuracy, other.tokens)


@given(st.floats(1, 1e9), st.floats(1, 1e6), st.integers(1, 500))
def test_no_rung_costs_more_than_is_left(budget: float, cost: float, limit: int) -> None:
    """Each rung stays within the tokens, at the cost of a question known so far."""
    try:
        first = first_questions(budget, cost, limit)
    except ValueError:
        assert budget < 8 * cost
        return
    assert 1 <= first <= limit
    assert first * cost <= budget / 2 * (1 + 1e-9)
    second = next_questions(first, budget - first * cost, cost, limit)
    assert first <= second <= limit
    assert second * cost <= budget * (1 + 1e-9)
