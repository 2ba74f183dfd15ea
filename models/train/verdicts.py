"""Judge lessons over replies that the policy sampled itself: its own errors, not made-up ones."""

import random
from typing import NamedTuple

from models.tasks import TASKS
from models.train.judge_prompts import JudgeExample, judgement

BEYOND_SHARE = 0.2
"""How often a prefix goes on past the first fault, as a search that missed it would."""


class Reply(NamedTuple):
    """A sampled reply: its steps as text, and how many of them are good."""

    task: str
    question: str
    steps: list[str]
    good: int


class Verdicts:
    """A pool of sampled replies to judge, as many that go wrong as go right."""

    def __init__(self, replies: list[Reply]) -> None:
        self.pools: dict[str, list[Reply]] = {}
        for reply in replies:
            self.pools.setdefault(reply.task, []).append(reply)

    def lesson(self, rng: random.Random) -> JudgeExample:
        """A judge prompt and its true reply: half the prefixes end good, half end in a fault."""
        pool = self.pools[rng.choice(sorted(self.pools))]
        while True:
            reply = rng.choice(pool)
            faulty = reply.good < len(reply.steps)
            if rng.random() < 0.5 and faulty:
                beyond = rng.random() < BEYOND_SHARE
                cut = rng.randint(reply.good + 1, len(reply.steps)) if beyond else reply.good + 1
            elif reply.good:
                cut = rng.randint(1, reply.good)
            else:
                continue
            return judgement(TASKS[reply.task], reply.question, reply.steps[:cut])
