"""Compiles JSON schemas with llguidance for one tokenizer, which then says what may come next.

A schema with parts that llguidance cannot enforce is refused; no part is ignored. White space
between parts is one blank, or a new line and its indent, so that no reply is endless blanks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from runtime.schema_size import MOST_OF_PATTERNS, patterns_size
from runtime.text import Text

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MOST_CHARACTERS = 1 << 16
"""Most characters of a schema."""
LONGEST_REASON = 400
OPTIONS: JsonCompileOptions = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n {0,32})",
}
LIMITS = LLParserLimits(
    max_items_in_row=10_000,
    initial_lexer_fuel=300_000,  # some 0.1 s
    step_lexer_fuel=200_000,
    max_lexer_states=50_000,  # 2 kB each
    max_grammar_size=30_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)


class SchemaRefused(ValueError):
    """A schema that cannot be compiled; the message says why."""


class JsonSchemas:
    """Compiles schemas for one vocabulary."""

    def __init__(
        self, tokens: _CheckpointTokens | _SingleBytes, size: int, ends: Sequence[int]
    ) -> None:
        """``tokens``: the vocabulary in llguidance's form; called with bytes that must come next it
        returns their ids. ``size``: all ids are below it; ``ends``: the ids that end a reply."""
        self.vocab = size
        self._lacking = lacking(tokens.tokens)
        self._tokenizer = LLTokenizer(TokenizerWrapper(tokens), n_vocab=size, eos_token=list(ends))

    @classmethod
    def of(cls, text: Text) -> JsonSchemas:
        """``text``: its tokenizer must not be used elsewhere at the same time. Raises ValueError
        for a model that cannot write JSON."""
        if not spells_json(text):
            needed = "one that ends a reply and every ASCII character are needed"
            raise ValueError(f"{text.checkpoint}: lacks tokens; {needed}")
        return cls(_CheckpointTokens(text), text.vocab_size, sorted(text.eos))

    def compile(self, schema: str) -> LLMatcher:
        """A matcher that follows a reply and says which tokens may come next. Takes up to some
        tenths of a second, without blocking other threads. Raises SchemaRefused."""
        if len(schema) > MOST_CHARACTERS:
            raise SchemaRefused(f"{len(schema)} characters; at most {MOST_CHARACTERS} are allowed")
        _must_be_small(schema)
        self._must_be_spelt(schema)
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)
        except ValueError as error:
            raise SchemaRefused(_reason(str(error))) from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some limits are met by the first token only
        if matcher.is_error():
            raise SchemaRefused(_reason(matcher.get_error()))
        return matcher

    def _must_be_spelt(self, schema: str) -> None:
        """Raises SchemaRefused for characters that the model cannot write."""
        if not self._lacking or (schema.isascii() and "\\u" not in schema):
            return
        try:
            text = json.dumps(json.loads(schema), ensure_ascii=False).encode(errors="ignore")
        except (ValueError, RecursionError):
            return  # compiling it gives a better message
        if missing := self._lacking & {*text}:
            raise SchemaRefused(f"holds byte {min(missing):#x}, for which the model has no token")


def _must_be_small(schema: str) -> None:
    """Raises SchemaRefused for patterns that compile too long; llguidance has no limit for them."""
    try:
        size = patterns_size(json.loads(schema))
    except (ValueError, RecursionError):
        return  # compiling it gives a better message
    if size > MOST_OF_PATTERNS:
        excess = f"patterns of {size} characters with their repeats written out"
        raise SchemaRefused(f"{excess}; at most {MOST_OF_PATTERNS} are allowed")


def must_compile(schema: str) -> None:
    """Raises SchemaRefused for a schema that cannot be compiled for any model."""
    _single_bytes().compile(schema)


@cache
def _single_bytes() -> JsonSchemas:
    return JsonSchemas(_SingleBytes(), _SingleBytes.eos_token_id + 1, [256])


class _SingleBytes:
    """A vocabulary of the 256 bytes and an end token."""

    eos_token_id, bos_token_id = 256, None
    tokens, special_token_ids = (*(bytes([i]) for i in range(256)), b"<end>"), (256,)

    def __call__(self, data: bytes) -> list[int]:
        return list(data)


def spells_json(text: Text) -> bool:
    """Whether a model has tokens for all of JSON and for the end of a reply."""
    return bool(text.eos) and not lacking(text.pieces) & {10, *range(32, 127)}


def lacking(pieces: Sequence[bytes]) -> frozenset[int]:
    """The bytes that have no token of their own: some vocabularies leave out rare ones."""
    return frozenset(range(256)) - {piece[0] for piece in pieces if len(piece) == 1}


class _CheckpointTokens:
    """A checkpoint's vocabulary."""

    def __init__(self, text: Text) -> None:
        self.eos_token_id, self.bos_token_id = text.end, text.bos
        self.tokens, self.special_token_ids = text.pieces, sorted(text.special)
        self._text = text
        ids = (i for i in range(len(text.pieces)) if i not in text.special)
        self._by_piece = {text.pieces[i]: i for i in ids}
        self._longest = max(map(len, self._by_piece))

    def __call__(self, data: bytes) -> list[int]:
        """The tokenizer's ids amid a text if they spell ``data`` exactly, else greedy ones."""
        text = data.decode()
        ids = self._text.encode_after(self._text.plain(text))
        return ids if self._bytes(ids) == data else self._greedy(data)

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(map(self._text.piece, ids))

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token at each place. Raises ValueError for a byte without a token."""
        ids, at = [], 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((n for n in sizes if data[at : at + n] in self._by_piece), None)
            if size is None:
                raise ValueError(f"no token stands for byte {data[at]:#x}")
            ids.append(self._by_piece[data[at : at + size]])
            at += size
        return ids


def _reason(message: str) -> str:
    """An error's message in one line, cut at ``LONGEST_REASON`` characters."""
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}..."
