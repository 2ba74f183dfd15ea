"""Rename the people and things of word problems, which leaves the labels unchanged.

A reward model memorises a reply that it reads twice; with new names each time it has to look at
the text.
"""

import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from models.tasks.story import NAMES, THINGS
from models.train.batches import Row


def renamed(tokenizer: PreTrainedTokenizerBase, row: Row, rng: random.Random) -> Row:
    """The row with its names and things replaced by others, consistently."""
    names, things = rng.sample(NAMES, len(NAMES)), rng.sample(THINGS, len(THINGS))
    new_ids = _exchange(tokenizer, NAMES, names)
    for old, new in ((NAMES, names), (THINGS, things)):
        new_ids |= _exchange(tokenizer, [f" {word}" for word in old], [f" {word}" for word in new])
    return row._replace(ids=[new_ids.get(token, token) for token in row.ids])


def _exchange(
    tokenizer: PreTrainedTokenizerBase, old: Sequence[str], new: Sequence[str]
) -> dict[int, int]:
    """Map the old words' ids to the new words'; every word is one token."""
    pairs = [(tokenizer.encode(a), tokenizer.encode(b)) for a, b in zip(old, new, strict=True)]
    return {a: b for (a,), (b,) in pairs}
