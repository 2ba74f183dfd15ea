"""Replies with the checker's verdict on every step, from which the reward model learns."""

from itertools import chain
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from models.tasks.task import STEP_BREAK, Task
from models.train.batches import text_of


class Labelled(NamedTuple):
    """A question, the steps of a reply as token ids (ends included), and their labels."""

    task: str
    question: str
    steps: list[list[int]]
    labels: list[bool]


def step_ids(reply: list[int], step_break: int) -> list[list[int]]:
    """A reply's ids cut after each step break."""
    steps: list[list[int]] = [[]]
    for token in reply:
        steps[-1].append(token)
        if token == step_break:
            steps.append([])
    return steps if steps[-1] else steps[:-1]


def label(
    tokenizer: PreTrainedTokenizerBase, task: Task, question: str, reply: list[int]
) -> Labelled:
    """Label the reply's steps by the checker; a cut-off last step is never right."""
    (step_break,) = tokenizer.encode(STEP_BREAK)
    row = label_steps(tokenizer, task, question, step_ids(reply, step_break))
    if reply[-1] != tokenizer.eos_token_id:
        row.labels[-1] = False
    return row


def label_steps(
    tokenizer: PreTrainedTokenizerBase, task: Task, question: str, steps: list[list[int]]
) -> Labelled:
    """Label the steps of a reply, or of the beginning of one, by the checker."""
    labels = list(task.check(question, text_of(tokenizer, flat(steps))).steps)
    # An empty paragraph at either end is a step of tokens but not of text.
    labels = (labels + [False] * len(steps))[: len(steps)]
    return Labelled(task.name, question, steps, labels)


def flat(steps: list[list[int]]) -> list[int]:
    """The steps' ids as one list."""
    return list(chain.from_iterable(steps))
