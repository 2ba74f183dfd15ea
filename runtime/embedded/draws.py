"""Draws for branches: which noise, position and sampling belong to which row of logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import torch

from runtime.embedded.branches import Run
from search.engine import EngineError, Sampling

Token = tuple[int, float, float]
"""A token with its log-probability and the entropy before it."""


class Draw(Protocol):
    """``runtime.embedded.sampler.draw``: one token, log-probability and entropy a row."""

    def __call__(
        self,
        logits: torch.Tensor,
        seeds: np.ndarray,
        positions: np.ndarray,
        temperature: np.ndarray,
        top_p: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...


def draw_for(
    draw: Draw, rows: Sequence[tuple[Run, int, torch.Tensor]]
) -> Iterator[tuple[Run, list[Token]]]:
    """Each branch with its draws.

    ``rows``: a branch, how many tokens after those it has drawn the first draw stands, and logits
    (n, vocab) for it and the next n - 1.
    """
    if not rows:
        return
    each = [(run, ahead + i) for run, ahead, logits in rows for i in range(len(logits))]
    drawn = draw(
        torch.cat([logits for *_, logits in rows]),
        np.array([run.branch.seed for run, _ in each], dtype=np.uint64),
        np.array([run.length + ahead for run, ahead in each], dtype=np.int64),
        np.array([run.call.sampling.temperature for run, _ in each]),
        np.array([run.call.sampling.top_p for run, _ in each]),
    )
    tokens = zip(*(np.asarray(part).tolist() for part in drawn), strict=True)
    for run, _, logits in rows:
        yield run, list(islice(tokens, len(logits)))


def must_be_sane(sampling: Sampling) -> None:
    """Raise EngineError for sampling that nothing can be drawn by."""
    if not all(sampling.stop):
        raise EngineError("stop: an empty string; at least one character is needed")
    if not sampling.temperature >= 0:
        raise EngineError(f"temperature: {sampling.temperature}; 0 or more is needed")
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"top_p: {sampling.top_p}; more than 0 and at most 1 is needed")
