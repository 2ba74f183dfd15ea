"""A step as a completion: the request for it, and what is taken of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.openai.server_dialect import EXTRAS, token_ids, token_logprobs, top_logprobs
from runtime.servers.drawn_step import DrawnStep, entropy
from search.engine import EngineError
from search.tree import step_seed

LARGEST_SEED = (1 << 63) - 1
"""vLLM's seeds are signed."""


@dataclass(slots=True, eq=False)
class StepCompletion(DrawnStep):
    """A step on its way: one request, as a list of prompts has one seed for all."""

    def body(self, top: int) -> dict[str, Any]:
        """The body that asks for the rest of the step, but for the model's name."""
        sampling = self.sampling
        return {
            "prompt": list(self.path),
            "max_tokens": self.left,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": self._seed() & LARGEST_SEED,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(self.eos),
            "logprobs": top,
            **EXTRAS,
        }

    def take(self, answer: Mapping[str, Any], top: int) -> int:
        """Add what was drawn up to where the step ends; how many tokens that are.

        Raises EngineError for an answer without a token, or without their log-probabilities.
        """
        choice = answer["choices"][0]
        ids, logprobs = token_ids(choice), token_logprobs(choice)
        if not ids:
            raise EngineError(
                f"the server drew nothing after {len(self.path)} tokens: "
                f"{choice.get('finish_reason')}"
            )
        if logprobs is None or len(logprobs) != len(ids):
            raise EngineError("the server told no log-probabilities of what it drew")
        taken = self.add(zip(ids, logprobs, strict=True))
        self.entropy = entropy(top_logprobs(choice, taken - 1, top))
        return taken

    def _seed(self) -> int:
        """A step that goes on draws with a seed of its own: a server starts anew with each."""
        drawn = len(self.tokens)
        return step_seed(self.branch.seed, (drawn,)) if drawn else self.branch.seed
