"""The dials: strict, but for JSON's one kind of number."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from search.spec import SearchSpec


def test_a_whole_number_is_an_integer() -> None:
    """JSON writes 16 as 16.0 where it likes; a fraction is refused, as is a text."""
    spec = SearchSpec.model_validate({"width": 16.0, "temperature": 1.0, "max_tokens": 1e3})
    assert (spec.width, spec.temperature, spec.max_tokens) == (16, 1.0, 1000)
    for wrong in (16.5, "16", True, float("inf"), float("nan"), 1e308):
        with pytest.raises(ValidationError):
            SearchSpec.model_validate({"width": wrong})
