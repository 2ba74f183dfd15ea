"""Random derivations of word problems like a search's: right conclusions, and near misses.

Endless and exactly labelled. A near miss, from which the walk goes on, imitates a policy that loses
its place: a fact taken for another, a number misquoted or used before it is known, a wrong sum, or
things counted that were not asked for.
"""

import random

from models.tasks.story import THINGS, Story, conclusions, given, parse_story, ways_on
from models.tasks.task import ANSWER_PREFIX
from models.train.careless import NUMBERS, TRIES, misquote
from models.train.misreading import misread_fact

MISS_SHARE = 0.2
"""The share of near misses among the conclusions up to the first."""
ASIDE_SHARE = 0.15
"""The share of conclusions that may be any legal one, whether the answer needs it or not."""
OFF_BY = (-20, -10, -3, -2, -1, 1, 2, 3, 10, 20)

Conclusion = tuple[str, str, int]
"""A step's text, the person it is about, and the number."""


def walk(question: str, rng: random.Random) -> list[str]:
    """The steps of a walk and its answer line. Raises ValueError if it is no word problem."""
    story = parse_story(question)
    if story is None:
        raise ValueError(f"not a word problem: {question!r}")
    for _ in range(TRIES):
        steps = _attempt(story, rng)
        if steps:
            return steps
    raise ValueError(f"no walk of {question!r} comes to an end")


def _attempt(story: Story, rng: random.Random) -> list[str]:
    """A walk's steps; empty if a near miss left no way on, or for too large a number."""
    amounts, steps, faulty = given(story), [], False
    while story.who not in amounts:
        ways = ways_on(story, amounts)
        if not ways or rng.random() < ASIDE_SHARE:
            ways = list(conclusions(story, amounts))
        miss = None
        if not faulty and rng.random() < MISS_SHARE:
            miss = near_miss(story, amounts, rng)
        faulty = faulty or miss is not None
        if miss is None and not ways:
            return []
        text, who, number = miss or rng.choice(ways)
        if number not in NUMBERS:
            return []
        amounts[who] = number
        steps.append(text)
    return [*steps, f"{ANSWER_PREFIX}{amounts[story.who]}."]


def near_miss(story: Story, amounts: dict[str, int], rng: random.Random) -> Conclusion | None:
    """A conclusion that does not follow from what is known; None if none was found."""
    legal = {text for text, _, _ in conclusions(story, amounts)}
    for _ in range(TRIES):
        kind = rng.choice((_misreads, _misreads, _misquotes, _guesses, _miscounts, _other_things))
        misses = [miss for miss in kind(story, amounts, rng) if miss[0] not in legal]
        misses = [miss for miss in misses if miss[1] not in amounts and miss[2] in NUMBERS]
        if misses:
            return rng.choice(misses)
    return None


def _misreads(story: Story, amounts: dict[str, int], rng: random.Random) -> list[Conclusion]:
    """Conclusions from a misread fact, see `misread_fact`."""
    facts = list(story.facts)
    place = rng.choice([i for i, fact in enumerate(facts) if fact.kind != "base"])
    facts[place] = misread_fact(story, facts[place], rng)
    return list(conclusions(story._replace(facts=tuple(facts)), amounts))


def _misquotes(story: Story, amounts: dict[str, int], rng: random.Random) -> list[Conclusion]:
    """Conclusions from a misquoted number."""
    legal = list(conclusions(story, amounts))
    if not legal:
        return []
    text, who, _ = rng.choice(legal)
    return [miss for miss in conclusions(story, misquote(amounts, text, rng)) if miss[1] == who]


def _guesses(story: Story, amounts: dict[str, int], rng: random.Random) -> list[Conclusion]:
    """Conclusions from a number that is not known yet, as if it were another person's."""
    people = {other for fact in story.facts for other in fact.others} - amounts.keys()
    if not people or not amounts:
        return []
    wrong_amounts = amounts | {rng.choice(sorted(people)): rng.choice(list(amounts.values()))}
    return list(conclusions(story, wrong_amounts))


def _miscounts(story: Story, amounts: dict[str, int], rng: random.Random) -> list[Conclusion]:
    """Conclusions with a wrong sum."""
    off = rng.choice(OFF_BY)
    return [
        (_with_result(text, number, number + off), who, number + off)
        for text, who, number in conclusions(story, amounts)
    ]


def _with_result(text: str, right: int, claimed: int) -> str:
    """The step with another number at the end of its last sum, and behind it."""
    head, _, tail = text.rpartition(f"= {right}")
    end = tail.replace(f"has {right}.", f"has {claimed}.")
    return f"{head}= {claimed}{end}"


def _other_things(story: Story, amounts: dict[str, int], rng: random.Random) -> list[Conclusion]:
    """Conclusions about other things than those asked for."""
    other_thing = rng.choice([thing for thing in THINGS if thing != story.thing])
    return [
        (text.replace(story.thing, other_thing), who, number)
        for text, who, number in conclusions(story, amounts)
    ]
