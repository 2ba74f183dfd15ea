"""Derivations of misread word problems: one fact is taken for another, and the rest follows.

They imitate a policy that looks at the wrong words: the reply is sound but for that one fact, so a
reward model has to go back to the question.
"""

import random

from models.tasks import TASKS
from models.tasks.story import Fact, Story, parse_story, story_text
from models.tasks.task import STEP_BREAK, Task

TRIES = 20
MOST = 199
"""The largest number that is one token."""


def misread(question: str, rng: random.Random) -> list[str] | None:
    """A derivation that misreads one fact of the story; None if no wrong one was found."""
    story, task = parse_story(question), TASKS["wordproblem"]
    if story is None:
        raise ValueError(f"not a word problem: {question!r}")
    places = [i for i, fact in enumerate(story.facts) if fact.kind != "base"]
    for _ in range(TRIES):
        place = rng.choice(places)
        wrong = list(story.facts)
        wrong[place] = misread_fact(story, story.facts[place], rng)
        misread_question = story_text(story._replace(facts=tuple(wrong)))
        steps = _solution(task, misread_question, rng)
        if steps and not all(task.check(question, STEP_BREAK.join(steps)).steps):
            return steps
    return None


def _solution(task: Task, question: str, rng: random.Random) -> list[str]:
    try:
        steps = task.solve(question, rng)
    except ValueError:
        return []
    numbers = [int(word.strip(".,")) for step in steps for word in step.split() if _number(word)]
    return steps if all(0 < n <= MOST for n in numbers) else []


def _number(word: str) -> bool:
    return word.strip(".,").lstrip("-").isdigit()


def misread_fact(story: Story, fact: Fact, rng: random.Random) -> Fact:
    """The fact turned round, with another comparison's words, or about somebody else.

    If it takes several people together, one is missing, replaced or named twice.
    """
    people = sorted({f.who for f in story.facts} | {o for f in story.facts for o in f.others})
    strangers = [who for who in people if who != fact.who and who not in fact.others]
    if fact.kind == "together":
        others = list(fact.others)
        place = rng.randrange(len(others))
        if len(others) > 2 and rng.random() < 0.4:
            others.pop(place)
        elif strangers and rng.random() < 0.6:
            others[place] = rng.choice(strangers)
        else:
            others[place] = others[place - 1]
        return fact._replace(others=tuple(others))
    change = rng.choice(("round", "round", "words", "words", "other", "who"))
    if change == "round":
        return fact._replace(who=fact.others[0], others=(fact.who,))
    comparisons = [f for f in story.facts if f.kind not in ("base", "together") and f != fact]
    if change == "words" and comparisons:
        source = rng.choice(comparisons)
        return fact._replace(kind=source.kind, amount=source.amount)
    if not strangers:
        return fact
    if change == "who":
        return fact._replace(who=rng.choice(strangers))
    return fact._replace(others=(rng.choice(strangers),))
