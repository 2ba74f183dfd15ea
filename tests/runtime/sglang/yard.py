"""Real SGLang servers of the bundled models, on the CPU, two at most at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from runtime.sglang.launch import Server, ServerOptions, Servers
from server.settings import BUNDLED

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
MODELS = {
    "policy": BUNDLED / "policy",
    "another policy": BUNDLED / "policy",
    "reward": BUNDLED / "prm",
}
KV_TOKENS = 20_000
MEMORY = 0.5
"""SGLang counts what others take of this machine meanwhile as its own; KV_TOKENS bounds the KV."""
START_SECONDS = 1200.0


class Yard:
    """Servers by name, started when they are asked for; those that are not asked for go.

    ``policy`` has our plug-in at work, the others are as SGLang makes them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: dict[str, Servers] = {}

    async def have(self, *names: str) -> list[Server]:
        """These servers, ready."""
        for name in set(self._all) - set(names):
            await self._all.pop(name).close()
        fresh = {name: self._new(name) for name in names if name not in self._all}
        self._all |= fresh
        await asyncio.gather(*(servers.start() for servers in fresh.values()))
        for name in set(names) - set(fresh):
            await self._all[name].restart()
        return [self._all[name].servers[0] for name in names]

    def supervised(self, name: str) -> Servers:
        """What looks after a server."""
        return self._all[name]

    def close(self) -> None:
        """End them all."""
        for servers in self._all.values():
            for server in servers.servers:
                server.stop()

    def _new(self, name: str) -> Servers:
        options = ServerOptions(
            model=MODELS[name],
            python=PYTHON,
            device="cpu",
            memory=MEMORY,
            kv_tokens=KV_TOKENS,
            args=("--random-seed", "1"),
            seeds=name == "policy",
            evicts=name == "policy",
            log=self._folder / f"{name}.log",
        )
        return Servers([options], START_SECONDS)
