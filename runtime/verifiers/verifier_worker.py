"""A process that runs one Python verifier; it imports nothing of the house.

``verifier_worker.py MODULE:FUNCTION PATHS``: frames of JSON come on standard input and go to
standard output, each after its length in four bytes; the first that goes says what was loaded.
``PATHS``, as JSON: where modules are looked for, before the working directory. What the verifier
prints goes to standard error. The process ends with its input, whatever runs then.
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
    """Raises EOFError where there is none."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    return json.loads(source.read(LENGTH.unpack(head)[0]))


def frame(content: Any) -> bytes:
    """As it is sent."""
    body = json.dumps(content).encode()
    return LENGTH.pack(len(body)) + body


def load(name: str) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """The function, and what is told of it: whether it is pure, and its file's hash."""
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
    """Answer until the input ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path[:] = [*json.loads(paths), os.getcwd()]

    def tell(content: Any) -> None:
        answers.write(frame(content))
        answers.flush()

    try:
        function, about = load(name)
    except BaseException as error:  # whatever the module does when it is imported
        log.exception("%s cannot be loaded", name)
        tell({"error": f"{type(error).__name__}: {error}"})
        return
    batches: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive, args=(requests, batches), daemon=True).start()
    tell(about)
    while True:
        tell(_answer(function, batches.get()))


def _receive(requests: BinaryIO, batches: SimpleQueue[Any]) -> None:
    """Nobody is left to answer to where the input ends, however long a call still takes."""
    try:
        while True:
            batches.put(read_frame(requests))
    except EOFError:
        os._exit(0)


def _answer(function: Callable[[Any], Any], batch: Any) -> dict[str, Any]:
    try:
        return {"scores": [float(score) for score in function(batch)]}
    except Exception as error:  # a verifier's fault is that call's answer
        log.exception("the verifier failed at a call")
        return {"error": type(error).__name__}


if __name__ == "__main__":
    main(*sys.argv[1:])
