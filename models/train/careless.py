"""Word problems worked out by somebody who now and then misquotes a number, and goes on from there.

A policy that learns from these slips now and then too, anywhere, as larger models do: without
them its only mistakes are misreadings, the same ones in every sample of a question.
"""

import random

from models.tasks import TASKS
from models.tasks.story import conclusions, given, parse_story, ways_on
from models.tasks.task import ANSWER_PREFIX

SLIPS = 0.1
"""How often a conclusion quotes somebody's number wrong."""
OFF_BY = (-10, -1, 1, 10)
ANOTHERS = 0.5
"""How often the wrong number is another person's, not one near the right one."""
NUMBERS = range(1, 200)
"""Those of one token."""
TRIES = 20


def careless(question: str, rng: random.Random, slips: float = SLIPS) -> list[str]:
    """A derivation that misquotes a number at a share of `slips` and goes on from there.

    Raises ValueError for what is no word problem.
    """
    for _ in range(TRIES):
        steps = _attempt(question, rng, slips)
        if steps is not None:
            return steps
    return TASKS["wordproblem"].solve(question, rng)


def careless_lesson(rng: random.Random) -> tuple[str, list[str]]:
    """A train story, worked out carelessly."""
    question, _ = TASKS["wordproblem"].lesson(rng)
    return question, careless(question, rng)


def _attempt(question: str, rng: random.Random, slips: float) -> list[str] | None:
    """None where a slip left no way on (a third of 31), or a number too large to be said."""
    story = parse_story(question)
    if story is None:
        raise ValueError(f"not a word problem: {question!r}")
    known, steps = given(story), []
    while story.who not in known:
        ways = ways_on(story, known)
        if not ways:
            return None
        said, who, number = rng.choice(ways)
        if rng.random() < slips:
            heard = misquoted(known, said, rng)
            said, who, number = next(
                (way for way in conclusions(story, heard) if way[1] == who), (said, who, number)
            )
        if number not in NUMBERS:
            return None
        known[who] = number
        steps.append(said)
    return [*steps, f"{ANSWER_PREFIX}{known[story.who]}."]


def misquoted(known: dict[str, int], said: str, rng: random.Random) -> dict[str, int]:
    """What is known, but for one number that is quoted."""
    quoted = [who for who, number in known.items() if f"{who} has {number}" in said]
    who = rng.choice(quoted)
    others = [number for number in known.values() if number != known[who]]
    if others and rng.random() < ANOTHERS:
        return known | {who: rng.choice(others)}
    return known | {who: max(1, known[who] + rng.choice(OFF_BY))}
