"""What a router before two SGLang servers keeps together: hits through it beside hits directly.

Two real servers of the bundled policy on this machine's CPU, and SMG (the SGLang model gateway,
which ``make smg-env`` installs) before them with each of its ways to choose a server. The same
searches, several at once, from empty caches each time; a row is one way.

- ``hits``: of the tokens that searches had read before, the share that was cached; ``of_direct``:
  over the share where Hedgerow itself keeps searches on servers.
- ``warned``: Hedgerow has said that the router does not keep trees together; ``different``:
  searches whose steps differ from the direct ones.

    python -m loadtest.sglang_router [--policies manual cache_aware round_robin] [--json]
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtest.on_sglang import engine_on, forget, policy_server, started, to_its_end
from loadtest.options import BenchmarkParser
from loadtest.report import publish, say
from loadtest.searches import REBASE_8, Item, Method, grow_all, items_of, steps_of
from runtime.sglang.launched_server import HOST, LaunchedServer, free_port
from search.outcome import Outcome

SMG = Path(".venv-smg/bin/smg")
DIRECT = "direct"
POLICIES = ("manual", "cache_aware", "round_robin")
KEYS = ("policy", "searches", "expected_tokens", "hits", "of_direct", "warned", "different")
POOL_TOKENS = 20_000
SEARCHES = 8
METHOD = Method("one", REBASE_8)
READY_SECONDS = 120.0


class Warnings(logging.Handler):
    """Notes whether Hedgerow has warned of a router."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warned = False

    def emit(self, record: logging.LogRecord) -> None:
        """Note whether a line of the log is the warning."""
        self.warned |= "does it heed the header" in record.getMessage()


@asynccontextmanager
async def smg(program: Path, policy: str, workers: Sequence[LaunchedServer]) -> AsyncIterator[str]:
    """Run SMG before running servers; yield its URL once it has found them."""
    port, metrics = free_port(), free_port()
    command = [
        *(str(program), "launch", "--host", HOST, "--port", str(port), "--policy", policy),
        *("--prometheus-host", HOST, "--prometheus-port", str(metrics), "--log-level", "warn"),
        *("--worker-urls", *(worker.url for worker in workers)),
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    url = f"http://{HOST}:{port}"
    try:
        async with asyncio.timeout(READY_SECONDS), httpx.AsyncClient(trust_env=False) as client:
            while not await _workers_ready(client, url, len(workers)):
                if process.returncode is not None:
                    raise RuntimeError(f"{program} ended with status {process.returncode}")
                await asyncio.sleep(0.2)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _workers_ready(client: httpx.AsyncClient, url: str, workers: int) -> bool:
    """Whether the router has this number of healthy servers."""
    try:
        reply = (await client.get(f"{url}/workers")).raise_for_status().json()
    except httpx.HTTPError:
        return False
    return sum(bool(worker.get("is_healthy")) for worker in reply["workers"]) == workers


@dataclass(frozen=True, slots=True)
class Run:
    """The searches of one way, and what was cached of what they had read before."""

    outcomes: list[Outcome]
    expected: int
    hits: float
    warned: bool


async def run_on(servers: Sequence[LaunchedServer], items: Sequence[Item], **how: Any) -> Run:
    """Run all searches at once from empty caches; ``how``: SglangOptions."""
    await forget(servers)
    warnings, log = Warnings(), logging.getLogger("runtime.servers.routing")
    log.addHandler(warnings)
    try:
        async with engine_on(servers, [], **how) as engine:
            outcomes = await grow_all(engine, items, METHOD, len(items))
            totals = (await engine.usage()).totals
    finally:
        log.removeHandler(warnings)
    hits = 1 - totals.rehydrated_tokens / max(1, totals.expected_tokens)
    return Run(outcomes, totals.expected_tokens, hits, warnings.warned)


def row(policy: str, run: Run, direct: Run) -> dict[str, Any]:
    """A way's row, compared with the direct one."""
    pairs = zip(run.outcomes, direct.outcomes, strict=True)
    return {
        "policy": policy,
        "searches": len(run.outcomes),
        "expected_tokens": run.expected,
        "hits": run.hits,
        "of_direct": run.hits / max(1e-9, direct.hits),
        "warned": run.warned,
        "different": sum(steps_of(ours) != steps_of(theirs) for ours, theirs in pairs),
    }


async def measure(
    python: Path, program: Path, policies: Sequence[str], searches: int
) -> list[dict[str, Any]]:
    """Run the searches directly, and through a router with each of ``policies``."""
    workers = [policy_server(python, "arborkv", POOL_TOKENS) for _ in range(2)]
    items = items_of("game24", "dev", searches, seed=0)
    async with started(workers):
        direct = await run_on(workers, items)
        rows = [row(DIRECT, direct, direct)]
        for policy in policies:
            async with smg(program, policy, workers) as url:
                run = await run_on(workers, items, policy_urls=(url,), routing="smg")
            rows.append(row(policy, run, direct))
            say(f"{policy}: {run.hits:.3f} of {run.expected} tokens, direct {direct.hits:.3f}")
    return rows


def main() -> None:
    """Measure, and print a table or a JSON document with ``rows``."""
    parser = BenchmarkParser("sglang_router", __doc__, "searches", "python")
    parser.set_defaults(searches=SEARCHES)
    parser.add_argument("--smg", type=Path, default=SMG)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    options = parser.parse_args()
    work = measure(options.python, options.smg, options.policies, options.searches)
    publish({"rows": to_its_end(work)}, options.json, "SGLang behind a router", KEYS)


if __name__ == "__main__":
    main()
