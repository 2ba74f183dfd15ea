"""Judge prompts carry the truth about the steps they show."""

import random

from models.tasks import TASKS
from models.tasks.task import STEP_BREAK
from models.train.judge import corrupt, judge_lesson, judge_prompt, judge_reply

QUESTION = "Use 4 9 10 13 to make 24."
STEPS = [
    "13 - 9 = 4 (left: 4 4 10)",
    "10 - 4 = 6 (left: 4 6)",
    "6 * 4 = 24 (left: 24)",
    "The answer is 24.",
]


def test_the_prompt_holds_question_and_steps() -> None:
    prompt = judge_prompt(QUESTION, STEPS[:2])
    assert STEP_BREAK.join((QUESTION, *STEPS[:2])) in prompt


def test_the_number_grows_with_certainty() -> None:
    game = TASKS["game24"]
    right = judge_reply(game, QUESTION, STEPS, [])
    assert right == "The answer is right.\n\nThe number is 10."
    early = judge_reply(game, QUESTION, STEPS[:1], STEPS[1:])
    assert early == f"Next: {STEPS[1]}\n\nThe number is 8."
    dead_end = judge_reply(game, QUESTION, ["13 * 10 = 130 (left: 4 9 130)"], [])
    assert dead_end == "After step 1 no way leads on.\n\nThe number is 2."
    illegal = judge_reply(game, QUESTION, [STEPS[0], "10 - 4 = 7 (left: 4 7)"], [])
    assert illegal == "Step 2 is wrong.\n\nThe number is 1."


def test_lessons_of_both_kinds_occur() -> None:
    rng = random.Random(1)
    numbers = {judge_lesson(rng)[1].rsplit(" ", 1)[1] for _ in range(200)}
    assert {"1.", "2.", "10."} <= numbers
    assert numbers <= {f"{n}." for n in range(1, 11)}


def test_corruption_changes_at_most_one_word() -> None:
    rng = random.Random(2)
    for step in (*STEPS, "unstack a from c: b d c, hand a", "The answer is 6 moves."):
        before, after = step.split(" "), corrupt(step, rng).split(" ")
        assert len(before) == len(after)
        assert sum(a != b for a, b in zip(before, after, strict=True)) <= 1
