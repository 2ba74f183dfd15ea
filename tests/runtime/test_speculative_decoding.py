"""Drafts change time but no step, whatever the draft proposes and however it is verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from runtime.embedded.branch_sampling import FollowerTokens, VerifiedTokens
from runtime.embedded.draft_length import AcceptanceRate, DraftLength, KeptPromise
from runtime.embedded.draft_model import DraftModel
from runtime.embedded.model.batch_plan import Span
from runtime.embedded.sampler import rank_candidates
from runtime.embedded.scheduler import Scheduler
from runtime.embedded.sequence import BranchSequence, DraftTree
from runtime.embedded.speculative_decoding import SpeculativeDecoder
from search.engine import LogitsParams
from search.tree import Finish
from tests.runtime.hash_model import CONFIG, HashModel, Letters, logits_after, naive_step
from tests.runtime.scheduler_support import (
    OPTIONS,
    PROMPTS,
    SAMPLING,
    Grower,
    children,
    finish,
    scheduler,
)


class Likeness(HashModel):
    """The hash model with one logit row in ``wrong`` reversed."""

    def __init__(self, wrong: int) -> None:
        super().__init__()
        self._wrong = wrong

    def run(self, spans: Sequence[Span], store: np.ndarray) -> torch.Tensor:
        """The hash model's logits, some rows reversed."""
        logits = super().run(spans, store)
        turned = (logits[:, 0] * 2**20).long() % self._wrong == 0
        logits[turned] = logits[turned].flip(-1)
        return logits


def drafted(wrong: int = 4, **changes: Any) -> tuple[Scheduler, Likeness, HashModel]:
    """A scheduler, its draft (wrong in one of ``wrong`` rows) and its model; ``changes``: fields of
    the options."""
    draft, ticks = Likeness(wrong), count()
    all_changes = {"draft": "scheduled", "draft_model": "likeness", "draft_tokens": 3} | changes
    options = replace(OPTIONS, **all_changes)
    draft_length = DraftLength(options.draft_tokens, options.k_config)
    draft_model = DraftModel(
        options,
        draft,
        CONFIG,
        eos=Letters.eos,
        pass_time=draft_length.draft,
        clock=lambda: float(next(ticks)),
    )
    speculation = SpeculativeDecoder(
        options, draft_model, draft_length, clock=lambda: float(next(ticks))
    )
    engine, model = scheduler(speculation=speculation, **all_changes)
    return engine, draft, model


@pytest.mark.promise(
    "Drafts change no step: serial or scheduled, right or wrong, in ample or little memory."
)
@pytest.mark.parametrize("dedup", [False, True], ids=["apart", "deduplicated"])
@pytest.mark.parametrize(
    "settings",
    [
        {"draft": "serial"},
        {},
        {"wrong": 1},
        {"wrong": 10**9, "draft_tokens": 7, "batch_limit": 1},
        {"verify_batch": 1, "k_config": (2, 1, 1)},
        {"k_config": (2, 2, 1), "wrong": 2, "verify_batch": 3, "batch_limit": 8},
        {"k_config": (3, 2), "kv_tokens": 120, "draft_kv_tokens": 90},
        {"verify_batch": 3, "batch_limit": 8, "draft_tokens": 0},
        {"kv_tokens": 100},
        {"kv_tokens": 100, "draft_kv_tokens": 90, "verify_batch": 1},
        {"kv_tokens": 65, "draft_kv_tokens": 70, "kv_policy": "lru", "batch_limit": 7},
    ],
    ids=str,
)
def test_steps_are_what_naive_decoding_samples(settings: dict, dedup: bool) -> None:
    """In any mode, with any draft and memory, every step is the one drawn alone, including its
    log-probability and entropy, and the accounting is right."""
    engine, *_ = drafted(**settings, dedup=dedup)
    steps_by_tree = Grower(engine).grow({name: PROMPTS[name] for name in ("tree3", "tree5")}, 2, 3)
    for branch, step in (pair for pairs in steps_by_tree.values() for pair in pairs):
        assert step == naive_step(branch, SAMPLING)
    engine.check()
    totals = engine.totals()
    assert 0 <= totals.accepted_tokens <= totals.tested_tokens <= totals.drafted_tokens
    assert totals.drafted_tokens > 0
    if settings.get("wrong") == 10**9:
        assert totals.accepted_tokens == totals.tested_tokens > 0


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"wrong": 10**9, "batch_limit": 8},
        {"k_config": (2, 2, 1), "wrong": 2, "verify_batch": 3},
        {"kv_tokens": 100, "draft_kv_tokens": 90},
    ],
    ids=str,
)
def test_penalties_follow_from_a_branchs_own_path(settings: dict, dedup: bool) -> None:
    """Penalties hold with drafts, sharing and recomputation; a perfect draft stays perfect, because
    it draws by the same parameters."""
    params = LogitsParams(5, 0.01, ((3, 0.5),), 2, 1.2, 0.3, 0.4)
    sampling = replace(SAMPLING, logits=params, prompt_tokens=20)
    engine, *_ = drafted(**settings, dedup=dedup)
    trees = {name: PROMPTS[name] for name in ("tree3", "tree5")}
    steps_by_tree = Grower(engine, sampling=sampling).grow(trees, 2, 3)
    pairs = [pair for pairs in steps_by_tree.values() for pair in pairs]
    for branch, step in pairs:
        assert step == naive_step(branch, sampling)
    assert any(step.tokens != naive_step(branch, SAMPLING).tokens for branch, step in pairs)
    totals = engine.totals()
    assert totals.tested_tokens > 0
    if settings["wrong" if "wrong" in settings else "kv_tokens"] == 10**9:
        assert totals.accepted_tokens == totals.tested_tokens


