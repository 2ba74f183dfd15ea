"""The functions of ``native.c``, compiled on the machine that runs them.

A library is built once, in about a second, by the first C compiler found (``CC``, cc, gcc, clang),
and cached under ``~/.cache/hedgerow`` by what its bits depend on. Without a compiler the engine
uses torch, which gives other bits and takes more time.
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
"""Rows and heads must have a multiple of MULTIPLE numbers, and heads at most MOST."""
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC")
THREADED = "-fopenmp"
"""Used to compile but not to link, so that OpenMP's functions are those of the library that torch
has loaded, and there is only one pool of threads."""
BUILD_SECONDS = 60.0
_FEATURES = ("flags", "Features", "model name", "CPU part")
"""Prefixes of the lines of /proc/cpuinfo that tell processors apart."""


class NotBuilt(ValueError):
    """There is no usable compiled library; the message says why."""


class Norm(ctypes.Structure):
    """``Norm`` of the source; the structures below are the source's as well."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("stream", "added", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        ("eps", ctypes.c_float),
    ]


class Projection(ctypes.Structure):
    """``Projection`` of the source: projected queries, keys and values, and where they go."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("projected", "bias", "scales", "cosine", "sine")),
        *((name, ctypes.c_void_p) for name in ("slots", "query", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "size", "store_rows")),
        ("eps", ctypes.c_float),
    ]


class Attending(ctypes.Structure):
    """``Attention`` of the source: its arrays, and the extents that they are laid out by."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "out", "slots")),
        *((name, ctypes.c_void_p) for name in ("starts", "row", "low", "high", "row_starts")),
        *((name, ctypes.c_void_p) for name in ("row_items", "highest", "sums", "mixed")),
        *((name, ctypes.c_int64) for name in ("rows", "blocks", "kv_heads", "group", "size")),
        ("store_rows", ctypes.c_int64),
    ]


class Native:
    """The loaded library. ``name`` identifies its bits: equal names compute the same.

    Each function takes its structure of the source and runs on as many threads as torch would use:
    ``norm`` adds to the residual stream and norms its rows; ``project`` rotates queries and keys
    and stores them and the values; ``attend`` computes softmax(query keys) values of every row.
    """

    def __init__(self, path: Path) -> None:
        """Load the library. Raises NotBuilt if it cannot be loaded."""
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
    """The library, built if necessary. Raises NotBuilt."""
    return load(SOURCE, "rows", Native)


def load(source: Path, name: str, library: Callable[[Path], Library]) -> Library:
    """``library`` of the compiled ``source``, whose file name begins with ``name``, built if
    necessary; without OpenMP if it does not work with it. Raises NotBuilt."""
    compiler = _compiler()
    errors = []
    for flags in ((*FLAGS, THREADED), FLAGS):
        try:
            return library(_build(compiler, flags, source, name))
        except NotBuilt as error:
            errors.append(str(error))
    raise NotBuilt("; ".join(errors))


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if executable := shutil.which(name):
            return executable
    raise NotBuilt("no C compiler (CC, cc, gcc, clang)")


def _build(compiler: str, flags: Sequence[str], source: Path, name: str) -> Path:
    """Build the library; its file. If another process builds it, too, the later file stays."""
    bits = "\0".join(_bit_sources(compiler, flags, source))
    path = user_cache() / f"{name}-{hashlib.sha256(bits.encode()).hexdigest()[:16]}.so"
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        object_file, shared_object = Path(folder) / "compiled.o", Path(folder) / "linked.so"
        _run([compiler, *flags, "-c", str(source), "-o", str(object_file)])
        _run([compiler, "-shared", str(object_file), "-lm", "-o", str(shared_object)])
        shared_object.replace(path)
    _LOG.info("built %s with %s %s", path, compiler, " ".join(flags))
    return path


def _bit_sources(compiler: str, flags: Sequence[str], source: Path) -> Iterator[str]:
    """What the library's bits depend on: source, compiler, flags and the processor's features."""
    yield source.read_text(encoding="utf-8")
    yield _run([compiler, "--version"])
    yield " ".join(flags)
    yield f"{platform.machine()} {platform.processor()}"
    with suppress(OSError):  # elsewhere than on Linux
        cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        yield from sorted({line for line in cpu_info.splitlines() if line.startswith(_FEATURES)})


def _run(command: Sequence[str]) -> str:
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=True
        )
    except subprocess.CalledProcessError as error:
        raise NotBuilt(f"{command[0]}: {error.stderr.strip()[:400]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{command[0]}: {error}") from error
    return process.stdout
