"""For every test: its place in the run, and that how long Hypothesis' examples take fails none.

What ``CI=true`` sets of Hypothesis besides stays: the same examples every time.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

LONGEST = (
    "tests/test_same_tree.py",
    "tests/test_soak.py",
    "tests/loadtest/test_scenarios.py",
    "tests/server/test_many.py",
    "tests/clients/test_clients.py",
)
"""Begun last, one of these would keep one worker busy long after the others are done."""

settings.register_profile(
    "timeless", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("timeless")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others as they were."""
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
