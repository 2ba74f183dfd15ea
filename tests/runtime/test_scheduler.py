"""The scheduler on a model that exposes any wrong slot: the same steps under any batching."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from runtime.embedded.choices import KvPolicy
from runtime.embedded.sequence import SampledToken
from search.engine import Branch, EngineError, Hint, LogitsParams, PrefixTooLong, Sampling
from search.tree import ROOT, Finish
from tests.runtime.hash_model import (
    BREAK,
    CONTEXT,
    END,
    LETTER_BREAK,
    NEWLINE,
    VOCAB,
    naive_step,
)
from tests.runtime.scheduler_support import (
    PROMPTS,
    SAMPLING,
    Grower,
    children,
    finish,
    scheduler,
    unique_tokens,
)


@pytest.fixture(scope="module")
def reference() -> list:
    """One tree, grown alone with ample memory."""
    return Grower(scheduler()[0]).grow({"tree3": PROMPTS["tree3"]}, 3, 6)["tree3"]


def test_steps_are_what_naive_decoding_samples(reference: list) -> None:
    """With sharing and batching every step equals the one drawn alone without a cache."""
    assert len(reference) > 12
    for branch, step in reference:
        assert step == naive_step(branch, SAMPLING)


@pytest.mark.slow
@pytest.mark.promise(
    "A child's step is the same whenever it is drawn: beside other trees, in any batch, after "
    "eviction and preemption."
)
@pytest.mark.parametrize("kv_policy", ["lru", "arborkv"])
@pytest.mark.parametrize(
    ("batch_limit", "kv_tokens"), [(1, 4000), (3, 4000), (64, 4000), (64, 130), (7, 65)]
)
def test_steps_do_not_depend_on_company_places_or_memory(
    reference: list, batch_limit: int, kv_tokens: int, kv_policy: KvPolicy
) -> None:
    """A tree is equal beside seven others, at any batch size, with evictions and preemptions."""
    engine, model = scheduler(batch_limit=batch_limit, kv_tokens=kv_tokens, kv_policy=kv_policy)
    trees = Grower(engine).grow(PROMPTS, 3, 6)
    assert trees["tree3"] == reference
    engine.cache.check()
    assert model.largest <= batch_limit
    small = kv_tokens < 4000
    assert (engine.cache.evicted_tokens > 0) == small
    assert (engine.totals().rehydrated_tokens > 0) == small
    if kv_tokens == 130:
        assert engine.preemptions > 0


def test_a_warm_cache_changes_nothing_but_the_work(reference: list) -> None:
    """A second tree on a cached prompt is equal and computes one prompt token instead of all."""
    engine, _ = scheduler()
    grower = Grower(engine)
    cold = grower.grow({"tree3": PROMPTS["tree3"]}, 3, 6)["tree3"]
    first = engine.release("tree3")
    warm = grower.grow({"again": PROMPTS["tree3"]}, 3, 6)["again"]
    second = engine.release("again")
    assert cold == warm == reference
    assert first is not None
    assert second is not None
    assert first.prefilled_tokens - second.prefilled_tokens == len(PROMPTS["tree3"]) - 1
    assert second.cached_tokens - first.cached_tokens == len(PROMPTS["tree3"]) - 1
    assert first.decoded_tokens == second.decoded_tokens


@pytest.mark.promise("Forks copy no KV: children hold their common prefix and tokens once.")
@pytest.mark.parametrize("dedup", [False, True])
def test_forks_copy_nothing(dedup: bool) -> None:
    """Sixteen children compute and hold their prefix and common tokens once.

    With dedup equal draws are computed once too. Ended replies hold nothing.
    """
    engine, model = scheduler(dedup=dedup)
    prompt = PROMPTS["tree5"]
    steps = Grower(engine).round({"oak": children(prompt, 16)})["oak"]
    assert any(step.finish is Finish.END for step in steps)
    computed = [(*prompt, *s.tokens[:-1]) for s in steps if s.finish is not Finish.END]
    assert engine.cache.active_tokens == unique_tokens(computed)
    paths = [(*prompt, *step.tokens[:-1]) for step in steps]
    each = len(prompt) + sum(len(step.tokens) - 1 for step in steps)
    assert model.rows == (unique_tokens(paths) if dedup else each)
    account = engine.searches["oak"].counters
    assert account.prefilled_tokens == len(prompt)
    assert account.cached_tokens == 15 * len(prompt)
    assert account.decoded_tokens == sum(len(step.tokens) for step in steps)


@pytest.mark.promise(
    "A pruned step's own KV is freed at once, and KV that it shares with live steps stays."
)
def test_pruned_steps_are_freed_at_once() -> None:
    """A hint frees dead nodes' own tokens at once; tokens shared with live nodes stay."""
    engine, _ = scheduler()
    prompt = PROMPTS["tree1"]
    steps = Grower(engine).round({"oak": children(prompt, 8)})["oak"]
    engine.hint("oak", Hint(dead=(1, 2, 3, 5, 8)))
    computed = [(*prompt, *s.tokens[:-1]) if s.finish is not Finish.END else prompt for s in steps]
    live = [prompt, *(computed[i - 1] for i in (4, 6, 7))]
    assert unique_tokens(computed) > unique_tokens(live) > len(prompt)
    assert engine.cache.active_tokens == unique_tokens(live)
    engine.hint("oak", Hint(dead=(1, 2, 3, 5, 8)))
    assert engine.cache.active_tokens == unique_tokens(live)
    engine.cache.check()


