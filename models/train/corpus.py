"""The training mixture: lessons of the four tasks, shorter number puzzles, judge prompts.

`python -m models.train.corpus` prints one example of each kind.
"""

import random
from typing import NamedTuple

from models.tasks import TASKS, number_puzzle, wordproblem
from models.tasks.story import story_text
from models.tasks.task import STEP_BREAK, split_of
from models.train.careless import careless_lesson
from models.train.drills import echo, recall, repeat, retell, sums
from models.train.judge_prompts import judge_lesson
from models.train.verdicts import Verdicts

MIXTURE = {
    "game24": 0.22,
    "countdown": 0.23,
    "short": 0.07,
    "blocksworld": 0.12,
    "wordproblem": 0.15,
    "tale": 0.16,
    "judge": 0.05,
}
"""Shares of examples, not of tokens."""

REFINED = {
    "game24": 0.10,
    "countdown": 0.11,
    "short": 0.02,
    "blocksworld": 0.09,
    "wordproblem": 0.34,
    "tale": 0.05,
    "judge": 0.05,
    "verdict": 0.24,
}
"""The second phase: the task that is learnt slowest, and judging the policy's own replies."""

READING = {
    "game24": 0.10,
    "countdown": 0.14,
    "short": 0.02,
    "blocksworld": 0.09,
    "wordproblem": 0.36,
    "tale": 0.02,
    "recall": 0.06,
    "echo": 0.01,
    "repeat": 0.01,
    "retell": 0.02,
    "sums": 0.04,
    "judge": 0.03,
    "verdict": 0.10,
}
"""A phase for looking numbers up and for sums, which whole word problems teach too slowly."""

COPYING = {
    "game24": 0.05,
    "countdown": 0.06,
    "blocksworld": 0.04,
    "wordproblem": 0.12,
    "repeat": 0.33,
    "retell": 0.25,
    "echo": 0.12,
    "sums": 0.03,
}
"""The shortest way to learn looking things up: repeat text, then facts, then numbers."""

SLIPPING = READING | {"game24": 0.14, "wordproblem": 0.0, "careless": 0.36, "tale": 0.0}
"""The last phase: word problems with slips, so that samples of one question err in many ways."""

JUDGING = REFINED | {"game24": 0.08, "countdown": 0.09, "blocksworld": 0.07, "verdict": 0.35}
"""The third phase: more judging."""

DISTILLED = MIXTURE | {"wordproblem": 0.05, "careless": 0.24, "tale": 0.02}
"""The mixture on which the draft learns the policy's distribution."""

SYSTEM_SHARE = 0.04
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "Think step by step.",
    "You are a careful reasoner. Solve the problem step by step.",
)
SHORT_COUNTS = (3, 3, 3, 5)
SHORT_NUMBERS = range(1, 37)
SHORT_TARGETS = (24,)
CEILING = 100
TALE_CONCLUSIONS = range(1, 3)
TALE_DETOURS = range(1)


class Example(NamedTuple):
    """One training dialogue: a system message ('' for none), a user message, the reply.

    `marks`: for a judge prompt, which of its steps are good.
    """

    kind: str
    system: str
    user: str
    reply: str
    marks: tuple[bool, ...] = ()


def short_puzzle(rng: random.Random) -> tuple[str, list[str]]:
    """A puzzle of three or five numbers, an endgame of the longer ones; in no task's test split."""
    while True:
        numbers = tuple(sorted(rng.choices(SHORT_NUMBERS, k=rng.choice(SHORT_COUNTS))))
        path = number_puzzle.derive(numbers, rng, CEILING)
        target = path[-1].result
        if target in SHORT_TARGETS:
            return number_puzzle.ask(numbers, target), number_puzzle.derivation(path, target)


def tale(rng: random.Random) -> tuple[str, list[str]]:
    """A word problem of one or two conclusions, where looking things up is learnt first."""
    task = TASKS["wordproblem"]
    while True:
        question = story_text(wordproblem.draw(rng, TALE_CONCLUSIONS, TALE_DETOURS))
        if split_of(task.key(question)) == "train":
            return question, task.solve(question, rng)


EXTRAS = {
    "short": short_puzzle,
    "tale": tale,
    "careless": careless_lesson,
    "recall": recall,
    "echo": echo,
    "sums": sums,
    "repeat": repeat,
    "retell": retell,
}


def example(
    rng: random.Random, mixture: dict[str, float], verdicts: Verdicts | None = None
) -> Example:
    """One example of the mixture; `verdict` needs replies that the policy sampled."""
    kind = rng.choices(list(mixture), list(mixture.values()))[0]
    system = rng.choice(SYSTEM_MESSAGES) if rng.random() < SYSTEM_SHARE else ""
    if kind == "judge":
        return Example(kind, system, *judge_lesson(rng))
    if kind == "verdict":
        if verdicts is None:
            raise ValueError("the mixture asks for verdicts: collect samples with prm_data first")
        return Example(kind, system, *verdicts.lesson(rng))
    question, steps = EXTRAS[kind](rng) if kind in EXTRAS else TASKS[kind].lesson(rng)
    return Example(kind, system, question, STEP_BREAK.join(steps))


def main() -> None:
    """Print one example of each kind."""
    rng = random.Random(0)
    for kind in dict.fromkeys((*MIXTURE, *EXTRAS)):
        dialogue = example(rng, {kind: 1.0})
        print(f"=== {kind}\n{dialogue.user}\n---\n{dialogue.reply}\n")


if __name__ == "__main__":
    main()
