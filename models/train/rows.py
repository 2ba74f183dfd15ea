"""Labelled replies as the reward model reads them."""

from transformers import PreTrainedTokenizerBase

from models.train.batches import IGNORED, Row, prompt_ids
from models.train.prm_data import Labelled
from models.train.tokenizer import TAG


def sign_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of `+` and `-`."""
    return [tokenizer.encode(sign)[0] for sign in "+-"]


def scored_row(tokenizer: PreTrainedTokenizerBase, row: Labelled) -> Row:
    """Prompt, steps and tags as one row; labels stand at the tags, 0 for `+` and 1 for `-`."""
    (tag,) = tokenizer.encode(TAG)
    ids = prompt_ids(tokenizer, row.question)
    labels = [IGNORED] * len(ids)
    for step, right in zip(row.steps, row.labels, strict=True):
        ids += [*step, tag]
        labels += [IGNORED] * len(step) + [int(not right)]
    return Row(row.task, ids, labels)
