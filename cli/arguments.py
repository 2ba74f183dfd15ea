"""The commands' arguments and exit codes: shared options, and every setting as an option.

A wrong argument ends the command with one line.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from search.engine import EngineError
from search.spec import AUTO_POLICY, PolicyName, RequestedSearch, SearchSpec
from server.settings import ModelSettings, Settings, SettingsError, load_settings, option
from server.tree_log import TreeLog

T = TypeVar("T")

FAILED = 1
WRONG_USE = 2
INTERRUPTED = 130


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; end the command with one line for foreseen errors."""
    from cli.solve import ClientError

    try:
        return asyncio.run(work)
    except (SettingsError, EngineError, ClientError) as error:
        fail(str(error), FAILED)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def fail(message: str, code: int) -> NoReturn:
    """End the command with one line on stderr and an exit code."""
    typer.echo(f"hedgerow: {message}", err=True)
    raise typer.Exit(code)


def tell(line: str) -> None:
    """Print a line to stderr, beside a command's results on stdout."""
    typer.echo(f"hedgerow: {line}", err=True)


@contextmanager
def exit_on(kinds: type[Exception] | tuple[type[Exception], ...], flag: str = "") -> Iterator[None]:
    """End the command with WRONG_USE for exceptions of ``kinds``; ``flag`` begins the message."""
    try:
        yield
    except kinds as error:
        fail(f"{flag}{error}", WRONG_USE)


Switch = Literal["on", "off"]
Returns = Literal["reward", "checker"]
"""The return of a finished trajectory: its last reward, or 1 or 0 by its task's checker."""
TaskSplit = Literal["train", "dev", "test"]
Trees = Annotated[Path | None, typer.Option(help="Append every tree to this file, one per line.")]
Json = Annotated[bool, typer.Option("--json", help="Print only one JSON document to stdout.")]
Url = Annotated[
    str | None,
    typer.Option(
        help="Use the server at this URL, with the key in HEDGEROW_API_KEY if set, instead of "
        "starting an engine."
    ),
]
Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Policy model: Hugging Face name, folder or bundled name; as --model.",
    ),
]
Policy = Annotated[
    str,
    typer.Option(help=f"Search policy: {', '.join((*get_args(PolicyName), AUTO_POLICY))}."),
]
PoliciesToTry = Annotated[
    str | None,
    typer.Option(
        help="Policies, separated by commas; default: self_consistency, best_of_n, adaptive, "
        "rebase, dora, ets, particle_filter, dvts, beam."
    ),
]
VotesToTry = Annotated[
    str | None,
    typer.Option(
        help="Votes, separated by commas; default: weighted_majority, majority, lineages, "
        "best_last."
    ),
]
Width = Annotated[
    int | None,
    typer.Option(help="Number of trajectories to finish; default: 16, or as tuned for auto."),
]
Widths = Annotated[
    str | None,
    typer.Option(help="Widths, separated by commas; default: 16, or as tuned for auto."),
]
GpuPeaks = Annotated[
    tuple[float, float, float] | None,
    typer.Option(
        help="Plan for SGLang on a GPU: three numbers, separated by spaces: its bfloat16 TFLOP/s, "
        "GB/s and GB."
    ),
]
SearchFields = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set another search field, as name=value; may be repeated."),
]
Seed = Annotated[int | None, typer.Option(help="Random seed; drawn at random if not set.")]


def setting_options(fields: Mapping[str, FieldInfo]) -> list[Any]:
    """Make command-line options of settings, with choices, switches, lists and help texts."""
    kinds = {name: _option(name, declaration) for name, declaration in fields.items()}
    options = [
        (name, kind, field(default=None)) for name, kind in kinds.items() if kind is not None
    ]
    template = typer.Typer(add_completion=False)
    template.command()(make_dataclass("SettingOptions", options))
    return [param for param in typer.main.get_command(template).params if param.name in kinds]


def _option(name: str, field: FieldInfo) -> Any:
    """The option's annotated type for typer; None if the setting has no option."""
    flag = option(name)
    if flag is None:
        return None
    text = field.description or ""
    info = typer.Option(flag, help=f"{text[:1].upper()}{text[1:]}.", rich_help_panel="Settings")
    if name == "launch":
        return Annotated[bool, info]
    kind: Any = str
    if field.annotation is bool:
        kind = Switch
    elif get_origin(field.annotation) is Literal:
        kind = field.annotation
    elif name.endswith("_urls"):
        kind = list[str]
    return Annotated[kind | None, info]


