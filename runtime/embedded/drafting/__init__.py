"""Speculative decoding: a draft runs ahead, the target checks."""
