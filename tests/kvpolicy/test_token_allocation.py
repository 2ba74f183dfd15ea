"""Extractive mode: equations (2) and (3), α, floors that do not fit, tokens within a block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpolicy.eviction_order import Infeasible
from kvpolicy.token_allocation import Floors, Variant, allocate, keep_counts, keep_ratios, select

NO_FLOORS = Floors(ratio=0.0, tokens=0, tail=0)


def ids(*numbers: int) -> np.ndarray:
    """An int64 array."""
    return np.array(numbers, dtype=np.int64)


def nobody(count: int) -> np.ndarray:
    """A mask (count,) with no block on the active path."""
    return np.zeros(count, dtype=bool)


def test_equation_two_clips_to_r_min_and_one() -> None:
    """α 2: gains 0.01, 0.3 and 0.9 become r_min 0.05, 0.6 and 1."""
    ratios = keep_ratios(2.0, np.array([0.01, 0.3, 0.9]), Floors())
    assert ratios == pytest.approx([0.05, 0.6, 1.0])


def test_equation_three_by_hand() -> None:
    """100 tokens at 0.35: 35; at 0.05: K_min 8; 5 tokens: all of them; 9 with a tail of 12: 9."""
    floors = Floors(ratio=0.05, tokens=8, tail=4)
    assert keep_counts(np.array([0.35, 0.05, 0.5]), ids(100, 100, 5), floors).tolist() == [35, 8, 5]
    assert keep_counts(np.array([0.5]), ids(9), Floors(tail=12)).tolist() == [9]


def test_a_whole_number_with_rounding_noise_stays_whole() -> None:
    """0.29 * 100 is 28.999999999999996 in float64; it keeps 29 tokens."""
    assert keep_counts(np.array([0.29]), ids(100), NO_FLOORS).tolist() == [29]


def test_alpha_by_hand_as_equation_two_says() -> None:
    """w 0.4 and 0.1, 100 and 50 tokens, budget 90: α (40 + 5) = 90, so α = 2, k = 80 and 10."""
    allocation = allocate(np.array([0.4, 0.1]), ids(100, 50), nobody(2), 90, NO_FLOORS)
    assert allocation.alpha == pytest.approx(2.0)
    assert allocation.counts.tolist() == [80, 10]


def test_alpha_by_hand_as_the_optimisation_says() -> None:
    """k ∝ w: α (0.4 + 0.1) = 90, so α = 180, k = 72 and 18: not what equation (2) gives."""
    allocation = allocate(np.array([0.4, 0.1]), ids(100, 50), nobody(2), 90, NO_FLOORS, "share")
    assert allocation.alpha == pytest.approx(180.0)
    assert allocation.counts.tolist() == [72, 18]


def test_both_readings_agree_where_blocks_are_equally_long() -> None:
    """Equation (2) and the optimisation differ by the length alone."""
    weight = np.array([0.9, 0.5, 0.2, 0.05])
    by_ratio, by_share = (
        allocate(weight, ids(64, 64, 64, 64), nobody(4), 150, Floors(), variant)
        for variant in ("ratio", "share")
    )
    assert by_ratio.counts.tolist() == by_share.counts.tolist()


def test_what_one_block_cannot_take_goes_to_the_others() -> None:
    """The first is whole at 10; 40 remain for equal weights 0.2 of 50 and 50: 20 each."""
    allocation = allocate(np.array([0.9, 0.2, 0.2]), ids(10, 50, 50), nobody(3), 50, NO_FLOORS)
    assert allocation.counts.tolist() == [10, 20, 20]


def test_what_is_gone_takes_no_room_by_hand() -> None:
    """The first block has 10 tokens left, so the second gets 30 of a budget of 40, not 20."""
    weight, tokens = np.array([0.5, 0.5]), ids(50, 50)
    allocation = allocate(weight, tokens, nobody(2), 40, NO_FLOORS, most=ids(10, 50))
    assert allocation.counts.tolist() == [10, 30]
    gone = allocate(weight, tokens, nobody(2), 40, Floors(0.0, 8, 8), most=ids(0, 50))
    assert gone.counts.tolist() == [0, 40]


def test_a_path_that_is_not_made_whole_again_keeps_what_there_is() -> None:
    """Block 0 is on the path with 12 of 30 tokens left, so 38 remain for the other."""
    whole = np.array([True, False])
    allocation = allocate(np.array([0.1, 0.5]), ids(30, 60), whole, 50, NO_FLOORS, most=ids(12, 60))
    assert allocation.counts.tolist() == [12, 38]


def test_the_active_path_stays_whole() -> None:
    """Block 0 is on the path and takes 30 of 50 tokens before the others share the rest."""
    whole = np.array([True, False, False])
    allocation = allocate(np.array([0.1, 0.5, 0.5]), ids(30, 40, 40), whole, 50, NO_FLOORS)
    assert allocation.counts.tolist() == [30, 10, 10]
    assert allocation.ratios[0] == 1.0


def test_floors_that_alone_exceed_the_budget_are_refused_with_both_numbers() -> None:
    """The paper's pressure loop never ends here: 5 whole, 2 x 8 at the floor, a budget of 20."""
    whole = np.array([True, False, False])
    with pytest.raises(Infeasible, match=r"budget: 20 tokens; .* need 21") as refused:
        allocate(np.ones(3), ids(5, 40, 40), whole, 20, Floors(ratio=0.0))
    assert (refused.value.needed, refused.value.budget) == (21, 20)


