"""Vectors from a sentence encoder on disk, read with ``transformers``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from search.engine import EmbeddingMissing

_STEPS = {"Transformer", "Pooling", "Normalize"}
_POOLINGS = ("mean", "cls")


class Encoder:
    """A Hugging Face encoder in a folder, with or without the files of sentence-transformers.

    The mean of the last hidden states is the vector, or the first one where ``1_Pooling`` says so.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        """Raises ValueError for a folder that holds no encoder, or one with layers of its own."""
        folder = Path(checkpoint)
        if not (folder / "config.json").is_file():
            raise ValueError(f"encoder: {checkpoint}; a folder with a config.json is needed")
        self._pooling = _pooling(folder)
        from transformers import AutoModel, AutoTokenizer  # takes seconds: only who needs it waits

        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._model = AutoModel.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True, use_safetensors=True
        ).eval()
        self._longest = int(getattr(self._model.config, "max_position_embeddings", 512))

    def embed_texts(self, texts: Sequence[str]) -> list[tuple[float, ...]]:
        """A vector a text, each read alone; what exceeds the encoder's context is left out.

        Raises EmbeddingMissing if the model fails.
        """
        try:
            with torch.inference_mode():
                return [self._vector(text) for text in texts]
        except (RuntimeError, ValueError, IndexError) as error:
            raise EmbeddingMissing(f"the encoder failed: {type(error).__name__}") from error

    def _vector(self, text: str) -> tuple[float, ...]:
        ids = self._tokenizer(
            text.strip(), return_tensors="pt", truncation=True, max_length=self._longest
        )
        states = self._model(**ids).last_hidden_state[0].double()
        vector = states[0] if self._pooling == "cls" else states.mean(0)
        return tuple(vector.tolist())


def _pooling(folder: Path) -> str:
    """``mean`` or ``cls``. Raises ValueError naming what the folder asks for beyond these."""
    for module in _read_json(folder / "modules.json", []):
        kind = str(module["type"]).rpartition(".")[2]
        if kind not in _STEPS:
            raise ValueError(f"encoder: {folder} has a {kind} layer; {sorted(_STEPS)} are read")
    pooling: dict[str, Any] = _read_json(folder / "1_Pooling" / "config.json", {})
    flags = [name.removeprefix("pooling_mode_") for name, on in pooling.items() if on is True]
    modes = [pooling["pooling_mode"]] if "pooling_mode" in pooling else []
    modes += [{"mean_tokens": "mean", "cls_token": "cls"}.get(f, f) for f in flags]
    modes = [mode for mode in modes if mode != "include_prompt"] or ["mean"]
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        raise ValueError(f"encoder: {folder} pools by {modes}; one of {_POOLINGS} is needed")
    return modes[0]


def _read_json(path: Path, default: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default
