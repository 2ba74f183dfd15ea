"""Hand-made trees."""

from __future__ import annotations

from search.tree import Finish, Tree

STEP, END, LENGTH, LIMIT = Finish.STEP, Finish.END, Finish.LENGTH, Finish.LIMIT

Line = tuple[int, str, Finish, float | None]
"""A step: parent id, text, how it ended, reward."""


def tree_of(*lines: Line, logprobs: tuple[float | None, ...] = ()) -> Tree:
    """The tree with these steps as nodes 1, 2, ...; a character is a token, the prompt is ``?``."""
    tree = Tree((ord("?"),))
    for i, (parent, text, finish, reward) in enumerate(lines):
        logprob = logprobs[i] if logprobs else -1.0
        node = tree.add(parent, tuple(map(ord, text)), text, finish, logprob=logprob)
        node.reward = reward
    return tree


def row(*rewards: float | None, finish: Finish = STEP) -> Tree:
    """A root with one child for each reward."""
    return tree_of(*((0, f"s{i}", finish, reward) for i, reward in enumerate(rewards)))
