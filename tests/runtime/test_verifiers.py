"""Verifiers of one's own: Python functions in processes, servers behind HTTP, well and unwell."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.verified_engine import VerifiedEngine, start_verifier
from runtime.verifiers.python_verifier import PythonVerifier
from runtime.verifiers.verifier import Judged, Verifier, VerifierOptions, must_be_scores
from search.engine import Trajectory, VerifierFailed
from search.tree import round_reward
from tests.closing import closing
from tests.search.scripted_engine import ScriptedEngine, encode, judge

EXAMPLES = "tests.runtime.verifier_examples"
_STARTS_ONE = """
import asyncio
from runtime.verifiers.python_verifier import PythonVerifier
from runtime.verifiers.verifier import VerifierOptions

async def main():
    options = VerifierOptions("tests.runtime.verifier_examples:odd", seconds=600.0)
    verifier = await PythonVerifier.start(options)
    print(verifier._idle[0]._process.pid, flush=True)
    await verifier.verify([{"question": "?", "steps": ["hang"]}])

asyncio.run(main())
"""


def path(*steps: str, question: str = "?") -> Judged:
    """A path of these steps."""
    return {"question": question, "steps": list(steps)}


@asynccontextmanager
async def running(name: str, **options: float) -> AsyncIterator[Verifier]:
    """A verifier that is ended."""
    async with closing(await start_verifier(replace(VerifierOptions(name), **options))) as verifier:
        yield verifier


async def test_a_function_is_asked_about_all_at_once() -> None:
    """Questions and steps go in, a number each comes out, rounded; what it prints is no answer."""
    async with running(f"{EXAMPLES}:length") as verifier:
        assert await verifier.verify([path("12", "1"), path("12")]) == [0.5, 0.3333]
        assert not verifier.pure
    async with running(f"{EXAMPLES}:questions") as verifier:
        told = [path("why so"), path("why", "so", question="why")]
        assert await verifier.verify(told) == [0.0, 1.0]
    async with running(f"{EXAMPLES}:Checks.half") as verifier:
        assert await verifier.verify([path("1")]) == [0.5]


async def test_the_bundled_one_is_pure() -> None:
    """As any may declare itself, or its operator for it."""
    async with running("arithmetic") as verifier:
        assert verifier.pure
        assert await verifier.verify([path("9 / 4 = 3"), path("30 - 6 = 24")]) == [0.0, 1.0]
        own = verifier.fingerprint
    async with running(f"{EXAMPLES}:one") as verifier:
        assert verifier.pure
        assert verifier.fingerprint != own
    async with running(f"{EXAMPLES}:length", pure=True) as verifier:
        assert verifier.pure


@pytest.mark.promise(
    "A verifier's fault is its own search's error, counted; others go on, however it fails"
)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "the verifier raised LookupError"),
        ("nan", "the verifier gave nan; numbers from 0 to 1 are needed"),
        ("short", "the verifier gave 1 numbers for 2 steps"),
        ("large", "the verifier gave 1.5; numbers from 0 to 1 are needed"),
        ("none", "the verifier raised TypeError"),
        ("words", "the verifier raised ValueError"),
        ("exit", "the verifier's process ended with 3"),
        ("hang", "the verifier gave no answer within 0.3 s"),
    ],
)
async def test_a_fault_is_that_calls_error(fault: str, message: str) -> None:
    """Said in one sentence; the next call is answered, by a new process if need be."""
    async with running(f"{EXAMPLES}:odd", seconds=0.3, processes=1) as verifier:
        with pytest.raises(VerifierFailed) as failed:
            await verifier.verify([path(fault), path("well")])
        assert str(failed.value) == message
        assert isinstance(verifier, PythonVerifier)
        verifier._seconds = 30.0
        assert await verifier.verify([path("well")]) == [1.0]


async def test_a_call_that_hangs_keeps_no_other_waiting() -> None:
    """There is a second process; and who gives up leaves the hanging one to its time limit."""
    async with running(f"{EXAMPLES}:odd", seconds=600, processes=2) as verifier:
        hanging = asyncio.create_task(verifier.verify([path("hang")]))
        assert await verifier.verify([path("well")]) == [1.0]
        assert not hanging.done()
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert await verifier.verify([path("well")]) == [1.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:verify", "ModuleNotFoundError: No module named 'nowhere'"),
        (f"{EXAMPLES}:missing", "has no attribute 'missing'"),
        ("math:pi", "TypeError: pi is no function"),
    ],
)
async def test_what_cannot_be_loaded_is_said_at_the_start(name: str, message: str) -> None:
    """With its name and what Python says of it."""
    with pytest.raises(ValueError, match=f"verifier: '{name}' does not start: .*{message}"):
        await start_verifier(VerifierOptions(name))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A verifier's server, a process of its own."""
    script = Path(__file__).with_name("verifier_server.py")
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/verify"
        process.kill()


