"""Which answer a reply gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tasks import TASKS
from server.answers import answer_of, generic_answer, normalise


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
    """The last box wins, then the last sentence; equal answers are spelled alike."""
    assert generic_answer(reply) == answer


@given(st.text())
def test_normalising_twice_is_normalising_once(text: str) -> None:
    """A canonical form is its own canonical form."""
    once = normalise(text)
    assert once is None or normalise(once) == once


@pytest.mark.parametrize("name", TASKS)
def test_a_tasks_own_questions_are_answered_by_the_task(name: str) -> None:
    """Whatever is not a task's question goes to the generic extractor."""
    task = TASKS[name]
    for question in task.questions("dev", 5):
        assert answer_of(question) == task.answer
    assert answer_of("What is the capital of France?") is generic_answer
    assert answer_of("") is generic_answer
