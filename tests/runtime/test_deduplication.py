"""Equal tokens of several branches are computed once; every step is the one drawn alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.embedded.branch_sampling import sample_followers, with_followers
from runtime.embedded.sequence import BranchSequence, ExpandCall, SharedPrefix
from search.engine import Step
from search.tree import ROOT, Finish
from tests.runtime.hash_model import naive_step
from tests.runtime.scheduler_support import (
    PROMPTS,
    SAMPLING,
    Grower,
    children,
    finish,
    scheduler,
    unique_tokens,
)
from tests.runtime.test_speculative_decoding import drafted

PROMPT = PROMPTS["tree2"]
ALIKE = 24
"""Children of one prefix: enough that many draw the same first tokens."""


@lru_cache
def alone(seed: int) -> list[Step]:
    """The steps of ALIKE children, each drawn alone."""
    return [naive_step(branch, SAMPLING) for branch in children(PROMPT, ALIKE, seed=seed)]


def computed(prompt: tuple[int, ...], steps: list) -> int:
    """The number of distinct tokens of prompt and steps, without each last one, not read yet."""
    return unique_tokens([(*prompt, *step.tokens[:-1]) for step in steps])


@pytest.mark.promise(
    "Tokens that several branches draw alike are computed once, also below different nodes with "
    "equal tokens."
)
def test_children_of_steps_drawn_alike_are_one_voice() -> None:
    """Children of two nodes with equal tokens share rows until their tokens differ.

    A token is deduplicated if another branch drew from the same row, after equal tokens.
    """
    engine, model = scheduler()
    twins = [*children(PROMPT, 8, parent=1, seed=1), *children(PROMPT, 8, parent=2, seed=2)]
    engine.expand(1, "oak", twins, SAMPLING)
    steps = finish(engine)[1]
    assert steps == [naive_step(branch, SAMPLING) for branch in twins]
    assert model.rows == computed(PROMPT, steps)
    assert model.rows < len(PROMPT) + sum(len(step.tokens) - 1 for step in steps)
    account = engine.searches["oak"].counters
    assert account.decoded_tokens == sum(len(step.tokens) for step in steps)
    ways = {step.tokens[:n] for step in steps for n in range(len(step.tokens))}
    assert account.decoded_tokens - account.deduplicated_tokens == len(ways)


@pytest.mark.promise(
    "Deduplication changes no step: each branch gets what it would draw alone, in any batch size "
    "and KV pool."
)
@settings(max_examples=40)
@given(
    places=st.integers(1, 12),
    kv_tokens=st.sampled_from([65, 90, 130, 4000]),
    seed=st.integers(0, 3),
)
def test_places_and_memory_change_nothing(places: int, kv_tokens: int, seed: int) -> None:
    """Followers without a place wait with their tokens, and a preempted sequence's followers wait
    with it. The accounting is right, and nothing is held afterwards."""
    engine, model = scheduler(batch_limit=places, kv_tokens=kv_tokens)
    engine.expand(1, "oak", children(PROMPT, ALIKE, seed=seed), SAMPLING)
    assert finish(engine)[1] == alone(seed)
    assert model.largest <= places
    engine.cache.check()
    engine.release("oak")
    engine.cache.check()
    assert engine.cache.active_tokens == 0


def test_whole_searches_are_the_same_with_and_without() -> None:
    """Several searches have the same steps with deduplication, for fewer computed rows."""
    rows, trees = [], []
    for dedup in (False, True):
        engine, model = scheduler(dedup=dedup)
        trees.append(Grower(engine).grow(PROMPTS, 4, 12))
        rows.append(model.rows)
    assert trees[0] == trees[1]
    assert rows[1] < rows[0]


def test_a_split_by_hand() -> None:
    """Of five followers two draw 7, one draws 9, and two end their step with 0."""
    call = ExpandCall(1, 1, "oak", SAMPLING, stops=None, steps=[])  # type: ignore[arg-type]
    prefix = SharedPrefix("oak", np.array([1]), visited=False)
    runs = [
        BranchSequence(call, i, branch, prefix, (0, 0, i))
        for i, branch in enumerate(children((1,), 5))
    ]
    draws = [[(token, -1.0, 0.5)] for token in (7, 9, 0, 7, 0)]
    done = sample_followers(
        runs, draws, (7,), lambda run: Finish.STEP if run.output[-1] == 0 else None
    )
    assert done.ended == [(runs[2], Finish.STEP), (runs[4], Finish.STEP)]
    assert done.groups == {(7,): [runs[0], runs[3]], (9,): [runs[1]]}
    assert (done.counts, done.matching) == ([1, 1, 1, 1, 1], [1, 0, 0, 1, 0])
    assert done.diverged((7,))
    assert [(run.output, run.logprob, run.entropy) for run in runs][1] == ([9], -1.0, 0.5)
    runs[0].followers = [runs[3]]
    assert with_followers(runs[0]) == (runs[0], runs[3])
    assert runs[0].branch.parent == ROOT


def test_along_the_drafts_of_another_by_hand() -> None:
    """The leader takes three tokens at once. One follower agrees to the end, two part at the second
    (one by ending its step), and one parts at the first and has only that draw."""
    call = ExpandCall(1, 1, "oak", SAMPLING, stops=None, steps=[])  # type: ignore[arg-type]
    prefix = SharedPrefix("oak", np.array([1]), visited=False)
    runs = [
        BranchSequence(call, i, branch, prefix, (0, 0, i))
        for i, branch in enumerate(children((1,), 4))
    ]
    draws = [
        [(token, -1.0, 0.5) for token in way] for way in ((7, 8, 9), (7, 5, 9), (7, 0, 9), (6,))
    ]
    done = sample_followers(
        runs, draws, (7, 8, 9), lambda run: Finish.STEP if run.output[-1] == 0 else None
    )
    assert done.ended == [(runs[2], Finish.STEP)]
    assert done.groups == {(7, 8, 9): [runs[0]], (7, 5): [runs[1]], (6,): [runs[3]]}
    assert (done.counts, done.matching) == ([3, 2, 2, 1], [3, 1, 1, 0])
    assert [run.output for run in runs] == [[7, 8, 9], [7, 5], [7, 0], [6]]
    assert [run.logprob for run in runs] == [-3.0, -2.0, -2.0, -1.0]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    places=st.integers(1, 12),
    kv_tokens=st.sampled_from([65, 90, 130, 4000]),
    draft_kv_tokens=st.sampled_from([65, 130, 4000]),
    wrong=st.sampled_from([1, 2, 4, 10**9]),
    draft_tokens=st.sampled_from([0, 1, 3, 7]),
    k_config=st.sampled_from([(), (2, 2, 1), (3, 2)]),
    draft=st.sampled_from(["serial", "scheduled"]),
    verify_batch=st.integers(0, 3),
    seed=st.integers(0, 3),
)
def test_with_a_draft_it_changes_nothing(seed: int, **switches: Any) -> None:
    """With any draft quality, draft length and order of verification every step is the one drawn
    alone, and nothing is held afterwards."""
    engine, *_ = drafted(batch_limit=switches.pop("places"), **switches)
    engine.expand(1, "oak", children(PROMPT, ALIKE, seed=seed), SAMPLING)
    assert finish(engine)[1] == alone(seed)
    engine.check()
    engine.release("oak")
    engine.check()
    for cache in (engine.cache, engine.speculation.draft_model.cache):
        assert cache.active_tokens == 0


def test_a_draft_is_shared_until_they_part() -> None:
    """With a perfect draft the same rows are computed and as many tokens deduplicated, in fewer
    passes; both models compute fewer rows than without deduplication."""
    plain, model = scheduler()
    engine, draft, target = drafted(wrong=10**9)
    apart, other_draft, other_target = drafted(wrong=10**9, dedup=False)
    for each in (plain, engine, apart):
        each.expand(1, "oak", children(PROMPT, ALIKE), SAMPLING)
        assert finish(each)[1] == alone(0)
    totals, without = engine.totals(), plain.totals()
    assert totals.deduplicated_tokens == without.deduplicated_tokens > 0
    assert totals.target_passes < without.target_passes / 2
    assert target.rows == model.rows == computed(PROMPT, alone(0)) < other_target.rows
    assert draft.rows < other_draft.rows
    assert totals.drafted_tokens < apart.totals().drafted_tokens
