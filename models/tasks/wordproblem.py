"""Word problems: who has how many, three to nine conclusions, told with detours in between.

Which fact to use next, and which way round, must be inferred; facts may be told out of order,
and some lead nowhere. A legal detour costs a step, and the number of steps is limited.
"""

import random
import re
from collections.abc import Sequence

from models.tasks import story as english
from models.tasks.story import Fact, Story
from models.tasks.task import (
    ANSWER_PREFIX,
    Split,
    StepChecker,
    Verdict,
    answer_step,
    fail,
    split_of,
    stream,
)

CONCLUSIONS = range(3, 10)
KINDS = ("more", "fewer", "times", "half", "together", "together")
DETOURS = (0, 0, 1)
SECOND_START_SHARE = 0.2
BYSTANDER_SHARE = 0.15
BACKWARD_SHARE = 0.08
"""How often a fact is told from the other side: `Ann has 3 fewer than Cara` gives Cara's."""
HIGHEST = 150
MORE = range(11, 26)
FEWER = range(2, 11)
DEFAULT_LIMIT = 500
NUMBER = re.compile(r"\d{1,6}")


def relation(rng: random.Random, who: str, value: dict[str, int], last: str, thing: str) -> Fact:
    """A fact that gives `who` a number in range from `last` (and others); added to `value`."""
    while True:
        n = value[last]
        kind = rng.choice(KINDS)
        if kind == "together" and len(value) > 2:
            pool = [name for name in value if name != last]
            others = [last, *rng.sample(pool, min(len(pool), rng.choice((1, 1, 2, 3, 4))))]
            rng.shuffle(others)
            fact, total = Fact(kind, who, tuple(others), 0, thing), sum(value[o] for o in others)
        elif kind in ("more", "fewer"):
            amount = rng.choice(MORE if kind == "more" else FEWER)
            total = n + amount if kind == "more" else n - amount
            fact = Fact(kind, who, (last,), amount, thing)
            if rng.random() < BACKWARD_SHARE:
                amount = rng.choice(FEWER if kind == "more" else MORE)
                opposite = "fewer" if kind == "more" else "more"
                fact = Fact(opposite, last, (who,), amount, thing)
                total = n + amount if kind == "more" else n - amount
        elif kind == "times":
            amount = rng.choice((2, 2, 3, 4))
            fact, total = Fact(kind, who, (last,), amount, thing), n * amount
        elif kind == "half" and n % 2 == 0:
            fact, total = Fact(kind, who, (last,), 2, thing), n // 2
        else:
            continue
        if 0 < total <= HIGHEST:
            value[who] = total
            return fact


def draw(
    rng: random.Random,
    conclusions: Sequence[int] = CONCLUSIONS,
    detours: Sequence[int] = DETOURS,
) -> Story:
    """A chain of conclusions, now and then a detour or a fact about another thing."""
    names = rng.sample(english.NAMES, len(english.NAMES))
    thing, other_thing = rng.sample(english.THINGS, 2)
    last = names.pop()
    value = {last: rng.randint(4, 40)}
    facts = [Fact("base", last, (), value[last], thing)]
    if rng.random() < SECOND_START_SHARE:
        second = names.pop()
        value[second] = rng.randint(4, 40)
        facts.append(Fact("base", second, (), value[second], thing))
    for _ in range(rng.choice(conclusions)):
        who = names.pop()
        facts.append(relation(rng, who, value, last, thing))
        last = who
    subject = last
    for _ in range(rng.choice(detours)):
        who = names.pop()
        detour = relation(rng, who, value, rng.choice(list(value)), thing)
        facts.insert(rng.randint(1, len(facts)), detour)
    if rng.random() < BYSTANDER_SHARE:
        bystander = Fact("base", rng.choice(list(value)), (), rng.randint(4, 40), other_thing)
        facts.insert(rng.randint(0, len(facts)), bystander)
    spread = rng.choice((0, 0, 0, 3))
    place = {i: i + rng.uniform(0, spread) for i in range(len(facts))}
    return Story(tuple(facts[i] for i in sorted(place, key=place.__getitem__)), thing, subject)


