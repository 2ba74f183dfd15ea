"""A model that exposes any wrong slot table at once: its "keys" are hashes of token paths.

Each slot holds a hash of the whole path that ends there, and logits are a function of the sum of
the hashes in a sequence's slots. One slot too many, too few, stale or swapped for another changes
every logit after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from runtime.embedded.logits_processors import LogitsProcessors
from runtime.embedded.model.batch_plan import Span
from runtime.embedded.sampler import sample
from search.engine import Branch, Sampling, Step
from search.tree import Finish

VOCAB = 32
BREAK, NEWLINE, LETTER_BREAK, END = 28, 29, 30, 31
CONTEXT = 400


class Letters:
    """Stands in for ``Text``: 28 letters, three tokens with newlines, and an end token."""

    pieces = (
        *(bytes([ord("a") + i]) if i < 26 else bytes([ord("A") + i]) for i in range(28)),
        b"\n\n",
        b"\n",
        b"x\n",
        b"<end>",
    )
    eos = frozenset({END})

    def decode(self, tokens: Sequence[int], after: Sequence[int] = (), *, last: bool = True) -> str:
        """The text of these tokens, without end tokens."""
        return b"".join(self.pieces[t] for t in tokens if t != END).decode()


class HashStore:
    """Stands in for a KV store: one hash for each slot."""

    def __init__(self, slots: int) -> None:
        self.hashes = np.zeros(slots, dtype=np.uint64)


class HashModel:
    """A stand-in for ``Forward``. ``rows`` counts the token positions computed so far."""

    def __init__(self) -> None:
        self.rows = 0
        self.largest = 0

    def new_store(self, slots: int) -> HashStore:
        """A store with ``slots`` slots."""
        return HashStore(slots)

    def run(self, spans: Sequence[Span], store: HashStore) -> torch.Tensor:
        """Write the hashes of the new positions and return the logits (rows, vocab) asked for."""
        logits, hashes = [], store.hashes
        for span in spans:
            assert len(span.slots) == span.start + len(span.tokens)
            assert len(set(span.slots.tolist())) == len(span.slots)
            for i, token in enumerate(span.tokens.tolist()):
                at = span.start + i
                above = int(hashes[span.slots[at - 1]]) if at else 0
                hashes[span.slots[at]] = _mix(above, token, at)
                if i >= span.logits_from:
                    logits.append(_logits(hashes[span.slots[: at + 1]]))
            self.rows += len(span.tokens)
        self.largest = max(self.largest, len(spans))
        return torch.from_numpy(np.stack(logits)) if logits else torch.empty(0, VOCAB)

    @staticmethod
    def flops(tokens: int, context_sum: int, logits: int) -> float:
        """A stand-in for a cost: the sum of the three arguments."""
        return float(tokens + context_sum + logits)


CONFIG = SimpleNamespace(context=CONTEXT, vocab=VOCAB, flops=HashModel.flops)
"""Stands in for ``ModelConfig``."""


def logits_after(path: Sequence[int]) -> np.ndarray:
    """The model's logits (vocab,) after a path, computed without a cache."""
    hashes, above = [], np.uint64(0)
    for at, token in enumerate(path):
        above = _mix(int(above), token, at)
        hashes.append(above)
    return _logits(np.array(hashes, dtype=np.uint64))


def naive_step(branch: Branch, sampling: Sampling) -> Step:
    """The step of a branch, drawn alone, with every logit computed without a cache."""
    tokens: list[int] = []
    logprobs: list[float] = []
    while True:
        path = [*branch.tokens, *tokens]
        processors = LogitsProcessors(sampling, Letters.eos)
        draw = partial(processors.draw, np.array(path), branch.seed)
        draws = sample(
            torch.from_numpy(logits_after(path))[None],
            np.array([branch.seed], dtype=np.uint64),
            np.array([len(path)]),
            sampling.temperature,
            sampling.top_p,
            processed={0: draw} if sampling.logits.active() else {},
        )
        tokens.append(int(draws.tokens[0]))
        logprobs.append(float(draws.logprobs[0]))
        text = Letters().decode(tokens)
        if tokens[-1] == END:
            finish = Finish.END
        elif any(stop in text for stop in sampling.stop):
            finish = Finish.STEP
        elif len(tokens) == branch.limit:
            finish = Finish.LENGTH
        else:
            continue
        mean = sum(logprobs) / len(logprobs)
        return Step(tuple(tokens), text, finish, mean, float(draws.entropies[0]))


def _mix(above: int, token: int, at: int) -> np.uint64:
    word = (above ^ (token * 0x9E3779B97F4A7C15 + at * 0xC2B2AE3D27D4EB4F)) & (2**64 - 1)
    word = (word ^ (word >> 31)) * 0xD6E8FEB86659FD93 & (2**64 - 1)
    return np.uint64(word ^ (word >> 29))


def _logits(hashes: np.ndarray) -> np.ndarray:
    total = int(hashes.sum(dtype=np.uint64))
    return np.array(
        [int(_mix(total, column, 7)) / 2**62 for column in range(VOCAB)],
        dtype=np.float32,
    )
