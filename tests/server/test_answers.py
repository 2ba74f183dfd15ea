"""Which answer is read from a reply."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tasks import TASKS
from server.reply_text import answer_of, answers_to, generic_answer, maths_answer, normalise


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("So we get \\boxed{12}.", "12"),
        ("\\boxed{1} or rather \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("The answer is 1. No: the final answer is 1,234.", "1234"),
        ("The answer is 3.\nThe answer is: **4**", "4"),
        ("Answer: $x = 2$", "x = 2"),
        ("the answer is 3, but \\boxed{ 5 }", "5"),
        ("The answer is \\text{ten  apples}.", "ten apples"),
        ("The answer is 0.5", "0.5"),
        ("I do not know.", None),
        ("The answer is .", None),
        ("\\boxed{never closed", None),
        ("", None),
    ],
)
def test_the_generic_extractor_by_hand(reply: str, answer: str | None) -> None:
    """The last box wins, then the last sentence; equal answers get the same spelling."""
    assert generic_answer(reply) == answer


def test_an_answer_that_does_not_come_is_not_looked_for_for_long() -> None:
    """Only white space follows; each character is looked at once."""
    assert generic_answer("The answer is" + "\n " * 50_000) is None
    assert generic_answer("The answer is" + " " * 50_000 + ": 7.") == "7"


@given(st.text())
def test_normalising_twice_is_normalising_once(text: str) -> None:
    """Normalising a canonical form changes nothing."""
    normal_form = normalise(text)
    assert normal_form is None or normalise(normal_form) == normal_form


@pytest.mark.parametrize("name", TASKS)
def test_a_tasks_own_questions_are_answered_by_the_task(name: str) -> None:
    """Questions that are no task's go to the generic extractor."""
    task = TASKS[name]
    for question in task.questions("dev", 5):
        assert answer_of(question) == task.answer
    assert answer_of("What is the capital of France?") is generic_answer
    assert answer_of("") is generic_answer


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("The answer is x, not 3.", "x, not 3"),
        ("First 12, then\n= 1,234.5 apples", "1234.5"),
        ("so it is -3/4", "-3/4"),
        ("none at all", None),
    ],
)
def test_where_no_answer_is_named_the_last_number_of_maths_counts(
    reply: str, answer: str | None
) -> None:
    """It counts only where every question is declared to be a maths question."""
    assert maths_answer(reply) == answer


def test_answers_are_compared_as_the_rule_says() -> None:
    """A bundled task has its own spelling; other answers are maths unless ``text`` is asked for."""
    task_question = TASKS["game24"].questions("dev", 1)[0]
    assert answers_to(task_question, "auto").of == TASKS["game24"].answer
    assert answers_to(task_question, "auto").same is None
    assert answers_to("What?", "text").same is None
    auto, maths = answers_to("What?", "auto"), answers_to(task_question, "maths")
    assert (auto.of, maths.of) == (generic_answer, maths_answer)
    assert auto.same is not None
    assert auto.same("0.5", "1/2")
    assert not auto.same("Paris", "London")
