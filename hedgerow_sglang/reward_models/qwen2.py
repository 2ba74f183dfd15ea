"""Qwen2 bodies with a reward head: Qwen2.5-Math-PRM's and Skywork-o1-Open-PRM's.

A server of one (``--is-embedding``) answers with the head's raw outputs at the path's last token;
``runtime.reward_format`` says what they mean. Imported only inside SGLang's environment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.pooler import (  # pyright: ignore[reportMissingImports]
    EmbeddingPoolerOutput,
    Pooler,
    PoolingType,
)
from sglang.srt.models.qwen2 import (  # pyright: ignore[reportMissingImports]
    Qwen2ForCausalLM,
    Qwen2Model,
)
from sglang.srt.utils import add_prefix  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn


class Qwen2RewardModel(nn.Module):
    """A Qwen2 body, and a subclass's head over each position's final hidden state."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.quant_config = quant_config
        body = add_prefix("model", prefix)
        self.model = Qwen2Model(config, quant_config=quant_config, prefix=body)
        self.pooler = Pooler(pooling_type=PoolingType.LAST, normalize=False)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        get_embedding: bool = True,
    ) -> Any:
        """The head's outputs at each sequence's last token."""
        del get_embedding  # there is nothing else to get
        hidden = self.model(input_ids, positions, forward_batch, input_embeds)
        pooled = self.pooler(self.outputs_of(hidden), forward_batch)
        return EmbeddingPoolerOutput(embeddings=pooled.embeddings)

    def outputs_of(self, hidden: Tensor) -> Tensor:
        """The head's outputs (tokens, outputs) for hidden states (tokens, hidden)."""
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Load all weights but a language model's head, which some checkpoints still carry."""
        own_weights = [(name, tensor) for name, tensor in weights if not name.startswith("lm_head")]
        load = getattr(Qwen2ForCausalLM, "_legacy_load_weights", Qwen2ForCausalLM.load_weights)
        return load(self, own_weights)


class Qwen2ForProcessRewardModel(Qwen2RewardModel):
    """Qwen2.5-Math-PRM: two layers over two classes."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        size = config.hidden_size
        self.score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 2))

    def outputs_of(self, hidden: Tensor) -> Tensor:
        """The logits of "not good" and "good", before the softmax."""
        return self.score(hidden)


class Qwen2ForPrmModel(Qwen2RewardModel):
    """Skywork-o1-Open-PRM: a value head of one output."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        self.v_head = nn.ModuleDict({"summary": nn.Linear(config.hidden_size, 1)})

    def outputs_of(self, hidden: Tensor) -> Tensor:
        """The value, before the sigmoid."""
        return self.v_head["summary"](hidden)


EntryClass = [Qwen2ForProcessRewardModel, Qwen2ForPrmModel]
