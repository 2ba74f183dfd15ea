"""Custom verifiers: Python functions in processes and HTTP servers, working and failing."""

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
_STARTER = """
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
    """A verifier with these options that is closed with the block."""
    async with closing(await start_verifier(replace(VerifierOptions(name), **options))) as verifier:
        yield verifier


async def test_a_function_is_asked_about_all_at_once() -> None:
    """A function gets a batch of questions and steps and gives rounded scores; it may print."""
    async with running(f"{EXAMPLES}:length") as verifier:
        assert await verifier.verify([path("12", "1"), path("12")]) == [0.5, 0.3333]
        assert not verifier.pure
    async with running(f"{EXAMPLES}:questions") as verifier:
        batch = [path("why so"), path("why", "so", question="why")]
        assert await verifier.verify(batch) == [0.0, 1.0]
    async with running(f"{EXAMPLES}:Checks.half") as verifier:
        assert await verifier.verify([path("1")]) == [0.5]


async def test_the_bundled_one_is_pure() -> None:
    """The bundled verifier is pure; others can say so themselves or be declared so by option."""
    async with running("arithmetic") as verifier:
        assert verifier.pure
        assert await verifier.verify([path("9 / 4 = 3"), path("30 - 6 = 24")]) == [0.0, 1.0]
        bundled = verifier.fingerprint
    async with running(f"{EXAMPLES}:one") as verifier:
        assert verifier.pure
        assert verifier.fingerprint != bundled
    async with running(f"{EXAMPLES}:length", pure=True) as verifier:
        assert verifier.pure


@pytest.mark.promise(
    "A verifier that fails, in whatever way, fails that call alone, with an error that says how; "
    "the next call is answered."
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
    """A fault is its call's error; the next call is answered, by a new process if necessary."""
    async with running(f"{EXAMPLES}:odd", seconds=0.3, processes=1) as verifier:
        with pytest.raises(VerifierFailed) as failed:
            await verifier.verify([path(fault), path("well")])
        assert str(failed.value) == message
        assert isinstance(verifier, PythonVerifier)
        verifier._seconds = 30.0
        assert await verifier.verify([path("well")]) == [1.0]


async def test_a_call_that_hangs_keeps_no_other_waiting() -> None:
    """Another process answers while one hangs, also after the hanging call was cancelled."""
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
    """The error has the verifier's name and Python's message."""
    with pytest.raises(ValueError, match=f"verifier: '{name}' does not start: .*{message}"):
        await start_verifier(VerifierOptions(name))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a verifier server in a process of its own."""
    script = Path(__file__).with_name("verifier_server.py")
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/verify"
        process.kill()


async def test_a_server_is_asked_likewise(url: str) -> None:
    """A server gets one request for all; errors for clients do not name its address."""
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
    """A server's fault is its call's error, and the next call is answered."""
    async with running(url, key="s3cret", seconds=0.5) as verifier:
        with pytest.raises(VerifierFailed) as failed:
            await verifier.verify([path(fault)])
        assert str(failed.value) == message
    async with running(url, key="s3cret") as verifier:
        assert await verifier.verify([path("well")]) == [0.9]


async def test_a_server_that_is_not_there() -> None:
    """An unreachable server is reported by the kind of the error."""
    async with running("http://127.0.0.1:9/") as verifier:
        with pytest.raises(VerifierFailed, match=r"^the verifier does not answer: ConnectError$"):
            await verifier.verify([path("a")])


@pytest.mark.parametrize("answer", [{"0": 1}, [True], ["1"], [None], [[1.0]], [-0.1]])
def test_what_is_no_list_of_shares_is_refused(answer: object) -> None:
    """Any JSON but a list of numbers from 0 to 1 is refused."""
    with pytest.raises(VerifierFailed):
        must_be_scores(answer, 1)


async def test_alone_or_as_a_factor() -> None:
    """Alone, the verifier replaces the engine's rewards, which are not computed; else they are
    multiplied, and rounded as in a tree."""
    steps = ("one\n\n", "9 / 4 = 3\n\n"), ("one\n\n", "8 / 4 = 2\n\n")
    paths = [Trajectory(i, tuple(map(encode, texts)), texts) for i, texts in enumerate(steps)]
    rewards = [judge(texts) for texts in steps]
    for alone, expected in ((True, [0.0, 1.0]), (False, [0.0, round_reward(rewards[1])])):
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
    """A verifier's process ends when its input closes, even if its call hangs."""
    with subprocess.Popen(
        [sys.executable, "-c", _STARTER], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        verifier = os.pidfd_open(int(server.stdout.readline()))
        server.kill()
        assert select.select([verifier], [], [], 30)[0] == [verifier]
        os.close(verifier)
