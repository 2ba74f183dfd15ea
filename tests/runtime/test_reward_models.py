"""Each format on a tiny random model with the real tokens and positions, against transformers.

The engine reads a step at a time; the other side reads the whole conversation at once, as the
models' own code does, and picks the positions afterwards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from loadtest.reference_engine import ReferenceEngine, ReferenceOptions
from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.options import EngineOptions
from runtime.embedded.reward_scorer import RewardScorer, load_scorer
from search.engine import Branch, RewardMissing, Sampling, Trajectory
from search.tree import ROOT
from tests.runtime.tiny_models import make_checkpoint, make_reward_model, make_tokenizer

LLAMA = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_SPECIALS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN_SPECIALS = ("<|im_start|>", "<|im_end|>", "<extra_0>")
SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."

QUESTION = "What is the sum of 1, 2 and 3?"
STEPS = ("First 1 + 2 = 3.\n\n", "Then 3 + 3 = 6,\nwhich is the sum.\n\n", "The answer is 6.")
PROMPT = tuple(make_tokenizer().encode(f"<|user|>{QUESTION}<|end|><|assistant|>"))
IDS = tuple(tuple(make_tokenizer().encode(step)) for step in STEPS)

Expected = Callable[..., list[float]]
"""Computes rewards from a checkpoint's folder and steps (default: ``STEPS``)."""


@dataclass(frozen=True)
class Case:
    """A reward model, and its rewards for the three steps computed by transformers."""

    make: Callable[[Path], Path]
    expected: Expected


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """transformers' logits (tokens, vocab), float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double()


def hidden_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """transformers' hidden states (tokens, hidden) after the final norm, float64."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].double()


def head_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint by name, float64."""
    return {k: t.double() for k, t in load_file(folder / "model.safetensors").items()}


def two_way(logits: torch.Tensor, places: list[int], good: int, bad: int) -> list[float]:
    """The softmax share of ``good`` against ``bad`` at each place."""
    return torch.softmax(logits[places][:, [good, bad]], -1)[:, 0].tolist()


def bare(steps: Sequence[str]) -> list[str]:
    """The steps without surrounding white space."""
    return [step.strip() for step in steps]


def tagged(steps: Sequence[str]) -> tuple[list[int], list[int]]:
    """The policy's ids with a tag after each step, and the tags' indices."""
    tag = make_tokenizer().convert_tokens_to_ids("ки")
    ids, places = list(PROMPT), []
    for step in steps:
        ids += [*make_tokenizer().encode(step), tag]
        places.append(len(ids) - 1)
    return ids, places


def shepherd(folder: Path, steps: Sequence[str] = STEPS) -> list[float]:
    """P(+) against - at every ки."""
    ids, places = tagged(steps)
    good, bad = make_tokenizer().convert_tokens_to_ids(["+", "-"])
    return two_way(logits_of(folder, ids), places, good, bad)


def shepherd_by_text(folder: Path, steps: Sequence[str] = STEPS) -> list[float]:
    """The same for the text as on the model's card, tokenised at once, beside a policy with another
    tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tag, good, bad = tokenizer.convert_tokens_to_ids(["ки", "+", "-"])
    ids = tokenizer.encode(f"{QUESTION} " + "\n".join(f"{step}ки" for step in bare(steps)))
    places = [place for place, token in enumerate(ids) if token == tag]
    return two_way(logits_of(folder, ids), places, good, bad)


def llemma(folder: Path, steps: Sequence[str] = STEPS) -> list[float]:
    """sigmoid of the mean of the whole vocabulary's logits at every ки."""
    ids, places = tagged(steps)
    return torch.sigmoid(logits_of(folder, ids)[places].mean(-1)).tolist()


def rlhflow(folder: Path, steps: Sequence[str] = STEPS) -> list[float]:
    """P(+) against - at position -3 of the conversation up to and including each step's ``+``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    good, bad = tokenizer.encode("+")[-1], tokenizer.encode("-")[-1]
    conversation, rewards = [], []
    for number, step in enumerate(bare(steps)):
        text = step if number else f"{QUESTION} {step}"
        conversation += [{"role": "user", "content": text}, {"role": "assistant", "content": "+"}]
        ids = tokenizer.apply_chat_template(conversation, return_dict=False)
        assert tokenizer.convert_ids_to_tokens(ids[-2:]) == ["+", "<|eot_id|>"]
        rewards += two_way(logits_of(folder, ids), [len(ids) - 3], good, bad)
    return rewards


def skywork(folder: Path, steps: Sequence[str] = STEPS) -> list[float]:
    """sigmoid of the value head at the newline that ends each step."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    newline = tokenizer.encode("\n")[-1]
    ids, places = tokenizer.encode(QUESTION + "\n"), []
    for step in bare(steps):
        ids += [*tokenizer.encode(step), newline]
        places.append(len(ids) - 1)
    head = head_of(folder)
    values = hidden_of(folder, ids)[places] @ head["v_head.summary.weight"].T
    return torch.sigmoid(values + head["v_head.summary.bias"])[:, 0].tolist()