def test_a_draft_that_is_always_right_saves_passes() -> None:
    """Seven accepted drafts and the draw after them give eight tokens a pass. A step's first token
    comes from the prefix's pass, and its last one is never proposed."""
    engine, *_ = drafted(wrong=10**9, draft_tokens=7, dedup=False)
    steps = Grower(engine).round({"oak": children(PROMPTS["tree5"], 6)})["oak"]
    totals = engine.totals()
    assert totals.target_passes == sum(-(-(len(step.tokens) - 1) // 8) for step in steps)
    assert totals.decoded_tokens == sum(len(step.tokens) for step in steps)
    assert totals.prefilled_tokens == len(PROMPTS["tree5"])


@pytest.mark.promise("The draft model reads the prompt of n drafts once, not n times.")
def test_drafts_share_their_prompt() -> None:
    """The draft model reads the prompt of sixteen drafts once; later steps find it cached."""
    engine, draft, _ = drafted(wrong=10**9, draft_tokens=2)
    prompt = PROMPTS["tree5"]
    grower = Grower(engine)
    steps = grower.round({"oak": children(prompt, 16)})["oak"]
    assert draft.rows <= len(prompt) + sum(len(step.tokens) for step in steps)
    before = draft.rows
    going_on = next(s.tokens for s in steps if s.finish is not Finish.END)
    again = grower.round({"oak": children((*prompt, *going_on), 4, parent=1)})["oak"]
    assert draft.rows - before < 2 + sum(len(step.tokens) for step in again)


def test_candidates_are_the_first_under_the_noise() -> None:
    """(2, 2, 1) proposes two tokens, two after each and one after each of those. A perfect draft's
    first candidates are the tokens drawn; the others are forks."""
    engine, *_ = drafted(wrong=10**9, k_config=(2, 2, 1))
    assert engine.speculation is not None
    engine.expand(1, "oak", children(PROMPTS["tree5"], 1), SAMPLING)
    while not engine.running:
        engine.step()
    (run,) = (work for work in engine.batch.sequences if isinstance(work, BranchSequence))
    drafts = engine.speculation.draft_model.propose({run: (2, 2, 1)})[run]
    expected = naive_step(run.branch, SAMPLING).tokens
    start = len(run.output)
    assert tuple(drafts.tokens) == expected[start : start + 3]
    assert [(child.at, len(child.tokens)) for child in drafts.children] == [(0, 3), (1, 2), (1, 2)]
    assert drafts.count == 2 + 4 + 4
    firsts = [token for token, _ in drafts.at(None, 0)]
    assert (
        firsts
        == rank_candidates(
            logits_after(run.path().tolist())[None],
            [run.branch.seed],
            [run.position],
            np.array([SAMPLING.temperature]),
            np.array([SAMPLING.top_p]),
            2,
        )[0].tolist()
    )


def test_two_candidates_are_right_more_often() -> None:
    """For a draft that is wrong every other time two candidates have no lower acceptance and no
    more passes than one."""
    alone, both = (drafted(wrong=2, k_config=k_config)[0] for k_config in ((), (2, 2, 1)))
    for engine in (alone, both):
        Grower(engine).round({"oak": children(PROMPTS["tree2"], 24)})
    lone, pair = alone.totals(), both.totals()
    assert pair.accepted_tokens / pair.tested_tokens >= lone.accepted_tokens / lone.tested_tokens
    assert pair.target_passes <= lone.target_passes


@pytest.mark.parametrize(("mode", "verify_batch"), [("serial", 0), ("scheduled", 1)])
def test_one_is_checked_at_a_time(mode: str, verify_batch: int) -> None:
    """The paper's two modes verify one branch to its end, or all in turn, never two in a pass."""
    engine, draft, model = drafted(draft=mode, verify_batch=verify_batch)
    Grower(engine).round({"oak": children(PROMPTS["tree1"], 5)})
    assert model.largest == 1
    assert (draft.largest > 1) == (mode == "scheduled")


@pytest.mark.parametrize("passes", [1, 3, 5])
def test_an_abort_amid_drafts_frees_everything(passes: int) -> None:
    """After an abort at any point no KV is active, in the draft's cache either; others go on."""
    engine, *_ = drafted(verify_batch=2)
    engine.expand(1, "oak", children(PROMPTS["tree1"], 5), SAMPLING)
    engine.expand(2, "elm", children(PROMPTS["tree2"], 3), SAMPLING)
    for _ in range(passes):
        engine.step()
    assert engine.abort("oak") == [1]
    engine.release("oak")
    engine.check()
    assert finish(engine)[2] == [
        naive_step(branch, SAMPLING) for branch in children(PROMPTS["tree2"], 3)
    ]
    cost = engine.release("elm")
    assert cost is not None
    assert cost.drafted_tokens > 0
    engine.check()
    for cache in (engine.cache, engine.speculation.draft_model.cache):
        assert cache.active_tokens == 0


class TestDraftLength:
    """The choice of the draft length."""

    @staticmethod
    def measured(draft_seconds: float, acceptance: float) -> DraftLength:
        """Fed with target passes of 10 s, draft passes of ``draft_seconds``, and ``acceptance``."""
        draft_length = DraftLength()
        for rows in (1, 8, 64, 100) * 10:
            draft_length.target.add(rows, 10.0)
            draft_length.draft.add(rows, draft_seconds)
        for _ in range(100):
            draft_length.note_verified(1000, 100, round(100 * acceptance), at_end=False)
        return draft_length

    def test_the_length_that_pays_most(self) -> None:
        """Acceptance 0.8, a draft of a tenth of the target's time: (1 - 0.8^6) / 0.2 / 1.5 = 2.46
        tokens a pass's time at length 5, 2.44 at 4, 2.47 at 6; 2.45 at 7."""
        draft_length = self.measured(1.0, 0.8)
        assert draft_length.own.value == pytest.approx(0.8, abs=0.01)
        assert draft_length.yields()[5] == pytest.approx(3.69, abs=0.05)
        assert draft_length.plan(1, 1, 1)[0] in (5, 6, 7)

    def test_a_dear_or_a_wrong_draft_pauses(self) -> None:
        """An expensive or a bad draft is only tried now and then, ever more rarely."""
        for draft_length in (self.measured(9.0, 0.8), self.measured(1.0, 0.02)):
            plans = [draft_length.plan(8, 8, 8) for _ in range(500)]
            trials = [i for i, plan in enumerate(plans) if plan != (0, 0)]
            assert trials == [63, 63 + 128, 63 + 128 + 256]
            assert {plans[i] for i in trials} == {(3, 4)}
            assert draft_length.pauses == 1

    def test_a_step_that_ends_takes_no_more_drafts(self) -> None:
        """With steps of ten tokens each further guess is useful in 0.9 x 0.8 of all passes."""
        draft_length = self.measured(1.0, 0.8)
        for _ in range(200):
            draft_length.note_verified(10, 10, 8, at_end=True)
        assert draft_length.yields()[2] == pytest.approx(1 + 0.72 + 0.72**2, abs=0.03)

    @staticmethod
    def rounds(draft_length: DraftLength, share: float, number: int) -> list[tuple[int, int]]:
        """The plans of ``number`` rounds of 8 branches; drafted rounds take 1/``share`` times the
        promised time of 10 seconds for a pass and one for each drafted token."""
        plans = []
        for _ in range(number):
            length, branches = draft_length.plan(8, 8, 8)
            plans.append((length, branches))
            promised = 8 * draft_length.yields()[length], 10.0 + 1.0 * length
            draft_length.note_round(round(promised[0]), promised[1] / (share if length else 1.0))
        return plans

    def test_a_promise_that_is_not_kept_pauses(self) -> None:
        """A speed-up of 2.46 is promised. If a quarter of it is reached, drafting pauses after four
        rounds; after 64 rounds and a trial it starts again, and the next pause is twice as
        long."""
        plans = self.rounds(self.measured(1.0, 0.8), 0.25, 210)
        drafted = [i for i, (_, branches) in enumerate(plans) if branches == 8]
        trials = [i for i, (_, branches) in enumerate(plans) if branches == 4]
        assert trials == [4 + 63, 4 + 64 + 4 + 127]
        assert drafted == [*range(4), *range(68, 72), *range(200, 204)]

    def test_a_promise_that_is_kept_by_and_large_holds(self) -> None:
        """Drafting that is faster than plain decoding goes on, even if slower than promised."""
        for share in (0.7, 1.0, 1.3):
            plans = self.rounds(self.measured(1.0, 0.8), share, 100)
            assert all(branches == 8 for _, branches in plans)

    def test_a_stray_round_costs_little_trust(self) -> None:
        """A round that took a thousand times as long as promised counts as five."""
        trust = KeptPromise()
        for _ in range(30):
            trust.hold(1.0, 1.0)
        assert trust.value == 1.0
        trust.hold(1.0, 1000.0)
        assert 0.7 < trust.value < 0.9

    def test_who_follows_counts_too(self) -> None:
        """A branch accepts 0.8 of its drafts, its two followers a half: at length 2 a pass gives
        it 1 + 0.8 + 0.64 = 2.44 tokens and them 1.75 each. With many followers that accept
        nearly nothing, nothing is drafted."""
        draft_length = self.measured(4.0, 0.8)
        for _ in range(100):
            draft_length.followers.test(100, 50)
        assert draft_length.yields(followers=2.0)[2] == pytest.approx(
            (2.44 + 2 * 1.75) / 3, abs=0.05
        )
        assert draft_length.plan(1, 1, 1, followers=0.0) != (0, 0)
        for _ in range(100):
            draft_length.followers.test(100, 1)
        assert draft_length.plan(1, 1, 1, followers=0.0) != (0, 0)
        assert draft_length.plan(1, 1, 1, followers=15.0) == (0, 0)

    def test_it_hears_of_those_who_follow(self) -> None:
        """Of two accepted drafts a follower to the end counts 2 of 2, one that parts at the second
        1 of 2, at the first 0 of 1. The draw after the drafts is not counted."""
        speculation, share = drafted()[0].speculation, AcceptanceRate()
        assert speculation is not None
        passed = VerifiedTokens((7, 8, 9), (0, 1, 2), None, DraftTree([7, 8]), tested=2, accepted=2)
        speculation.note_followers(
            passed, FollowerTokens(counts=[3, 3, 2, 1], matching=[3, 2, 1, 0])
        )
        for tested, right in ((2, 2), (2, 2), (2, 1), (1, 0)):
            share.test(tested, right)
        assert speculation.draft_length.followers.value == share.value

    def test_many_rows_cost(self) -> None:
        """If a pass costs in proportion to its rows, many branches are decoded without drafts."""
        draft_length = DraftLength()
        for rows in (1, 16, 64, 256) * 10:
            draft_length.target.add(rows, 1.0 * rows)
            draft_length.draft.add(rows, 0.1 * rows)
        assert draft_length.plan(64, 64, 64) == (0, 0)

    def test_a_stray_measurement_counts_little(self) -> None:
        """A pass that took a thousand times as long changes the estimate by less than a third."""
        draft_length = self.measured(1.0, 0.8)
        draft_length.target.add(8, 10_000.0)
        assert draft_length.target.at(8) < 13.0
