"""What priorities requests have in SGLang, where what is higher goes first."""

from __future__ import annotations

PRIORITY_UNITS = 1000
"""What was asked for has from 0 to so many, by what it is worth."""
EARLY_PRIORITY = -10 * PRIORITY_UNITS
"""Of what nobody has asked for yet: let in last, and preempted first."""
