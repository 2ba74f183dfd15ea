"""Teacher derivations: right ones are right in every step, slipped ones up to the slip."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tasks import TASKS
from models.tasks.task import STEP_BREAK
from models.train.batches import load_tokenizer, text_of
from models.train.misreading import misread
from models.train.taught import lesson, taught

SEEDS = st.integers(0, 2**32)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
@given(SEEDS.map(random.Random))
def test_a_right_derivation_is_right_throughout(name: str, rng: random.Random) -> None:
    """Every step is labelled right, and the last one says the answer."""
    question = TASKS[name].lesson(rng)[0]
    row = taught(load_tokenizer(), TASKS[name], question, rng, slipped=False)
    assert all(row.labels)
    assert text_of(load_tokenizer(), row.steps[-1]).startswith("The answer is ")


@pytest.mark.parametrize("name", TASKS)
def test_most_lessons_hold_a_slip(name: str) -> None:
    """Five of six lessons are slipped, but a few slips turn out right or change no number."""
    rng = random.Random(3)
    rows = [lesson(load_tokenizer(), TASKS[name], rng) for _ in range(60)]
    assert 60 * 0.6 < sum(not all(row.labels) for row in rows) < 60


@given(SEEDS)
def test_the_same_seed_draws_the_same_lesson(seed: int) -> None:
    """A lesson follows from its seed, so that a process can draw it again."""
    tokenizer, task = load_tokenizer(), TASKS["wordproblem"]
    first, second = (lesson(tokenizer, task, random.Random(seed)) for _ in range(2))
    assert first == second


@given(SEEDS.map(random.Random))
def test_a_story_misread_goes_on_from_what_was_read(rng: random.Random) -> None:
    """Some step is wrong, and every step after it is wrong too."""
    task = TASKS["wordproblem"]
    question = task.lesson(rng)[0]
    steps = misread(question, rng)
    if steps is not None:
        labels = task.check(question, STEP_BREAK.join(steps)).steps
        assert not all(labels)
        assert not any(labels[labels.index(False) :])
