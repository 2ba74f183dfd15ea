"""Judge prompts and replies are true about the steps that they show."""

import random

from models.tasks import TASKS
from models.tasks.task import STEP_BREAK
from models.train.batches import IGNORED, encode, load_tokenizer
from models.train.corpus import Example
from models.train.judge_prompts import corrupt, judge_lesson, judge_prompt, judgement
from models.train.verdicts import Reply, Verdicts

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


def test_the_reply_goes_through_the_steps_up_to_the_first_fault() -> None:
    game = TASKS["game24"]
    right = judgement(game, QUESTION, STEPS)
    assert right.reply == (
        "Step 1 is good. Step 2 is good. Step 3 is good. The answer is right.\n\nThe number is 10."
    )
    assert right.marks == (True,) * 4
    early = judgement(game, QUESTION, STEPS[:1])
    assert early.reply == "Step 1 is good.\n\nThe number is 8."
    dead_end = judgement(game, QUESTION, ["13 * 10 = 130 (left: 4 9 130)", STEPS[1]])
    assert dead_end.reply == "After step 1 no way leads on.\n\nThe number is 2."
    assert dead_end.marks == (False, False)
    illegal = judgement(game, QUESTION, [STEPS[0], "10 - 4 = 7 (left: 4 7)"])
    assert illegal.reply == "Step 1 is good. Step 2 is wrong.\n\nThe number is 1."


def test_lessons_of_all_kinds_occur() -> None:
    rng = random.Random(1)
    numbers = {judge_lesson(rng).reply.rsplit(" ", 1)[1] for _ in range(200)}
    assert numbers == {"1.", "2.", "8.", "10."}


def test_verdicts_are_over_the_policys_own_replies() -> None:
    """Good prefixes end within the good steps, wrong ones at the first fault or later."""
    steps = [STEPS[0], "10 - 4 = 7 (left: 4 7)", "7 * 4 = 28 (left: 28)"]
    verdicts = Verdicts([Reply("game24", QUESTION, steps, 1)])
    rng = random.Random(3)
    replies = [verdicts.lesson(rng).reply for _ in range(60)]
    assert {reply.splitlines()[0] for reply in replies} == {
        "Step 1 is good.",
        "Step 1 is good. Step 2 is wrong.",
    }


def test_after_a_judged_step_the_row_teaches_its_sign() -> None:
    tokenizer = load_tokenizer()
    example = judgement(TASKS["game24"], QUESTION, [STEPS[0], "10 - 4 = 7 (left: 4 7)"])
    row = encode(tokenizer, Example("judge", "", *example))
    prompt = row.ids.index(tokenizer.encode("<|assistant|>")[0])
    assert [tokenizer.decode([x]) for x in row.labels[:prompt] if x != IGNORED] == ["+", "-"]


def test_corruption_changes_at_most_one_word() -> None:
    rng = random.Random(2)
    for step in (*STEPS, "unstack a from c: b d c, hand a", "The answer is 6 moves."):
        before, after = step.split(" "), corrupt(step, rng).split(" ")
        assert len(before) == len(after)
        assert sum(a != b for a, b in zip(before, after, strict=True)) <= 1
