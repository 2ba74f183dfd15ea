"""A word problem with other names is as right, or as wrong, as before."""

import random

from hypothesis import given
from hypothesis import strategies as st

from models.tasks import TASKS
from models.tasks.task import STEP_BREAK
from models.train.batches import Row, load_tokenizer, text_of
from models.train.judge_prompts import corrupt
from models.train.renaming import renamed

STORIES = TASKS["wordproblem"]


@given(st.integers(0, 2**32).map(random.Random), st.booleans())
def test_the_checker_says_the_same(rng: random.Random, slipped: bool) -> None:
    """The verdict stays, of a right derivation and of one with a corrupted step."""
    tokenizer = load_tokenizer()
    question, steps = STORIES.lesson(rng)
    if slipped:
        steps[0] = corrupt(steps[0], rng)
    split = len(tokenizer.encode(question))
    row = Row("wordproblem", tokenizer.encode(question + STEP_BREAK + STEP_BREAK.join(steps)), [])
    new_row = renamed(tokenizer, row, rng)
    new_question = text_of(tokenizer, new_row.ids[:split])
    reply = text_of(tokenizer, new_row.ids[split:]).strip()
    assert STORIES.check(new_question, reply) == STORIES.check(question, STEP_BREAK.join(steps))
