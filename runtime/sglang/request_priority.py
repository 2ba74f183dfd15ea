"""Priorities of requests in SGLang, which serves higher ones first."""

from __future__ import annotations

PRIORITY_UNITS = 1000
"""Requests of rounds have priorities from 0 to this, by their rewards."""
EARLY_PRIORITY = -10 * PRIORITY_UNITS
"""For steps that no round has asked for yet: admitted last, and preempted first."""
