"""Tiny random checkpoints of every architecture that the embedded engine runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama3": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 40}),
}
SPECIALS = ["<|user|>", "<|assistant|>", "<|end|>", "<|pad|>", "ки"]
_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_checkpoint(folder: Path, name: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of ``ARCHITECTURES[name]`` and its tokenizer to ``folder``.

    Vocabulary: 256 bytes, a few pairs such as ``\\n\\n``, and ``SPECIALS``. ``overrides`` go to the
    Hugging Face configuration.
    """
    make_config, make_model, extra = ARCHITECTURES[name]
    tokenizer = make_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|end|>"),
        "pad_token_id": tokenizer.convert_tokens_to_ids("<|pad|>"),
        "bos_token_id": None,
        "initializer_range": 0.15,
    }
    config = make_config(**(settings | extra | overrides))
    torch.manual_seed(seed)
    model = make_model(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key:
                value.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                value.normal_(std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_reward_model(
    folder: Path,
    head: dict[str, tuple[int, ...]],
    architecture: str,
    name: str = "qwen2",
    *,
    seed: int = 0,
    specials: Sequence[str] = (),
    template: str = "",
    **sizes: int,
) -> Path:
    """A random model of class ``architecture`` with the tensors of ``head``, shapes by name.

    Like reward models: a known body, heads of its own, no language-model head; ``specials``
    follow those of ``make_tokenizer``.
    """
    make_checkpoint(folder, name, seed=seed, vocab_size=320, **sizes)
    make_tokenizer(specials, template).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    draw = torch.Generator().manual_seed(seed)
    tensors |= {key: torch.randn(shape, generator=draw) * 0.3 for key, shape in head.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return folder


def make_pair(folder: Path) -> dict[str, Path]:
    """Checkpoints ``policy`` and, with twice its layers, ``prm``; both have a context of 320."""
    size: dict[str, Any] = {"max_position_embeddings": 320}
    return {
        "policy": make_checkpoint(folder / "policy", seed=1, num_hidden_layers=1, **size),
        "prm": make_checkpoint(folder / "prm", seed=2, num_hidden_layers=2, **size),
    }


def make_tokenizer(
    specials: Sequence[str] = (), template: str = "", pattern: str = ""
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 256 bytes, a few merges and the special tokens; ``pattern``:
    the pre-tokenizer's regular expression."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "="), ("t", "h"), ("th", "e"), ("Ġ", "the")]
    words = alphabet + ["".join(pair) for pair in merges]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIALS, *specials]})
    tokenizer.chat_template = template or _TEMPLATE
    return tokenizer
