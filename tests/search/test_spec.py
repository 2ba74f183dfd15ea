"""SearchSpec's fields are strict, except that JSON has one kind of number."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from search.spec import SearchSpec


def test_a_whole_number_is_an_integer() -> None:
    """16.0 is accepted for 16, since JSON may write it so; fractions and texts are refused."""
    spec = SearchSpec.model_validate({"width": 16.0, "temperature": 1.0, "max_tokens": 1e3})
    assert (spec.width, spec.temperature, spec.max_tokens) == (16, 1.0, 1000)
    for wrong in (16.5, "16", True, float("inf"), float("nan"), 1e308):
        with pytest.raises(ValidationError):
            SearchSpec.model_validate({"width": wrong})
