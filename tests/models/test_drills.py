"""Training drills beside whole puzzles: they are true, or wrong where their labels say so."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tasks import TASKS
from models.tasks.story import parse_fact
from models.tasks.task import STEP_BREAK
from models.train.batches import IGNORED, load_tokenizer, text_of
from models.train.drills import echo, recall, repeat, retell, sums
from models.train.misreading import misread
from models.train.slips import slipped_drill

seeds = st.integers(0, 2**32).map(random.Random)
STORIES = TASKS["wordproblem"]


@given(seeds)
def test_a_misreading_is_wrong_at_one_step_and_sound_otherwise(rng: random.Random) -> None:
    """Every sum is right and the reply has an answer; only against the question is it wrong."""
    question, _ = STORIES.lesson(rng)
    steps = misread(question, rng)
    if steps is None:
        return
    verdict = STORIES.check(question, STEP_BREAK.join(steps))
    assert not verdict.correct
    assert not all(verdict.steps)
    for step in steps[:-1]:
        for part in step.removeprefix("Next, ").rsplit("Then ")[-1].rstrip(".").split(", "):
            if "=" in part:
                left, right = part.split(" has ")[-1].split(" = ")
                assert _worked_out(left) == int(right)


def _worked_out(sum_text: str) -> int:
    first, op, second = sum_text.split()
    a, b = int(first), int(second)
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op]


def test_most_stories_can_be_misread() -> None:
    """Of 50 stories at most two have no misreading."""
    rng = random.Random(1)
    misreadings = [misread(STORIES.lesson(rng)[0], rng) for _ in range(50)]
    assert sum(steps is None for steps in misreadings) <= 2


def test_a_misread_question_must_be_a_story() -> None:
    """The error for another question quotes it."""
    with pytest.raises(ValueError, match="not a word problem: 'Use 4 9 10 13"):
        misread("Use 4 9 10 13 to make 24.", random.Random(0))


@given(seeds)
def test_what_is_retold_was_told(rng: random.Random) -> None:
    """A retelling has the same facts in another order and parses; a repetition is verbatim."""
    story, (retelling,) = retell(rng)
    facts = [f"{sentence}." for sentence in story.removesuffix(".").split(". ")]
    assert sorted(facts) == sorted(f"{text}." for text in retelling.removesuffix(".").split(". "))
    assert all(parse_fact(fact.removesuffix(".")) is not None for fact in facts)
    words, (again,) = repeat(rng)
    assert words == again


@given(seeds)
def test_drilled_numbers_are_right(rng: random.Random) -> None:
    """Echoes repeat the given facts, sums are right, and a recalled story is solved."""
    facts, (reply,) = echo(rng)
    assert all(f"{part} " in facts for part in reply.removeprefix("Next, ").rstrip(".").split(", "))
    _, (calculated,) = sums(rng)
    for part in calculated.removeprefix("Next, ").rstrip(".").split(", "):
        left, right = part.split(" = ")
        assert _worked_out(left) == int(right)
    question, steps = recall(rng)
    assert STORIES.check(question, STEP_BREAK.join(steps)).correct


@pytest.mark.slow
@given(seeds)
def test_a_wrong_sum_of_a_slipped_drill_is_labelled_so_and_a_right_one_too(
    rng: random.Random,
) -> None:
    """Each result's label is 1 exactly if the sum, recomputed from its text, is wrong."""
    tokenizer, row = load_tokenizer(), slipped_drill(load_tokenizer(), rng)
    if row.kind != "sums":
        assert set(row.labels) <= {0, 1, IGNORED}
        return
    (equals,) = tokenizer.encode(" =")
    for i, token in enumerate(row.ids):
        if token == equals:
            left = text_of(tokenizer, row.ids[i - 3 : i])
            result = int(text_of(tokenizer, [row.ids[i + 1]]))
            assert row.labels[i + 1] == int(result != _worked_out(left.strip()))


@pytest.mark.slow
@given(seeds)
def test_a_slipped_sum_is_marked_where_it_is_wrong(rng: random.Random) -> None:
    """Label 1 stands at a result of one token that is wrong."""
    tokenizer = load_tokenizer()
    row = slipped_drill(tokenizer, rng)
    if row.kind != "sums":
        return
    (equals,) = tokenizer.encode(" =")
    wrong = [i for i, label in enumerate(row.labels) if label == 1]
    assert all(row.ids[i - 1] == equals for i in wrong)
    for i in wrong:
        first, op, second, _, result = text_of(tokenizer, row.ids[i - 4 : i + 1]).split()
        assert _worked_out(f"{first} {op} {second}") != int(result)
