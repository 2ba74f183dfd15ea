"""Calls for embeddings, worked off a piece at a time so that drawing goes on beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.embedded.call_errors import CallErrors

PIECE_TOKENS = 256
"""Tokens of steps embedded in one iteration; a longer step is a piece of its own."""

Vector = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """A step to embed: its token ids and its text."""

    tokens: tuple[int, ...]
    text: str


@dataclass(slots=True, eq=False)
class EmbedCall:
    """Steps to embed together, and the vectors of the first of them."""

    id: int
    tree: str
    steps: Sequence[Words]
    vectors: list[Vector] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """A finished call and its vectors."""

    call: int
    vectors: list[Vector]


class StepEmbedder:
    """First come, first served. Each step is embedded alone, whatever is beside it in a piece."""

    def __init__(
        self,
        embed: Callable[[Sequence[Words]], list[Vector]],
        charge: Callable[[str, Sequence[Words]], None],
    ) -> None:
        """``charge`` books a piece to the search it is for."""
        self._embed = embed
        self._charge = charge
        self._calls: list[EmbedCall] = []
        self.faults = CallErrors()
        """The calls that get no vectors, and why."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to embed or to answer."""
        return bool(self._calls)

    def embed(self, call_id: int, tree: str, steps: Sequence[Words]) -> None:
        """Take on a call."""
        self._calls.append(EmbedCall(call_id, tree, steps))

    def step(self) -> list[EmbedResult]:
        """One iteration: embed a piece of the oldest call; that call if it is finished."""
        call = self._calls[0]
        piece = _piece(call.steps[len(call.vectors) :])
        done = []
        with self.faults.at(call.tree, call.id):  # a piece is one call's alone
            call.vectors += self._embed(piece) if piece else []
            self._charge(call.tree, piece)
            if len(call.vectors) < len(call.steps):
                return []
            done = [EmbedResult(call.id, call.vectors)]
        del self._calls[0]
        return done

    def abort(self, tree: str) -> list[int]:
        """Stop embedding for a search; the ids of the calls that get no answer."""
        stopped = [call.id for call in self._calls if call.tree == tree]
        self._calls = [call for call in self._calls if call.tree != tree]
        return stopped


def _piece(steps: Sequence[Words]) -> Sequence[Words]:
    tokens = 0
    for count, step in enumerate(steps):
        tokens += len(step.tokens)
        if count and tokens > PIECE_TOKENS:
            return steps[:count]
    return steps
