"""The embedded engine draws the same tokens as the reference engine, which is checked too."""

import math

import numpy as np
import pytest
import torch

from loadtest.reference_engine import ReferenceEngine, ReferenceOptions
from runtime.embedded.model.batch_plan import Span
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.embedded.sampler import sample
from runtime.embedded.scheduler import Scheduler
from runtime.embedded.step_embedder import HiddenStates
from runtime.text import Text
from search.engine import Branch, PrefixTooLong, RewardMissing, Sampling, Trajectory
from search.tree import Finish, node_seed
from tests.runtime.tiny_models import ARCHITECTURES, make_checkpoint, make_tokenizer

PROMPT = tuple(make_tokenizer().encode("Use 4 9 10 13 to make 24.\n"))
LIMIT = 40


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / request.param
    return make_checkpoint(folder, request.param, initializer_range=0.05)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "llama", initializer_range=0.05)


@pytest.fixture
def reference(llama):
    return ReferenceEngine(ReferenceOptions(policy=llama, prm=llama, reward_format="math-shepherd"))


def branches(count: int, limit: int = LIMIT) -> list[Branch]:
    return [Branch(0, i, PROMPT, node_seed(7, "step", (i,)), limit, i + 1) for i in range(count)]


def embedded_tokens(forward: Forward, branch: Branch, sampling: Sampling) -> list[int]:
    """``branch.limit`` tokens drawn with the embedded forward and sampler alone."""
    prefix, size = np.array(branch.tokens), len(branch.tokens) + branch.limit
    store, slots, tokens = forward.new_store(size), np.arange(size), []
    span = Span(prefix, 0, slots[: len(prefix)], len(prefix) - 1)
    while len(tokens) < branch.limit:
        at = len(prefix) + len(tokens)
        logits = forward.run([span], store)
        token = sample(logits, [branch.seed], [at], sampling.temperature, sampling.top_p).tokens[0]
        tokens.append(int(token))
        span = Span(np.array(tokens[-1:]), at, slots[: at + 1], 0)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
async def test_the_embedded_forward_draws_the_references_tokens(checkpoint, temperature, top_p):
    """Same noise gives the same tokens on every architecture; steps may end early, never differ."""
    sampling = Sampling(temperature, top_p, stop=(), max_step_tokens=LIMIT)
    reference = ReferenceEngine(ReferenceOptions(policy=checkpoint))
    steps = await reference.expand("tree", branches(4), sampling)
    forward = Forward(checkpoint, threads=1)
    for branch, step in zip(branches(4), steps, strict=True):
        ours = embedded_tokens(forward, branch, sampling)
        assert list(step.tokens) == ours[: len(step.tokens)]
        assert step.finish is (Finish.LENGTH if len(step.tokens) == LIMIT else Finish.END)
    assert len({step.tokens for step in steps}) == 4


@pytest.mark.promise(
    "The embedded engine draws the same steps as the reference engine: tokens, texts and finish "
    "reasons."
)
async def test_the_embedded_scheduler_draws_the_references_steps(checkpoint):
    """Batched, with stop strings: tokens, text and finish of every step are the reference's."""
    sampling = Sampling(stop=("x", "7", "th"), max_step_tokens=LIMIT)
    expected = await ReferenceEngine(ReferenceOptions(policy=checkpoint)).expand(
        "tree", branches(16), sampling
    )
    forward, text = Forward(checkpoint, threads=1), Text(checkpoint)
    options = EngineOptions(checkpoint, kv_tokens=1000, batch_limit=16)
    scheduler = Scheduler(options, forward, forward.config, text)
    scheduler.expand(1, "tree", branches(16), sampling)
    finished = []
    while not finished:
        finished = scheduler.step()
    assert {step.finish for step in expected} >= {Finish.STEP, Finish.LENGTH}
    for ours, theirs in zip(finished[0].steps, expected, strict=True):
        assert (ours.tokens, ours.text, ours.finish) == (theirs.tokens, theirs.text, theirs.finish)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.entropy == pytest.approx(theirs.entropy, abs=1e-4)


async def test_a_step_ends_at_the_stop_string_and_keeps_it(reference):
    """Every step that stopped ends with a stop string and has no other in it."""
    steps = await reference.expand("tree", branches(12), Sampling(stop=("x", "y", "7")))
    stopped = [step for step in steps if step.finish is Finish.STEP]
    assert stopped
    for step in stopped:
        assert step.text[-1] in "xy7"
        assert not set(step.text[:-1]) & set("xy7")
    for step in steps:
        assert step.logprob < 0 < step.entropy
        assert len(step.tokens) <= LIMIT


async def test_a_step_depends_on_its_own_branch_only(reference):
    """A branch draws the same step alone and among others."""
    together = await reference.expand("tree", branches(3), Sampling())
    alone = await reference.expand("other", branches(3)[2:], Sampling())
    assert alone == together[2:]


async def test_the_mean_logprob_is_the_models_own(reference, llama):
    """A step's mean log-probability equals that of reading its tokens again."""
    (step,) = await reference.expand("tree", branches(1), Sampling(temperature=0.5))
    reader = ReferenceEngine(ReferenceOptions(policy=llama))
    (reward,) = await reader.score("tree", PROMPT, "", [Trajectory(1, (step.tokens,), ("",))])
    assert math.log(reward) == pytest.approx(step.logprob, abs=1e-5)


async def test_reward_is_the_softmax_at_the_tag(reference, llama):
    """math-shepherd: P(+) against - after the last tag, as transformers gives it."""
    steps = ((10, 11, 12), (13, 14))
    (reward,) = await reference.score("tree", PROMPT, "", [Trajectory(2, steps, ("", ""))])
    tokenizer = make_tokenizer()
    tag, good, bad = (tokenizer.convert_tokens_to_ids(t) for t in ("ки", "+", "-"))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    path = [*PROMPT, 10, 11, 12, tag, 13, 14, tag]
    with torch.no_grad():
        logits = model(torch.tensor([path])).logits[0, -1]
    expected = torch.softmax(logits[[good, bad]].double(), 0)[0]
    assert reward == pytest.approx(float(expected), abs=1e-6)


async def test_without_a_reward_model_the_format_is_named(llama):
    """Without a reward model scoring raises RewardMissing, never returns zeros."""
    reference = ReferenceEngine(ReferenceOptions(policy=llama, reward_format="math-shepherd"))
    assert not reference.capabilities.scores
    with pytest.raises(RewardMissing, match="math-shepherd"):
        await reference.score("tree", PROMPT, "", [Trajectory(1, ((1,),), ("",))])


async def test_a_prefix_over_the_context_is_refused(reference):
    """The error names both sizes and the context."""
    with pytest.raises(PrefixTooLong, match=r"500 tokens and a step of up to 40 .* 512"):
        await reference.expand("tree", [Branch(0, 0, (1,) * 500, 0, 40, 1)], Sampling())


async def test_the_embedded_hidden_states_are_the_references(checkpoint):
    """Embeddings agree: after half of the layers, each step alone, the mean of normalised rows."""
    reference = ReferenceEngine(ReferenceOptions(policy=checkpoint))
    steps = [(5, 6, 7, 8), (9,), tuple(range(1, 60))]
    paths = [Trajectory(i, (PROMPT, step), ("", "")) for i, step in enumerate(steps)]
    theirs = await reference.embed("tree", PROMPT, paths)
    ours = HiddenStates(Forward(checkpoint, threads=1)).embed_steps(steps)
    assert reference.capabilities.embeds == "hidden"
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(yours, abs=1e-4)
