"""Derivations of word problems that now and then misquote a number and go on from there.

A policy that learns from them also slips now and then, anywhere, as larger models do: without
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
"""The numbers that are a single token."""
TRIES = 20


def careless(question: str, rng: random.Random, slips: float = SLIPS) -> list[str]:
    """A derivation in which each conclusion misquotes a number with probability `slips`.

    Raises ValueError if the question is no word problem.
    """
    for _ in range(TRIES):
        steps = _attempt(question, rng, slips)
        if steps is not None:
            return steps
    return TASKS["wordproblem"].solve(question, rng)


def careless_lesson(rng: random.Random) -> tuple[str, list[str]]:
    """A train story with a careless derivation."""
    question, _ = TASKS["wordproblem"].lesson(rng)
    return question, careless(question, rng)


def _attempt(question: str, rng: random.Random, slips: float) -> list[str] | None:
    """A derivation; None if a slip left no way on (a third of 31) or too large a number."""
    story = parse_story(question)
    if story is None:
        raise ValueError(f"not a word problem: {question!r}")
    amounts, steps = given(story), []
    while story.who not in amounts:
        ways = ways_on(story, amounts)
        if not ways:
            return None
        text, who, number = rng.choice(ways)
        if rng.random() < slips:
            wrong_amounts = misquote(amounts, text, rng)
            text, who, number = next(
                (step for step in conclusions(story, wrong_amounts) if step[1] == who),
                (text, who, number),
            )
        if number not in NUMBERS:
            return None
        amounts[who] = number
        steps.append(text)
    return [*steps, f"{ANSWER_PREFIX}{amounts[story.who]}."]


def misquote(amounts: dict[str, int], text: str, rng: random.Random) -> dict[str, int]:
    """`amounts` with a wrong number for one person whose number `text` quotes."""
    people = [who for who, number in amounts.items() if f"{who} has {number}" in text]
    who = rng.choice(people)
    others = [number for number in amounts.values() if number != amounts[who]]
    if others and rng.random() < ANOTHERS:
        return amounts | {who: rng.choice(others)}
    return amounts | {who: max(1, amounts[who] + rng.choice(OFF_BY))}
