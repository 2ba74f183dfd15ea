"""A tiny checkpoint of every row of ``docs/models.md``: class, configuration and tensors' names as
published, sizes small, weights random.

A row's models may differ in what matters to their arithmetic, such as whether the head is the
embedding: each such variant has a checkpoint of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from models.catalog import public_policies, public_reward_models
from runtime.reward_format import reward_format
from tests.runtime.outcome_model import HEAD as ONE_SCORE
from tests.runtime.test_reward_models import (
    CASES,
    QWEN,
    QWEN_SPECIALS,
    Expected,
    llama3_tokenizer,
    shepherd_by_text,
)
from tests.runtime.tiny_models import make_checkpoint, make_reward_model

VOCAB = 320
"""More than the tokenizer has, as in published checkpoints."""
EIGHT_STEPS = (
    "There are 3 boxes of 12 pens.\n\n",
    "So 3 * 12 = 36 pens,\nwhich is all of them.\n\n",
    "A third of the 36 is blue: 36 / 3 = 12.\n\n",
    "Then 36 - 12 = 24 are not blue.\n\n",
    "Half of the 24 are red – 12 of them.\n\n",
    "The other 24 - 12 = 12 are ½ green, ½ black.\n\n",
    "So 6 are green and 6 are black.\n\n",
    "The answer is 6.",
)


@dataclass(frozen=True)
class Published:
    """``kind``: a key of ``tiny_models.ARCHITECTURES``. ``variants``: fields of ``config.json``
    beside the sizes. ``head``: shapes of a reward head's tensors; ``spare``: whether an unused
    language-model head comes with them."""

    kind: str
    variants: tuple[Mapping[str, Any], ...]
    head: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    spare: bool = False


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
QWEN25 = {"rms_norm_eps": 1e-6, "use_sliding_window": False, "max_window_layers": 21}
MATHS = QWEN25 | {"rope_theta": 10000.0, "sliding_window": 4096, "max_position_embeddings": 4096}
INSTRUCT = QWEN25 | {"rope_theta": 1e6, "sliding_window": 32768, "max_position_embeddings": 32768}
DISTILLED = MATHS | {"max_position_embeddings": 131072}
QWEN3 = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "head_dim": 32,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_position_embeddings": 40960,
}
LLAMA = {"rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False}


def llama3(factor: float) -> dict[str, Any]:
    """The configuration of Llama 3.1 (rope scaling factor 8) or 3.2 (32)."""
    scaling = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return LLAMA | {
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "max_position_embeddings": 131072,
    }


MISTRAL = {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768} | UNTIED
REMOTE = {
    "AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig",
    "AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel",
}
"""Code named by Qwen's reward models, which must not be run."""
TWO_CLASSES = {
    "score.0.weight": (64, 64),
    "score.0.bias": (64,),
    "score.2.weight": (2, 64),
    "score.2.bias": (2,),
}
ONE_VALUE = {"v_head.summary.weight": (1, 64), "v_head.summary.bias": (1,)}

