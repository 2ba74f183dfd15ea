"""Calls for embeddings, worked off a piece at a time so that drawing goes on beside them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from search.engine import EngineError

PIECE_TOKENS = 256
"""Tokens of steps embedded in one iteration; a longer step is a piece of its own."""

KEPT_STEPS = 4_096
"""Steps whose vectors are kept: later rounds and other searches say the same again."""

Vector = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """A step to embed: its token ids and its text."""

    tokens: tuple[int, ...]
    text: str


@dataclass(slots=True, eq=False)
class Call:
    """Steps to embed together: what is ``known`` of them, and those ``left``, each once."""

    id: int
    tree: str
    steps: Sequence[Words]
    known: dict[Words, Vector]
    left: list[Words]


@dataclass(frozen=True, slots=True)
class Embedded:
    """A finished call: its vectors, or why there are none."""

    call: int
    result: list[Vector] | EngineError


class Embedder:
    """First come, first served. Each step is embedded alone, whatever is beside it in a piece, and
    once: what it was found to be is kept."""

    def __init__(
        self,
        embed: Callable[[Sequence[Words]], list[Vector]],
        charge: Callable[[str, Sequence[Words]], None],
    ) -> None:
        """``charge`` books a piece to the search it is for."""
        self._embed = embed
        self._charge = charge
        self._calls: list[Call] = []
        self._kept = OrderedDict[Words, Vector]()

    @property
    def busy(self) -> bool:
        """Whether there is anything to embed or to answer."""
        return bool(self._calls)

    def embed(self, call_id: int, tree: str, steps: Sequence[Words]) -> None:
        """Take on a call."""
        distinct = dict.fromkeys(steps)
        known = {step: self._kept[step] for step in distinct if step in self._kept}
        for step in known:
            self._kept.move_to_end(step)
        left = [step for step in distinct if step not in known]
        self._calls.append(Call(call_id, tree, steps, known, left))

    def step(self) -> list[Embedded]:
        """One iteration: embed a piece of the oldest call; that call if it is finished."""
        call = self._calls[0]
        if call.left:
            piece = _piece(call.left)
            try:
                found = dict(zip(piece, self._embed(piece), strict=True))
            except EngineError as error:
                return [Embedded(self._calls.pop(0).id, error)]
            self._charge(call.tree, piece)
            self._keep(found)
            call.known |= found
            call.left = call.left[len(piece) :]
        if call.left:
            return []
        self._calls.pop(0)
        return [Embedded(call.id, [call.known[step] for step in call.steps])]

    def abort(self, tree: str) -> list[int]:
        """Stop embedding for a search; the ids of the calls that get no answer."""
        stopped = [call.id for call in self._calls if call.tree == tree]
        self._calls = [call for call in self._calls if call.tree != tree]
        return stopped

    def _keep(self, found: Mapping[Words, Vector]) -> None:
        self._kept.update(found)
        while len(self._kept) > KEPT_STEPS:
            self._kept.popitem(last=False)


def _piece(steps: Sequence[Words]) -> Sequence[Words]:
    tokens = 0
    for count, step in enumerate(steps):
        tokens += len(step.tokens)
        if count and tokens > PIECE_TOKENS:
            return steps[:count]
    return steps
