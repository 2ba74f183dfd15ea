"""Hypothesis for every test: how long an example takes fails none of them.

What ``CI=true`` sets besides stays: the same examples every time.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "timeless", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("timeless")