PUBLISHED: Mapping[str, Published] = {
    "Qwen/Qwen2.5-Math-1.5B-Instruct": Published("qwen2", (MATHS | TIED, MATHS | UNTIED)),
    "Qwen/Qwen2.5-0.5B-Instruct": Published("qwen2", (INSTRUCT | UNTIED, INSTRUCT | TIED)),
    "Qwen/Qwen3-0.6B": Published("qwen3", (QWEN3 | TIED, QWEN3 | UNTIED)),
    "meta-llama/Llama-3.1-8B-Instruct": Published(
        "llama", (llama3(32.0) | TIED, llama3(8.0) | UNTIED)
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Published("qwen2", (DISTILLED | UNTIED,)),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": Published("llama", (llama3(8.0) | UNTIED,)),
    "mistralai/Mistral-7B-Instruct-v0.3": Published(
        "mistral", (MISTRAL | {"rope_theta": 1e6, "sliding_window": None},)
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Published(
        "llama", (LLAMA | TIED | {"rope_theta": 100000.0, "max_position_embeddings": 8192},)
    ),
    "Qwen/Qwen2.5-Math-PRM-7B": Published(
        "qwen2", (MATHS | UNTIED | {"auto_map": REMOTE},), TWO_CLASSES
    ),
    "Qwen/Qwen2.5-Math-7B-PRM800K": Published(
        "qwen2", (MATHS | UNTIED | {"auto_map": REMOTE},), TWO_CLASSES, spare=True
    ),
    "Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B": Published(
        "qwen2", (MATHS | UNTIED,), ONE_VALUE, spare=True
    ),
    "Qwen/Qwen2.5-Math-RM-72B": Published("qwen2", (MATHS | UNTIED,), ONE_SCORE),
    "peiyi9979/math-shepherd-mistral-7b-prm": Published(
        "mistral", (MISTRAL | {"rope_theta": 10000.0, "sliding_window": 4096},)
    ),
    "RLHFlow/Llama3.1-8B-PRM-Mistral-Data": Published("llama", (llama3(8.0) | UNTIED,)),
}
"""By the first name of each row."""
CLASSES = {row.names[0]: row.architecture for row in (*public_policies(), *public_reward_models())}
FORMATS = {
    row.names[0]: row.format
    for row in public_reward_models()
    if not reward_format(row.format).outcome
}
"""Formats that read steps; ``test_outcome_models`` and ``test_outcome_on_sglang`` test the one
that reads whole replies."""
REWARDS: Mapping[str, Expected] = {name: case.expected for name, case in CASES.items()} | {
    "math-shepherd": shepherd_by_text
}
"""Rewards by transformers for each format, beside a policy with another tokenizer."""
POLICIES = [
    (row.names[0], variant)
    for row in public_policies()
    for variant in range(len(PUBLISHED[row.names[0]].variants))
]
"""Each policy row's first name with each of its variants' numbers."""


def tiny(name: str, root: Path, variant: int = 0) -> Path:
    """Write a row's checkpoint to a folder with the model's own name, by which it is recognised."""
    published, folder = PUBLISHED[name], root / name.rpartition("/")[2]
    config, seed = dict(published.variants[variant]), sorted(PUBLISHED).index(name)
    shape = {key: config[key] for key in ("head_dim", "tie_word_embeddings") if key in config}
    if published.head:
        spare = {"lm_head.weight": (VOCAB, 64)} if published.spare else {}
        make_reward_model(
            folder,
            {**published.head, **spare},
            CLASSES[name],
            published.kind,
            seed=seed,
            specials=QWEN_SPECIALS,
            template=QWEN,
        )
    else:
        make_checkpoint(folder, published.kind, seed=seed, vocab_size=VOCAB, **shape)
    if published.kind == "llama":
        llama3_tokenizer().save_pretrained(folder)
    file = folder / "config.json"
    sizes = json.loads(file.read_text())
    for key in ("rope_parameters", "rope_theta", "layer_types", "sliding_window"):
        sizes.pop(key, None)
    file.write_text(json.dumps(sizes | config, indent=2))
    return folder


def tensors_of(folder: Path) -> set[str]:
    """Names of a checkpoint's tensors."""
    with safe_open(folder / "model.safetensors", "pt") as opened:
        return set(opened.keys())


def published_tensors(name: str, variant: int = 0) -> set[str]:
    """Names that the published checkpoint has, for the layers that the tiny one has."""
    published = PUBLISHED[name]
    layer = [
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    ]
    if published.kind == "qwen2":
        layer += [f"self_attn.{part}_proj.bias" for part in "qkv"]
    if published.kind == "qwen3":
        layer += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    whole = {"model.embed_tokens.weight", "model.norm.weight", *published.head}
    tied = published.variants[variant]["tie_word_embeddings"]
    if published.spare or not (tied or published.head):
        whole.add("lm_head.weight")
    return whole | {f"model.layers.{number}.{part}" for number in (0, 1) for part in layer}


def qwen_prm_for_vllm(folder: Path) -> Path:
    """A tiny random Qwen2.5-Math-PRM in a folder of its published name. Heads have size 32, because
    vLLM's CPU attention does not support 16."""
    return make_reward_model(
        folder / "Qwen2.5-Math-PRM-7B",
        dict(TWO_CLASSES),
        "Qwen2ForProcessRewardModel",
        specials=QWEN_SPECIALS,
        template=QWEN,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
