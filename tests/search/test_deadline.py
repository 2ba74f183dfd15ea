"""A search's deadline, by the test's own clock."""

from __future__ import annotations

import pytest

from search.stop import CLOSING_SECONDS, RELEASE_SECONDS, Deadline, TooLate


def deadline(now: float, at: float | None) -> Deadline:
    """A deadline at second ``at``, with a clock that stands at ``now``."""
    return Deadline(lambda: now, at)


def same(first: str, second: str) -> bool:
    """Whether two answers are equal but for their case."""
    return first.lower() == second.lower()


def test_seconds_left_to_a_deadline() -> None:
    """2.5 s are left before it, none after it, plus the grace given; None without a deadline."""
    before, after = deadline(10.0, at=12.5), deadline(13.0, at=12.5)
    assert (before.remaining(), before.remaining(0.5)) == (2.5, 3.0)
    assert (after.remaining(), after.remaining(0.5)) == (0.0, 0.5)
    assert deadline(10.0, at=None).remaining(0.5) is None


def test_closing_takes_little_longer_than_the_deadline() -> None:
    """Closing is limited by the given maximum too, and by that alone without a deadline."""
    before, after = deadline(10.0, at=12.5), deadline(13.0, at=12.5)
    assert [before.closing(most) for most in (None, 9.0, 1.0)] == [2.5 + CLOSING_SECONDS] * 2 + [
        1.0
    ]
    assert [after.closing(most) for most in (None, 9.0)] == [CLOSING_SECONDS] * 2
    assert [deadline(10.0, at=None).closing(most) for most in (None, 9.0)] == [None, 9.0]


def test_an_engine_that_stands_still_is_waited_for_a_moment_only() -> None:
    """Releasing a tree may take RELEASE_SECONDS, less than comparing answers may."""
    assert deadline(10.0, at=12.5).releasing() == 2.5 + RELEASE_SECONDS
    assert deadline(13.0, at=12.5).releasing() == RELEASE_SECONDS < CLOSING_SECONDS
    assert deadline(10.0, at=None).releasing() is None


def test_from_its_deadline_on_a_search_is_too_late() -> None:
    """``check`` raises TooLate from the deadline on, and never without one."""
    deadline(12.4, at=12.5).check()
    deadline(99.0, at=None).check()
    with pytest.raises(TooLate):
        deadline(12.5, at=12.5).check()


def test_answers_are_compared_until_the_search_is_closed() -> None:
    """Comparing raises TooLate once closing is over; without a deadline it is not wrapped."""
    closed = 12.5 + CLOSING_SECONDS
    compare = deadline(12.5, at=12.5).bound(same)
    assert compare is not None
    assert compare("Yes", "yes")
    assert not compare("Yes", "no")
    late = deadline(closed, at=12.5).bound(same)
    assert late is not None
    with pytest.raises(TooLate):
        late("Yes", "yes")
    assert deadline(99.0, at=None).bound(same) is same
    assert deadline(10.0, at=12.5).bound(None) is None