class EngineCommand(TyperCommand):
    """A command that starts an engine: it takes the settings of models as options, too.

    ``context.obj`` has those that are set on the command line, by name.
    """

    fields: Mapping[str, FieldInfo] = ModelSettings.model_fields

    def __init__(self, *args: Any, params: list[Any] | None = None, **more: Any) -> None:
        super().__init__(*args, params=[*(params or []), *setting_options(self.fields)], **more)

    def invoke(self, ctx: Any) -> Any:
        """Move the settings from the parameters to ``ctx.obj``, then run the command."""
        values = {name: ctx.params.pop(name) for name in self.fields if name in ctx.params}
        ctx.obj = {name: value for name, value in values.items() if _is_set(ctx, name)}
        return super().invoke(ctx)


def _is_set(ctx: Any, name: str) -> bool:
    """Whether an option was set on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


class ServeCommand(EngineCommand):
    """A command that takes all settings except secrets as options."""

    fields = Settings.model_fields


def settings_of(options: Mapping[str, Any], model: str | None = None) -> Settings:
    """Load the settings; options override the environment. ``model``: the positional argument."""
    model_option = options.get("policy_model")
    if model is not None and model_option not in (None, model):
        fail(f"{model} and --model {model_option}: one model is needed", WRONG_USE)
    values = dict(options) if model is None else {**options, "policy_model": model}
    with exit_on(SettingsError):
        return load_settings(**values)


def models_ready(settings: Settings, say: Callable[[str], object]) -> Settings:
    """Get the settings' models, downloading if need be; ``say`` gets a line on derived settings."""
    from server.model_download import what_follows, with_models

    with exit_on(SettingsError):
        ready = with_models(settings)
    line = what_follows(ready)
    if line is not None:
        say(line)
    return ready


def task_of(name: str, split: TaskSplit, limit: int, seed: int) -> tuple[Any, list[str]]:
    """A bundled task with questions of a split, or the user's own task from a file."""
    from cli.custom_dataset import SUFFIX, DatasetError, read_dataset
    from models.tasks import TASKS

    if name in TASKS:
        return TASKS[name], TASKS[name].questions(split, limit, seed)
    if not name.endswith(SUFFIX):
        fail(f"--task {name}: known are {', '.join(TASKS)}, or a file {SUFFIX}", WRONG_USE)
    with exit_on(DatasetError, "--task "):
        dataset = read_dataset(Path(name))
    return dataset, dataset.questions(limit)


def specs_of(
    policies: str, widths: str | None, seeds: str, fields: list[str] | None
) -> tuple[list[RequestedSearch], list[int]]:
    """A search for every policy and width, and the seeds."""
    seed_list = numbers("seed", seeds)
    sizes = [None] if widths is None else numbers("width", widths)
    if not (seed_list and sizes and parts(policies)):
        fail("--policy, --width, --seed: each needs at least one value", WRONG_USE)
    return [spec_of(p, w, seed_list[0], fields) for p in parts(policies) for w in sizes], seed_list


def spec_of(
    policy: str, width: int | None, seed: int | None, fields: list[str] | None, **more: Any
) -> RequestedSearch:
    """The search that is asked for. ``fields``: further fields as ``--set`` takes them; ``more``:
    fields that have options of their own."""
    values = {"policy": policy, "seed": seed} | ({} if width is None else {"width": width}) | more
    try:
        return RequestedSearch.model_validate(dict(_field(text) for text in fields or ()) | values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        reason = first["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
        switch = f"--{name} " if name in values else f"--set {name}="
        fail(f"{switch}{first['input']}: {reason}", WRONG_USE)


def _field(text: str) -> tuple[str, Any]:
    """Parse ``name=value`` of ``--set``; the value is JSON, or else a string."""
    name, _, value = text.partition("=")
    free = [field for field in SearchSpec.model_fields if field not in ("policy", "width", "seed")]
    if name not in free:
        fail(f"--set {text}: must be name=value with one of {', '.join(free)}", WRONG_USE)
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def tree_log_at(path: Path | None) -> TreeLog:
    """Open the file of ``--trees``."""
    try:
        return TreeLog(path)
    except OSError as error:
        fail(f"--trees {path}: {error.strerror}", WRONG_USE)


def parts(text: str) -> list[str]:
    """The parts between commas, without duplicates."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def numbers(flag: str, text: str) -> list[int]:
    """The whole numbers between commas, without duplicates; ``flag`` names the option in errors."""
    for part in parts(text):
        if not part.isdecimal():
            fail(f"--{flag} {part}: must be whole numbers, separated by commas", WRONG_USE)
    return list(dict.fromkeys(int(part) for part in parts(text)))
