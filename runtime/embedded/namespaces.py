"""Cache namespaces: trees of different ones never share cached tokens.

A tree's id may begin with a namespace and a slash. Inside the caches the first token of every path
carries its namespace's number above the token's own bits, so paths of two namespaces have nothing
in common; the model is given the token alone. Without a namespace paths are as they are.
"""

from __future__ import annotations

import numpy as np

SHIFT = 32
TOKEN = (1 << SHIFT) - 1


class Namespaces:
    """The numbers of the namespaces seen so far."""

    def __init__(self) -> None:
        self._numbers = {"": 0}

    def mark(self, tree: str, tokens: np.ndarray) -> np.ndarray:
        """A path (int64 ids, from the prompt on) in the namespace of ``tree``."""
        name = tree.rpartition("/")[0]
        number = self._numbers.setdefault(name, len(self._numbers))
        if not number or not len(tokens):
            return tokens
        marked = tokens.copy()
        marked[0] |= number << SHIFT
        return marked


def token_ids(tokens: np.ndarray) -> np.ndarray:
    """The ids alone, as the model knows them."""
    return tokens & TOKEN