def test_a_block_that_is_worth_nothing_stays_at_its_floor() -> None:
    """No α lifts a weight of 0, however large the budget; without any weight α is 0."""
    allocation = allocate(np.array([0.0, 0.5]), ids(50, 50), nobody(2), 1000, Floors(ratio=0.0))
    assert allocation.counts.tolist() == [8, 50]
    assert allocate(np.zeros(2), ids(50, 50), nobody(2), 1000, Floors()).alpha == 0.0


def test_floors_count_before_they_are_rounded_down() -> None:
    """5 % of 10 tokens is half a one: of 50 tokens 49.5 are left for the other block, α = 0.495.

    Of 100 tokens of which 2 are left no more than 2 can stay: α = 0.48. Where the floors fit only
    once they are rounded down, 2 of 2.5, no α lifts anything.
    """
    floors, weight = Floors(ratio=0.05, tokens=0, tail=0), np.array([0.0, 1.0])
    allocation = allocate(weight, ids(10, 100), nobody(2), 50, floors)
    assert allocation.alpha == pytest.approx(0.495)
    assert allocation.counts.tolist() == [0, 49]
    allocation = allocate(weight, ids(100, 100), nobody(2), 50, floors, most=ids(2, 100))
    assert allocation.alpha == pytest.approx(0.48)
    assert allocation.counts.tolist() == [2, 48]
    allocation = allocate(np.ones(1), ids(10), nobody(1), 2, Floors(ratio=0.25, tokens=0, tail=0))
    assert (allocation.alpha, allocation.counts.tolist()) == (0.0, [2])


BLOCKS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(1, 200), st.booleans()), min_size=1, max_size=30
)
FLOORS = st.builds(
    Floors, ratio=st.floats(0, 0.3), tokens=st.integers(0, 10), tail=st.integers(0, 10)
)


@given(
    blocks=BLOCKS,
    floors=FLOORS,
    share=st.floats(0, 1.1),
    variant=st.sampled_from(["ratio", "share"]),
    remaining=st.sampled_from([0.0, 0.3, 1.0]),
)
@example([(0.0, 2, False), (0.011067186764683214, 3, False)], Floors(0.0, 0, 0), 1.0, "ratio", 1.0)
@example([(0.0, 14, False), (1.0, 7, False), (0.5, 4, False)], Floors(0.0, 1, 0), 1.0, "ratio", 0.3)
def test_a_budget_is_respected_and_no_larger_alpha_would_respect_it(
    blocks: list[tuple[float, int, bool]],
    floors: Floors,
    share: float,
    variant: Variant,
    remaining: float,
) -> None:
    """Floors hold up to the ``remaining`` share of each block, Path* keeps all it has, and rounding
    leaves less than one token a block unused."""
    weight = np.array([w for w, _, _ in blocks])
    tokens = ids(*(n for _, n, _ in blocks))
    whole = np.array([p for _, _, p in blocks])
    most = (remaining * tokens).astype(np.int64)
    least = np.minimum(floors.of(tokens), most)
    budget = int(share * most.sum())
    lowest = int(np.where(whole, most, least).sum())
    if lowest > budget:
        with pytest.raises(Infeasible):
            allocate(weight, tokens, whole, budget, floors, variant, most)
        return
    allocation = allocate(weight, tokens, whole, budget, floors, variant, most)
    assert allocation.counts.sum() <= budget
    assert np.all(allocation.counts[whole] == most[whole])
    assert np.all((allocation.counts >= least) & (allocation.counts <= most))
    rising = (np.maximum(allocation.ratios * tokens, least) < most - 1e-9) & (weight > 1e-200)
    if np.any(rising & (allocation.ratios > floors.ratio)):
        assert allocation.counts.sum() > min(budget, most.sum()) - len(blocks)
    more = allocate(weight, tokens, whole, budget + 5, floors, variant, most)
    assert np.all(more.counts >= allocation.counts)
    assert more.alpha >= allocation.alpha


def test_tokens_within_a_block_by_hand() -> None:
    """Ten tokens, keep five, tail three: 7 8 9, and of the rest those attended to most: 2 and 5."""
    attention = np.array([0.1, 0.2, 0.9, 0.3, 0.1, 0.8, 0.0, 5.0, 5.0, 5.0])
    assert select(10, 5, 3, attention).tolist() == [2, 5, 7, 8, 9]


def test_the_tail_comes_first_when_there_is_room_for_nothing_else() -> None:
    """Keep two of a tail of three: the last two. Without attention the earliest go first."""
    assert select(10, 2, 3, np.arange(10.0)).tolist() == [8, 9]
    assert select(10, 4, 3).tolist() == [6, 7, 8, 9]
    assert select(10, 0, 3).tolist() == []


def test_equal_attention_keeps_the_lower_position() -> None:
    """Ties in attention are broken by position."""
    assert select(6, 3, 1, np.ones(6)).tolist() == [0, 1, 5]
