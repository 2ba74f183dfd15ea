"""A real vLLM server on the CPU, in an environment of its own (``make vllm-env``)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[3]
VLLM = ROOT / ".venv-vllm" / "bin" / "vllm"
START_SECONDS = 600.0
NO_CHUNKS = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "16384")
"""On a CPU vLLM 0.32 ends at a seeded request whose prompt is read in pieces."""


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def serving(model: Path, log: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """The server's URL, once it is ready; its group of processes ends with the block."""
    port = free_port()
    command = [str(VLLM), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    command += ["--block-size", "32", *NO_CHUNKS, *options]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it answers. Raises RuntimeError with its last words."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM is not ready: {log.read_text(errors='replace')[-2000:]}")
