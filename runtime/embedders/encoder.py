"""Vectors from a sentence encoder on disk, read with ``transformers``."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint import check_weights
from search.engine import EmbeddingMissing

log = logging.getLogger(__name__)

BATCH = 16
"""Most texts in one forward pass."""
MULTIPLE = 16
"""Every text is padded to a multiple of so many tokens, alone or in a batch: with the same length
its sums have the same order."""
_STEPS = {"Transformer", "Pooling", "Normalize"}
_POOLINGS = ("mean", "cls")
_SENTENCES = "sentence_bert_config.json"
"""sentence-transformers' file with the most tokens it reads of a text, often below the model's."""
_POSITIONS = "max_position_embeddings"


class Encoder:
    """A Hugging Face encoder in a folder, with or without the files of sentence-transformers.

    The vector is the mean of the last hidden states, or the first one if ``1_Pooling`` says so.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        """Raises ValueError for a folder without an encoder, or with unsupported layers."""
        folder = Path(checkpoint)
        if not (folder / "config.json").is_file():
            raise ValueError(f"encoder: {checkpoint}; a folder with a config.json is needed")
        self._pooling = _pooling(folder)
        check_weights(folder)
        from transformers import AutoModel, AutoTokenizer  # takes seconds: only who needs it waits

        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._model = AutoModel.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True, use_safetensors=True
        ).eval()
        settings: dict[str, Any] = _read_json(folder / _SENTENCES, {})
        limits = [settings.get("max_seq_length"), getattr(self._model.config, _POSITIONS, None)]
        self._longest = min((int(length) for length in limits if length), default=512)
        self.batch = self._checked_batch()

    def embed_texts(self, texts: Sequence[str]) -> list[tuple[float, ...]]:
        """A vector a text, with the same bits in every batch; what exceeds the encoder's length is
        left out.

        Raises EmbeddingMissing if the model fails.
        """
        try:
            ids = [
                self._tokenizer(text.strip(), truncation=True, max_length=self._longest).input_ids
                for text in texts
            ]
            return self._vectors(ids, self.batch)
        except (RuntimeError, ValueError, IndexError) as error:
            raise EmbeddingMissing(f"the encoder failed: {type(error).__name__}") from error

    def _vectors(self, ids: Sequence[Sequence[int]], batch: int) -> list[tuple[float, ...]]:
        vectors: dict[int, tuple[float, ...]] = {}
        for length, places in self._alike(ids):
            for first in range(0, len(places), batch):
                group = places[first : first + batch]
                vectors |= zip(group, self._read([ids[i] for i in group], length), strict=True)
        return [vectors[i] for i in range(len(ids))]

    def _alike(self, ids: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[int]]]:
        """Padded lengths, each with the places of the texts that have it."""
        places: dict[int, list[int]] = defaultdict(list)
        for place, text_ids in enumerate(ids):
            padded = -(-len(text_ids) // MULTIPLE) * MULTIPLE
            places[min(self._longest, padded)].append(place)
        yield from places.items()

    def _read(self, ids: Sequence[Sequence[int]], length: int) -> list[tuple[float, ...]]:
        """One forward pass over texts of one padded length."""
        padded = torch.full((len(ids), length), self._tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(padded)
        for row, text_ids in enumerate(ids):
            padded[row, : len(text_ids)] = torch.tensor(text_ids)
            mask[row, : len(text_ids)] = 1
        with torch.inference_mode():
            states = self._model(input_ids=padded, attention_mask=mask).last_hidden_state.double()
        pooled = (
            states[row, 0] if self._pooling == "cls" else states[row, : len(text_ids)].mean(0)
            for row, text_ids in enumerate(ids)
        )
        return [tuple(vector.tolist()) for vector in pooled]

    def _checked_batch(self) -> int:
        """``BATCH`` if a trial's texts have the same bits in a batch as alone; else 1."""
        words = range(1, 1 + min(self._longest - 1, 3 * MULTIPLE // 2))
        ids = [list(words[: len(words) - row % 8]) for row in range(BATCH)]
        if self._vectors(ids, BATCH) == self._vectors(ids, 1):
            return BATCH
        log.info("encoder: texts are read one by one: beside others they have other bits here")
        return 1


def _pooling(folder: Path) -> str:
    """``mean`` or ``cls``. Raises ValueError naming layers or poolings that are not supported."""
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
