"""A step as a server draws it: its tokens so far, and where it ends.

Only token ids count: servers stop by their own reading of the text, and what they return is cut
where the embedded engine would have stopped. If they stopped too early, the step is continued.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from runtime.stop_strings import StopStrings
from runtime.text import Text
from search.engine import Branch, EngineError, Sampling, Step, TokenLogprob
from search.tree import Finish

TOP = 16
"""How many of the highest log-probabilities are asked for at each token: the most that vLLM and
SGLang return. Those at a step's last token give its entropy."""


@dataclass(slots=True, eq=False)
class DrawnStep:
    """A step being drawn: its branch, and its tokens so far.

    ``logprob``: the sum over its tokens, natural; ``logprobs``: of each token and the likeliest
    ones there, if the sampling asks for them. ``entropy``: in nats, at the last token, of the
    likeliest tokens and one more "other". ``has_logprobs``: whether these are known.
    """

    branch: Branch
    sampling: Sampling
    stops: StopStrings
    eos: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    entropy: float = 0.0
    finish: Finish | None = None
    has_logprobs: bool = True

    @property
    def path(self) -> tuple[int, ...]:
        """The ids of the prefix and of the step so far."""
        return (*self.branch.tokens, *self.tokens)

    @property
    def remaining(self) -> int:
        """How many tokens may still be drawn at most."""
        return self.branch.limit - len(self.tokens)

    def add(self, draws: Iterable[tuple[int, float]]) -> int:
        """Add ids and log-probabilities up to where the step ends; returns how many were added.

        Sets ``finish`` if it ends. Raises EngineError if a step under a grammar does not end,
        because the server would begin the grammar again.
        """
        count = 0
        for token, logprob in draws:
            self.tokens.append(token)
            self.logprob += logprob
            count += 1
            self.finish = self._finish()
            if self.finish is not None:
                break
        if self.finish is None and self.sampling.grammar is not None:
            raise EngineError(f"grammar: the server ended a reply early, after {count} tokens")
        return count

    def step(self, text: Text) -> Step:
        """The complete step. ``finish`` must be set."""
        assert self.finish is not None, "the step is complete"
        tokens = tuple(self.tokens)
        words = text.decode(tokens, self.branch.tokens, last=self.finish is Finish.END)
        if not self.has_logprobs:
            return Step(tokens, words, self.finish, None, None)
        mean, logprobs = self.logprob / len(tokens), tuple(self.logprobs)
        return Step(tokens, words, self.finish, mean, self.entropy, logprobs=logprobs)

    def _finish(self) -> Finish | None:
        if self.tokens[-1] in self.eos:
            return Finish.END
        if self.stops.matches(self.tokens):
            return Finish.STEP
        return Finish.LENGTH if len(self.tokens) == self.branch.limit else None


def entropy(logprobs: Sequence[float]) -> float:
    """The entropy of these probabilities and their remainder to 1, in nats: a lower bound."""
    shares = [math.exp(logprob) for logprob in logprobs]
    rest = max(0.0, 1.0 - math.fsum(shares))
    return -math.fsum(p * math.log(p) for p in (*shares, rest) if p > 0.0)
