"""Servers that are started: options that are refused however they are written, and what is said."""

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
"""Of SGLang's own that may be given, some that begin as refused ones do."""


def options(*args: str, python: str | Path = sys.executable, **more: object) -> LaunchOptions:
    return LaunchOptions(SPRIG_FOLDER / "policy", python, args=args, **more)  # type: ignore[arg-type]


def parser() -> argparse.ArgumentParser:
    """As SGLang's, which takes abbreviations."""
    made = argparse.ArgumentParser(exit_on_error=False)
    for name in (*REFUSED, *OTHERS):
        made.add_argument(name)
    return made


@given(st.sampled_from((*REFUSED, *OTHERS)), st.integers(2, 40), st.booleans())
def test_whatever_the_parser_takes_for_a_refused_option_is_refused(
    name: str, letters: int, joined: bool
) -> None:
    """Every beginning of every option, against argparse itself."""
    given = name[:letters]
    args = (f"{given}=1",) if joined else (given, "1")
    try:
        taken = {
            f"--{key.replace('_', '-')}" for key, v in vars(parser().parse_args(args)).items() if v
        }
    except (argparse.ArgumentError, SystemExit):
        taken = set()
    if taken & set(REFUSED):
        with pytest.raises(ValueError, match=f"^{given}.*: not allowed; "):
            options(*args)
    elif taken:
        assert options(*args).args == args


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--hos", "0.0.0.0"), r"--hos \(short for --host\): not allowed; .* 127\.0\.0\.1"),
        (("--model", "X"), "--model: not allowed; the settings name the models"),
        (("--po", "1"), r"--po \(short for --port\)"),
        (("--enable-custom-logit-proc",), r"\(short for --enable-custom-logit-processor\).* code"),
        (("--tp-size", "2", "--is-emb"), "the reward format says"),
    ],
)
def test_abbreviations_that_were_taken_once(args: tuple[str, ...], said: str) -> None:
    """Each named in full, with why."""
    with pytest.raises(ValueError, match=said):
        options(*args)


def test_our_settings_do_not_reach_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither API keys nor anything else that begins with ``HEDGEROW_``; the rest does."""
    monkeypatch.setenv("HEDGEROW_API_KEYS", "oak:secret")
    monkeypatch.setenv("HEDGEROW_LAUNCH", "true")
    monkeypatch.setenv("HF_HOME", "/cache")
    given = options().environment()
    assert not [name for name in given if name.startswith("HEDGEROW_")]
    assert given["HF_HOME"] == "/cache"


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_sglangs_own_parser_has_no_other_option_that_begins_one_of_these() -> None:
    """And takes each of their beginnings for the option itself, where it takes it at all."""
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
def started(server: LaunchedServer) -> Iterator[LaunchedServer]:
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


@pytest.mark.parametrize(("code", "said"), ENDS.items())
async def test_a_server_that_ends_says_why_in_our_error(
    code: str, said: str, tmp_path: Path
) -> None:
    """Its last error, among all that it has said; the lines themselves are passed on."""
    log = tmp_path / "log"
    servers = LaunchedServers([options(python=python_that(tmp_path, code), log=log)])
    async with asyncio.timeout(60):
        with pytest.raises(EngineDown, match=f"the SGLang server of .*policy .*{said}"):
            await servers.start()
    assert servers.servers[0].process is None
    assert "-9" in said or log.read_bytes()


async def test_a_start_is_not_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What starts, for how long it is waited for, and what it last said when that is over."""
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 0.01)
    python = python_that(tmp_path, "print('loading', flush=True); import time; time.sleep(600)")
    (tmp_path / "log").touch()
    made = LaunchedServer(options(python=python, log=tmp_path / "log"))
    with started(made) as server, caplog.at_level(logging.INFO):
        while b"loading" not in (tmp_path / "log").read_bytes():
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDown, match=r"did not come up in 0\.2 s; it last said: loading"):
            await server.ready(0.2)
    assert f"SGLang starts with {SPRIG_FOLDER / 'policy'}, 0 of up to 0.2 s" in caplog.text
