"""A step drawn by completions: its request, and what is taken from the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.openai.sampling_fields import sampling_fields
from runtime.openai.server_dialect import (
    EXTRAS,
    Dialect,
    grammar_fields,
    ids_of_text,
    token_ids,
    token_logprobs,
    top_logprobs,
)
from runtime.servers.drawn_step import TOP, DrawnStep, entropy
from runtime.text import Text
from search.engine import EngineError
from search.tree import Finish, step_seed

LARGEST_SEED = (1 << 63) - 1
"""The largest seed that vLLM accepts: its seeds are signed."""


@dataclass(slots=True, eq=False)
class StepCompletion(DrawnStep):
    """A step being drawn, in its own request: a list of prompts would share one seed.

    ``retokenized``: its ids come from the tokenizer here, not from the server.
    """

    retokenized: bool = False

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """The body that asks for the rest of the step, without the model's name."""
        sampling = self.sampling
        body: dict[str, Any] = {
            "prompt": list(self.path),
            "max_tokens": self.remaining,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": self._seed() & LARGEST_SEED,
            **sampling_fields(sampling, len(self.path), self.remaining),
        }
        if dialect.stops:
            body |= {"stop": list(sampling.stop)}
        if dialect.extras:
            body |= {"stop_token_ids": sorted(self.eos), "logprobs": TOP, **EXTRAS}
        if sampling.grammar is not None:
            body |= grammar_fields(dialect.grammar, sampling.grammar)
        return body

    def take(self, answer: Mapping[str, Any], dialect: Dialect, text: Text) -> int:
        """Add the drawn tokens up to the step's end; returns how many were drawn in all.

        Raises EngineError for an answer without a token, or without promised log-probabilities.
        """
        choice = answer["choices"][0]
        ids = token_ids(choice) if dialect.ids else ids_of_text(choice, self.sampling.stop, text)
        if not ids and self.tokens and choice.get("finish_reason") == "length":
            self.finish = Finish.LENGTH  # its tokenizer counts more tokens for the text than ours
            return 0
        if not ids:
            raise EngineError(
                f"the server drew nothing after {len(self.path)} tokens: "
                f"{choice.get('finish_reason')}"
            )
        self.retokenized |= not dialect.ids
        self.has_logprobs &= dialect.logprobs
        logprobs = token_logprobs(choice) if dialect.logprobs else [0.0] * len(ids)
        if logprobs is None or len(logprobs) != len(ids):
            raise EngineError("the server told no log-probabilities of what it drew")
        count = self.add(zip(ids, logprobs, strict=True))
        self.entropy = entropy(top_logprobs(choice, count - 1, TOP))
        return len(ids)

    def _seed(self) -> int:
        """The next request's seed, another each time because servers restart their noise."""
        count = len(self.tokens)
        return step_seed(self.branch.seed, (count,)) if count else self.branch.seed
