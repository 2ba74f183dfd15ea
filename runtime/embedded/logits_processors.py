"""Apply sampling parameters to a row of logits before its token is drawn: vLLM's, in its order.

The result follows from the branch's own path, so that neither the batch nor drafts nor evictions
can change it. Computed in float64, each draw by itself.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hedgerow_sglang.noise import gumbel_of, hashes_of
from runtime.embedded.grammar_masks import GrammarMask
from runtime.embedded.sampler import COLD, nucleus
from runtime.embedded.shortlist import Floats, Ids
from search.engine import EngineError, Sampling


class LogitsProcessors:
    """The processors of one ``Sampling``."""

    def __init__(
        self, sampling: Sampling, eos: frozenset[int], grammar: GrammarMask | None = None
    ) -> None:
        """``eos``: the ids that end a reply; ``grammar``: what the output must fit."""
        self._sampling = sampling
        self._grammar = grammar
        self._params = sampling.logits
        self._eos = np.array(sorted(eos), dtype=np.int64)
        bias = self._params.logit_bias
        self._biased = np.array([token for token, _ in bias], dtype=np.int64)
        self._bias = np.array([value for _, value in bias], dtype=np.float64)

    def draw(self, path: Ids, seed: int, logits: NDArray[np.float32]) -> int:
        """The token after ``path``, drawn from ``logits`` (vocab,) by ``seed``'s noise."""
        return self.rank(path, seed, logits, 1)[0]

    def rank(self, path: Ids, seed: int, logits: NDArray[np.float32], count: int) -> list[int]:
        """The ``count`` tokens with the highest noisy scores, the one that ``draw`` returns first;
        fewer if fewer may be drawn; ties by id."""
        scores = self.penalised(path, logits)
        if self._grammar is not None:
            self._grammar.apply(path[self._sampling.prompt_tokens :], seed, scores)
        if self._sampling.temperature <= COLD:
            if count == 1:
                return [int(scores.argmax())]
            order = np.argsort(-scores, kind="stable")[:count]
            return order[scores[order] > -np.inf].tolist()
        scores -= scores.max()
        with np.errstate(over="ignore"):
            scores /= self._sampling.temperature
        tokens = self.kept(scores)
        seeds, positions = np.array([seed], np.uint64), np.array([len(path)], np.int64)
        noise = gumbel_of(hashes_of(seeds, positions, tokens))
        values = scores[tokens] + noise
        if count == 1:
            return [int(tokens[values.argmax()])]
        return tokens[np.argsort(-values, kind="stable")[:count]].tolist()

    def may_end(self, path: Ids, seed: int) -> None:
        """Raise EngineError if a reply that ends after ``path`` does not fit its grammar."""
        if self._grammar is not None:
            output = path[self._sampling.prompt_tokens :]
            if (fault := self._grammar.fault(output, seed)) is not None:
                raise EngineError(fault)

    def penalised(self, path: Ids, logits: NDArray[np.float32]) -> Floats:
        """The logits (vocab,) after minimum length, bias and penalties, in float64."""
        params, scores = self._params, logits.astype(np.float64)
        output = path[self._sampling.prompt_tokens :]
        if len(output) < params.min_tokens:
            scores[self._eos[self._eos < len(scores)]] = -np.inf
        scores[self._biased] += self._bias
        if params.repetition_penalty != 1.0:
            token_ids = np.unique(path)
            values = scores[token_ids]
            penalty = params.repetition_penalty
            scores[token_ids] = np.where(values > 0, values / penalty, values * penalty)
        if params.frequency_penalty or params.presence_penalty:
            token_ids, counts = np.unique(output, return_counts=True)
            scores[token_ids] -= params.frequency_penalty * counts + params.presence_penalty
        return scores

    def kept(self, scores: Floats) -> Ids:
        """The ids, ascending, of the tokens that may be drawn: min-p, then top-k, then top-p of the
        rest. ``scores`` (vocab,): after the temperature, the highest one 0."""
        params = self._params
        least = math.log(params.min_p) if params.min_p else -np.inf
        if 0 < params.top_k < len(scores):
            least = max(least, np.partition(scores, -params.top_k)[-params.top_k])
        tokens = np.flatnonzero((scores >= least) & (scores > -np.inf))
        if 0 < params.top_k < len(tokens):
            order = np.argsort(-scores[tokens], kind="stable")
            tokens = np.sort(tokens[order[: params.top_k]])
        if self._sampling.top_p < 1.0:
            remaining = np.full_like(scores, -np.inf)
            remaining[tokens] = scores[tokens]
            tokens = np.sort(nucleus(remaining, self._sampling.top_p))
        return tokens
