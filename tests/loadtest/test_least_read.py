"""The least that a cache would have read again, on draws that can be followed by hand."""

from __future__ import annotations

import itertools
import random

from loadtest.least_read import Draw, draws_of, least_read_again
from loadtest.sglang_kills import grow_each, items_for
from search.outcome import Outcome
from tests.search.scripted_engine import ScriptedEngine

PROMPT = (1, 2)


def test_what_never_comes_back_goes_first() -> None:
    """A prompt of 2, steps of 3 below it, one after the other; then the first of them is gone on
    from. In 8 tokens the second goes for the third, and nothing is read again; in 7 one token of
    the first has to go as well, where the third needs 5."""
    first, second, third = (3, 3, 3), (4, 4, 4), (5, 5, 5)
    draws = [Draw(PROMPT, step) for step in (first, second, third)]
    draws.append(Draw(PROMPT + first, (6,)))
    assert least_read_again(draws, 11) == 0
    assert least_read_again(draws, 8) == 0
    assert least_read_again(draws, 7) == 1
    assert least_read_again(draws, 6) == 2
    assert least_read_again(draws, 5) == 3
    assert least_read_again(draws, 1) == 3, "what a draw needs stays whatever the pool"


def test_what_two_searches_have_in_common_is_there_once() -> None:
    """The same step drawn again takes no more room."""
    draws = [Draw(PROMPT, (3, 3)), Draw(PROMPT, (3, 3)), Draw((*PROMPT, 3, 3), (4,))]
    assert least_read_again(draws, 5) == 0


def by_trying(draws: list[Draw], pool: int) -> int:
    """The least over every way to give tips up, followed through to the end."""
    states = {(frozenset(), frozenset()): 0}
    for draw in draws:
        whole = draw.prefix + draw.step
        needed = {whole[:n] for n in range(1, len(whole) + 1)}
        read = {whole[:n] for n in range(1, len(draw.prefix) + 1)}
        after: dict = {}
        for (cached, seen), cost in states.items():
            more = cost + len((read - cached) & seen)
            for kept in _closed(cached - needed):
                if len(kept | needed) <= pool or not kept:
                    state = kept | needed, seen | needed
                    after[state] = min(after.get(state, more), more)
        states = after
    return min(states.values())


def _closed(paths: frozenset) -> list[frozenset]:
    """Every set of these paths in which none stands without what is above it among them."""
    found = []
    for size in range(len(paths) + 1):
        for chosen in itertools.combinations(sorted(paths), size):
            kept = frozenset(chosen)
            if all(path[:-1] in kept for path in kept if path[:-1] in paths):
                found.append(kept)
    return found


def test_no_other_order_reads_less() -> None:
    """Against every order there is, on small random searches."""
    compared = 0
    for seed in range(60):
        chance = random.Random(seed)
        paths, draws = [(0,)], []
        for _ in range(6):
            prefix = chance.choice(paths)
            step = tuple(chance.choices((1, 2), k=chance.randint(1, 2)))
            draws.append(Draw(prefix, step))
            paths.append(prefix + step)
        pool = max(len(draw.prefix + draw.step) for draw in draws) + chance.randint(-2, 1)
        assert least_read_again(draws, pool) == by_trying(draws, pool), seed
        compared += least_read_again(draws, pool) != 0
    assert compared > 5


async def test_draws_of_searches_take_turns() -> None:
    """Every step once, after its parent's path; of two searches a fork each in turn."""
    first, second = (await grow_each(ScriptedEngine(), items_for(2), 2)).found
    assert isinstance(first, Outcome)
    assert isinstance(second, Outcome)
    draws = draws_of([first, second])
    assert len(draws) == len(first.tree) + len(second.tree) - 2
    assert draws[0].prefix == first.tree.prompt
    at = len(first.tree[0].children)
    assert draws[at].prefix == second.tree.prompt
    known = {first.tree.prompt, second.tree.prompt}
    for draw in draws:
        assert draw.prefix in known
        known.add(draw.prefix + draw.step)
