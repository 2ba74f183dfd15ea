"""vLLM servers on this machine's CPU, for as long as a benchmark or tests last; engines on them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import httpx

from loadtest.on_sglang import PATIENCE_SECONDS
from loadtest.searches import SPRIG
from runtime.openai.openai_engine import OpenaiEngine
from runtime.openai.openai_options import OpenaiOptions, ServedModel
from runtime.sglang.launched_server import free_port

VLLM = Path(".venv-vllm/bin/vllm")
"""vLLM's command in the environment that ``make vllm-env`` makes."""
START_SECONDS = 900.0
STOP_SECONDS = 60.0
LAST_WORDS = 2000
CPU = ("--dtype", "float32", "--enforce-eager", "--block-size", "32")
NO_CHUNKS = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "16384")
"""On a CPU vLLM 0.32 dies of a seeded request whose prompt is read in pieces."""
POLICY_OPTIONS = ("--enable-prompt-tokens-details", "--scheduling-policy", "priority")
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(slots=True)
class VllmServer:
    """A server of ``model`` that keeps its port when it starts again; ``options`` are vLLM's."""

    model: Path
    options: Sequence[str] = ()
    context: int = 512
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    log: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it in a process group of its own."""
        command = [str(VLLM), "serve", str(self.model), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--max-model-len", str(self.context)]
        self.process = subprocess.Popen(
            [*command, *CPU, *NO_CHUNKS, *self.options],
            stdout=self.log,
            stderr=self.log,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )

    def ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until it answers. Raises RuntimeError with the end of its log."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._runs():
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"vLLM is not ready: {self._last_words()}")

    def kill(self) -> None:
        """Kill its process group."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Terminate its process group, if it runs."""
        if self._runs():
            self._end(signal.SIGTERM)

    def _end(self, sign: signal.Signals) -> None:
        assert self.process is not None, "it was started"
        os.killpg(self.process.pid, sign)
        self.process.wait(STOP_SECONDS)

    def _runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def _last_words(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-LAST_WORDS:]


@asynccontextmanager
async def engine_at(policy: str, reward: str, **changes: Any) -> AsyncIterator[OpenaiEngine]:
    """The openai engine over the bundled models at these URLs, with timeouts for shared cores;
    ``changes`` are OpenaiOptions."""
    assert SPRIG.prm is not None, "the bundled models have a reward model"
    options = OpenaiOptions(
        policy=ServedModel(SPRIG.policy, (policy,)),
        reward=ServedModel(SPRIG.prm, (reward,)),
        reward_format=SPRIG.reward_format,
        connect_seconds=PATIENCE_SECONDS,
        probe_seconds=PATIENCE_SECONDS,
    )
    engine = await OpenaiEngine.start(replace(options, **changes))
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def serving(servers: Sequence[VllmServer]) -> AsyncIterator[None]:
    """Start the servers and wait until they are ready; stop them at the end."""
    try:
        for server in servers:
            server.start()
        await asyncio.gather(*(asyncio.to_thread(server.ready) for server in servers))
        yield
    finally:
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))
        for server in servers:
            server.log.close()
