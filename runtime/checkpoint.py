"""Reads from a checkpoint's folder, without loading weights: its model's sizes, its head's outputs,
and whether another folder holds the same tokenizer and the same model."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

_NESTED = ("text_config", "llm_config", "language_config")
"""The keys under which multimodal models keep their language model's config."""
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
"""The sizes that a language model's config must state."""
_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
_HEADS: Mapping[str, int] = {
    "Qwen2ForProcessRewardModel": 2,
    "Qwen2ForPrmModel": 1,
    "Qwen2ForRewardModel": 1,
}
"""Number of outputs for classes whose head has a fixed size."""
LANGUAGE = ("ForCausalLM", "ForConditionalGeneration")
"""Suffixes of the names of generative classes."""
_LABELLED = ("ForSequenceClassification", "ForTokenClassification")
_LABELS = 2
"""Outputs of a classifier whose config states none: transformers' default."""
_WEIGHTS = "model.safetensors"
_SAMPLED_TENSORS = 8
_SAMPLED_BYTES = 4096


def read_config(folder: str | Path) -> dict[str, Any]:
    """``config.json``; for a multimodal model its language model's part, with the outer class.

    Sizes missing from a nested config get transformers' defaults. Raises ValueError naming the file
    if it holds no object, OSError if it is not there.
    """
    file = Path(folder) / "config.json"
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(whole, dict):
        raise ValueError(f"{file}: no object; a model's configuration is needed")
    nested = next((whole[name] for name in _NESTED if isinstance(whole.get(name), dict)), None)
    if nested is None:
        return whole
    if any(name not in whole and nested.get(name) is None for name in SIZES):
        nested = _with_defaults(nested)
    outer = {name: whole[name] for name in ("architectures", *_IDS) if whole.get(name) is not None}
    return whole | nested | outer


