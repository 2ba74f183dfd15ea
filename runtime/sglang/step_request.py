"""A step as SGLang draws it: the request for it, and where it ends.

Token ids are the truth: SGLang stops by its own reading of the text, and what it returns is cut
where the embedded engine would have stopped. What it stopped too early is asked to go on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hedgerow_sglang.plugin_protocol import sampling_seed
from runtime.stop_strings import StopStrings
from search.engine import Branch, EngineError, Sampling
from search.tree import Finish

WHOLE = 1 << 20
"""Tokens between two words on an item of a list: more than it has, so that its end is told."""


@dataclass(slots=True, eq=False)
class StepRequest:
    """A step on its way: its branch, and what has been drawn of it.

    ``entropy``: in nats, at the last token, of the likeliest tokens and one more "other".
    """

    branch: Branch
    sampling: Sampling
    stops: StopStrings
    eos: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    entropy: float = 0.0
    finish: Finish | None = None
    acknowledged: bool = False
    """The server knows that the step is complete, or is not to hear of it."""

    @property
    def path(self) -> tuple[int, ...]:
        """The prefix and what has been drawn of the step."""
        return (*self.branch.tokens, *self.tokens)

    def continue_from(self, early: StepRequest) -> None:
        """Take what was drawn early of the same step."""
        self.tokens, self.logprob = early.tokens, early.logprob
        self.entropy, self.finish, self.acknowledged = (
            early.entropy,
            early.finish,
            early.acknowledged,
        )

    def body(self, top: int, note: Mapping[str, Any]) -> dict[str, Any]:
        """The body that asks for the rest of the step; ``note``: more sampling parameters."""
        sampling = self.sampling
        return {
            "input_ids": list(self.path),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": top,
            "sampling_params": {
                "max_new_tokens": self.branch.limit - len(self.tokens),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "stop": list(sampling.stop),
                "stop_token_ids": sorted(self.eos),
                "no_stop_trim": True,
                "stream_interval": WHOLE,
                "skip_special_tokens": False,
                "sampling_seed": sampling_seed(self.branch.seed),
                **note,
            },
        }

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """What a step is known by that was drawn before it was asked for."""
        return self.branch.tokens, self.branch.seed

    def take(self, answer: Mapping[str, Any], start: int = 0) -> int:
        """Add what was drawn from place ``start`` on, up to where the step ends, and give the place
        behind that; ``finish`` says so if it ends.

        Raises EngineError for an answer without a token.
        """
        meta = answer["meta_info"]
        drawn = meta["output_token_logprobs"]
        if not drawn:
            raise EngineError(
                f"SGLang drew nothing after {meta['prompt_tokens']} tokens: "
                f"{meta.get('finish_reason')}"
            )
        place = start
        for place in range(start, len(drawn)):
            logprob, token, *_ = drawn[place]
            self.tokens.append(token)
            self.logprob += logprob
            self.finish = self._finish()
            if self.finish is not None:
                break
        self.entropy = entropy([p for p, *_ in meta["output_top_logprobs"][place]])
        return place + 1

    def _finish(self) -> Finish | None:
        if self.tokens[-1] in self.eos:
            return Finish.END
        if self.stops.ended(self.tokens):
            return Finish.STEP
        return Finish.LENGTH if len(self.tokens) == self.branch.limit else None


@dataclass(frozen=True, slots=True)
class PathRead:
    """A path to read, with nothing drawn: its own log-probabilities from position ``start`` on.

    ``node``: where it ends, if children are to be drawn from there; ``step``: the node and its
    parent, if the server is to hear that its step is drawn.
    """

    path: tuple[int, ...]
    start: int
    node: int | None = None
    step: tuple[int, int] | None = None

    def body(self, note: Mapping[str, Any]) -> dict[str, Any]:
        """The body that asks for it; ``note``: more sampling parameters."""
        return {
            "input_ids": list(self.path),
            "return_logprob": True,
            "logprob_start_len": self.start,
            "top_logprobs_num": 0,
            "sampling_params": {"max_new_tokens": 0, **note},
        }


def entropy(logprobs: Sequence[float]) -> float:
    """Of these log-probabilities and what is left to one, in nats: at most the true entropy."""
    shares = [math.exp(logprob) for logprob in logprobs]
    other = max(0.0, 1.0 - math.fsum(shares))
    return -math.fsum(p * math.log(p) for p in (*shares, other) if p > 0.0)
