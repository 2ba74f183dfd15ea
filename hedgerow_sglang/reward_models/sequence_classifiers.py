"""Qwen's sequence classifiers, whose head has no bias in transformers.

SGLang's own classes (0.5.16 to 0.5.23) give the head one. No checkpoint holds it, so each start of
a server draws another, and the same step gets another reward.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.models import (  # pyright: ignore[reportMissingImports]
    qwen2_classification,
    qwen3_classification,
)
from torch import nn


class Qwen2ForSequenceClassification(qwen2_classification.Qwen2ForSequenceClassification):
    """One linear layer ``score`` without a bias."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)


class Qwen3ForSequenceClassification(qwen3_classification.Qwen3ForSequenceClassification):
    """One linear layer ``score`` without a bias."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)


EntryClass = [Qwen2ForSequenceClassification, Qwen3ForSequenceClassification]
