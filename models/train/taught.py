"""Teacher derivations, right or with one slip in them that the rest goes on from.

They cost no sampling: there are as many as there are questions.
"""

import random

from transformers import PreTrainedTokenizerBase

from models.tasks.task import STEP_BREAK, Task
from models.train.careless import careless
from models.train.judge_prompts import corrupt
from models.train.labelled import Labelled, label
from models.train.misreading import misread
from models.train.tokenizer import END

SLIPPED_SHARE = 5 / 6
MISREAD_SHARE = 0.5
CARELESS_SHARE = 0.3
"""Shares of the slipped word problems; in the rest one word is wrong."""
CARELESSNESS = 0.3


def taught(
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    question: str,
    rng: random.Random,
    slipped: bool,
) -> Labelled:
    """A teacher's derivation, right or with one slip in it."""
    steps = _derivation_with_slip(task, question, rng) if slipped else task.solve(question, rng)
    return label(tokenizer, task, question, tokenizer.encode(STEP_BREAK.join(steps) + END))


def lesson(tokenizer: PreTrainedTokenizerBase, task: Task, rng: random.Random) -> Labelled:
    """A derivation for a new train question, most of them slipped."""
    question = task.lesson(rng)[0]
    return taught(tokenizer, task, question, rng, slipped=rng.random() < SLIPPED_SHARE)


def _derivation_with_slip(task: Task, question: str, rng: random.Random) -> list[str]:
    """A derivation with a wrong number, carried on or not, or of a misread story."""
    kind = rng.random() if task.name == "wordproblem" else 1.0
    if kind < CARELESS_SHARE:
        return careless(question, rng, CARELESSNESS)
    if kind < CARELESS_SHARE + MISREAD_SHARE:
        steps = misread(question, rng)
        if steps is not None:
            return steps
    steps = task.solve(question, rng)
    cut = rng.randrange(len(steps) - 1)
    steps[cut] = corrupt(steps[cut], rng)
    return steps
