"""Starts SGLang servers for a policy and a reward model, and looks after their processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from hedgerow_sglang.plugin_protocol import BACKENDS, REWARD_CLASSES, REWARD_MODELS
from runtime.all_of import all_of
from runtime.checkpoint import architecture
from runtime.servers.waiting import report_while
from runtime.sglang.request_priority import PRIORITY_UNITS
from runtime.sglang.server_output import ServerOutput
from runtime.supervised_process import SupervisedProcess
from search.engine import EngineDown

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
"""Only this machine may reach SGLang's port: any client may flush its cache and stop searches."""
PORTS = range(20_000, 32_000)
STUBS = Path(__file__).parent / "cpu" / "stubs"
LOOK_SECONDS = 0.5
SETTING = "HEDGEROW_"
"""Prefix of our settings' environment variables; the plug-in reads none of them."""
KILLED = -signal.SIGKILL
REFUSED = {
    "--enable-custom-logit-processor": "it lets whoever reaches the port run code",
    "--host": f"the servers listen on {HOST}",
    "--port": "the servers choose free ports",
    "--model-path": "the settings name the models",
    "--model": "the settings name the models",
    "--is-embedding": "the reward format says which server is one",
    "--api-key": f"the servers listen on {HOST} alone, and Hedgerow sends none",
    "--config": "a file could hold what is refused here",
}
"""SGLang's options that are refused, with reasons. Its parser accepts prefixes of names, so these
are refused too: no other option of SGLang's is a prefix of one of these."""
ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--disable-overlap-schedule", "--watchdog-timeout", "1200", "--sleep-on-idle"),
)
"""Options for SGLang's plain PyTorch path, in the embedded engine's number type, for tests.

An idle server sleeps until a request comes, because polling would take a whole core.
"""

COMPACT_JSON = "--constrained-json-disable-any-whitespace"
"""Keeps replies under a schema from being endless blanks."""
BY_PREFIX = ("--schedule-policy", "dfs-weight")
"""Admits requests with a common prefix together, so that a small KV pool recomputes less than in
order of arrival (``lpm`` stops at 128 waiting requests). Excludes SGLang's priorities."""
BY_PRIORITY = (
    *("--enable-priority-scheduling", "--retraction-policy", "priority"),
    *("--priority-scheduling-preemption-threshold", str(PRIORITY_UNITS)),
)
"""Early work gives way to all other requests; these do not preempt each other."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The options of one SGLang server. ``python``: of SGLang's environment.

    ``memory``: share of the device's memory that is free when the server starts, for weights and
    KV; ``kv_tokens``: most tokens of KV, None for what that share holds. ``seeds``, and a
    ``kv_policy`` other than SGLang's ``lru``, need our plug-in in the same environment.
    ``schedules``: requests are admitted by priority, so that steps can be drawn early.
    ``args``: more of SGLang's own options. ``log``: a file for its output; None: our stderr.
    """

    model: str | Path
    python: str | Path
    device: Literal["cuda", "cpu"] = "cuda"
    memory: float = 0.6
    kv_tokens: int | None = None
    args: tuple[str, ...] = ()
    seeds: bool = False
    kv_policy: str = "lru"
    classifies: bool = False
    schedules: bool = False
    log: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.memory < 1:
            raise ValueError(f"memory: {self.memory}; a share between 0 and 1 is needed")
        if not Path(self.python).is_file():
            raise ValueError(f"python: '{self.python}': there is no such file; see make sglang-env")
        for arg in self.args:
            name = arg.partition("=")[0]
            full_name = next(
                (option for option in sorted(REFUSED) if option.startswith(name)), None
            )
            if name.startswith("--") and full_name is not None:
                short = "" if full_name == name else f" (short for {full_name})"
                raise ValueError(f"{name}{short}: not allowed; {REFUSED[full_name]}")

    @property
    def evicts(self) -> bool:
        """Whether our plug-in decides what is evicted."""
        return self.kv_policy in BACKENDS

    def command(self, port: int) -> list[str]:
        """The command line that starts the server."""
        return [
            *(str(self.python), "-m", "sglang.launch_server"),
            *("--model-path", str(self.model), "--host", HOST, "--port", str(port)),
            *("--enable-metrics", "--log-level", "warning"),
            *("--mem-fraction-static", f"{self.memory:g}"),
            *(("--max-total-tokens", str(self.kv_tokens)) if self.kv_tokens else ()),
            *(ON_CPU if self.device == "cpu" else ()),
            *(("--sampling-backend", "pytorch") if self.seeds else ()),
            *(("--radix-cache-backend", BACKENDS[self.kv_policy]) if self.evicts else ()),
            *(("--is-embedding",) if self.classifies else (COMPACT_JSON,)),
            *(BY_PRIORITY if self.schedules else BY_PREFIX),
            *self.args,
        ]

    def environment(self) -> dict[str, str]:
        """Our environment without our settings, which hold API keys, and ``own_environment``."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(SETTING)}
        return ours | self.own_environment()

    def own_environment(self) -> dict[str, str]:
        """Variables for log-probabilities before temperature, the plug-in, and stubs on a CPU."""
        variables = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "HF_HUB_OFFLINE": "1"}
        if not (self.seeds or self.evicts):
            variables["SGLANG_PLUGINS"] = "none"
        if self.classifies and architecture(Path(self.model)) in REWARD_CLASSES:
            variables["SGLANG_EXTERNAL_MODEL_PACKAGE"] = REWARD_MODELS
        if self.device == "cpu":
            variables |= {
                "SGLANG_USE_CPU_ENGINE": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(STUBS),
            }
        return variables


def free_port() -> int:
    """A port that is free now, below the range for outgoing connections: a server binds its port
    only once its model is loaded, and waits for ever if it is taken by then."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((HOST, port))
            return port
    raise OSError(f"every port from {PORTS.start} to {PORTS.stop - 1} is taken")


