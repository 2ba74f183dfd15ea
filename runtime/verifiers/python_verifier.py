"""A verifier that is a Python function, run in processes of its own.

So a call that hangs is ended, one that crashes takes nothing along, and none holds the server up,
whatever it computes. Processes are started when they are needed and kept.
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
"""For a process to have imported the function's module."""
END_SECONDS = 1.0
"""For a process whose input has ended; one that computes outside of Python may not notice."""
MOST_BYTES = 1 << 24
"""Of an answer."""
_END_ERRORS = (asyncio.IncompleteReadError, ConnectionError, ValueError)
"""What is met at a process that ends meanwhile, or says what is no answer."""


class VerifierProcess:
    """One process, asked one thing at a time."""

    def __init__(self, process: Process, about: dict[str, Any]) -> None:
        """``about``: what it has told of the function."""
        self.about = about
        self._process = process

    @classmethod
    async def start(cls, name: str) -> VerifierProcess:
        """Raises ValueError with why it does not start."""
        script = Path(verifier_worker.__file__)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(script), name, json.dumps(sys.path)),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is the server's to hear
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
        """Its answer. Raises one of ``_ENDED`` if the process ends."""
        assert self._process.stdin is not None, "started with its input in a pipe"
        self._process.stdin.write(frame(batch))
        await self._process.stdin.drain()
        return await self._receive()

    async def end(self) -> int:
        """How it ended; it is ended now if it was not.

        It ends with its input. Killed while it does, how it ended would be lost.
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
    """The function behind a number of processes."""

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
        """Raises ValueError naming what is wrong with the function."""
        try:
            first = await VerifierProcess.start(_function(options))
        except ValueError as error:
            raise ValueError(f"verifier: {options.name!r} does not start: {error}") from None
        return cls(options, first)

    async def verify(self, batch: Sequence[Judged]) -> list[float]:
        """A number in [0, 1] for each, rounded. Raises VerifierFailed.

        The time limit is that of the call itself: waiting for a process does not count. Who leaves
        meanwhile leaves the call to its end, so that the process can be asked again.
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
    """An error that nobody waits for any more is no news."""
    if not call.cancelled():
        call.exception()
