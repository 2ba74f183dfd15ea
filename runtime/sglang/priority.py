"""What a request's priority says to SGLang: a whole number, what is higher goes first.

What is let in last, and evicted first where a stock server evicts by it, is the lowest.
"""

UNITS = 1000
"""Of what was asked for: 0 to so many, by what it is worth."""
EARLY = -10 * UNITS
"""Of what nobody has asked for yet."""
