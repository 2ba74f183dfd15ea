"""Exercises for what word problems need and teach slowly: looking numbers up, and sums."""

import random

from models.tasks import TASKS, wordproblem
from models.tasks.story import NAMES, THINGS, Fact, Story, fact_text, story_text
from models.tasks.task import split_of

RECALL_PEOPLE = range(3, 8)
RECALL_LISTED = range(2, 6)
RECALL_HIGHEST = 60
ECHO_PEOPLE = range(3, 9)
DRILLED = 16
REPEATED = range(12, 41)
RETOLD = range(4, 11)

WORDS = ("has", "and", "more", "fewer", "half", "many", "together", "Next,", "so", "How")

DRILLS = {"echo": " has", "sums": " ="}
"""By drill, the word before each learnt token: the rest of the drill's reply is random."""


def recall(rng: random.Random) -> tuple[str, list[str]]:
    """A word problem of many people with numbers, some added up: looking up, and sums."""
    task = TASKS["wordproblem"]
    while True:
        names = rng.sample(NAMES, rng.choice(RECALL_PEOPLE) + 2)
        total, last, *people = names
        thing = rng.choice(THINGS)
        value = {name: rng.randint(1, RECALL_HIGHEST) for name in people}
        summands = rng.sample(people, min(len(people), rng.choice(RECALL_LISTED)))
        facts = [Fact("base", name, (), n, thing) for name, n in value.items()]
        facts.append(Fact("together", total, tuple(summands), 0, thing))
        value[total] = sum(value[name] for name in summands)
        if value[total] > wordproblem.HIGHEST:
            continue
        facts.append(wordproblem.relation(rng, last, value, total, thing))
        rng.shuffle(facts)
        question = story_text(Story(tuple(facts), thing, rng.choice((total, last, last))))
        if split_of(task.key(question)) == "train":
            return question, task.solve(question, rng)


def echo(rng: random.Random) -> tuple[str, list[str]]:
    """Repeat who has how many, in another order: the shortest way to learn looking it up."""
    thing = rng.choice(THINGS)
    value = {name: rng.randint(0, 199) for name in rng.sample(NAMES, rng.choice(ECHO_PEOPLE))}
    facts = " ".join(f"{name} has {n} {thing}." for name, n in value.items())
    names = rng.choices(list(value), k=DRILLED)
    return facts, ["Next, " + ", ".join(f"{name} has {value[name]}" for name in names) + "."]


def repeat(rng: random.Random) -> tuple[str, list[str]]:
    """Repeat random words: teaches only to find what came after this word the last time."""
    numbers = [str(rng.randint(0, 199)) for _ in range(12)]
    words = rng.choices([*NAMES, *THINGS, *WORDS, *numbers], k=rng.choice(REPEATED))
    text = " ".join(words)
    return text, [text]


def retell(rng: random.Random) -> tuple[str, list[str]]:
    """Repeat unconnected comparisons in another order."""
    thing = rng.choice(THINGS)
    count = rng.choice(RETOLD)
    pairs = zip(rng.sample(NAMES, count), rng.sample(NAMES, count), strict=True)
    facts = [_comparison(rng, who, other, thing) for who, other in pairs if who != other]
    sentences = [f"{fact_text(fact)}." for fact in facts]
    return " ".join(sentences), [" ".join(rng.sample(sentences, len(sentences)))]


def _comparison(rng: random.Random, who: str, other: str, thing: str) -> Fact:
    kind = rng.choice(("more", "fewer", "times", "half"))
    amounts = {"more": wordproblem.MORE, "fewer": wordproblem.FEWER, "times": range(2, 5)}
    return Fact(kind, who, (other,), rng.choice(amounts.get(kind, (2,))), thing)


def sums(rng: random.Random) -> tuple[str, list[str]]:
    """A list of sums like those of word problems."""
    return "Sums.", ["Next, " + ", ".join(_sum(rng) for _ in range(DRILLED)) + "."]


def _sum(rng: random.Random) -> str:
    while True:
        op, n = rng.choice("++--*/"), rng.randint(1, wordproblem.HIGHEST)
        amount = rng.randint(2, 4) if op in "*/" else rng.randint(2, 25)
        if op == "+" and rng.random() < 0.5:
            amount = rng.randint(1, wordproblem.HIGHEST)
        if op == "/" and n % amount:
            continue
        value = {"+": n + amount, "-": n - amount, "*": n * amount, "/": n // amount}[op]
        if 0 <= value <= wordproblem.HIGHEST:
            return f"{n} {op} {amount} = {value}"
