"""Labelled replies as the reward model reads them."""

from transformers import PreTrainedTokenizerBase

from models.tasks.blocksworld import LETTERS
from models.tasks.task import STEP_BREAK
from models.train.batches import IGNORED, Row, prompt_ids, text_of
from models.train.faults import plan, right_letters
from models.train.labelled import Labelled
from models.train.tokenizer import TAG

MOVES_TO_GO, MOST_MOVES = 2, 15
"""Labels from MOVES_TO_GO on are numbers of moves, of MOST_MOVES at most."""
IN_PLACE = MOVES_TO_GO + MOST_MOVES + 1
"""The label of a block that need not move any more; the next one: of a block that has to."""


def number_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of the numbers of moves, 0 to MOST_MOVES."""
    return [tokenizer.encode(str(number))[0] for number in range(MOST_MOVES + 1)]


def sign_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of `+` and `-`."""
    return [tokenizer.encode(sign)[0] for sign in "+-"]


def scored_row(
    tokenizer: PreTrainedTokenizerBase, row: Labelled, within: list[list[int]] | None = None
) -> Row:
    """Prompt, steps and tags as one row; labels stand at the tags, 0 for `+` and 1 for `-`.

    `within` gives labels at the steps' own tokens, see `labels_within`; without it there are none.
    """
    (tag,) = tokenizer.encode(TAG)
    ids = prompt_ids(tokenizer, row.question)
    labels = [IGNORED] * len(ids)
    inner = within or [[IGNORED] * len(step) for step in row.steps]
    for step, right, step_labels in zip(row.steps, row.labels, inner, strict=True):
        ids += [*step, tag]
        labels += [*step_labels, int(not right)]
    return Row(row.task, ids, labels)


def learnt_row(tokenizer: PreTrainedTokenizerBase, row: Labelled) -> Row:
    """The reply as the reward model learns it, with labels at tags and at words."""
    return scored_row(tokenizer, row, labels_within(tokenizer, row))


def labels_within(tokenizer: PreTrainedTokenizerBase, row: Labelled) -> list[list[int]]:
    """Label the tokens of a reply's steps: 0 while all is right up to there, 1 at the fault.

    IGNORED after the fault: labels there only teach that long replies tend to be wrong; IGNORED
    also in a step that is legal in itself but leads nowhere. In a blocks world, a legal step's end
    gets MOVES_TO_GO plus the moves to the goal, and the blocks that it shows IN_PLACE or the label
    after it; the blocks only in every second right step, and in all steps after these.
    """
    labels = [[IGNORED] * len(step) for step in row.steps]
    texts = [text_of(tokenizer, step).removesuffix(STEP_BREAK) for step in row.steps]
    good = sum(row.labels)
    for i in range(good):
        labels[i] = [0] * len(row.steps[i])
    if good < len(row.steps):
        letters = right_letters(row.question, texts[: good + 1])
        labels[good] = _up_to(tokenizer, row.steps[good], letters)
    if row.task == "blocksworld":
        for i, plan_step in enumerate(plan(row.question, texts)):
            labels[i][-1] = MOVES_TO_GO + min(plan_step.moves_to_go, MOST_MOVES)
            if i >= good or i % 2 == 0:
                _label_blocks(tokenizer, row.steps[i], plan_step.in_place, labels[i])
    return labels


def _label_blocks(
    tokenizer: PreTrainedTokenizerBase, step: list[int], in_place: list[bool], labels: list[int]
) -> None:
    """Label the blocks behind a step's colon, where each is one token."""
    words = [text_of(tokenizer, [token]).strip() for token in step]
    colon = words.index(":") if ":" in words else len(words)
    places = [i for i, word in enumerate(words) if i > colon and word in set(LETTERS)]
    if len(places) == len(in_place):
        for i, placed in zip(places, in_place, strict=True):
            labels[i] = IN_PLACE + int(not placed)


def _up_to(tokenizer: PreTrainedTokenizerBase, step: list[int], letters: int) -> list[int]:
    """0 for the tokens within the first `letters` of a step, 1 for the next, nothing behind."""
    ends = [len(text_of(tokenizer, step[: n + 1])) for n in range(len(step))]
    if letters >= len(text_of(tokenizer, step).removesuffix(STEP_BREAK)):
        return [IGNORED] * len(step)
    fault = sum(end <= letters for end in ends)
    return [0] * fault + [1] + [IGNORED] * (len(step) - fault - 1)
