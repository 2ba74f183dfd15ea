"""Penalties over a whole trajectory, where each request draws only one step of it.

SGLang's penalizers count only what their own request has drawn. For a request that says where the
output began in its prompt (``output_param``) the rest of the prompt is counted too, and so is what
it drew before SGLang retracted it for lack of memory. Penalties are applied in vLLM's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hedgerow_sglang.plugin_protocol import OUTPUT


def count_past_output(info: Any, _: type, batch: Any, *__: Any) -> None:
    """After ``SamplingBatchInfo.from_schedule_batch``: count earlier output in its penalizers."""
    penalizers = info.penalizer_orchestrator
    if penalizers is None or not penalizers.is_required:
        return
    by_name = {type(penalizer).__name__: penalizer for penalizer in penalizers.penalizers.values()}
    penalizers.penalizers = {type(by_name[name]): by_name[name] for name in _COUNTS}
    for row, request in enumerate(batch.reqs):
        start = (request.sampling_params.custom_params or {}).get(OUTPUT)
        if start is not None:
            path = [*request.origin_input_ids, *request.output_ids]
            count = len(request.output_ids)
            for name, penalizer in by_name.items():
                if penalizer.is_prepared():
                    _COUNTS[name](penalizer, row, path, start, count)


def _count_tokens(penalizer: Any, row: int, path: Sequence[int], start: int, count: int) -> None:
    penalizer.len_output_tokens[row] = count


def _count_path(penalizer: Any, row: int, path: Sequence[int], start: int, count: int) -> None:
    """Penalise the prompt's tokens too, as vLLM's repetition penalty does."""
    penalties = penalizer.cumulated_repetition_penalties
    penalties[row, _ids(path, penalties)] = penalizer.repetition_penalties[row]


def _count_uses(penalizer: Any, row: int, path: Sequence[int], start: int, count: int) -> None:
    penalties = penalizer.cumulated_frequency_penalties
    ids = _ids(path[start:], penalties)
    penalties[row].index_add_(0, ids, penalizer.frequency_penalties[row].expand(len(ids)))


def _count_presence(penalizer: Any, row: int, path: Sequence[int], start: int, count: int) -> None:
    penalties = penalizer.cumulated_presence_penalties
    penalties[row, _ids(path[start:], penalties)] = penalizer.presence_penalties[row]


_COUNTS: dict[str, Callable[[Any, int, Sequence[int], int, int], None]] = {
    "BatchedMinNewTokensPenalizer": _count_tokens,
    "BatchedRepetitionPenalizer": _count_path,
    "BatchedFrequencyPenalizer": _count_uses,
    "BatchedPresencePenalizer": _count_presence,
}
"""How each penalizer counts earlier output, in vLLM's order."""


def _ids(tokens: Sequence[int], beside: torch.Tensor) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=beside.device)
