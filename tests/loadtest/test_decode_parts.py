"""The table of an iteration's parts: what is timed, and that nothing stays changed."""

from types import SimpleNamespace

import pytest

from loadtest.decode_parts import PARTS, timed


def test_parts_are_timed_and_put_back():
    """Calls give what they gave, arguments and errors go through; afterwards all is as before."""

    def half(value: int, *, up: bool = False) -> int:
        if value < 0:
            raise ValueError("less than nothing")
        return value // 2 + up

    house = SimpleNamespace(half=half)
    with timed({"part": [(house, "half")]}) as spent:
        assert house.half is not half
        assert house.half(7, up=True) == 4
        with pytest.raises(ValueError, match="nothing"):
            house.half(-1)
    assert house.half is half
    assert spent["part"] > 0


def test_every_part_is_where_it_is_looked_for():
    """A function that moves elsewhere would drop out of the table unseen."""
    places = [place for found in PARTS.values() for place in found]
    assert all(callable(getattr(owner, name)) for owner, name in places)
