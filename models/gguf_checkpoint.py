"""Convert a Llama in a GGUF file to a bfloat16 checkpoint folder for Hugging Face's tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from models.gguf import GgufError, GgufFile

CONTROL = 3
"""The type of control tokens, which are no text, in a GGUF file."""
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""A layer's tensors: their names in GGUF and in Hugging Face's checkpoints."""


def convert(file: GgufFile, folder: Path) -> None:
    """Write the checkpoint. Raises GgufError for any architecture but Llama, and any tokenizer
    but SmolLM's: byte-level BPE in which every digit is a token."""
    for key, expected in {"general.architecture": "llama", "tokenizer.ggml.pre": "smollm"}.items():
        if file.metadata.get(key) != expected:
            raise GgufError(f"{key}: {file.metadata.get(key)!r}; {expected!r} is read")
    _write_json(folder / "config.json", _config(file.metadata))
    ids = {name: file.metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    _write_json(folder / "generation_config.json", {f"{k}_token_id": i for k, i in ids.items()})
    save_file(_tensors(file), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(file.metadata, folder)


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    llama = {key.removeprefix("llama."): value for key, value in metadata.items()}
    theta = llama["rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": llama["vocab_size"],
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["rope.dimension_count"],
        "max_position_embeddings": llama["context_length"],
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _tensors(file: GgufFile) -> dict[str, torch.Tensor]:
    """The tensors by Hugging Face's names. For RoPE llama.cpp pairs neighbouring rows of a head,
    Hugging Face pairs its halves: rows of queries and keys are reordered."""
    metadata = file.metadata
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    weights = {
        "model.embed_tokens.weight": file.tensor("token_embd.weight"),
        "model.norm.weight": file.tensor("output_norm.weight"),
    }
    for layer in range(metadata["llama.block_count"]):
        for gguf_name, hf_name in _LAYER.items():
            weight = file.tensor(f"blk.{layer}.{gguf_name}.weight")
            if gguf_name in heads:
                pairs = weight.reshape(heads[gguf_name], -1, 2, weight.shape[1])
                weight = pairs.swapaxes(1, 2).reshape(weight.shape)
            weights[f"model.layers.{layer}.{hf_name}.weight"] = weight
    return {
        name: torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)
        for name, weight in weights.items()
    }


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        metadata["tokenizer.chat_template"], encoding="utf-8"
    )
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    settings = {
        f"{hf_name}_token": tokens[metadata[f"tokenizer.ggml.{gguf_name}_token_id"]]
        for hf_name, gguf_name in names.items()
    } | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
