"""How many bytes of a text one token may stand for at most: what is too long need not be tokenised.

Only where that is certain: every byte of a text must come into some token's piece, or into one that
a normal form makes shorter by a known factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SHRINKING: Mapping[str, int] = {"Prepend": 1, "Replace": 1, "NFC": 3, "NFKC": 12, "NFD": 1}
"""By which factor a normaliser may shorten a text at most. Hangul's letters join to a third, a
styled letter of four bytes may stand for one of one byte."""
KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits"})
CUTTING = frozenset({"Split", "Punctuation"})
"""These keep all of a text unless they are told to remove what they find."""


def most_bytes_a_token(tokenizer: Mapping[str, Any], pieces: Iterable[bytes]) -> int | None:
    """By a ``tokenizer.json``'s content and the bytes each id stands for; None: not known."""
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
    """The steps of a part of a tokenizer, which may be a sequence of sequences."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for step in part[name]:
            yield from _steps(step, name)
    else:
        yield part


def _lengthens(step: Mapping[str, Any]) -> bool:
    """Whether a replacement is no shorter than what it is put for."""
    if step["type"] != "Replace":
        return True
    wanted = step["pattern"].get("String")
    return wanted is not None and len(step["content"].encode()) >= len(wanted.encode())
