"""A weight multiplies rows as torch would, in either layout."""

import pytest
import torch

from runtime.embedded.model import layers
from runtime.embedded.model.layers import Matrix

WAYS = [False, *([True] if layers.PACKED else [])]
"""Plain everywhere, packed where there is oneDNN."""


@pytest.fixture(params=WAYS, ids=lambda packed: "packed" if packed else "plain")
def _laid_out(request, monkeypatch):
    monkeypatch.setattr(layers, "PACKED", request.param)


def drawn(*shape: int) -> torch.Tensor:
    """The same numbers every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("_laid_out")
def test_rows_are_multiplied_as_by_torch():
    """By the weight as a checkpoint has it, (outputs, inputs)."""
    weight, rows = drawn(24, 16), drawn(5, 16)
    made = Matrix(weight)
    assert (made.inputs, made.outputs) == (16, 24)
    torch.testing.assert_close(made.times(rows), rows @ weight.t())


@pytest.mark.usefixtures("_laid_out")
def test_a_gate_is_torchs_silu_of_the_product():
    """a / (1 + e^-a), large numbers of either sign included."""
    weight, rows = 20 * drawn(24, 16), drawn(5, 16)
    expected = torch.nn.functional.silu(rows @ weight.t())
    torch.testing.assert_close(Matrix(weight).gate(rows), expected, rtol=1e-4, atol=1e-4)
