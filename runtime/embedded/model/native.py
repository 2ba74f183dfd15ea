"""The functions of ``native.c``, compiled on the machine that runs them.

A library is built once, in a second, by the C compiler that is found (``CC``, cc, gcc, clang) and
kept under ``~/.cache/hedgerow`` by what its bits depend on. Where there is no compiler the engine
does the same by torch: other bits, and more time.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from runtime.user_cache import user_cache

_LOG = logging.getLogger(__name__)

Library = TypeVar("Library")

SOURCE = Path(__file__).with_suffix(".c")
MULTIPLE, MOST = 16, 256
"""Rows and heads have a multiple of the one, heads up to the other numbers."""
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC")
THREADED = "-fopenmp"
"""To compile, not to link: OpenMP's functions are then those of the library that torch has loaded,
and there is one pool of threads."""
BUILD_SECONDS = 60.0
_FEATURES = ("flags", "Features", "model name", "CPU part")
"""How lines of /proc/cpuinfo begin that tell processors apart."""


class NotBuilt(ValueError):
    """There is no compiled attention; the message says why."""


class Norm(ctypes.Structure):
    """As in the source, like those below."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("stream", "added", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        ("eps", ctypes.c_float),
    ]


class Projection(ctypes.Structure):
    """Queries, keys and values as a layer projects them, and where they go."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("projected", "bias", "scales", "cosine", "sine")),
        *((name, ctypes.c_void_p) for name in ("slots", "query", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "size", "store_rows")),
        ("eps", ctypes.c_float),
    ]


class Attending(ctypes.Structure):
    """``Attention`` of the source: its arrays, and what they are laid out by."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "out", "slots")),
        *((name, ctypes.c_void_p) for name in ("starts", "row", "low", "high", "row_starts")),
        *((name, ctypes.c_void_p) for name in ("row_items", "highest", "sums", "mixed")),
        *((name, ctypes.c_int64) for name in ("rows", "blocks", "kv_heads", "group", "size")),
        ("store_rows", ctypes.c_int64),
    ]


class Native:
    """The loaded library. ``name`` stands for its bits: equal names compute the same.

    Each function takes what the source says, on as many threads as torch would use: ``norm`` adds
    to the residual stream and norms its rows; ``project`` turns queries and keys, and puts them and
    the values where they go; ``attend`` is softmax(query keys) values of every row.
    """

    def __init__(self, path: Path) -> None:
        """Raises NotBuilt where the machine's loader does not take it."""
        try:
            library = ctypes.CDLL(str(path))
            self.norm, self.project, self.attend = library.norm, library.project, library.attend
        except (OSError, AttributeError) as error:
            raise NotBuilt(f"{path}: {error}") from error
        functions = self.norm, self.project, self.attend
        for function, call in zip(functions, (Norm, Projection, Attending), strict=True):
            function.restype, function.argtypes = None, [ctypes.POINTER(call)]
        self.name = path.stem


@cache
def native() -> Native:
    """The library, built if need be. Raises NotBuilt."""
    return load(SOURCE, "rows", Native)


def load(source: Path, name: str, library: Callable[[Path], Library]) -> Library:
    """What ``library`` makes of a source's file, which is built if need be and begins with
    ``name``; without threads where the compiler knows none. Raises NotBuilt."""
    compiler = _compiler()
    tried = []
    for flags in ((*FLAGS, THREADED), FLAGS):
        try:
            return library(_build(compiler, flags, source, name))
        except NotBuilt as error:
            tried.append(str(error))
    raise NotBuilt("; ".join(tried))


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if executable := shutil.which(name):
            return executable
    raise NotBuilt("no C compiler (CC, cc, gcc, clang)")


def _build(compiler: str, flags: Sequence[str], source: Path, name: str) -> Path:
    """The library's file. Another process may build it at the same time: the last one stays."""
    bits = "\0".join(_bit_sources(compiler, flags, source))
    path = user_cache() / f"{name}-{hashlib.sha256(bits.encode()).hexdigest()[:16]}.so"
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        compiled, linked = Path(place) / "compiled.o", Path(place) / "linked.so"
        _run([compiler, *flags, "-c", str(source), "-o", str(compiled)])
        _run([compiler, "-shared", str(compiled), "-lm", "-o", str(linked)])
        linked.replace(path)
    _LOG.info("built %s with %s %s", path, compiler, " ".join(flags))
    return path


def _bit_sources(compiler: str, flags: Sequence[str], source: Path) -> Iterator[str]:
    """What the library's bits depend on: source, compiler, flags and the processor's features."""
    yield source.read_text(encoding="utf-8")
    yield _run([compiler, "--version"])
    yield " ".join(flags)
    yield f"{platform.machine()} {platform.processor()}"
    with suppress(OSError):  # elsewhere than on Linux
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        yield from sorted({line for line in described.splitlines() if line.startswith(_FEATURES)})


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=True
        )
    except subprocess.CalledProcessError as error:
        raise NotBuilt(f"{command[0]}: {error.stderr.strip()[:400]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{command[0]}: {error}") from error
    return done.stdout