def test_a_branch_that_can_never_fit_is_refused_with_both_sizes() -> None:
    """The error names the prefix and the room, and nothing stays behind."""
    engine, _ = scheduler(kv_tokens=30)
    with pytest.raises(PrefixTooLong, match=r"20 tokens and a step of up to 12 .* kv_tokens of 30"):
        engine.expand(1, "oak", children(PROMPTS["tree0"], 2), SAMPLING)
    long = (0,) * (CONTEXT - 5)
    with pytest.raises(PrefixTooLong, match="context of 400"):
        scheduler()[0].expand(1, "oak", children(long, 1), SAMPLING)
    assert not engine.busy
    assert engine.cache.active_tokens == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: children((), 1), "tokens: empty"),
        (lambda: children((3, VOCAB), 1), f"token id {VOCAB}"),
        (lambda: children((3, -1), 1), "token id -1"),
        (lambda: [Branch(ROOT, 0, (1,), 0, 0, 1)], "limit: 0; from 1 to 12"),
        (lambda: [Branch(ROOT, 0, (1,), 0, 13, 1)], "limit: 13; from 1 to 12"),
    ],
)
def test_bad_branches_are_refused_by_name(change: Callable[[], list[Branch]], message: str) -> None:
    """The error names the field and what is allowed."""
    with pytest.raises(EngineError, match=message):
        scheduler()[0].expand(1, "oak", change(), SAMPLING)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(temperature=-1.0), "temperature: -1.0"),
        (Sampling(top_p=0.0), "top_p: 0.0"),
        (Sampling(stop=("\n", "")), "stop: an empty string"),
        (Sampling(logits=LogitsParams(min_p=1.5)), "min_p: 1.5"),
        (Sampling(logits=LogitsParams(repetition_penalty=0)), "repetition_penalty: 0"),
        (Sampling(logits=LogitsParams(presence_penalty=float("nan"))), "presence_penalty: nan"),
        (Sampling(logits=LogitsParams(logit_bias=((VOCAB, 1.0),))), f"logit_bias: {VOCAB}"),
    ],
)
def test_bad_sampling_is_refused_by_name(sampling: Sampling, message: str) -> None:
    """The error names the field and what is allowed."""
    with pytest.raises(EngineError, match=message):
        scheduler()[0].expand(1, "oak", children((1, 2), 1), sampling)


class Scripted:
    """A sampler that returns these tokens in order, whatever the logits."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def __call__(self, logits: object, requests: Sequence) -> list[list[SampledToken]]:
        if not requests:
            return []
        token = self.tokens.pop(0)
        return [[(token, -float(token), 0.5 * token)]]


@pytest.mark.parametrize(
    ("tokens", "expected_finish", "text"),
    [
        ((1, 2, BREAK), Finish.STEP, "bc\n\n"),
        ((NEWLINE, 4, NEWLINE, NEWLINE), Finish.STEP, "\ne\n\n"),
        ((LETTER_BREAK, NEWLINE), Finish.STEP, "x\n\n"),
        ((1, LETTER_BREAK, END), Finish.END, "bx\n"),
        ((1, 2, 3, 4, 5), Finish.LENGTH, "bcdef"),
        ((1, 2, 3, NEWLINE, NEWLINE), Finish.STEP, "bcd\n\n"),
        ((BREAK,), Finish.STEP, "\n\n"),
    ],
)
def test_where_a_step_ends(tokens: tuple[int, ...], expected_finish: Finish, text: str) -> None:
    """A step ends with a stop string over any token borders, an end token, or at the limit."""
    engine, _ = scheduler(sample=Scripted(*tokens, 0))
    engine.expand(1, "oak", [Branch(ROOT, 0, (7, 8), 0, 5, 1)], SAMPLING)
    (step,) = finish(engine)[1]
    assert step.tokens == tokens
    assert (step.finish, step.text) == (expected_finish, text)
    assert step.logprob == -sum(tokens) / len(tokens)
    assert step.entropy == 0.5 * tokens[-1]


def test_no_stop_string_means_steps_of_exactly_the_limit() -> None:
    """Without stop strings only an end token makes a step shorter than the limit."""
    engine, _ = scheduler()
    branches = children(PROMPTS["tree0"], 20)
    engine.expand(1, "oak", branches, Sampling(stop=(), max_step_tokens=12))
    for step in finish(engine)[1]:
        assert len(step.tokens) == 12 or step.finish is Finish.END
        assert step.finish is not Finish.STEP


def test_an_empty_round_is_answered() -> None:
    """A round without branches is answered with no steps."""
    engine, _ = scheduler()
    engine.expand(1, "oak", [], SAMPLING)
    assert finish(engine) == {1: []}


def test_log_probability_of_a_trajectory() -> None:
    """The mean over all tokens drawn on the path; unknown steps raise KeyError."""
    engine, _ = scheduler()
    grower = Grower(engine)
    prompt = PROMPTS["tree2"]
    (first,) = grower.round({"oak": children(prompt, 1)})["oak"]
    (second,) = grower.round({"oak": children((*prompt, *first.tokens), 1, parent=1)})["oak"]
    total = first.logprob * len(first.tokens) + second.logprob * len(second.tokens)
    expected = total / (len(first.tokens) + len(second.tokens))
    mean_logprob = engine.steps.mean_logprob
    assert mean_logprob("oak", prompt, [first.tokens, second.tokens]) == pytest.approx(expected)
    with pytest.raises(KeyError):
        mean_logprob("oak", prompt, [(1, 2, 3)])