def architecture(checkpoint: Path) -> str | None:
    """The name of a checkpoint's model class; None if its config states none."""
    names = config_of(checkpoint).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def config_of(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's ``config.json`` as ``read_config`` gives it; empty if it cannot be read."""
    with suppress(OSError, ValueError):
        return read_config(checkpoint)
    return {}


def _with_defaults(nested: Mapping[str, Any]) -> dict[str, Any]:
    """A nested config with transformers' default sizes; unchanged for an unknown model type."""
    from transformers import AutoConfig  # takes seconds: only who needs it waits

    stored = dict(nested)
    kind = stored.pop("model_type", None)
    try:
        complete = AutoConfig.for_model(kind, **stored).to_dict()
    except ValueError:
        return dict(nested)
    return {name: complete.get(name) for name in SIZES} | stored | {"model_type": kind}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder and its ``read_config``."""

    folder: Path
    config: Mapping[str, Any]

    @classmethod
    def of(cls, folder: str | Path) -> Checkpoint:
        """Read the folder's config. Raises ValueError and OSError as ``read_config``."""
        return cls(Path(folder), read_config(folder))

    @property
    def architecture(self) -> str:
        """The name of the model class in the config; ``(none)`` if there is none."""
        return (self.config.get("architectures") or ["(none)"])[0]

    def head_outputs(self) -> int | None:
        """How many numbers an embedding server gives for it: its reward head's outputs, by tensor
        or by class, or a language model's hidden size; None if that is not known."""
        tensors = {} if self.architecture.endswith(LANGUAGE) else _tensors(self.folder)
        for name in ("v_head.summary.weight", "score.2.weight", "score.weight"):
            if name in tensors:
                return int(tensors[name].shape[0])
        return outputs_of_class(self.architecture, self.config)

    def same_tokenizer(self, other: Checkpoint) -> bool | None:
        """Whether both tokenizers give the same ids; None if one has no ``tokenizer.json``."""
        first, second = (checkpoint.folder / "tokenizer.json" for checkpoint in (self, other))
        if not (first.is_file() and second.is_file()):
            return None
        return _same_tokenizer(_state(first), _state(second))

    def same_weights(self, other: Checkpoint) -> bool | None:
        """Whether a sample of the tensors that both hold is equal, byte for byte; None if they have
        no tensor of the same name, number type and shape."""
        first, second = _tensors(self.folder), _tensors(other.folder)
        shared_names = [n for n in sorted(first) if n in second and first[n].kind == second[n].kind]
        if not shared_names:
            return None
        sample_names = shared_names[:: max(1, len(shared_names) // _SAMPLED_TENSORS)]
        return all(first[name].sample() == second[name].sample() for name in sample_names)


_State = tuple[Path, int, int]
"""A file, its time of change in nanoseconds and its size in bytes."""


def _state(file: Path) -> _State:
    stat = file.stat()
    return file, stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=16)
def _same_tokenizer(first: _State, second: _State) -> bool:
    """Compare two ``tokenizer.json``. Cached, because they are megabytes of JSON to parse."""
    if first[0].read_bytes() == second[0].read_bytes():
        return True
    return _words(first[0]) == _words(second[0])


def _words(file: Path) -> Mapping[str, Any]:
    """The vocabulary, merges and added tokens of a ``tokenizer.json``."""
    content = json.loads(file.read_text(encoding="utf-8"))
    model = content["model"]
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or []
    ]
    added = {token["id"]: token["content"] for token in content.get("added_tokens", [])}
    return {"vocabulary": model.get("vocab"), "merges": merges, "added": added}


def outputs_of_class(architecture: str, config: Mapping[str, Any]) -> int | None:
    """The outputs of a class with this ``config``, which may be empty; None if not known."""
    if architecture in _HEADS:
        return _HEADS[architecture]
    if architecture.endswith(LANGUAGE):
        return config.get("hidden_size")
    if architecture.endswith(_LABELLED) and config:
        return config.get("num_labels") or len(config.get("id2label") or ()) or _LABELS
    return None


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor's byte range in its file. ``kind``: its number type and shape."""

    file: Path
    start: int
    end: int
    kind: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kind[1:]

    def sample(self) -> bytes:
        """Up to 4096 bytes from its middle: an embedding's first rows may be untrained."""
        with self.file.open("rb") as stream:
            middle = (self.end - self.start) // 2
            stream.seek(self.start + max(0, middle - _SAMPLED_BYTES // 2))
            return stream.read(min(_SAMPLED_BYTES, self.end - self.start))


def check_weights(folder: Path) -> dict[str, _Tensor]:
    """The tensors of a folder's safetensors files, of which only headers are read; empty without
    such files. Raises ValueError naming a file that is missing, broken or cut short, as by a
    download that was interrupted."""
    index = folder / f"{_WEIGHTS}.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        names = {_WEIGHTS} if (folder / _WEIGHTS).is_file() else set()
    tensors: dict[str, _Tensor] = {}
    for file in sorted(folder / name for name in names):
        if not file.is_file():
            raise ValueError(f"{file}: is not there, and {index.name} names it")
        file_tensors = _file_tensors(file)
        size, end = file.stat().st_size, max((t.end for t in file_tensors.values()), default=0)
        if size < end:
            raise ValueError(f"{file}: is cut short, {size} bytes of {end}; get it again")
        tensors |= file_tensors
    return tensors


def _tensors(folder: Path) -> dict[str, _Tensor]:
    """The tensors of a folder's safetensors files, by their headers; broken files are left out."""
    tensors: dict[str, _Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(ValueError):
            tensors |= _file_tensors(file)
    return tensors


def _file_tensors(file: Path) -> dict[str, _Tensor]:
    """A file's tensors, by its header. Raises ValueError naming a file with a broken header."""
    with file.open("rb") as stream:
        size = stream.read(8)
        length = struct.unpack("<Q", size)[0] if len(size) == 8 else 0
        text = stream.read(length) if 0 < length <= file.stat().st_size else b""
    tensors: dict[str, _Tensor] = {}
    try:
        for name, entry in json.loads(text).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                kind = (entry["dtype"], *entry["shape"])
                tensors[name] = _Tensor(file, 8 + length + first, 8 + length + last, kind)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{file}: no whole safetensors file; get it again") from None
    return tensors
