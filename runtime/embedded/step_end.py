"""When a step ends, and what it then is; how likely it was is remembered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.embedded.expand_call import BranchSequence
from runtime.embedded.stop_strings import StopStrings, StopStringTables
from runtime.text import Text
from search.engine import Sampling, Step
from search.tree import Finish


class StepBuilder:
    """Judges the tokens that branches have drawn."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._eos = text.eos
        self._stops = StopStringTables(text.pieces)
        self._likelihoods = StepLikelihoods()

    def stops(self, sampling: Sampling) -> StopStrings:
        """What ends a step under this sampling. Raises ValueError for strings that are no text."""
        return self._stops.of(sampling.stop)

    def finish(self, run: BranchSequence) -> Finish | None:
        """Why the step ends with its last token; None if it goes on."""
        if run.drawn[-1] in self._eos:
            return Finish.END
        if run.call.stops.ended(run.drawn):
            return Finish.STEP
        return Finish.LENGTH if len(run.drawn) == run.branch.limit else None

    def step(self, run: BranchSequence, finish: Finish, attention: tuple[float, ...] = ()) -> Step:
        """The step that a branch has come to, with what its end attends to."""
        mean = run.logprob / len(run.drawn)
        self._likelihoods.note(run.tree, run.path(), mean, len(run.drawn))
        text = self._text.decode(run.drawn, run.branch.tokens, last=finish is Finish.END)
        return Step(tuple(run.drawn), text, finish, mean, run.entropy, attention)

    def mean_logprob(self, tree: str, prompt: np.ndarray, steps: Sequence[Sequence[int]]) -> float:
        """Mean log-probability a token of steps drawn here. Raises KeyError for others."""
        return self._likelihoods.mean(tree, prompt, steps)

    def forget(self, tree: str) -> None:
        """The search is over."""
        self._likelihoods.forget(tree)


class StepLikelihoods:
    """Mean log-probabilities of drawn steps, by search and token path (int64 ids)."""

    def __init__(self) -> None:
        self._known: dict[str, dict[bytes, tuple[float, int]]] = {}

    def note(self, tree: str, path: np.ndarray, mean: float, tokens: int) -> None:
        """The last ``tokens`` of ``path`` are a step with this mean."""
        self._known.setdefault(tree, {})[path.tobytes()] = mean, tokens

    def mean(self, tree: str, prompt: np.ndarray, steps: Sequence[Sequence[int]]) -> float:
        """Mean log-probability a token of all ``steps``. Raises KeyError for unknown ones."""
        known, path = self._known[tree], prompt
        total, tokens = 0.0, 0
        for step in steps:
            path = np.concatenate([path, np.asarray(step, dtype=np.int64)])
            mean, count = known[path.tobytes()]
            total, tokens = total + mean * count, tokens + count
        return total / tokens

    def forget(self, tree: str) -> None:
        """The search is over."""
        self._known.pop(tree, None)
