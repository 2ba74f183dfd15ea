"""What is read from a model's folder: nested configs, heads, and whether two models are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3Config, Gemma3TextConfig

from runtime.checkpoint import Checkpoint, check_weights, outputs_of_class, read_config
from runtime.embedded.model.config import ModelConfig, UnsupportedModel
from runtime.embedded.model.layers import tensor_reader
from runtime.text import Text
from tests.runtime.tiny_models import make_checkpoint, make_tokenizer

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def folder_of(folder: Path, config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_vision_models_text_tower_gives_the_sizes(tmp_path: Path) -> None:
    """As in published Qwen2.5-VL configs, class and end tokens are the whole model's, sizes the
    text tower's. The embedded engine refuses the class; costs for SGLang are known.
    """
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "eos_token_id": 7,
        "text_config": SIZES | {"model_type": "qwen2_5_vl_text", "eos_token_id": 9},
        "vision_config": {"hidden_size": 1280},
    }
    folder = folder_of(tmp_path, config)
    make_tokenizer().save_pretrained(folder)
    text = Text(folder)
    assert (text.context, text.model_vocab, text.eos & {7, 9}) == (512, 320, {7})
    assert Checkpoint.of(folder).architecture == "Qwen2_5_VLForConditionalGeneration"
    message = "Qwen2_5_VLForConditionalGeneration; the embedded engine runs Llama.*sglang"
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_checkpoint(folder)
    plain = make_checkpoint(tmp_path / "plain", "llama", **SIZES)
    costs = [ModelConfig.sizes_of(path).flops(3, 6) for path in (folder, plain)]
    assert costs[0] == costs[1] > 0


def test_what_a_nested_config_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    """Sizes that Gemma 3's published configs omit take transformers' defaults."""
    whole = Gemma3Config(text_config=Gemma3TextConfig(num_hidden_layers=3)).to_dict()
    text_config = {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 512}
    folder = folder_of(
        tmp_path,
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text_config},
    )
    config = read_config(folder)
    for name in ("hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads"):
        assert config[name] == whole["text_config"][name]
    assert (config["num_hidden_layers"], Text(folder).context) == (3, config[SIZE])


SIZE = "max_position_embeddings"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({k: v for k, v in SIZES.items() if k != SIZE}, f"{SIZE}: missing"),
        (SIZES | {"num_experts": 8}, "num_experts: 8"),
    ],
)
def test_sizes_that_are_not_known_are_named(config: Any, message: str, tmp_path: Path) -> None:
    """Missing or unsupported sizes raise UnsupportedModel; costs are not guessed."""
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.sizes_of(folder_of(tmp_path, config))


@pytest.mark.parametrize(("content", "message"), [("{", "not JSON"), ("[]", "no object")])
def test_a_broken_config_is_named(content: str, message: str, tmp_path: Path) -> None:
    """The error for a broken config names its file."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        Text(tmp_path)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    """The error for a missing tokenizer names the folder."""
    folder = folder_of(tmp_path, SIZES)
    with pytest.raises(ValueError, match=f"{folder}: holds no tokenizer"):
        _ = Text(folder).tokenizer


@pytest.mark.parametrize(
    ("architecture", "config", "outputs"),
    [
        ("Qwen2ForProcessRewardModel", {}, 2),
        ("Qwen2ForRewardModel", {}, 1),
        ("LlamaForSequenceClassification", {"num_labels": 1, "hidden_size": 64}, 1),
        ("LlamaForSequenceClassification", {"id2label": {"0": "a", "1": "b", "2": "c"}}, 3),
        ("LlamaForSequenceClassification", {"hidden_size": 64}, 2),
        ("LlamaForSequenceClassification", {}, None),
        ("LlamaForCausalLM", {"hidden_size": 64}, 64),
        ("NobodyKnows", {"hidden_size": 64}, None),
    ],
)
def test_a_classs_outputs(architecture: str, config: dict[str, Any], outputs: int | None) -> None:
    """The number of a class's outputs, or None; a language model's are its hidden state."""
    assert outputs_of_class(architecture, config) == outputs


def test_two_folders_of_one_model(tmp_path: Path) -> None:
    """Tokenizers are compared by what their ids stand for, not by their files; weights by a sample
    of tensors. The result is None if either folder lacks them."""
    first, second, third = (
        Checkpoint.of(make_checkpoint(tmp_path / str(n), seed=seed))
        for n, seed in enumerate((1, 1, 2))
    )
    assert first.same_weights(second) is True
    assert first.same_weights(third) is False
    stored = second.folder / "tokenizer.json"
    content = json.loads(stored.read_text())
    content["model"]["merges"] = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]
    ]
    stored.write_text(json.dumps(content | {"padding": None}, indent=4))
    assert first.same_tokenizer(second) is True
    content["added_tokens"].pop()
    stored.write_text(json.dumps(content))
    assert first.same_tokenizer(second) is False
    bare = Checkpoint.of(folder_of(tmp_path / "bare", SIZES))
    assert first.same_tokenizer(bare) is first.same_weights(bare) is None


def test_weights_that_are_cut_short_are_named(tmp_path: Path) -> None:
    """Weights cut short at any point, as by an interrupted download, give a one-line error before
    anything is loaded."""
    folder = make_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    check_weights(folder)
    for size, why in ((0, "no whole safe"), (100, "no whole safe"), (len(whole) - 1, "cut short")):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"{file}: .*{why}.*; get it again"):
            check_weights(folder)
        with pytest.raises(ValueError, match=f"{file}: .*{why}.*; get it again"):
            tensor_reader(folder)
    file.write_bytes(b"\x04" + bytes(7) + b"[3,4")
    with pytest.raises(ValueError, match="no whole safetensors file"):
        check_weights(folder)


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A missing file of the weights' index is named; files outside the index are not read."""
    folder = make_checkpoint(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    (folder / "consolidated.safetensors").write_bytes(b"another tool's")
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors: is not there"):
        check_weights(folder)
