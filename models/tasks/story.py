"""The small English of the word problems: facts, what follows from them, how it is worded.

A fact relates one person's number of things to others'. Texts are both written and read here,
so that the checker needs nothing but the question.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

NAMES = (
    "Ann", "Ben", "Cara", "Dan", "Eve", "Finn", "Gus", "Hana",
    "Ivy", "Jon", "Kim", "Leo", "Mia", "Ned", "Olga", "Pia",
)  # fmt: skip
THINGS = ("apples", "books", "coins", "shells", "stamps", "cards")

_NAME = r"[A-Z][a-z]+"
STATEMENT = re.compile(
    rf"(?P<who>{_NAME}) has (?:(?P<base>\d{{1,3}}) (?P<thing>[a-z]+)"
    rf"|as many (?P<things>[a-z]+) as (?P<all>{_NAME}(?:, {_NAME})* and {_NAME}) together)"
)
COMPARISON = re.compile(
    rf"(?P<other>{_NAME}) has (?P<thing>[a-z]+) and (?P<who>{_NAME}) has "
    rf"(?:(?P<delta>\d{{1,3}}) (?P<sign>more|fewer)|(?P<factor>half|twice|\d times) as many)"
)
QUERY = re.compile(rf"How many (?P<thing>[a-z]+) does (?P<who>{_NAME}) have\?")


class Fact(NamedTuple):
    """`who` has `amount` things (without `others`), or a number that follows from theirs.

    `kind` is one of base, more, fewer, times, half, together.
    """

    kind: str
    who: str
    others: tuple[str, ...]
    amount: int
    thing: str


class Story(NamedTuple):
    """The facts in the order of the text, and whose things are asked for."""

    facts: tuple[Fact, ...]
    thing: str
    who: str


def enumeration(items: list[str]) -> str:
    """Write a list as `a`, `a and b` or `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def comparison_text(fact: Fact) -> str:
    """How `who` compares to the other person: `5 more`, `twice as many`."""
    if fact.kind in ("more", "fewer"):
        return f"{fact.amount} {fact.kind}"
    if fact.kind == "half":
        return "half as many"
    return "twice as many" if fact.amount == 2 else f"{fact.amount} times as many"


def fact_text(fact: Fact) -> str:
    """The fact as a sentence, without its full stop."""
    if fact.kind == "base":
        return f"{fact.who} has {fact.amount} {fact.thing}"
    if fact.kind == "together":
        others = enumeration(list(fact.others))
        return f"{fact.who} has as many {fact.thing} as {others} together"
    return f"{fact.others[0]} has {fact.thing} and {fact.who} has {comparison_text(fact)}"


def story_text(story: Story) -> str:
    """The question text."""
    sentences = " ".join(f"{fact_text(fact)}." for fact in story.facts)
    return f"How many {story.thing} does {story.who} have? {sentences}"


def parse_fact(sentence: str) -> Fact | None:
    """The fact a sentence states, None if it states none."""
    statement = STATEMENT.fullmatch(sentence)
    if statement is not None:
        if statement["base"]:
            return Fact("base", statement["who"], (), int(statement["base"]), statement["thing"])
        others = tuple(re.findall(_NAME, statement["all"]))
        return Fact("together", statement["who"], others, 0, statement["things"])
    match = COMPARISON.fullmatch(sentence)
    if match is None:
        return None
    who, others, thing = match["who"], (match["other"],), match["thing"]
    if match["sign"]:
        return Fact(match["sign"], who, others, int(match["delta"]), thing)
    if match["factor"] == "half":
        return Fact("half", who, others, 2, thing)
    amount = 2 if match["factor"] == "twice" else int(match["factor"].split()[0])
    return Fact("times", who, others, amount, thing)


def parse_story(text: str) -> Story | None:
    """The story in a question's text, None if it is no such question."""
    query, *sentences = re.split(r"(?<=[.?]) ", text.strip())
    match = QUERY.fullmatch(query)
    if match is None or not sentences:
        return None
    parsed = [parse_fact(sentence.removesuffix(".")) for sentence in sentences]
    facts = tuple(fact for fact in parsed if fact is not None)
    return Story(facts, match["thing"], match["who"]) if len(facts) == len(parsed) else None


def given(story: Story) -> dict[str, int]:
    """By person, the amounts of the thing asked for that are stated outright."""
    facts = (fact for fact in story.facts if fact.kind == "base" and fact.thing == story.thing)
    return {fact.who: fact.amount for fact in facts}


def conclusions(story: Story, amounts: dict[str, int]) -> Iterator[tuple[str, str, int]]:
    """Every (step text, person, number) that one fact yields from the known `amounts`."""
    for fact in story.facts:
        if fact.kind == "base" or fact.thing != story.thing:
            continue
        if fact.who not in amounts and all(person in amounts for person in fact.others):
            yield _forward(fact, amounts)
        elif fact.kind != "together" and fact.who in amounts and fact.others[0] not in amounts:
            backward = _backward(fact, amounts)
            if backward is not None:
                yield backward


def ways_on(story: Story, amounts: dict[str, int]) -> list[tuple[str, str, int]]:
    """The conclusions that lead to the answer; empty if it cannot be reached."""
    people = needed(story, amounts) or []
    return [conclusion for conclusion in conclusions(story, amounts) if conclusion[1] in people]


def amounts_after(story: Story, steps: list[str]) -> dict[str, int]:
    """The known amounts by person after these steps, all of which must be right."""
    amounts = given(story)
    for step in steps:
        legal = {text: (who, number) for text, who, number in conclusions(story, amounts)}
        who, number = legal[step]
        amounts[who] = number
    return amounts


def _forward(fact: Fact, amounts: dict[str, int]) -> tuple[str, str, int]:
    if fact.kind == "together":
        return _sum(fact, amounts)
    other, who = fact.others[0], fact.who
    op = {"more": "+", "fewer": "-", "times": "*", "half": "/"}[fact.kind]
    sum_text, value = _calculation(amounts[other], op, fact.amount)
    because = f"{other} has {amounts[other]} {fact.thing} and {who} has {comparison_text(fact)}"
    return f"Next, {because}, so {who} has {sum_text}.", who, value


def _backward(fact: Fact, amounts: dict[str, int]) -> tuple[str, str, int] | None:
    start, who = amounts[fact.who], fact.others[0]
    if fact.kind == "times" and start % fact.amount:
        return None
    op = {"more": "-", "fewer": "+", "times": "/", "half": "*"}[fact.kind]
    sum_text, value = _calculation(start, op, fact.amount)
    than = "than" if fact.kind in ("more", "fewer") else "as"
    because = f"{fact.who} has {start} {fact.thing}, {comparison_text(fact)} {than} {who}"
    return f"Next, {because}, so {who} has {sum_text}.", who, value


def _calculation(start: int, op: str, n: int) -> tuple[str, int]:
    value = {"+": start + n, "-": start - n, "*": start * n, "/": start // n}[op]
    return f"{start} {op} {n} = {value}", value


def _sum(fact: Fact, amounts: dict[str, int]) -> tuple[str, str, int]:
    have = enumeration([f"{person} has {amounts[person]}" for person in fact.others])
    total, sums = amounts[fact.others[0]], []
    for person in fact.others[1:]:
        sums.append(f"{total} + {amounts[person]} = {total + amounts[person]}")
        total += amounts[person]
    text = f"Next, {have}. {fact_text(fact)}. Then {', '.join(sums)}, so {fact.who} has {total}."
    return text, fact.who, total


def needed(story: Story, amounts: dict[str, int]) -> list[str] | None:
    """The people whose amounts the answer still needs, its own too; None if out of reach."""
    values, parents = dict(amounts), {}
    grew = True
    while grew and story.who not in values:
        grew = False
        for _, who, value in list(conclusions(story, values)):
            if who not in values:
                parents[who] = _sources(story, values, who)
                values[who] = value
                grew = True
    if story.who not in values:
        return None
    people, stack = [], [story.who]
    while stack:
        who = stack.pop()
        if who not in amounts and who not in people:
            people.append(who)
            stack.extend(parents[who])
    return people


def _sources(story: Story, values: dict[str, int], who: str) -> tuple[str, ...]:
    for fact in story.facts:
        if fact.kind == "base" or fact.thing != story.thing:
            continue
        if fact.who == who and all(person in values for person in fact.others):
            return fact.others
        if fact.kind != "together" and fact.others[0] == who and fact.who in values:
            return (fact.who,)
    raise AssertionError(f"no fact yields {who}")
