"""A real vLLM server on the CPU, in an environment of its own (``make vllm-env``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loadtest.on_vllm import VllmServer


@contextmanager
def serving(model: Path, log: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """Yield the server's URL once it is ready; its process group ends with the block."""
    with log.open("w+b") as out:
        server = VllmServer(model, options, log=out)
        server.start()
        try:
            server.ready()
            yield server.url
        finally:
            server.stop()
