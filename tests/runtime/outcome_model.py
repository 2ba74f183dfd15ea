"""A tiny outcome model as Qwen2.5-Math-RM is published, and its scores by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

from search.engine import Trajectory
from tests.runtime.test_reward_models import QWEN, QWEN_SPECIALS, SYSTEM
from tests.runtime.tiny_models import make_reward_model, make_tokenizer

FORMAT = "qwen2.5-math-rm"
QUESTION = "What is the sum of 1 to 8?"
STEPS = (*(f"Step {n}: {n} + 1 = {n + 1},\nso far.\n\n" for n in range(1, 8)), "It is 36.")
"""Eight steps."""
HEAD = {
    "score.0.weight": (64, 64),
    "score.0.bias": (64,),
    "score.2.weight": (1, 64),
    "score.2.bias": (1,),
}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pre-tokenizer pattern, used by transformers for any tokenizer with such a config."""
_AUTO_MAP = {
    "AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig",
    "AutoModel": "modeling_qwen2_rm.Qwen2ForRewardModel",
}


def make_outcome_model(folder: Path) -> Path:
    """A Qwen2 body with a two-layer head of one output. Its ``auto_map`` names code that does not
    exist, because it must not be run."""
    kind = "Qwen2ForRewardModel"
    make_reward_model(folder, HEAD, kind, seed=8, specials=QWEN_SPECIALS, template=QWEN)
    make_tokenizer(QWEN_SPECIALS, QWEN, _WORDS).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": _AUTO_MAP}))
    return folder


def trajectories() -> list[Trajectory]:
    """The replies that end after one step, after two, up to all eight."""
    ids = [tuple(make_tokenizer().encode(step)) for step in STEPS]
    lengths = range(1, len(STEPS) + 1)
    return [Trajectory(n, tuple(ids[:n]), STEPS[:n]) for n in lengths]


def outcome_of(folder: Path, reply: str) -> float:
    """The score as the model card computes it: the whole conversation, read at its last token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": reply},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
    ids = tokenizer.encode(text, return_tensors="pt", add_special_tokens=False)
    body = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    head = {
        name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    with torch.no_grad():
        hidden = body(ids).last_hidden_state[0, -1].double()
    between = torch.relu(head["score.0.weight"] @ hidden + head["score.0.bias"])
    return float(head["score.2.weight"] @ between + head["score.2.bias"])


def expected_rewards(folder: Path, scale: float = 1.0) -> list[float]:
    """The rewards of ``trajectories``, in [0, 1]: sigmoids of the scores divided by ``scale``."""
    scores = [outcome_of(folder, "".join(t.texts).strip()) for t in trajectories()]
    return torch.sigmoid(torch.tensor(scores, dtype=torch.float64) / scale).tolist()