@dataclass(eq=False, slots=True)
class LaunchedServer:
    """A server's process, on the same port after each restart."""

    options: LaunchOptions
    port: int = field(default_factory=free_port)
    process: SupervisedProcess | None = None
    start_seconds: float = 600.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a server on a GPU starts, because each measures the memory that is free."""
    _output: ServerOutput | None = None

    @property
    def url(self) -> str:
        """The server's base URL."""
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start the process; it ends when we do. Raises OSError if it cannot be started."""
        options = self.options
        self.process = SupervisedProcess(
            options.command(self.port),
            env=options.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._output = ServerOutput(self.process, options.log)

    @property
    def exit_status(self) -> int | None:
        """The process's exit status; None while it runs or before it was started."""
        return None if self.process is None else self.process.poll()

    def stop(self) -> None:
        """End the process and its descendants, by force if need be, and wait for the end."""
        if self.process is not None:
            self.process.end()
            self.process = None

    async def health(self) -> None:
        """Raise EngineDown if the process does not run."""
        if self.process is None:
            raise EngineDown(f"the SGLang server of {self.options.model} has not started")
        if self.exit_status is not None:
            raise EngineDown(self.end())

    async def restart(self) -> None:
        """Stop it if it runs, start it, and wait until it answers. Raises OSError, or EngineDown if
        it does not answer, after stopping it."""
        try:
            async with self.turn:
                await asyncio.to_thread(self.stop)
                self.start()
                if self.options.device != "cpu":
                    await self.ready(self.start_seconds)
            await self.ready(self.start_seconds)
        except EngineDown:
            await asyncio.to_thread(self.stop)
            raise

    async def ready(self, seconds: float) -> None:
        """Wait until the server answers, and log the wait. Raises EngineDown if it ends or does not
        answer in ``seconds``."""
        model, start = self.options.model, time.monotonic()

        def say(elapsed: float) -> None:
            log.info("SGLang starts with %s, %.0f of up to %g s", model, elapsed, seconds)

        try:
            async with asyncio.timeout(seconds):
                await report_while(self._answers(), say)
        except TimeoutError:
            last_line = f"; it last said: {self._last_line()}" if self._last_line() else ""
            raise EngineDown(
                f"the SGLang server of {model} did not come up in {seconds:g} s{last_line}"
            ) from None
        elapsed = time.monotonic() - start
        log.info("SGLang is ready with %s on %s, after %.0f s", model, self.url, elapsed)

    async def _answers(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
            while True:
                if self.exit_status is not None:
                    raise EngineDown(self.end())
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/health")).is_success:
                        return
                await asyncio.sleep(LOOK_SECONDS)

    def end(self) -> str:
        """A sentence with the process's exit status and its last line of output."""
        last_line = f": {self._last_line()}" if self._last_line() else ""
        status = self.exit_status
        hint = " (killed, as by the system when memory is short)" if status == KILLED else ""
        return f"the SGLang server of {self.options.model} ended with {status}{hint}{last_line}"

    def _last_line(self) -> str:
        return "" if self._output is None else self._output.error()


class LaunchedServers:
    """Servers that are started together, and restarted one by one."""

    def __init__(self, options: Sequence[LaunchOptions], start_seconds: float = 600.0) -> None:
        turn = asyncio.Lock()
        self.servers = [
            LaunchedServer(launch, start_seconds=start_seconds, turn=turn) for launch in options
        ]

    async def start(self) -> None:
        """Start all servers, and wait until they answer.

        Raises EngineDown or OSError if one does not start, after stopping the others.
        """
        try:
            await all_of(server.restart() for server in self.servers)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop all servers."""
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in self.servers))
