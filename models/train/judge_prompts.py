"""Judge prompts: the policy as its own evaluator.

The user message holds a question and the steps so far; the reply goes through them, stops at the
first fault and ends with `The number is N.`, from 1 (certainly lost) to 10 (certainly right).
"""

import random
from typing import NamedTuple

from models.tasks import TASKS
from models.tasks.task import STEP_BREAK, Task

OPENING = "Judge these steps."
CLOSING = "How surely do they lead to a correct answer, from 1 to 10?"
ILLEGAL, DEAD_END, HOPEFUL, CERTAIN = 1, 2, 8, 10
TASK_WEIGHTS = {"game24": 4, "countdown": 3, "blocksworld": 2, "wordproblem": 1}


class JudgeExample(NamedTuple):
    """A judge prompt and its true reply; `marks`: which of the steps in the prompt are good."""

    prompt: str
    reply: str
    marks: tuple[bool, ...]


def judge_prompt(question: str, steps: list[str]) -> str:
    """The user message of a judge request."""
    return STEP_BREAK.join((OPENING, question, *steps, CLOSING))


def judgement(task: Task, question: str, steps: list[str]) -> JudgeExample:
    """The true verdict on `steps`: a remark on each up to the first fault, then the number."""
    verdict = task.check(question, STEP_BREAK.join(steps))
    good = sum(verdict.steps)
    remarks = [f"Step {i + 1} is good." for i in range(good)]
    if verdict.correct:
        remarks[-1], number = "The answer is right.", CERTAIN
    elif good == len(steps):
        number = HOPEFUL
    elif verdict.reason.endswith(("reach", "for the answer")):
        remarks, number = [*remarks, f"After step {good + 1} no way leads on."], DEAD_END
    else:
        remarks, number = [*remarks, f"Step {good + 1} is wrong."], ILLEGAL
    reply = STEP_BREAK.join((" ".join(remarks), f"The number is {number}."))
    return JudgeExample(judge_prompt(question, steps), reply, verdict.steps)


def corrupt(step: str, rng: random.Random) -> str:
    """The step with one of its numbers (or, having none, one of its letters) changed."""
    words = step.split(" ")
    places = [i for i, word in enumerate(words) if word.strip("().,:").isdigit()]
    if places:
        place = rng.choice(places)
        number = words[place].strip("().,:")
        new_number = max(0, int(number) + rng.choice((-10, -2, -1, 1, 2, 10)))
        words[place] = words[place].replace(number, str(new_number))
        return " ".join(words)
    places = [i for i, word in enumerate(words) if len(word) == 1 and word.isalpha()]
    if places:
        words[rng.choice(places)] = rng.choice("abcdef")
    return " ".join(words)


def judge_lesson(rng: random.Random) -> JudgeExample:
    """A judge prompt and its true reply: half good prefixes, half spoilt in one of two ways."""
    name = rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()))[0]
    task = TASKS[name]
    question, steps = task.lesson(rng)
    cut = rng.randint(1, len(steps))
    kind = rng.random()
    if kind < 0.5:
        prefix = steps[:cut]
    elif kind < 0.75:
        rival_steps = task.solve(task.rival(question, rng), rng)[:-1]
        prefix = rival_steps[:cut]
    else:
        prefix = [*steps[: cut - 1], corrupt(steps[cut - 1], rng)]
    return judgement(task, question, prefix)
