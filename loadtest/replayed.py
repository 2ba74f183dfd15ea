"""A search's rounds, recorded once and given to a scheduler again without any arithmetic.

What the KV policy does depends on what is drawn and when, not on logits: a model that says what
was said before shows at little cost what another budget, policy or constant would have kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from runtime.embedded.drawing.account import Account
from runtime.embedded.drawing.scheduler import Scheduler
from runtime.embedded.kv.retention import WORTH, KvPolicy, Worth
from runtime.embedded.model.forward import Span
from runtime.text import Text
from search.engine import Branch, Hint, Sampling, Step

TREE = "replayed"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A round: what the engine was told before it, what was asked, and what was drawn."""

    hint: Hint
    branches: tuple[Branch, ...]
    sampling: Sampling
    steps: tuple[Step, ...]


class Told:
    """Stands in for a model and its sampler: every branch says what it said before."""

    def __init__(self, rounds: Sequence[Recorded]) -> None:
        self._drawn = {
            branch.seed: (len(branch.tokens), step)
            for each in rounds
            for branch, step in zip(each.branches, each.steps, strict=True)
        }

    def new_store(self, slots: int) -> None:
        """Nothing is kept."""

    def run(self, spans: Sequence[Span], store: Any) -> torch.Tensor:
        """As many rows as are asked for."""
        return torch.zeros(sum(len(span.tokens) - span.logits_from for span in spans), 1)

    def draw(
        self,
        logits: torch.Tensor,
        seeds: np.ndarray,
        positions: np.ndarray,
        temperature: np.ndarray,
        top_p: np.ndarray,
        rows: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The recorded tokens at these positions, and zeros."""
        tokens = []
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):
            start, step = self._drawn[seed]
            tokens.append(step.tokens[position - start])
        zeros = np.zeros(len(tokens))
        return np.array(tokens, dtype=np.int64), zeros, zeros


def replay(
    rounds: Sequence[Recorded],
    text: Text,
    kv_policy: KvPolicy,
    kv_tokens: int,
    *,
    worth: Worth = WORTH,
    batch_limit: int = 256,
    watch: Callable[[Scheduler], None] = lambda _: None,
) -> Account:
    """Give a search's rounds to a scheduler with this budget; what they cost there.

    ``watch`` sees the scheduler after every step. Raises RuntimeError if it says anything else.
    """
    told = Told(rounds)
    scheduler = Scheduler(
        told,
        told.draw,
        text,
        context=text.context,
        vocab=text.model_vocab,
        kv_tokens=kv_tokens,
        batch_limit=batch_limit,
        flops=lambda tokens, context, logits: 0.0,
        kv_policy=kv_policy,
        worth=worth,
    )
    for call, each in enumerate(rounds):
        scheduler.hint(TREE, each.hint)
        scheduler.expand(call, TREE, each.branches, each.sampling)
        done = []
        while not done:
            done = scheduler.step()
            watch(scheduler)
        if [step.tokens for step in done[0].steps] != [step.tokens for step in each.steps]:
            raise RuntimeError(f"round {call} was drawn otherwise than it was recorded")
    account = scheduler.release(TREE)
    assert account is not None, "a search without rounds was replayed"
    return account