async def test_a_server_is_asked_likewise(url: str) -> None:
    """By one request; what a client is told of it is not its address."""
    async with running(url, key="s3cret") as verifier:
        assert await verifier.verify([path("a"), path("a", "b")]) == [0.9, 0.8]
        assert not verifier.pure
    async with running(url) as verifier:
        with pytest.raises(VerifierFailed, match=r"^the verifier answered with status 401$"):
            await verifier.verify([path("a")])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("status", "the verifier answered with status 503"),
        ("text", "the verifier answered with no JSON"),
        ("shape", "the verifier answered without scores"),
        ("hang", "the verifier gave no answer within 0.5 s"),
        ("drip", "the verifier gave no answer within 0.5 s"),
        ("huge", "the verifier's answer has more than 1048576 bytes"),
    ],
)
async def test_a_servers_fault_is_that_calls_error(url: str, fault: str, message: str) -> None:
    """However it fails; the next call is answered."""
    async with running(url, key="s3cret", seconds=0.5) as verifier:
        with pytest.raises(VerifierFailed) as failed:
            await verifier.verify([path(fault)])
        assert str(failed.value) == message
    async with running(url, key="s3cret") as verifier:
        assert await verifier.verify([path("well")]) == [0.9]


async def test_a_server_that_is_not_there() -> None:
    """Is told by the kind of the error."""
    async with running("http://127.0.0.1:9/") as verifier:
        with pytest.raises(VerifierFailed, match=r"^the verifier does not answer: ConnectError$"):
            await verifier.verify([path("a")])


@pytest.mark.parametrize("answer", [{"0": 1}, [True], ["1"], [None], [[1.0]], [-0.1]])
def test_what_is_no_list_of_shares_is_refused(answer: object) -> None:
    """Whatever JSON may hold."""
    with pytest.raises(VerifierFailed):
        must_be_scores(answer, 1)


async def test_alone_or_as_a_factor() -> None:
    """Alone the engine's own rewards are not asked for; else they are multiplied, and rounded as a
    tree would hold them."""
    steps = ("one\n\n", "9 / 4 = 3\n\n"), ("one\n\n", "8 / 4 = 2\n\n")
    paths = [Trajectory(i, tuple(map(encode, texts)), texts) for i, texts in enumerate(steps)]
    own = [judge(texts) for texts in steps]
    for alone, expected in ((True, [0.0, 1.0]), (False, [0.0, round_reward(own[1])])):
        scripted = ScriptedEngine()
        async with closing(
            VerifiedEngine(
                scripted, await start_verifier(VerifierOptions("arithmetic")), alone=alone
            )
        ) as engine:
            assert await engine.score("oak", (1,), "?", paths) == expected
            able, usage = engine.capabilities, await engine.usage()
        assert len(scripted.scored) == (0 if alone else 1)
        assert scripted.closed
        assert (able.exact, able.reproducible) == (True, "exact")
        assert able.fingerprint.startswith("scripted-1/verifier-")
        assert (usage.totals.verifier_calls, usage.totals.verifier_failures) == (1, 0)


def test_a_server_that_is_killed_leaves_no_process() -> None:
    """Not even one whose call hangs: it ends with its input."""
    with subprocess.Popen(
        [sys.executable, "-c", _STARTS_ONE], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        verifier = os.pidfd_open(int(server.stdout.readline()))
        server.kill()
        assert select.select([verifier], [], [], 30)[0] == [verifier]
        os.close(verifier)
