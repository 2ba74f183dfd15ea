"""Which tokens may come next where a reply must fit a JSON schema: a function of the reply's own
token ids alone. The matchers kept in memory only make the next call for a branch fast; they can be
rebuilt from those ids."""

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
"""Most branches of one schema whose places in it are remembered."""


@dataclass(slots=True)
class _Place:
    """A branch's place in the schema: its matcher, and the ids that the matcher has consumed."""

    matcher: LLMatcher
    ids: Ids


class GrammarMask:
    """The mask of one schema."""

    def __init__(self, schemas: JsonSchemas, schema: str, eos: frozenset[int]) -> None:
        """Compile the schema. Raises SchemaRefused."""
        self._schemas, self._schema = schemas, schema
        self._start = schemas.compile(schema)
        self._eos = np.array(sorted(eos), dtype=np.int64)
        self._places: OrderedDict[int, _Place] = OrderedDict()

    def apply(self, output: Ids, seed: int, scores: Floats) -> None:
        """Set ``scores`` (vocab,) to minus infinity for tokens that may not come after ``output``.
        If none may, only ends of a reply stay, and ``fault`` says why. If all allowed tokens were
        at minus infinity before, they become equally likely. ``seed``: the branch's, under which
        its place is remembered.
        """
        allowed = self._allowed(output, seed)[: len(scores)]
        if not allowed.any():
            allowed[self._eos[self._eos < len(scores)]] = True
        scores[~allowed] = -np.inf
        if scores.max() == -np.inf:
            scores[allowed] = 0.0

    def fault(self, output: Ids, seed: int) -> str | None:
        """Why a reply cannot end after ``output``; None if it can."""
        matcher = self._matcher_at(output, seed)
        if matcher is None:
            return "grammar: the reply does not fit it"
        if matcher.is_accepting():
            return None
        reason = matcher.get_error() or "the model has no token that does"
        return f"grammar: nothing fits after {len(output)} tokens: {reason}"

    def _allowed(self, output: Ids, seed: int) -> NDArray[np.bool_]:
        """Which tokens may come after ``output`` (vocab,); none if ``output`` does not fit."""
        matcher = self._matcher_at(output, seed)
        bits = matcher.compute_bitmask() if matcher else b""
        if matcher and matcher.is_error():  # earlier calls may have used up one of its limits
            matcher = self._rebuild(output, seed)
            bits = matcher.compute_bitmask() if matcher else b""
        if matcher is None or matcher.is_error():
            return np.zeros(self._schemas.vocab, dtype=bool)
        array = np.frombuffer(bits, dtype=np.uint8)
        allowed = np.unpackbits(array, count=self._schemas.vocab, bitorder="little").astype(bool)
        allowed[self._eos] = matcher.is_accepting()
        return allowed

    def _matcher_at(self, output: Ids, seed: int) -> LLMatcher | None:
        """The matcher that has consumed ``output``; None if ``output`` does not fit.

        A remembered place that is no prefix of ``output`` is discarded, never rolled back:
        llguidance 1.9.1 allows other tokens after a rollback.
        """
        place = self._places.get(seed)
        if place is None or not np.array_equal(place.ids, output[: len(place.ids)]):
            place = _Place(self._start.deep_copy(), output[:0])
        return self._advance(place.matcher, output, len(place.ids), seed) or (
            self._rebuild(output, seed) if place.matcher.is_error() else None
        )

    def _rebuild(self, output: Ids, seed: int) -> LLMatcher | None:
        """As ``_matcher_at``, from the schema and the ids alone."""
        return self._advance(self._schemas.compile(self._schema), output, 0, seed)

    def _advance(self, matcher: LLMatcher, output: Ids, start: int, seed: int) -> LLMatcher | None:
        """Have a matcher consume ``output`` from ``start`` on; None if one of its ids misfits."""
        end = start + matcher.try_consume_tokens(output[start:].tolist())
        self._places[seed] = _Place(matcher, output[:end].copy())
        self._places.move_to_end(seed)
        if len(self._places) > MOST_BRANCHES:
            self._places.popitem(last=False)
        return matcher if end == len(output) else None


class GrammarMasks:
    """The masks of one model by schema; the most recently used ones are kept."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._schemas: JsonSchemas | None = None
        self._masks: OrderedDict[str, GrammarMask] = OrderedDict()

    def of(self, schema: str) -> GrammarMask:
        """The mask of a schema. Raises EngineError if it cannot be compiled."""
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
