"""The bytes that tokens stand for, by their names and by a tokenizer's normalisation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
SHRINKING: Mapping[str, int] = {"Prepend": 1, "Replace": 1, "NFC": 3, "NFKC": 12, "NFD": 1}
"""The largest factor by which a normaliser may shorten a text. Hangul letters join to a third; a
styled letter of four bytes may become a letter of one byte."""
KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits"})
CUTTING = frozenset({"Split", "Punctuation"})
"""Pre-tokenizers that keep all of a text unless they are set to remove their matches."""


def _byte_alphabet() -> dict[str, int]:
    """Maps byte-level BPE's printable characters to the bytes they stand for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(rest)}


_ALPHABET = _byte_alphabet()


def spell_byte_level(name: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for."""
    if all(letter in _ALPHABET for letter in name):
        return bytes(_ALPHABET[letter] for letter in name)
    return name.encode()


def spell_sentencepiece(name: str) -> bytes:
    """The bytes that a token of a SentencePiece vocabulary stands for."""
    match = _BYTE_TOKEN.match(name)
    return bytes([int(match[1], 16)]) if match else name.replace("▁", " ").encode()


def most_bytes_a_token(tokenizer: Mapping[str, Any], pieces: Iterable[bytes]) -> int | None:
    """The most bytes of a text that one token may stand for, so that a text that is too long need
    not be tokenised; None if not known. ``tokenizer``: a ``tokenizer.json``'s content.

    It is known only if every byte of a text ends up in some token's piece, shortened by a
    normaliser by a known factor at most.
    """
    model = tokenizer.get("model") or {}
    steps = list(_steps(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    names = {step["type"] for step in steps}
    whole = "ByteLevel" in names or bool(model.get("byte_fallback"))
    cuts = [step for step in steps if step["type"] not in KEEPING]
    keeps = all(s["type"] in CUTTING and s.get("behavior") != "Removed" for s in cuts)
    swallows = any(t.get("lstrip") or t.get("rstrip") for t in tokenizer.get("added_tokens", []))
    if model.get("type") != "BPE" or not whole or not keeps or swallows:
        return None
    factor = 1
    for step in _steps(tokenizer.get("normalizer"), "normalizers"):
        if step["type"] not in SHRINKING or not _lengthens(step):
            return None
        factor *= SHRINKING[step["type"]]
    return factor * max(map(len, pieces), default=1)


def _steps(part: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a part of a tokenizer; nested sequences are flattened."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for step in part[name]:
            yield from _steps(step, name)
    else:
        yield part


def _lengthens(step: Mapping[str, Any]) -> bool:
    """Whether a step replaces nothing, or a fixed string by one that is no shorter."""
    if step["type"] != "Replace":
        return True
    pattern = step["pattern"].get("String")
    return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
