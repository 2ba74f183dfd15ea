"""The loop that search scripts run on plain transformers, as an engine: our yardstick for speed.

Every round all branches are drawn by one batched generate, from a prefill of their whole prefixes,
and all trajectories are scored by one padded batch of the reward model. Nothing is kept from call
to call. Models, noise and stop rules are those of the embedded engine, so trees come out alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loadtest.reference_engine import ReferenceEngine, ReferenceOptions
from loadtest.searches import SPRIG
from runtime.embedded.sampler import sample
from runtime.stop_strings import StopStrings, StopStringTables
from search.engine import Branch, Sampling, Step, Trajectory
from search.tree import Finish


class GenerateLoop(ReferenceEngine):
    """The reference engine, but batched as scripts batch."""

    def __init__(self, threads: int) -> None:
        """Load the bundled models in this process."""
        super().__init__(
            ReferenceOptions(
                policy=SPRIG.policy,
                prm=SPRIG.prm,
                reward_format=SPRIG.reward_format,
                threads=threads,
            )
        )
        self._stops = StopStringTables(self._text.pieces)

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw by one batched generate; finished rows stay in the batch until all have finished."""
        del tree
        stops = self._stops.of(sampling.stop)
        outputs: list[list[int]] = [[] for _ in branches]
        logprobs = [0.0] * len(branches)
        entropies = [0.0] * len(branches)
        finishes: list[Finish | None] = [None] * len(branches)
        batch = _LeftPadded([b.tokens for b in branches])
        while None in finishes:
            rows = self._draw(batch.logits(self._policy), branches, outputs, sampling)
            for i, (token, logprob, entropy) in enumerate(zip(*rows, strict=True)):
                if finishes[i] is None:
                    outputs[i].append(int(token))
                    logprobs[i] += float(logprob)
                    entropies[i] = float(entropy)
                    finishes[i] = self._finish_of(outputs[i], branches[i], stops)
            batch.append([tokens[-1] for tokens in outputs])
        steps = []
        for branch, tokens, logprob, entropy, finish in zip(
            branches, outputs, logprobs, entropies, finishes, strict=True
        ):
            assert finish is not None, "the loop ends when all rows have"
            text = self._text.decode(tokens, branch.tokens, last=finish is Finish.END)
            steps.append(Step(tuple(tokens), text, finish, logprob / len(tokens), entropy))
        return steps

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """Score whole trajectories in one padded batch."""
        del tree
        assert self._prm is not None, "the bundled models have a reward model"
        paths = [list(self._reader.paths.path(prompt, question, t, {})) for t in trajectories]
        logits = _LeftPadded(paths).logits(self._prm)
        return [self._reader.reading.reward(row) for row in logits]

    @staticmethod
    def _draw(
        logits: Tensor, branches: Sequence[Branch], outputs: Sequence[list[int]], sampling: Sampling
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        seeds = np.array([b.seed for b in branches], dtype=np.uint64)
        at = [len(b.tokens) + len(d) for b, d in zip(branches, outputs, strict=True)]
        return sample(logits, seeds, at, sampling.temperature, sampling.top_p)

    def _finish_of(self, tokens: list[int], branch: Branch, stops: StopStrings) -> Finish | None:
        if tokens[-1] in self._text.eos:
            return Finish.END
        if stops.matches(tokens):
            return Finish.STEP
        return Finish.LENGTH if len(tokens) == branch.limit else None


class _LeftPadded:
    """A batch of sequences of unequal length, padded on the left, and their KV so far."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, sequences))
        self._fresh = torch.zeros(len(sequences), longest, dtype=torch.int64)
        self._mask = torch.zeros_like(self._fresh)
        for row, tokens in enumerate(sequences):
            self._fresh[row, longest - len(tokens) :] = torch.tensor(tokens)
            self._mask[row, longest - len(tokens) :] = 1
        self._kv = None

    def logits(self, model: torch.nn.Module) -> Tensor:
        """Logits (rows, vocab) of every sequence's last token."""
        new = self._fresh.shape[1]
        positions = (self._mask.cumsum(-1) - 1).clamp_min(0)[:, -new:]
        with torch.inference_mode():
            out = model(
                self._fresh,
                attention_mask=self._mask,
                position_ids=positions,
                past_key_values=self._kv,
                use_cache=True,
                logits_to_keep=1,
            )
        self._kv = out.past_key_values
        return out.logits[:, -1].float()

    def append(self, tokens: Sequence[int]) -> None:
        """Append the next token of every sequence."""
        self._fresh = torch.tensor(tokens)[:, None]
        self._mask = torch.cat([self._mask, torch.ones_like(self._fresh)], -1)