def _canonical(question: str) -> str:
    names: dict[str, str] = {}
    words = re.sub("|".join(english.THINGS), "things", question)

    def rename(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"P{len(names)}")

    return re.sub("|".join(english.NAMES), rename, words)


class WordProblem(StepChecker):
    """A story about who has how many; the reply concludes one person at a time."""

    name = "wordproblem"
    max_depth = CONCLUSIONS.stop + 2
    max_step_tokens = 120

    def questions(self, split: Split, limit: int | None = None, seed: int = 0) -> list[str]:
        """An endless stream that the seed decides, cut at `limit`; stories never repeat."""

        def draw_question(rng: random.Random) -> tuple[str, str] | None:
            question = english.story_text(draw(rng))
            key = _canonical(question)
            return (key, question) if split_of(key) == split else None

        limit = DEFAULT_LIMIT if limit is None else limit
        return stream(f"wordproblem {split} {seed}", draw_question, limit)

    def key(self, question: str) -> str:
        """The story up to the names of people and things."""
        return _canonical(question)

    def matches(self, question: str) -> bool:
        """Is the first sentence the question, and every other a known kind of fact?"""
        return english.parse_story(question) is not None

    def _verdict(self, question: str, steps: list[str], *, hopeful: bool) -> Verdict:
        """Each step must be one conclusion, worded in full."""
        story = self._parse(question)
        amounts = english.given(story)
        for i, step in enumerate(steps):
            if step.startswith(ANSWER_PREFIX):
                right = f"{ANSWER_PREFIX}{amounts.get(story.who)}."
                if step == right and i == len(steps) - 1 and story.who in amounts:
                    return Verdict(True, (True,) * len(steps), "")
                return fail(steps, i, f"step {i + 1}: a wrong answer line")
            legal = {text: (who, n) for text, who, n in english.conclusions(story, amounts)}
            if step not in legal:
                return fail(steps, i, f"step {i + 1}: does not follow")
            who, number = legal[step]
            amounts[who] = number
            if not hopeful:
                continue
            missing = english.needed(story, amounts)
            if missing is None or i + 1 + len(missing) + 1 > self.max_depth:
                return fail(steps, i, f"step {i + 1}: no steps are left for the answer")
        return Verdict(False, (True,) * len(steps), "no answer line")

    def answer(self, text: str) -> str | None:
        """The number that the answer line claims."""
        claim = answer_step(text)
        return claim if claim is not None and NUMBER.fullmatch(claim) else None

    def solve(self, question: str, rng: random.Random) -> list[str]:
        """The needed conclusions and no others, in a random valid order."""
        story = self._parse(question)
        amounts, steps = english.given(story), []
        while story.who not in amounts:
            ways = english.ways_on(story, amounts)
            if not ways:
                raise ValueError(f"cannot be worked out: {question!r}")
            text, who, number = rng.choice(ways)
            amounts[who] = number
            steps.append(text)
        return [*steps, f"{ANSWER_PREFIX}{amounts[story.who]}."]

    def rival(self, question: str, rng: random.Random) -> str:
        """The same story, asking about somebody else whose number must be worked out."""
        story = self._parse(question)
        people = {fact.who for fact in story.facts} | {o for f in story.facts for o in f.others}
        others = sorted(people - set(english.given(story)) - {story.who})
        stories = [story._replace(who=who) for who in others]
        rivals = [tale for tale in stories if english.needed(tale, english.given(tale))]
        return english.story_text(rng.choice(rivals))

    def lesson(self, rng: random.Random) -> tuple[str, list[str]]:
        """A train story with the conclusions it needs."""
        while True:
            question = english.story_text(draw(rng))
            if split_of(_canonical(question)) == "train":
                return question, self.solve(question, rng)

    def _parse(self, question: str) -> Story:
        story = english.parse_story(question)
        if story is None:
            raise ValueError(f"not a word problem: {question!r}")
        return story
