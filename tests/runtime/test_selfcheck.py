"""The start-up check keeps only sizes that agree in every bit."""

import pytest
import torch

from runtime.embedded.model.selfcheck import Inexact, largest_agreeing


def results(bits: dict[int, list[float]]):
    """A fake machine: by size, the numbers that its repetitions compute."""
    return lambda size: iter([[torch.tensor([value]) for value in bits[size]]])


def test_the_largest_group_of_equal_sizes_stays():
    """Sizes 16 and 4 agree, 64 rounds differently: 64 is left out."""
    bits = {64: [1.0, 1.0], 16: [1.5, 1.5], 4: [1.5, 1.5]}
    assert largest_agreeing((64, 16, 4), results(bits)) == (16, 4)


@pytest.mark.promise(
    "The engine uses no tile size whose results differ in any bit when repeated on this machine."
)
def test_a_size_that_does_not_repeat_itself_is_left_out():
    """Size 64 gives other bits on repetition, so it is left out though its first result agrees."""
    bits = {64: [1.5, 1.0], 16: [1.5, 1.5], 4: [1.5, 1.5]}
    assert largest_agreeing((64, 16, 4), results(bits)) == (16, 4)


def test_on_a_tie_the_larger_sizes_win():
    """Of two groups with one size each the larger size is kept."""
    assert largest_agreeing((64, 16), results({64: [1.0], 16: [2.0]})) == (64,)


def test_a_machine_without_any_exact_size_is_refused():
    """If no size repeats its own bits, exact arithmetic is refused."""
    with pytest.raises(Inexact, match="exact: on"):
        largest_agreeing((64, 16), results({64: [1.0, 2.0], 16: [1.0, 2.0]}))
