"""A process that runs one Python verifier; it imports nothing else of Hedgerow.

``verifier_worker.py MODULE:FUNCTION PATHS``: frames of JSON come on standard input and go to
standard output, each after its length in four bytes; the first one sent says what was loaded.
``PATHS``, as JSON: where modules are searched, before the working directory. What the verifier
prints goes to standard error. The process exits when its input ends, even during a call.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import logging
import os
import struct
import sys
import threading
from collections.abc import Callable
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, BinaryIO

log = logging.getLogger(__name__)

LENGTH = struct.Struct(">I")


def read_frame(source: BinaryIO) -> Any:
    """The content of the next frame. Raises EOFError at the end of the input."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    return json.loads(source.read(LENGTH.unpack(head)[0]))


def frame(content: Any) -> bytes:
    """The bytes of a frame: the length of the JSON in four bytes, and the JSON."""
    body = json.dumps(content).encode()
    return LENGTH.pack(len(body)) + body


def load(name: str) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """Import the function; returns it, whether it is pure, and a hash of its file."""
    module_name, _, path = name.partition(":")
    module = importlib.import_module(module_name)
    function = attrgetter(path)(module)
    if not callable(function):
        raise TypeError(f"{path} is no function")
    file = inspect.getsourcefile(module)
    source = b""
    if file is not None:
        with open(file, "rb") as stream:
            source = stream.read()
    digest = hashlib.sha256(source).hexdigest()
    return function, {"pure": bool(getattr(function, "pure", False)), "source": digest}


def main(name: str, paths: str) -> None:
    """Load the function, then answer calls until the input ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path[:] = [*json.loads(paths), os.getcwd()]

    def tell(content: Any) -> None:
        answers.write(frame(content))
        answers.flush()

    try:
        function, about = load(name)
    except BaseException as error:  # anything the module raises at import
        log.exception("%s cannot be loaded", name)
        tell({"error": f"{type(error).__name__}: {error}"})
        return
    batches: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive, args=(requests, batches), daemon=True).start()
    tell(about)
    while True:
        tell(_answer(function, batches.get()))


def _receive(requests: BinaryIO, batches: SimpleQueue[Any]) -> None:
    """Queue batches from the input; at its end exit at once, even during a call."""
    try:
        while True:
            batches.put(read_frame(requests))
    except EOFError:
        os._exit(0)


def _answer(function: Callable[[Any], Any], batch: Any) -> dict[str, Any]:
    try:
        return {"scores": [float(score) for score in function(batch)]}
    except Exception as error:  # a fault is that call's answer only
        log.exception("the verifier failed at a call")
        return {"error": type(error).__name__}


if __name__ == "__main__":
    main(*sys.argv[1:])
