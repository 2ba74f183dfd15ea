"""A verifier that is a Python function, run in separate processes.

So a call that hangs can be ended, a crash harms nothing else, and no call blocks the server.
Processes are started when they are needed and reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.verifiers import verifier_worker
from runtime.verifiers.verifier import (
    BUNDLED_VERIFIERS,
    Judged,
    VerifierOptions,
    fingerprint_of,
    must_be_scores,
)
from runtime.verifiers.verifier_worker import LENGTH, frame
from search.engine import VerifierFailed

START_SECONDS = 60.0
"""Most seconds for a process to import the function's module."""
END_SECONDS = 1.0
"""Most seconds for a process to exit after its input ends; native code may not notice that."""
MOST_BYTES = 1 << 24
"""Most bytes of an answer."""
_END_ERRORS = (asyncio.IncompleteReadError, ConnectionError, ValueError)
"""Errors met when a process ends during a call or gives an invalid answer."""


class VerifierProcess:
    """A process that answers one call at a time."""

    def __init__(self, process: Process, about: dict[str, Any]) -> None:
        """``about``: what the process has said about the function."""
        self.about = about
        self._process = process

    @classmethod
    async def start(cls, name: str) -> VerifierProcess:
        """Start a process for the function. Raises ValueError with why it does not start."""
        script = Path(verifier_worker.__file__)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(script), name, json.dumps(sys.path)),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for the server only
        )
        worker = cls(process, {})
        try:
            async with asyncio.timeout(START_SECONDS):
                worker.about = await worker._receive()
        except (TimeoutError, *_END_ERRORS) as error:
            await worker.end()
            why = f"not there after {START_SECONDS:g} s" if isinstance(error, TimeoutError) else ""
            raise ValueError(why or "its process ended") from None
        except BaseException:
            await worker.end()
            raise
        if "error" in worker.about:
            await worker.end()
            raise ValueError(worker.about["error"])
        return worker

    async def ask(self, batch: Sequence[Judged]) -> Any:
        """The process's answer. Raises one of ``_END_ERRORS`` if the process ends."""
        assert self._process.stdin is not None, "started with its input in a pipe"
        self._process.stdin.write(frame(batch))
        await self._process.stdin.drain()
        return await self._receive()

    async def end(self) -> int:
        """End the process if it still runs; returns its exit status.

        It exits when its input ends. Killing it at once would lose its own status.
        """
        assert self._process.stdin is not None, "started with its input in a pipe"
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                return await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return await self._process.wait()

    async def _receive(self) -> Any:
        assert self._process.stdout is not None, "started with its output in a pipe"
        size = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))[0]
        if size > MOST_BYTES:
            raise ValueError(f"{size} bytes; at most {MOST_BYTES} are read")
        return json.loads(await self._process.stdout.readexactly(size))


class PythonVerifier:
    """A function that runs in up to ``options.processes`` processes at once."""

    def __init__(self, options: VerifierOptions, first: VerifierProcess) -> None:
        self.pure = options.pure or first.about["pure"]
        self.fingerprint = fingerprint_of(options.name, str(self.pure), first.about["source"])
        self._name = _function(options)
        self._seconds = options.seconds
        self._places = asyncio.Semaphore(options.processes)
        self._idle = [first]
        self._calls: set[asyncio.Task[list[float]]] = set()

    @classmethod
    async def start(cls, options: VerifierOptions) -> PythonVerifier:
        """Start the first process. Raises ValueError naming what is wrong with the function."""
        try:
            first = await VerifierProcess.start(_function(options))
        except ValueError as error:
            raise ValueError(f"verifier: {options.name!r} does not start: {error}") from None
        return cls(options, first)

    async def verify(self, batch: Sequence[Judged]) -> list[float]:
        """A number in [0, 1] for each, rounded. Raises VerifierFailed.

        The time limit is for the call itself: waiting for a process does not count. If the caller
        is cancelled, the call still runs to its end, so that its process can be used again.
        """
        call = asyncio.create_task(self._call(batch))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(_retrieve)
        return await asyncio.shield(call)

    async def close(self) -> None:
        """End all processes, and the calls under way."""
        for call in tuple(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        while self._idle:
            await self._idle.pop().end()

    async def _call(self, batch: Sequence[Judged]) -> list[float]:
        async with self._places:
            process = self._idle.pop() if self._idle else await self._another()
            try:
                async with asyncio.timeout(self._seconds):
                    answer = await process.ask(batch)
            except TimeoutError:
                await process.end()
                raise VerifierFailed(
                    f"the verifier gave no answer within {self._seconds:g} s"
                ) from None
            except _END_ERRORS:
                status = await process.end()
                raise VerifierFailed(f"the verifier's process ended with {status}") from None
            except BaseException:
                await process.end()
                raise
            self._idle.append(process)
        if "error" in answer:
            raise VerifierFailed(f"the verifier raised {answer['error']}")
        return must_be_scores(answer["scores"], len(batch))

    async def _another(self) -> VerifierProcess:
        try:
            return await VerifierProcess.start(self._name)
        except (ValueError, OSError) as error:
            raise VerifierFailed(f"the verifier does not start again: {error}") from None


def _function(options: VerifierOptions) -> str:
    return BUNDLED_VERIFIERS.get(options.name, options.name)


def _retrieve(call: asyncio.Task[list[float]]) -> None:
    """Retrieve a call's error, so that asyncio does not log one that nobody waits for."""
    if not call.cancelled():
        call.exception()
