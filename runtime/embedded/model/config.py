"""A Llama-family model's shape, read from its ``config.json``, and the cost of its passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpolicy.roofline import DevicePeaks, ModelCosts
from runtime.accounting import Flops
from runtime.checkpoint import SIZES, read_config

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "LlamaForSequenceClassification": "llama",
    "Qwen2ForSequenceClassification": "qwen2",
    "Qwen3ForSequenceClassification": "qwen3",
    "MistralForSequenceClassification": "mistral",
    "LlamaForTokenClassification": "llama",
    "Qwen2ForTokenClassification": "qwen2",
    "Qwen2ForProcessRewardModel": "qwen2",
    "Qwen2ForPrmModel": "qwen2",
    "Qwen2ForRewardModel": "qwen2",
}
"""Model families by class name; classes other than ``ForCausalLM`` are reward models."""
_OTHER = "other"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
SIDE = 1024
"""Side of the square matrices whose product is timed."""
COPIED_BYTES = 64 << 20
REPEATS = 5


class UnsupportedModel(ValueError):
    """A checkpoint needs something that the embedded forward does not support; names the field."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's scaling of RoPE: low frequencies are divided by ``factor``, high ones kept.

    ``original_context``: the context before scaling; wavelengths between
    ``original_context / high`` and ``original_context / low`` are blended.
    """

    factor: float
    low: float
    high: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The parameters of the forward pass. Sizes in elements, ``context`` in tokens.

    ``qkv_bias``: biases on the query, key and value projections (Qwen2); ``output_bias``: on the
    attention's output projection too; ``qk_norm``: an RMS norm over each query and key head
    (Qwen3); ``tied``: the head is the embedding; ``sliding_window``: a query at position p sees
    keys p - window + 1 .. p only (None: all).
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tied: bool
    sliding_window: int | None
    context: int
    group: int = field(init=False)
    """Query heads that share a key/value head."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", self.heads // self.kv_heads)

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> ModelConfig:
        """Read ``path/config.json``. Raises UnsupportedModel naming an unsupported field."""
        raw = read_config(path)
        architecture = _architecture(raw)
        _refuse(raw)
        return cls._of(raw, architecture, *_rope(raw), _sliding_window(raw, architecture))

    @classmethod
    def sizes_of(cls, path: str | Path) -> ModelConfig:
        """The sizes of a model of any class, for the cost of its passes on another engine; of a
        model with several towers, those of its language model.

        Raises UnsupportedModel for missing sizes, and for a mixture of experts, where a token
        passes through only a few of them.
        """
        raw = read_config(path)
        experts = next((name for name in _EXPERTS if raw.get(name)), None)
        if experts is not None:
            raise UnsupportedModel(f"{experts}: {raw[experts]}; what experts cost is not known")
        return cls._of(raw, _OTHER)

    @classmethod
    def _of(
        cls,
        raw: Mapping[str, Any],
        architecture: str,
        theta: float = 10000.0,
        scaling: Llama3Scaling | None = None,
        window: int | None = None,
    ) -> ModelConfig:
        missing = [name for name in SIZES if raw.get(name) is None]
        if missing:
            raise UnsupportedModel(f"{missing[0]}: missing in config.json")
        heads = raw["num_attention_heads"]
        attention_bias = bool(raw.get("attention_bias", False))
        return cls(
            architecture=architecture,
            layers=raw["num_hidden_layers"],
            hidden=raw["hidden_size"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            ffn=raw["intermediate_size"],
            vocab=raw["vocab_size"],
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            qkv_bias=architecture == "qwen2" or attention_bias,
            output_bias=architecture != "qwen2" and attention_bias,
            qk_norm=architecture == "qwen3",
            tied=bool(raw.get("tie_word_embeddings", False)),
            sliding_window=window,
            context=raw["max_position_embeddings"],
        )

    @property
    def flops(self) -> Flops:
        """The FLOPs of the model's passes."""
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        layer = self.hidden * (width + self.heads * self.head_dim + 3 * self.ffn)
        attention = 2 * self.heads * self.head_dim
        return Flops(self.layers * layer, self.layers * attention, self.hidden * self.vocab)


def middle_layer(layers: int) -> int:
    """Half of the layers, rounded up: by default steps are embedded after so many layers, and
    attention is read in the last of these."""
    return (layers + 1) // 2


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or ["(none)"]
    if names[0] not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(
            f"architectures: {names[0]}; the embedded engine runs {supported}; "
            "SGLang (--engine sglang) has more"
        )
    return ARCHITECTURES[names[0]]


def _refuse(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act: {activation!r}; only 'silu' is done")
    if raw.get("mlp_bias"):
        raise UnsupportedModel("mlp_bias: true; only false is done")
    if raw.get("quantization_config"):
        raise UnsupportedModel("quantization_config: quantised weights; only plain ones are read")


def _rope(raw: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor: only 1.0 is done")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModel(f"rope_scaling: type {kind!r}; 'default' and 'llama3' are done")
    return theta, Llama3Scaling(
        factor=float(rope["factor"]),
        low=float(rope["low_freq_factor"]),
        high=float(rope["high_freq_factor"]),
        original_context=int(rope["original_max_position_embeddings"]),
    )


def _sliding_window(raw: Mapping[str, Any], architecture: str) -> int | None:
    window = raw.get("sliding_window")
    if window is None or (architecture != "mistral" and not raw.get("use_sliding_window", False)):
        return None
    if architecture == "mistral":
        return int(window)
    layers = raw["num_hidden_layers"]
    full_below = raw.get("max_window_layers", 28)
    default = ["full_attention" if i < full_below else "sliding_attention" for i in range(layers)]
    kinds = set(raw.get("layer_types") or default)
    if len(kinds) > 1:
        raise UnsupportedModel("layer_types: mixed full and sliding attention; one kind is done")
    return int(window) if kinds == {"sliding_attention"} else None


def footprint(config: ModelConfig, number_bytes: int) -> ModelCosts:
    """A model's costs with ``number_bytes`` per weight and KV number; each pass reads the head."""
    rows = config.flops(1, 0)
    return ModelCosts(
        token_flops=rows,
        pair_flops=config.flops(0, 1, 0),
        weight_bytes=rows / 2 * number_bytes,
        kv_bytes=2 * config.layers * config.kv_heads * config.head_dim * number_bytes,
    )


def weight_bytes(config: ModelConfig, number_bytes: int) -> int:
    """Bytes of all weights: those that a pass reads, and the embedding unless it is the head."""
    embedding = 0 if config.tied else config.vocab * config.hidden * number_bytes
    return int(footprint(config, number_bytes).weight_bytes) + embedding


def measured_peaks(threads: int, clock: Callable[[], float] = time.perf_counter) -> DevicePeaks:
    """Measure peaks with ``threads`` threads: the fastest of a few float32 products and copies."""
    import torch  # imported here because reading a config needs no torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
        product = _fastest(lambda: torch.mm(left, right), clock)
        source = torch.zeros(COPIED_BYTES // 4)
        target = torch.empty_like(source)
        copy = _fastest(lambda: target.copy_(source), clock)
    finally:
        torch.set_num_threads(before)
    return DevicePeaks(flops=2.0 * SIDE**3 / product, bandwidth=2.0 * COPIED_BYTES / copy)


def _fastest(work: Callable[[], object], clock: Callable[[], float]) -> float:
    times = []
    for _ in range(REPEATS):
        start = clock()
        work()
        times.append(clock() - start)
    return max(min(times), 1e-9)
