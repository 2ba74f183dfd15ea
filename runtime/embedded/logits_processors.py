"""What sampling parameters make of a row of logits before its token is drawn: vLLM's, in its order.

All of it follows from the branch's own path, so that neither company nor drafts nor an eviction
can change it. In float64, every draw by itself.
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
    """Those of one sampling."""

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
        """What ``draw`` draws, and what would come after that: ``count`` of them, fewer where
        fewer may be drawn; equals by id."""
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
        seeds, places = np.array([seed], np.uint64), np.array([len(path)], np.int64)
        noise = gumbel_of(hashes_of(seeds, places, tokens))
        values = scores[tokens] + noise
        if count == 1:
            return [int(tokens[values.argmax()])]
        return tokens[np.argsort(-values, kind="stable")[:count]].tolist()

    def may_end(self, path: Ids, seed: int) -> None:
        """Raises EngineError for a reply that ends after ``path`` and does not fit its grammar."""
        if self._grammar is not None:
            output = path[self._sampling.prompt_tokens :]
            if (fault := self._grammar.fault(output, seed)) is not None:
                raise EngineError(fault)

    def penalised(self, path: Ids, logits: NDArray[np.float32]) -> Floats:
        """The logits after what may change which is the highest: (vocab,)."""
        params, scores = self._params, logits.astype(np.float64)
        output = path[self._sampling.prompt_tokens :]
        if len(output) < params.min_tokens:
            scores[self._eos[self._eos < len(scores)]] = -np.inf
        scores[self._biased] += self._bias
        if params.repetition_penalty != 1.0:
            seen = np.unique(path)
            own = scores[seen]
            by = params.repetition_penalty
            scores[seen] = np.where(own > 0, own / by, own * by)
        if params.frequency_penalty or params.presence_penalty:
            seen, counts = np.unique(output, return_counts=True)
            scores[seen] -= params.frequency_penalty * counts + params.presence_penalty
        return scores

    def kept(self, scores: Floats) -> Ids:
        """Which tokens may be drawn by these scores (vocab,), the highest of which is 0, after the
        temperature: min-p, then top-k, then top-p of what is left. By rising id."""
        params = self._params
        least = math.log(params.min_p) if params.min_p else -np.inf
        if 0 < params.top_k < len(scores):
            least = max(least, np.partition(scores, -params.top_k)[-params.top_k])
        tokens = np.flatnonzero((scores >= least) & (scores > -np.inf))
        if 0 < params.top_k < len(tokens):
            order = np.argsort(-scores[tokens], kind="stable")
            tokens = np.sort(tokens[order[: params.top_k]])
        if self._sampling.top_p < 1.0:
            left = np.full_like(scores, -np.inf)
            left[tokens] = scores[tokens]
            tokens = np.sort(nucleus(left, self._sampling.top_p))
        return tokens
