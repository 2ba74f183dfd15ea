"""A weight in either layout multiplies rows as torch does."""

import pytest
import torch

from runtime.embedded.model import layers
from runtime.embedded.model.layers import Matrix

WAYS = [False, *([True] if layers.PACKED else [])]
"""Layouts to test: plain everywhere, packed where oneDNN is available."""


@pytest.fixture(params=WAYS, ids=lambda packed: "packed" if packed else "plain")
def _laid_out(request, monkeypatch):
    monkeypatch.setattr(layers, "PACKED", request.param)


def random_tensor(*shape: int) -> torch.Tensor:
    """A random tensor that is the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("_laid_out")
def test_rows_are_multiplied_as_by_torch():
    """The weight is given as in a checkpoint, (outputs, inputs)."""
    weight, rows = random_tensor(24, 16), random_tensor(5, 16)
    matrix = Matrix(weight)
    assert (matrix.inputs, matrix.outputs) == (16, 24)
    torch.testing.assert_close(matrix.times(rows), rows @ weight.t())


@pytest.mark.usefixtures("_laid_out")
def test_a_gate_is_torchs_silu_of_the_product():
    """a / (1 + e^-a), large numbers of either sign included."""
    weight, rows = 20 * random_tensor(24, 16), random_tensor(5, 16)
    expected = torch.nn.functional.silu(rows @ weight.t())
    torch.testing.assert_close(Matrix(weight).gate(rows), expected, rtol=1e-4, atol=1e-4)
