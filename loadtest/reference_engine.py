"""A reference for the embedded engine: plain ``transformers``, one branch at a time.

Nothing is shared, batched or kept between calls, and nothing is accounted for. It runs any causal
language model and draws by the same noise, so the embedded engine is tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from runtime.embedded.model.config import middle_layer
from runtime.embedded.sampler import sample
from runtime.judge import Judge
from runtime.reward_format import reward_format
from runtime.reward_reader import Reader, overhead_of
from runtime.text import Text
from search.counters import Counters, Usage
from search.engine import (
    Branch,
    Capabilities,
    Hint,
    PrefixTooLong,
    RewardMissing,
    Sampling,
    Step,
    Trajectory,
)
from search.tree import Finish

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ReferenceOptions:
    """``policy`` and ``prm`` are checkpoint folders; ``threads``: of the arithmetic."""

    policy: str | Path
    prm: str | Path | None = None
    reward_format: str = "none"
    threads: int = 1


class ReferenceEngine:
    """``search.engine.Engine`` on plain transformers, in this process. Slow on purpose."""

    def __init__(self, options: ReferenceOptions) -> None:
        """Load the models. Raises ValueError or RewardMissing for options that cannot be met."""
        torch.set_num_threads(options.threads)
        self._form = reward_format(options.reward_format)
        self._text = Text(options.policy)
        self._policy = _load(options.policy)
        self._prm: PreTrainedModel | None = None
        if options.prm is not None and self._form.needs_model:
            self._reader = Reader.of(self._form, Text(options.prm), self._text)
            self._prm = _load(options.prm, head=not self._form.reads_hidden)
        self._judge = Judge(self._form, self._text) if self._form.reads == "judge" else None
        overhead = (0, 0)
        if self._judge is not None:
            overhead = self._judge.overhead()
        elif self._prm is not None and self._reader is not None:
            overhead = overhead_of(self._reader.paths)
        models = {"policy": options.policy, "prm": options.prm}
        self.capabilities = Capabilities(
            engine="reference",
            models={name: str(path) for name, path in models.items() if path is not None},
            exact=True,
            scores=self._prm is not None or not self._form.needs_model,
            embeds="hidden",
            context_tokens=self._text.context,
            fingerprint=f"reference-{torch.__version__}-{options.threads}",
            score_tokens=overhead,
            outcome=self._form.outcome,
            likelihood=self._form.reads == "logprob",
        )

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw one step for each branch, one after the other."""
        for branch in branches:
            length = len(branch.tokens) + branch.limit
            if length > self._text.context:
                raise PrefixTooLong(
                    f"a prefix of {len(branch.tokens)} tokens and a step of up to {branch.limit} "
                    f"do not fit the context of {self._text.context}"
                )
        return [self._step(branch, sampling) for branch in branches]

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """One reward in [0, 1] a trajectory, each read from the start."""
        return [self._reward(prompt, question, trajectory) for trajectory in trajectories]

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """Each last step's hidden states, as ``runtime.embedded.step_embedder`` reads them."""
        return [self._states(trajectory.steps[-1]) for trajectory in trajectories]

    def hint(self, tree: str, hint: Hint) -> None:
        """Nothing is kept, so there is nothing to decide."""

    async def release(self, tree: str) -> Counters:
        """Nothing is kept, and nothing counted."""
        return Counters()

    async def abort(self, tree: str) -> Counters:
        """Nothing to stop: a call is over before another begins."""
        return Counters()

    async def usage(self) -> Usage:
        """No KV outlives a step."""
        return Usage(kv_tokens_active=0, kv_tokens_cached=0)

    async def health(self) -> None:
        """Always well: there is no process of its own to lose."""

    async def close(self) -> None:
        """Nothing to stop."""

    def _step(self, branch: Branch, sampling: Sampling) -> Step:
        """Prefill the whole prefix, then decode token by token until the step ends."""
        output: list[int] = []
        logprobs: list[float] = []
        entropy, finish, cache = 0.0, None, None
        fresh = list(branch.tokens)
        with torch.inference_mode():
            while finish is None:
                out = self._policy(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                position = len(branch.tokens) + len(output)
                token, logprob, entropy = _draw(out.logits[0, -1:], branch, position, sampling)
                output.append(token)
                logprobs.append(logprob)
                fresh = [token]
                finish = self._finish(output, branch, sampling)
        text = self._text.decode(output, branch.tokens, last=finish is Finish.END)
        mean = sum(logprobs) / len(logprobs)
        return Step(tuple(output), text, finish, mean, entropy)

    def _finish(self, output: list[int], branch: Branch, sampling: Sampling) -> Finish | None:
        if output[-1] in self._text.eos:
            return Finish.END
        text = self._text.tokenizer.decode(output, skip_special_tokens=False)
        assert isinstance(text, str), "one sequence decodes to one text"
        if any(stop in text for stop in sampling.stop):
            return Finish.STEP
        return Finish.LENGTH if len(output) == branch.limit else None

    def _reward(self, prompt: Sequence[int], question: str, trajectory: Trajectory) -> float:
        if self._judge is not None:
            return self._judgement(self._judge, question, trajectory)
        if not self._form.needs_model:
            return self._likelihood(prompt, trajectory.steps)
        if self._prm is None:
            raise RewardMissing(f"reward_format {self._form.name!r}: no reward model is loaded")
        path = self._reader.paths.path(prompt, question, trajectory, {})
        with torch.inference_mode():
            out = self._prm(torch.tensor([path]))
        rows = out.last_hidden_state if self._form.reads_hidden else out.logits
        return self._reader.reading.reward(rows[0, -1])

    def _judgement(self, judge: Judge, question: str, trajectory: Trajectory) -> float:
        prompt, limit = judge.prompt(question, trajectory), judge.form.verdict_tokens
        branches = [
            Branch(trajectory.node, vote, prompt, seed, limit, -1)
            for vote, seed in enumerate(judge.seeds(trajectory))
        ]
        return judge.judge([self._step(branch, judge.sampling).text for branch in branches])[0]

    def _likelihood(self, prompt: Sequence[int], steps: Sequence[Sequence[int]]) -> float:
        """exp of the mean log-probability a token of the steps."""
        reply = [token for step in steps for token in step]
        path = torch.tensor([[*prompt, *reply]])
        with torch.inference_mode():
            logits = self._policy(path).logits[0, len(prompt) - 1 : -1].double()
        logprobs = torch.log_softmax(logits, -1)[torch.arange(len(reply)), torch.tensor(reply)]
        return math.exp(float(logprobs.mean()))

    def _states(self, step: Sequence[int]) -> tuple[float, ...]:
        """The mean of the normalised residual stream after half of the layers."""
        config = self._policy.config
        layer = middle_layer(config.num_hidden_layers)
        with torch.inference_mode():
            states = self._policy(torch.tensor([step]), output_hidden_states=True).hidden_states
        residual = states[layer][0]
        scale = residual.pow(2).mean(-1, keepdim=True).add(config.rms_norm_eps).rsqrt()
        return tuple((residual * scale).double().mean(0).tolist())


def _load(checkpoint: str | Path, *, head: bool = True) -> PreTrainedModel:
    # takes seconds: imported only when a model is loaded
    from transformers import AutoModel, AutoModelForCausalLM

    kind = AutoModelForCausalLM if head else AutoModel
    return kind.from_pretrained(
        str(checkpoint), dtype=torch.float32, local_files_only=True, use_safetensors=True
    ).eval()


def _draw(
    logits: Tensor, branch: Branch, position: int, sampling: Sampling
) -> tuple[int, float, float]:
    """Token, log-probability and entropy from ``logits`` (1, vocab)."""
    samples = sample(
        logits.float(),
        np.array([branch.seed], dtype=np.uint64),
        [position],
        sampling.temperature,
        sampling.top_p,
    )
    return int(samples.tokens[0]), float(samples.logprobs[0]), float(samples.entropies[0])
