"""Launched servers: options refused in any spelling, their environment, and their messages."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.hostile.killed_starts import python_that
from models.bundled import SPRIG_FOLDER
from runtime.servers import waiting
from runtime.sglang.launched_server import (
    REFUSED,
    STUBS,
    LaunchedServer,
    LaunchedServers,
    LaunchOptions,
)
from search.engine import EngineDown
from tests.runtime.sglang.support import PYTHON

OTHERS = ("--model-impl", "--context-length", "--tp-size", "--hicache-ratio", "--enable-metrics")
"""Allowed SGLang options, some of which share a beginning with refused ones."""


def options(*args: str, python: str | Path = sys.executable, **more: object) -> LaunchOptions:
    return LaunchOptions(SPRIG_FOLDER / "policy", python, args=args, **more)  # type: ignore[arg-type]


def parser() -> argparse.ArgumentParser:
    """A parser that takes abbreviations, like SGLang's."""
    argument_parser = argparse.ArgumentParser(exit_on_error=False)
    for name in (*REFUSED, *OTHERS):
        argument_parser.add_argument(name)
    return argument_parser


@given(st.sampled_from((*REFUSED, *OTHERS)), st.integers(2, 40), st.booleans())
def test_whatever_the_parser_takes_for_a_refused_option_is_refused(
    name: str, letters: int, joined: bool
) -> None:
    """Any prefix that argparse takes for a refused option is refused."""
    spelling = name[:letters]
    args = (f"{spelling}=1",) if joined else (spelling, "1")
    try:
        names = {
            f"--{key.replace('_', '-')}" for key, v in vars(parser().parse_args(args)).items() if v
        }
    except (argparse.ArgumentError, SystemExit):
        names = set()
    if names & set(REFUSED):
        with pytest.raises(ValueError, match=f"^{spelling}.*: not allowed; "):
            options(*args)
    elif names:
        assert options(*args).args == args


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--hos", "0.0.0.0"), r"--hos \(short for --host\): not allowed; .* 127\.0\.0\.1"),
        (("--model", "X"), "--model: not allowed; the settings name the models"),
        (("--po", "1"), r"--po \(short for --port\)"),
        (("--enable-custom-logit-proc",), r"\(short for --enable-custom-logit-processor\).* code"),
        (("--tp-size", "2", "--is-emb"), "the reward format says"),
    ],
)
def test_abbreviations_that_were_taken_once(args: tuple[str, ...], message: str) -> None:
    """The error names the full option and the reason."""
    with pytest.raises(ValueError, match=message):
        options(*args)


def test_our_settings_do_not_reach_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ``HEDGEROW_`` variable reaches the server's process; other variables do."""
    monkeypatch.setenv("HEDGEROW_API_KEYS", "oak:secret")
    monkeypatch.setenv("HEDGEROW_LAUNCH", "true")
    monkeypatch.setenv("HF_HOME", "/cache")
    environment = options().environment()
    assert not [name for name in environment if name.startswith("HEDGEROW_")]
    assert environment["HF_HOME"] == "/cache"


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_sglangs_own_parser_has_no_other_option_that_begins_one_of_these() -> None:
    """No other option of SGLang's is a prefix of a refused one."""
    code = (
        "import argparse, json\nfrom sglang.srt.server_args import ServerArgs\n"
        "p = argparse.ArgumentParser()\nServerArgs.add_cli_args(p)\n"
        "print(json.dumps(sorted(p._option_string_actions)))"
    )
    ran = subprocess.run(
        [PYTHON, "-c", code],
        env={"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STUBS), "HOME": "/tmp"},
        capture_output=True,
        check=True,
    )
    names = json.loads(ran.stdout.splitlines()[-1])
    assert set(REFUSED) <= set(names)
    shorter = {name for name in names for refused in REFUSED if refused.startswith(name)}
    assert shorter == set(REFUSED)


@contextlib.contextmanager
def running_server(server: LaunchedServer) -> Iterator[LaunchedServer]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


ENDS = {
    "raise ModuleNotFoundError(\"No module named 'torchvision'\")": "No module named 'torchvision'",
    "import argparse; argparse.ArgumentParser().parse_args(['--x'])": "error: unrecognized.*--x",
    "print('first', flush=True); print('no room'); raise SystemExit(3)": "ended with 3: no room",
    "import os; os.kill(os.getpid(), 9)": r"ended with -9 \(killed, as by the system",
}


@pytest.mark.parametrize(("code", "message"), ENDS.items())
async def test_a_server_that_ends_says_why_in_our_error(
    code: str, message: str, tmp_path: Path
) -> None:
    """The error has the last error line of the server's output; the output itself is logged."""
    log = tmp_path / "log"
    servers = LaunchedServers([options(python=python_that(tmp_path, code), log=log)])
    async with asyncio.timeout(60):
        with pytest.raises(EngineDown, match=f"the SGLang server of .*policy .*{message}"):
            await servers.start()
    assert servers.servers[0].process is None
    assert "-9" in message or log.read_bytes()


@pytest.mark.slow
async def test_a_start_is_not_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start is logged with its time limit; the time-out names the server's last line."""
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 0.01)
    python = python_that(tmp_path, "print('loading', flush=True); import time; time.sleep(600)")
    (tmp_path / "log").touch()
    launched = LaunchedServer(options(python=python, log=tmp_path / "log"))
    with running_server(launched) as server, caplog.at_level(logging.INFO):
        while b"loading" not in (tmp_path / "log").read_bytes():
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDown, match=r"did not come up in 0\.2 s; it last said: loading"):
            await server.ready(0.2)
    assert f"SGLang starts with {SPRIG_FOLDER / 'policy'}, 0 of up to 0.2 s" in caplog.text
