"""Run a Dockerfile's steps in a folder, without a container engine.

A stage's root is a folder: absolute paths below ``IMAGE_PATHS`` are moved there. This cannot show
what the base image brings, its packages (``apt-get`` is skipped) and what root, users and
namespaces do.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

IMAGE_PATHS = ("/opt/hedgerow", "/src")
SKIPPED = {"USER", "EXPOSE", "STOPSIGNAL", "ARG", "FROM"}


@dataclass
class Stage:
    """One build stage: its instructions and, once it has run, its environment and command."""

    name: str
    steps: list[tuple[str, str]]
    root: Path = Path()
    args: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    start: list[str] = field(default_factory=list)
    probe: list[str] = field(default_factory=list)


def stages_of(dockerfile: Path) -> dict[str, Stage]:
    """The stages by name, without comments and with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.M).replace("\\\n", " ")
    stages: dict[str, Stage] = {}
    steps: list[tuple[str, str]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            name = rest.split(" AS ")[1]
            stages[name] = Stage(name, steps := [])
        steps.append((word, rest.strip()))
    return stages


class Builder:
    """Run stages one after the other below ``folder``."""

    def __init__(self, context: Path, folder: Path, before_run: Callable[[Stage], None]) -> None:
        """``before_run`` is called with the stage before each of its RUN steps."""
        self._context = context
        self._folder = folder
        self._before_run = before_run
        self._allowed = (context / ".dockerignore").read_text().splitlines()
        self._stages: dict[str, Stage] = {}

    def run(self, stage: Stage) -> Stage:
        """Run all steps of a stage; a step that fails raises CalledProcessError."""
        stage.root = self._folder / stage.name
        stage.root.mkdir()
        for word, rest in stage.steps:
            if word == "ARG":
                name, _, default = rest.partition("=")
                stage.args[name] = os.environ.get(name, default)
            if word not in SKIPPED:
                getattr(self, f"_{word.lower()}")(stage, rest)
        self._stages[stage.name] = stage
        return stage

    def relocate(self, stage: Stage, text: str) -> str:
        """The text with the image's own paths moved below the stage's root."""
        for path in IMAGE_PATHS:
            text = re.sub(rf"(?<![\w/]){path}\b", f"{stage.root}{path}", text)
        return text

    def environment(self, stage: Stage) -> dict[str, str]:
        """The stage's environment variables, on top of those that a base image has."""
        python = str(Path(sys.executable).parent)
        base = {"PATH": f"{python}:{os.environ['PATH']}", "HOME": str(self._folder)}
        passed = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_", "HTTP"))}
        return passed | base | stage.args | stage.env

    def _env(self, stage: Stage, rest: str) -> None:
        variables = self.environment(stage)
        for item in shlex.split(rest):
            name, _, value = item.partition("=")
            value = re.sub(r"\$(\w+)", lambda match: variables[match[1]], value)
            stage.env[name] = self.relocate(stage, value) if name != "HOME" else variables["HOME"]

    def _workdir(self, stage: Stage, rest: str) -> None:
        stage.workdir = (
            self.relocate(stage, rest) if rest.startswith(IMAGE_PATHS) else str(self._folder)
        )
        Path(stage.workdir).mkdir(parents=True, exist_ok=True)

    def _copy(self, stage: Stage, rest: str) -> None:
        *sources, target = rest.split()
        origin = None
        if sources[0].startswith("--from="):
            origin = self._stages[sources.pop(0).partition("=")[2]]
        for source in sources:
            if origin is None:
                assert f"!{source}" in self._allowed, f".dockerignore keeps {source} out"
                at = self._context / source
                into = Path(stage.workdir) / target
                into = into if source.endswith("/") else into / source
            else:
                at = Path(self.relocate(origin, source))
                into = Path(self.relocate(stage, target))
            into.parent.mkdir(parents=True, exist_ok=True)
            if at.is_dir() and origin is not None:
                into.symlink_to(at)  # a virtual environment's scripts hold its absolute path
            elif at.is_dir():
                shutil.copytree(at, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(at, into)

    def _run(self, stage: Stage, rest: str) -> None:
        if rest.startswith("apt-get"):
            return
        self._before_run(stage)
        command = self.relocate(stage, rest)
        subprocess.run(
            ["/bin/sh", "-c", command], cwd=stage.workdir, env=self.environment(stage), check=True
        )

    def _healthcheck(self, stage: Stage, rest: str) -> None:
        stage.probe = json.loads(rest.partition(" CMD ")[2])

    def _entrypoint(self, stage: Stage, rest: str) -> None:
        stage.start = json.loads(rest)

    def _cmd(self, stage: Stage, rest: str) -> None:
        stage.start = [*stage.start, *json.loads(rest)]
