"""A GGUF file's metadata and tensors, by ggml's specification (docs/gguf.md of ggml-org/ggml).

Three kinds of tensors are read: plain float32, Q8_0 and Q4_1. The last two hold blocks of 32
numbers along a row: a float16 scale and 32 signed bytes; a float16 scale, a float16 minimum and 32
half bytes, first the low halves.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes, Floats = NDArray[np.uint8], NDArray[np.float32]
MAGIC = b"GGUF"
VERSIONS = (2, 3)
BLOCK = 32
"""Numbers in a block of a tensor; also the default alignment of the tensors, in bytes."""
NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""``struct`` formats of numeric metadata, by GGUF's type."""
STRING, ARRAY = 8, 9


class GgufError(ValueError):
    """The file cannot be read here; the message names it and what is wrong."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """``shape``: in NumPy's order; ``kind``: ggml's number; ``start``: in bytes after the head."""

    shape: tuple[int, ...]
    kind: int
    start: int


class GgufFile:
    """An open file. ``metadata`` by key: strings, numbers and lists of these."""

    def __init__(self, path: Path) -> None:
        """Raises GgufError if it is no GGUF file of a known version, OSError if it is missing."""
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._path, self._offset = path, len(MAGIC)
        if self._bytes[: len(MAGIC)] != MAGIC or self._number("I") not in VERSIONS:
            raise GgufError(f"{path}: no GGUF file of version {' or '.join(map(str, VERSIONS))}")
        tensors, keys = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            self.metadata[key] = self._value(self._number("I"))
        self._tensors = dict(self._tensor() for _ in range(tensors))
        step = self.metadata.get("general.alignment", BLOCK)
        self._head = -(-self._offset // step) * step

    def tensor(self, name: str) -> Floats:
        """Read a tensor. Raises GgufError if it is missing, cut off or of an unknown kind."""
        entry = self._tensors.get(name)
        if entry is None:
            raise GgufError(f"{self._path}: tensor {name} is missing")
        if entry.kind not in KINDS:
            raise GgufError(f"{self._path}: tensor {name} is of ggml's kind {entry.kind}")
        size, numbers = KINDS[entry.kind]
        blocks = int(np.prod(entry.shape)) // BLOCK
        start = self._head + entry.start
        if start + blocks * size > len(self._bytes):
            raise GgufError(f"{self._path}: ends before tensor {name} does")
        raw = np.frombuffer(self._bytes, np.uint8, blocks * size, start)
        return numbers(raw.reshape(blocks, size)).reshape(entry.shape)

    def _tensor(self) -> tuple[str, StoredTensor]:
        name = self._string()
        extents = [self._number("Q") for _ in range(self._number("I"))]
        return name, StoredTensor(tuple(extents[::-1]), self._number("I"), self._number("Q"))

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            element, count = self._number("I"), self._number("Q")
            return [self._value(element) for _ in range(count)]
        if kind not in NUMBERS:
            raise GgufError(f"{self._path}: metadata of kind {kind}")
        return self._number(NUMBERS[kind])

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._bytes, self._offset)
        self._offset += struct.calcsize(f"<{form}")
        return value

    def _string(self) -> str:
        size = self._number("Q")
        self._offset += size
        return self._bytes[self._offset - size : self._offset].decode()


def _float32(blocks: Bytes) -> Floats:
    return blocks.copy().view("<f4")


def _q4_1(blocks: Bytes) -> Floats:
    packed = blocks[:, 4:]
    levels = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32)
    return _halves(blocks[:, :2]) * levels + _halves(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Floats:
    return _halves(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _halves(column: Bytes) -> Floats:
    return column.copy().view("<f2").astype(np.float32)


KINDS: Mapping[int, tuple[int, Callable[[Bytes], Floats]]] = MappingProxyType(
    {0: (4 * BLOCK, _float32), 3: (4 + BLOCK // 2, _q4_1), 8: (2 + BLOCK, _q8_0)}
)
"""By ggml's kind: the bytes of a block, and the function that decodes blocks."""
