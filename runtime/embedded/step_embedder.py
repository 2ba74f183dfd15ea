"""Embed steps, one piece of a call per iteration so that decoding goes on beside it; and the policy
model's own hidden states as vectors, each step read alone, from position 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from runtime.accounting import TrackedSearch
from runtime.embedded.model.batch_plan import KVStore, Span
from runtime.embedded.model.config import middle_layer
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.embedded.pipe import StepWords, Vector
from runtime.embedded.validation import CallErrors, must_be_ids
from search.engine import EngineError

PIECE_TOKENS = 256
"""Tokens of steps embedded in one iteration; a longer step is a piece of its own."""


@dataclass(slots=True, eq=False)
class EmbedCall:
    """Steps to embed, and the vectors of those that are done."""

    id: int
    tree: str
    steps: Sequence[StepWords]
    vectors: list[Vector] = field(default_factory=list)


class StepEmbedder:
    """Embeds calls first come, first served. A step's vector does not depend on its piece."""

    def __init__(
        self,
        embed: Callable[[Sequence[StepWords]], list[Vector]],
        charge: Callable[[str, Sequence[StepWords]], None],
    ) -> None:
        """``charge`` adds the cost of a piece to its search."""
        self._embed = embed
        self._charge = charge
        self._calls: list[EmbedCall] = []
        self.errors = CallErrors()
        """Errors of the calls that get no vectors."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to embed or to answer."""
        return bool(self._calls)

    def embed(self, call_id: int, tree: str, steps: Sequence[StepWords]) -> None:
        """Queue a call."""
        self._calls.append(EmbedCall(call_id, tree, steps))

    def step(self) -> list[tuple[int, list[Vector]]]:
        """Run one iteration: embed a piece of the oldest call. Returns that call and its vectors if
        it is finished."""
        call = self._calls[0]
        piece = _piece(call.steps[len(call.vectors) :])
        answers = []
        with self.errors.at(call.tree, call.id):  # a piece is of one call only
            call.vectors += self._embed(piece) if piece else []
            self._charge(call.tree, piece)
            if len(call.vectors) < len(call.steps):
                return []
            answers = [(call.id, call.vectors)]
        del self._calls[0]
        return answers

    def abort(self, tree: str) -> list[int]:
        """Stop embedding for a search; the ids of the calls that get no answer."""
        calls = [call.id for call in self._calls if call.tree == tree]
        self._calls = [call for call in self._calls if call.tree != tree]
        return calls


def _piece(steps: Sequence[StepWords]) -> Sequence[StepWords]:
    tokens = 0
    for count, step in enumerate(steps):
        tokens += len(step.tokens)
        if count and tokens > PIECE_TOKENS:
            return steps[:count]
    return steps


class HiddenStates:
    """Embeds a step as the mean over its tokens of the normalised residual stream after one layer.

    It has its own KV store, so that no search's KV is touched. In exact mode a step's bits do not
    depend on the steps read beside it.
    """

    def __init__(self, forward: Forward, layer: int | None = None) -> None:
        """``layer``: the number of layers to read after, by default half of them."""
        self._forward = forward
        self._config = forward.config
        self.layer = middle_layer(self._config.layers) if layer is None else layer
        if not 1 <= self.layer <= self._config.layers:
            allowed = f"1 to {self._config.layers} are allowed"
            raise ValueError(f"embedder_layer: {self.layer}; {allowed} with this policy model")
        self._store: KVStore | None = None
        self._slots = 0

    def embed_steps(self, steps: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """A vector (hidden,) for each step. Raises EngineError for ids that the model does not
        have, and for a step that exceeds the context."""
        for step in steps:
            must_be_ids("steps", step, self._config.vocab)
            if len(step) > self._config.context:
                allowed = f"the context is {self._config.context}"
                raise EngineError(f"steps: one of {len(step)} tokens; {allowed}")
        ends = np.cumsum([len(step) for step in steps])
        store = self._room(int(ends[-1]))
        spans = [
            Span(np.asarray(step, dtype=np.int64), 0, np.arange(end - len(step), end), 0)
            for step, end in zip(steps, ends.tolist(), strict=True)
        ]
        states = self._forward.states(spans, store, self.layer).numpy().astype(np.float64)
        parts = np.split(states, ends[:-1])
        return [tuple((part.sum(axis=0) / len(part)).tolist()) for part in parts]

    def flops(self, steps: Sequence[Sequence[int]]) -> float:
        """The FLOPs of reading the steps: the layers up to the one read, without the head."""
        tokens = sum(len(step) for step in steps)
        contexts = sum(len(step) * (len(step) + 1) // 2 for step in steps)
        return replace(self._config, layers=self.layer).flops(tokens, contexts, 0)

    def _room(self, slots: int) -> KVStore:
        if self._store is None or self._slots < slots:
            self._store, self._slots = self._forward.new_store(slots), slots
        return self._store


def load_embedder(
    options: EngineOptions, policy: Forward, searches: Mapping[str, TrackedSearch]
) -> StepEmbedder | None:
    """The embedder that ``options`` name; None for one that needs no model in this process.

    ``searches``: the running searches, which are charged for reading hidden states.
    """
    if options.embedder == "hidden":
        hidden = HiddenStates(policy, options.embedder_layer)

        def charge(tree: str, steps: Sequence[StepWords]) -> None:
            search = searches.get(tree)
            if search is not None:
                search.counters.flops += hidden.flops([step.tokens for step in steps])
                search.counters.model_calls += 1

        return StepEmbedder(lambda steps: hidden.embed_steps([s.tokens for s in steps]), charge)
    if options.embedder == "encoder" and options.encoder is not None:
        from runtime.embedders.encoder import Encoder

        encoder = Encoder(options.encoder)
        return StepEmbedder(
            lambda steps: encoder.embed_texts([step.text for step in steps]), lambda *_: None
        )
    return None
