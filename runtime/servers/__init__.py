"""Servers that somebody else runs: which one a search is on, and whether it is there."""
