"""Past output is counted in SGLang's penalizers; stand-ins with the same tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hedgerow_sglang.past_output import count_past_output
from hedgerow_sglang.plugin_protocol import OUTPUT, NoteError, output_param, parse_output

VOCAB = 8


class _Penalizer:
    """A penalizer with SGLang's interface: per-row tensors as attributes."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.__dict__.update(tensors)

    def is_prepared(self) -> bool:
        return True


class BatchedMinNewTokensPenalizer(_Penalizer):
    """Counts output tokens."""


class BatchedRepetitionPenalizer(_Penalizer):
    """Scales the logits of tokens seen in prompt or output."""


class BatchedFrequencyPenalizer(_Penalizer):
    """Subtracts once for each occurrence in the output."""


class BatchedPresencePenalizer(_Penalizer):
    """Subtracts once for each token that occurs in the output."""


def request(*ids: int, output: tuple[int, ...] = (), **custom: int) -> Any:
    """A request as SGLang's scheduler has it."""
    params = SimpleNamespace(custom_params=custom)
    return SimpleNamespace(origin_input_ids=[*ids], output_ids=[*output], sampling_params=params)


def penalties(value: float, rows: int) -> torch.Tensor:
    return torch.full((rows, 1), value)


def penalizers_of(*requests: Any) -> Any:
    """The penalizers of a new batch of these requests."""
    rows = len(requests)
    penalizers = (
        BatchedPresencePenalizer(
            cumulated_presence_penalties=torch.zeros(rows, VOCAB),
            presence_penalties=penalties(0.5, rows),
        ),
        BatchedFrequencyPenalizer(
            cumulated_frequency_penalties=torch.zeros(rows, VOCAB),
            frequency_penalties=penalties(0.25, rows),
        ),
        BatchedRepetitionPenalizer(
            cumulated_repetition_penalties=torch.ones(rows, VOCAB),
            repetition_penalties=penalties(2.0, rows),
        ),
        BatchedMinNewTokensPenalizer(len_output_tokens=torch.zeros(rows, 1, dtype=torch.int32)),
    )
    orchestrator = SimpleNamespace(is_required=True, penalizers={type(p): p for p in penalizers})
    info = SimpleNamespace(penalizer_orchestrator=orchestrator)
    batch = SimpleNamespace(reqs=requests)
    count_past_output(info, object, batch)
    return orchestrator.penalizers


def test_what_steps_before_have_drawn_counts_as_output() -> None:
    """Prompt 1 2, output 3 3 4, of which the last was drawn before the request lost its place."""
    penalizers = penalizers_of(
        request(1, 2, 3, 3, output=(4,), **output_param(2)), request(1, 2, 3, output=(4,))
    )
    assert penalizers[BatchedFrequencyPenalizer].cumulated_frequency_penalties.tolist() == [
        [0, 0, 0, 0.5, 0.25, 0, 0, 0],
        [0] * 8,
    ]
    assert penalizers[BatchedPresencePenalizer].cumulated_presence_penalties.tolist() == [
        [0, 0, 0, 0.5, 0.5, 0, 0, 0],
        [0] * 8,
    ]
    assert penalizers[BatchedRepetitionPenalizer].cumulated_repetition_penalties.tolist() == [
        [1, 2, 2, 2, 2, 1, 1, 1],
        [1] * 8,
    ]
    assert penalizers[BatchedMinNewTokensPenalizer].len_output_tokens.tolist() == [[1], [0]]


def test_they_are_applied_in_vllms_order() -> None:
    """SGLang's own order is that of a set of classes, which differs between processes."""
    assert list(penalizers_of()) == [
        BatchedMinNewTokensPenalizer,
        BatchedRepetitionPenalizer,
        BatchedFrequencyPenalizer,
        BatchedPresencePenalizer,
    ]


@pytest.mark.parametrize("value", [-1, 1.0, "2", True, None])
def test_a_wrong_place_is_named(value: object) -> None:
    with pytest.raises(NoteError, match=f"{OUTPUT}: {value!r}"):
        parse_output(value)
