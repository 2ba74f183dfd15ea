"""What a command's arguments stand for; a wrong one ends the command with one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cli.command_options import TaskSplit
from cli.exit_codes import WRONG_USE, fail
from search.spec import SearchSpec
from server.settings import Settings, SettingsError, load_settings
from server.tree_log import TreeLog


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Those of the environment; the command line wins."""
    try:
        return load_settings(**given)
    except SettingsError as error:
        fail(str(error), WRONG_USE)


def task_of(name: str, split: TaskSplit, limit: int, seed: int) -> tuple[Any, list[str]]:
    """A task by name with a split's questions, or one's own from a file."""
    from cli.custom_dataset import SUFFIX, DatasetError, read_dataset
    from models.tasks import TASKS

    if name in TASKS:
        return TASKS[name], TASKS[name].questions(split.value, limit, seed)
    if not name.endswith(SUFFIX):
        fail(f"--task {name}: known are {', '.join(TASKS)}, or a file {SUFFIX}", WRONG_USE)
    try:
        own = read_dataset(Path(name))
    except DatasetError as error:
        fail(f"--task {error}", WRONG_USE)
    return own, own.questions(limit)


def specs_of(
    policies: str, widths: str, seeds: str, fields: list[str] | None
) -> tuple[list[SearchSpec], list[int]]:
    """A search for every policy and width, and the seeds."""
    numbers = [_number("seed", part) for part in parts(seeds)]
    wide = [_number("width", part) for part in parts(widths)]
    if not (numbers and wide and parts(policies)):
        fail("--policy, --width, --seed: each needs at least one value", WRONG_USE)
    specs = [spec_of(p, w, numbers[0], fields) for p in parts(policies) for w in wide]
    return specs, list(dict.fromkeys(numbers))


def spec_of(policy: str, width: int, seed: int | None, fields: list[str] | None) -> SearchSpec:
    """The search that is asked for; ``fields`` are its other fields, as ``--set`` takes them."""
    own = {"policy": policy, "width": width, "seed": seed}
    try:
        return SearchSpec.model_validate(dict(_field(text) for text in fields or ()) | own)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        said = first["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
        switch = f"--{name} " if name in own else f"--set {name}="
        fail(f"{switch}{first['input']}: {said}", WRONG_USE)


def _field(text: str) -> tuple[str, Any]:
    """``name=value`` of ``--set``; the value is JSON, or else a string."""
    name, _, value = text.partition("=")
    free = [field for field in SearchSpec.model_fields if field not in ("policy", "width", "seed")]
    if name not in free:
        fail(f"--set {text}: must be name=value with one of {', '.join(free)}", WRONG_USE)
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def tree_log_at(path: Path | None) -> TreeLog:
    """The file of ``--trees``, open."""
    try:
        return TreeLog(path)
    except OSError as error:
        fail(f"--trees {path}: {error.strerror}", WRONG_USE)


def check_plot(path: Path) -> None:
    """Whether a plot can be written there: before hours of work, not after."""
    from cli.accuracy_plot import check_path

    try:
        check_path(path)
    except ValueError as error:
        fail(f"--plot {error}", WRONG_USE)


def parts(text: str) -> list[str]:
    """What stands between commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _number(flag: str, text: str) -> int:
    if not text.isdecimal():
        fail(f"--{flag} {text}: must be whole numbers, separated by commas", WRONG_USE)
    return int(text)
