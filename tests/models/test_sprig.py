"""The committed models load with plain transformers, keep their size limits and solve tasks."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from models.bundled import SPRIG_FOLDER
from models.tasks import TASKS
from models.tasks.task import STEP_BREAK

FOLDERS = ("policy", "prm", "draft")
QUESTION = "Use 4 9 10 13 to make 24."
STEPS = [
    "13 - 9 = 4 (left: 4 4 10)",
    "10 - 4 = 6 (left: 4 6)",
    "6 * 4 = 24 (left: 24)",
    "The answer is 24.",
]
DEAD_END = [
    "13 * 10 = 130 (left: 4 9 130)",
    "9 - 4 = 5 (left: 5 130)",
    "130 - 5 = 125 (left: 125)",
    "The answer is 24.",
]


@pytest.fixture(scope="module")
def models() -> dict[str, LlamaForCausalLM]:
    return {
        name: AutoModelForCausalLM.from_pretrained(SPRIG_FOLDER / name, dtype=torch.float32)
        for name in FOLDERS
    }


def weights(folder: str) -> Path:
    return SPRIG_FOLDER / folder / "model.safetensors"


def test_sizes_keep_to_their_limits(models: dict[str, LlamaForCausalLM]) -> None:
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert 4_000_000 <= counts["policy"] <= 5_000_000
    assert counts["policy"] < counts["prm"] <= 6_500_000
    assert counts["draft"] < 1_000_000
    assert sum(weights(name).stat().st_size for name in FOLDERS) <= 25e6


@pytest.mark.parametrize("name", FOLDERS)
def test_configurations_agree_with_the_tokenizer(
    name: str, models: dict[str, LlamaForCausalLM]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SPRIG_FOLDER / name)
    model = models[name]
    assert isinstance(model, LlamaForCausalLM)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert AutoModelForCausalLM.from_pretrained(SPRIG_FOLDER / name).dtype == torch.bfloat16


def test_the_policy_writes_derivations(models: dict[str, LlamaForCausalLM]) -> None:
    """Of 32 samples at least one is right, which an untrained model would not manage."""
    tokenizer = AutoTokenizer.from_pretrained(SPRIG_FOLDER / "policy")
    messages = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    replies = models["policy"].generate(**inputs, max_new_tokens=64, num_return_sequences=32)
    texts = tokenizer.batch_decode(
        replies[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert any(TASKS["game24"].check(QUESTION, text).correct for text in texts)


def step_scores(model: LlamaForCausalLM, steps: list[str]) -> list[float]:
    """P('+') against '-' at the tag after each step."""
    tokenizer = AutoTokenizer.from_pretrained(SPRIG_FOLDER / "prm")
    tag, plus, minus = (tokenizer.encode(text)[0] for text in ("ки", "+", "-"))
    ids = tokenizer.encode(f"<|user|>{QUESTION}<|assistant|>")
    ends = [STEP_BREAK] * (len(steps) - 1) + [tokenizer.eos_token]
    for step, end in zip(steps, ends, strict=True):
        ids += [*tokenizer.encode(step + end), tag]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    places = [i for i, token in enumerate(ids) if token == tag]
    return logits[places][:, [plus, minus]].softmax(-1)[:, 0].tolist()


def test_the_prm_tells_right_from_wrong_at_the_step_tag(
    models: dict[str, LlamaForCausalLM],
) -> None:
    right, wrong = step_scores(models["prm"], STEPS), step_scores(models["prm"], DEAD_END)
    assert min(right) > 0.5 > max(wrong)


def test_the_prm_remembers_an_illegal_step(models: dict[str, LlamaForCausalLM]) -> None:
    """Every step below a false product scores below 0.5, even if it is right itself."""
    false_product = ["13 * 10 = 131 (left: 4 9 131)", *STEPS[1:]]
    assert max(step_scores(models["prm"], false_product)) < 0.5


def test_the_draft_often_says_what_the_policy_says(models: dict[str, LlamaForCausalLM]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SPRIG_FOLDER / "draft")
    prompt = tokenizer.encode(f"<|user|>{QUESTION}<|assistant|>")
    ids = torch.tensor([prompt + tokenizer.encode(STEP_BREAK.join(STEPS))])
    with torch.no_grad():
        predictions = [
            models[name](ids).logits[0, len(prompt) :].argmax(-1) for name in ("policy", "draft")
        ]
    assert (predictions[0] == predictions[1]).float().mean() > 0.6