def qwen(folder: Path, steps: Sequence[str] = STEPS) -> list[float]:
    """The share of class 1 at every <extra_0>."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "<extra_0>".join(bare(steps)) + "<extra_0>"},
    ]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    separator = tokenizer.convert_tokens_to_ids("<extra_0>")
    places = [i for i, token in enumerate(ids) if token == separator]
    head = head_of(folder)
    between = hidden_of(folder, ids)[places] @ head["score.0.weight"].T + head["score.0.bias"]
    classes = torch.relu(between) @ head["score.2.weight"].T + head["score.2.bias"]
    return torch.softmax(classes, -1)[:, 1].tolist()


def logit(folder: Path) -> list[float]:
    """P(+) against - at each step's own last token, without a tag."""
    ids = [*PROMPT, *(token for step in IDS for token in step)]
    ends = torch.tensor([len(step) for step in IDS]).cumsum(0) + len(PROMPT) - 1
    good, bad = make_tokenizer().convert_tokens_to_ids(["+", "-"])
    return two_way(logits_of(folder, ids), ends.tolist(), good, bad)


def make_llemma(folder: Path) -> Path:
    """A Llemma checkpoint, whose head is one row repeated for every token."""
    make_checkpoint(folder, seed=3)
    tensors = load_file(folder / "model.safetensors")
    row = tensors["lm_head.weight"][:1]
    tensors["lm_head.weight"] = row.repeat(len(tensors["lm_head.weight"]), 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_rlhflow(folder: Path) -> Path:
    """A Llama 3 checkpoint, whose tokenizer differs from the policy's."""
    make_checkpoint(folder, "llama3", seed=4, vocab_size=320)
    llama3_tokenizer().save_pretrained(folder)
    return folder


def llama3_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with Llama 3's pre-tokenizer, conversation tokens and chat template."""
    return make_tokenizer(LLAMA_SPECIALS, LLAMA, LLAMA_WORDS)


def make_skywork(folder: Path) -> Path:
    """A Qwen2 body with a value head."""
    head = {"v_head.summary.weight": (1, 64), "v_head.summary.bias": (1,)}
    return make_reward_model(folder, head, "Qwen2ForPrmModel", seed=5)


def make_qwen(folder: Path) -> Path:
    """A Qwen2 body with two layers over two classes."""
    head = {
        "score.0.weight": (64, 64),
        "score.0.bias": (64,),
        "score.2.weight": (2, 64),
        "score.2.bias": (2,),
    }
    kind = "Qwen2ForProcessRewardModel"
    return make_reward_model(folder, head, kind, seed=6, specials=QWEN_SPECIALS, template=QWEN)


CASES = {
    "math-shepherd": Case(lambda folder: make_checkpoint(folder, "mistral", seed=2), shepherd),
    "llemma": Case(make_llemma, llemma),
    "rlhflow": Case(make_rlhflow, rlhflow),
    "skywork": Case(make_skywork, skywork),
    "qwen2.5-math-prm": Case(make_qwen, qwen),
    "logit": Case(lambda folder: make_checkpoint(folder, "qwen3", seed=7), logit),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy beside all reward models."""
    return make_checkpoint(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that makes a format's reward model, once for each."""
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            folders[name] = CASES[name].make(tmp_path_factory.mktemp("prm"))
        return folders[name]

    return make


def options(policy: Path, prm: Path, form: str) -> EngineOptions:
    """One thread, room for all."""
    return EngineOptions(policy, prm, form, prm_kv_tokens=2000, batch_limit=8, threads=1)


def trajectory(length: int) -> Trajectory:
    """A trajectory of the first ``length`` steps."""
    return Trajectory(length, IDS[:length], STEPS[:length])


def read(scorer: RewardScorer, call: int, lengths: list[int], tree: str = "oak") -> list[float]:
    """The scorer's rewards of the trajectories of these lengths."""
    return rewards_of(scorer, call, [trajectory(n) for n in lengths], tree)


def rewards_of(
    scorer: RewardScorer, call: int, paths: list[Trajectory], tree: str = "oak"
) -> list[float]:
    """The scorer's rewards of these trajectories."""
    scorer.score(call, tree, PROMPT, QUESTION, paths)
    while scorer.busy and tree not in scorer.errors:
        for done, rewards in scorer.step():
            assert done == call
            return rewards
    raise AssertionError("no answer came")


@pytest.mark.promise(
    "Scoring a step costs one prefill of that step and gives the reward that transformers gives."
)
@pytest.mark.parametrize("form", CASES)
def test_rewards_are_those_of_transformers(
    form: str, policy: Path, models: Callable[[str], Path]
) -> None:
    """Step by step in the engine, whole in transformers: the same rewards at the same places.

    All at once the bits are those of one after the other, and a step costs its own tokens only.
    """
    prm = models(form)
    scorer = load_scorer(options(policy, prm, form))
    assert scorer is not None
    once, each = scorer.overhead
    rewards, costs = [], []
    for length in (1, 2, 3):
        before = scorer.totals().prm_tokens
        rewards += read(scorer, length, [length])
        costs.append(scorer.totals().prm_tokens - before)
    assert rewards == pytest.approx(CASES[form].expected(prm), abs=2e-6)
    assert len(set(rewards)) == 3
    assert all(cost <= len(IDS[n]) + each for n, cost in enumerate(costs) if n)
    assert sum(costs) <= len(PROMPT) + sum(map(len, IDS)) + once + 3 * each
    assert read(scorer, 4, [3, 1, 2], "elm") == [rewards[2], rewards[0], rewards[1]]
    scorer.release("oak")
    scorer.release("elm")
    assert scorer.cache.active_tokens == 0
    scorer.cache.check()


@pytest.mark.parametrize("form", CASES)
async def test_the_reference_engine_reads_the_same(
    form: str, policy: Path, models: Callable[[str], Path]
) -> None:
    """The reference engine gives every format's rewards too."""
    prm = models(form)
    reference = ReferenceEngine(ReferenceOptions(policy, prm, form))
    rewards = await reference.score("oak", PROMPT, QUESTION, [trajectory(n) for n in (1, 2, 3)])
    assert rewards == pytest.approx(CASES[form].expected(prm), abs=2e-6)


@pytest.mark.slow
async def test_the_engines_process_reads_another_tokenizer(
    policy: Path, models: Callable[[str], Path]
) -> None:
    """A reward model with its own tokenizer scores the policy's steps like the reference engine.

    The engine says beforehand what scoring takes of the context.
    """
    prm = models("rlhflow")
    engine = await EmbeddedEngine.start(options(policy, prm, "rlhflow"))
    try:
        sampling = Sampling(max_step_tokens=12)
        branches = [Branch(ROOT, i, PROMPT, i, 12, i + 1) for i in range(4)]
        steps = await engine.expand("oak", branches, sampling)
        paths = [Trajectory(i + 1, (s.tokens,), (s.text,)) for i, s in enumerate(steps)]
        rewards = await engine.score("oak", PROMPT, QUESTION, paths)
        able = engine.capabilities
        cost = await engine.release("oak")
    finally:
        await engine.close()
    reference = ReferenceEngine(ReferenceOptions(policy, prm, "rlhflow"))
    assert reference.capabilities.score_tokens == able.score_tokens
    assert rewards == pytest.approx(await reference.score("oak", PROMPT, QUESTION, paths), abs=2e-6)
    assert len(set(rewards)) == 4
    assert cost.prm_tokens > 0
    # + <eot>, <start> u s e r <end> \\n\\n, <eot>, <start> a s s i s t a n t <end> \\n\\n
    assert able.score_tokens == (0, 2 + 7 + 1 + 12)


def test_class_one_is_taken_by_position(policy: Path, tmp_path: Path) -> None:
    """A share that underflows to 0 stays that step's reward; rewards do not shift."""
    prm = make_qwen(tmp_path)
    tensors = load_file(prm / "model.safetensors")
    tensors["score.2.weight"] *= 1e4
    save_file(tensors, prm / "model.safetensors")
    scorer = load_scorer(options(policy, prm, "qwen2.5-math-prm"))
    assert scorer is not None
    rewards = [read(scorer, n, [n])[0] for n in (1, 2, 3)]
    assert rewards == pytest.approx(qwen(prm), abs=1e-6)
    assert {0.0, 1.0} >= set(rewards)


def test_an_empty_step_still_has_its_place(policy: Path, models: Callable[[str], Path]) -> None:
    """A step with only the end token has no text but still gets a reward."""
    for form in CASES:
        scorer = load_scorer(options(policy, models(form), form))
        assert scorer is not None
        end = (make_tokenizer().eos_token_id,)
        empty = Trajectory(2, (IDS[0], end), (STEPS[0], ""))
        assert len(set(rewards_of(scorer, 1, [trajectory(1), empty]))) == 2


@pytest.mark.parametrize(
    ("form", "tensor", "message"),
    [
        ("skywork", "v_head.summary.weight", "head: .* tensor v_head.summary.weight is missing"),
        ("qwen2.5-math-prm", "score.2.bias", "head: .* tensor score.2.bias is missing"),
    ],
)
def test_a_head_that_is_not_there_is_named(
    form: str, tensor: str, message: str, policy: Path, tmp_path: Path
) -> None:
    """A missing head tensor is refused at start, naming format and tensor."""
    prm = CASES[form].make(tmp_path)
    tensors = load_file(prm / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, prm / "model.safetensors")
    with pytest.raises(RewardMissing, match=f"'{form}': {message}"):
        load_scorer(options(policy, prm, form))


def test_a_head_with_the_wrong_outputs_is_refused(policy: Path, tmp_path: Path) -> None:
    """Heads with the wrong number of outputs are refused, naming the last layer."""
    file = tmp_path / "odd.json"
    file.write_text(json.dumps({"extends": "skywork", "reads": "classes"}))
    with pytest.raises(RewardMissing, match=r"summary .* has 1 outputs; at least 2 are needed"):
        load_scorer(options(policy, CASES["skywork"].make(tmp_path), str(file)))
    prm = make_qwen(tmp_path / "two")
    file.write_text(json.dumps({"extends": "qwen2.5-math-prm", "reads": "value"}))
    with pytest.raises(RewardMissing, match=r"score\.2 .* has 2 outputs; exactly one is needed"):
        load_scorer(options(policy, prm, str(file)))
    file.write_text(json.dumps({"extends": "qwen2.5-math-prm", "label": 2}))
    with pytest.raises(RewardMissing, match=r"score\.2 .* has 2 outputs; at least 3 are needed"):
        load_scorer(options(policy, prm, str(file)))


@pytest.mark.parametrize(("labels", "reads"), [(1, "value"), (2, "classes")])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_sequence_classifiers_of_transformers(
    name: str, labels: int, reads: str, policy: Path, tmp_path: Path
) -> None:
    """transformers' own classifiers, whose heads have no bias, score the last token alike."""
    make_checkpoint(tmp_path, name, seed=9)
    body = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=labels)
    body.save_pretrained(tmp_path)
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"reads": reads, "head": ["score"]}))
    scorer = load_scorer(options(policy, tmp_path, str(file)))
    assert scorer is not None
    ids = torch.tensor([[*PROMPT, *(token for step in IDS for token in step)]])
    with torch.no_grad():
        outputs = body.eval()(ids).logits[0].double()
    expected = torch.sigmoid(outputs[0]) if labels == 1 else torch.softmax(outputs, -1)[1]
    assert read(scorer, 1, [3]) == pytest.approx([float(expected)], abs=2e-6)


def test_a_reward_model_without_the_tag_is_refused(policy: Path, tmp_path: Path) -> None:
    """The error names the format and the missing tag."""
    message = r"'qwen2.5-math-prm': tag '<extra_0>' is not one token of"
    with pytest.raises(RewardMissing, match=message):
        load_scorer(options(policy, make_skywork(tmp_path), "qwen2.5-math-prm"))


def test_the_sigmoid_of_a_repeated_head_is_its_own(models: Callable[[str], Path]) -> None:
    """Llemma's head is one row for all tokens: the mean over the vocabulary is any one logit."""
    folder = models("llemma")
    ids, places = tagged(STEPS)
    expected = torch.sigmoid(logits_of(folder, ids)[places][:, 17]).tolist()
    assert llemma(folder) == pytest.approx(expected, abs=1e-6)
    assert not any(math.isclose(reward, 0.5) for reward in expected)
