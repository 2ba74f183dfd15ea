"""Which tokens may come next where a reply must fit a JSON schema: a function of the reply's own
ids alone. What stands in memory for a branch makes the next look fast and can be made anew from
them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from runtime.embedded.shortlist import Floats, Ids
from runtime.json_schemas import JsonSchemas
from runtime.text import Text
from search.engine import EngineError

MOST_SCHEMAS = 64
MOST_BRANCHES = 256
"""Of one schema, whose places in it are remembered."""


@dataclass(slots=True)
class _Place:
    """Where a branch is: the ids that its matcher has been given."""

    matcher: LLMatcher
    ids: Ids


class GrammarMask:
    """Of one schema."""

    def __init__(self, schemas: JsonSchemas, schema: str, eos: frozenset[int]) -> None:
        """Raises SchemaRefused."""
        self._schemas, self._schema = schemas, schema
        self._start = schemas.compile(schema)
        self._eos = np.array(sorted(eos), dtype=np.int64)
        self._places: OrderedDict[int, _Place] = OrderedDict()

    def apply(self, output: Ids, seed: int, scores: Floats) -> None:
        """Leave of ``scores`` (vocab,) what may come after ``output``; the end alone where nothing
        may, which ``fault`` then names. ``seed`` is the branch's: its place is remembered by it.

        Where all that may come has been ruled out before, it is all as likely.
        """
        allowed = self._allowed(output, seed)[: len(scores)]
        if not allowed.any():
            allowed[self._eos[self._eos < len(scores)]] = True
        scores[~allowed] = -np.inf
        if scores.max() == -np.inf:
            scores[allowed] = 0.0

    def fault(self, output: Ids, seed: int) -> str | None:
        """Why a reply cannot end after ``output``; None if it can."""
        matcher = self._at(output, seed)
        if matcher is None:
            return "grammar: the reply does not fit it"
        if matcher.is_accepting():
            return None
        why = matcher.get_error() or "the model has no token that does"
        return f"grammar: nothing fits after {len(output)} tokens: {why}"

    def _allowed(self, output: Ids, seed: int) -> NDArray[np.bool_]:
        """(vocab,); none for what does not fit."""
        matcher = self._at(output, seed)
        bits = matcher.compute_bitmask() if matcher else b""
        if matcher and matcher.is_error():  # it may have met a limit by what it was asked before
            matcher = self._anew(output, seed)
            bits = matcher.compute_bitmask() if matcher else b""
        if matcher is None or matcher.is_error():
            return np.zeros(self._schemas.vocab, dtype=bool)
        array = np.frombuffer(bits, dtype=np.uint8)
        allowed = np.unpackbits(array, count=self._schemas.vocab, bitorder="little").astype(bool)
        allowed[self._eos] = matcher.is_accepting()
        return allowed

    def _at(self, output: Ids, seed: int) -> LLMatcher | None:
        """What has been given these ids; None where they do not fit.

        A place that is not on the way there is left, never rolled back to where they part:
        llguidance 1.9.1 then allows other tokens than it would.
        """
        place = self._places.get(seed)
        if place is None or not np.array_equal(place.ids, output[: len(place.ids)]):
            place = _Place(self._start.deep_copy(), output[:0])
        return self._go_on(place.matcher, output, len(place.ids), seed) or (
            self._anew(output, seed) if place.matcher.is_error() else None
        )

    def _anew(self, output: Ids, seed: int) -> LLMatcher | None:
        """The same from nothing but the schema and the ids."""
        return self._go_on(self._schemas.compile(self._schema), output, 0, seed)

    def _go_on(self, matcher: LLMatcher, output: Ids, known: int, seed: int) -> LLMatcher | None:
        """It knows the first ids; give it the others. None where one of them does not fit."""
        taken = known + matcher.try_consume_tokens(output[known:].tolist())
        self._places[seed] = _Place(matcher, output[:taken].copy())
        self._places.move_to_end(seed)
        if len(self._places) > MOST_BRANCHES:
            self._places.popitem(last=False)
        return matcher if taken == len(output) else None


class GrammarMasks:
    """Of one model, by schema; those that were wanted last are kept."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._schemas: JsonSchemas | None = None
        self._masks: OrderedDict[str, GrammarMask] = OrderedDict()

    def of(self, schema: str) -> GrammarMask:
        """Raises EngineError for a schema that cannot be compiled."""
        try:
            self._schemas = self._schemas or JsonSchemas.of(self._text)
            mask = self._masks.pop(schema, None)
            mask = mask or GrammarMask(self._schemas, schema, self._text.eos)
        except ValueError as error:
            raise EngineError(f"grammar: {error}") from None
        self._masks[schema] = mask
        if len(self._masks) > MOST_SCHEMAS:
            self._masks.popitem(last=False)
        return mask
