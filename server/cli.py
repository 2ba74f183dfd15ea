"""The command ``hedgerow``: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from pydantic import ValidationError
from rich.console import Console

from search.spec import SearchSpec
from server.options import (
    Answers,
    Dials,
    Json,
    Model,
    Policy,
    Profile,
    RewardFormat,
    RewardModel,
    Seed,
    Split,
    Switch,
    Trees,
    Url,
    with_switches,
)
from server.settings import Settings, SettingsError, load_settings

T = TypeVar("T")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Test-time search behind OpenAI's API: trees of reasoning steps, scored and voted.",
)

config = typer.Typer(no_args_is_help=True, help="The settings a server would be started with.")
app.add_typer(config, name="config")

FAILED = 1
WRONG_USE = 2
INTERRUPTED = 130


def _version(wanted: bool) -> None:
    if wanted:
        from server.service import own_version

        print(own_version())
        raise typer.Exit


@app.callback()
def hedgerow(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hedgerow."""


@app.command()
@with_switches
def serve(
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    reward_format: RewardFormat = None,
    answers: Answers = None,
    trees: Trees = None,
    switches: dict[str, Any],
) -> None:
    """Serve OpenAI's API and /v1/search."""
    from server.assemble import serve as run
    from server.tree_log import TreeLog

    own = {"host": host, "port": port, "reward_format": reward_format, "answers": answers}
    settings = _settings(**switches, **own)
    with _tree_log(trees, TreeLog) as log:
        _run(run(settings, log))


@app.command()
@with_switches
def solve(
    *,
    question: Annotated[str, typer.Argument(help="What to answer.")],
    policy: Policy = "rebase",
    width: Annotated[int, typer.Option(help="Trajectories to finish.")] = 16,
    seed: Seed = None,
    dials: Dials = None,
    reward_format: RewardFormat = None,
    trees: Trees = None,
    url: Url = None,
    picture: Annotated[Path | None, typer.Option(help="Write the tree to this SVG file.")] = None,
    as_json: Json = False,
    switches: dict[str, Any],
) -> None:
    """Answer one question, growing its tree in the terminal."""
    from server.solve import solve as run
    from server.tree_log import TreeLog

    spec = _spec(policy, width, seed, dials)
    own = {"reward_format": reward_format}
    settings = _settings(**switches, **own)
    console = Console(stderr=as_json)
    with _tree_log(trees, TreeLog) as log:
        document = _run(run(question, spec, settings, console, log, url, picture))
    if as_json:
        print(json.dumps(document))


@app.command(name="eval")
@with_switches
def evaluate(
    *,
    task: Annotated[str, typer.Option(help="Task, such as game24, or a file .jsonl.")],
    split: Annotated[Split, typer.Option(help="Which questions of a task.")] = Split.TEST,
    limit: Annotated[int, typer.Option(min=1, help="Questions.")] = 100,
    policy: Annotated[str, typer.Option(help="Policies, separated by commas.")] = "rebase",
    width: Annotated[str, typer.Option(help="Widths, separated by commas.")] = "16",
    seed: Annotated[str, typer.Option(help="Seeds; the first one draws the questions.")] = "0",
    dials: Dials = None,
    model: Model = None,
    reward_model: RewardModel = None,
    reward_format: RewardFormat = None,
    profile: Profile = None,
    answers: Answers = None,
    at_once: Annotated[int, typer.Option(min=1, help="Questions under way on an engine.")] = 8,
    engines: Annotated[int, typer.Option(min=0, help="Engines; 0: what suits the models.")] = 0,
    share: Annotated[Switch, typer.Option(help="Draw common samples once.")] = Switch.ON,
    plot: Annotated[Path | None, typer.Option(help="Draw accuracy against KV.")] = None,
    trees: Trees = None,
    as_json: Json = False,
    switches: dict[str, Any],
) -> None:
    """Measure policies and widths on a task: accuracy, and what it costs.

    A file holds a JSON object a line with the fields problem and answer. Seconds are those of
    searches alone with --share off only.
    """
    from server.eval_run import run_evaluation
    from server.evaluate import Evaluation
    from server.tree_log import TreeLog

    if plot is not None:
        _check_plot(plot)
    specs, seeds = _specs(policy, width, seed, dials)
    graded, questions = _task(task, split, limit, seeds[0])
    own = {"reward_format": reward_format, "profile": profile, "answers": answers}
    own |= _models(model, reward_model)
    settings = _settings(**switches, **own)
    same, rule = share is Switch.ON, settings.answers
    wanted = Evaluation(graded, questions, seeds, specs, at_once=at_once, share=same, answers=rule)
    with _tree_log(trees, TreeLog) as log:
        rows = _run(run_evaluation(wanted, settings, log, as_json, engines))
    if plot is not None:
        from server.plot import plot as draw

        draw(rows, plot)
    if as_json:
        print(json.dumps({"rows": rows}))


@app.command()
@with_switches
def calibrate(
    *,
    task: Annotated[str, typer.Option(help="Tasks, separated by commas.")],
    out: Annotated[Path, typer.Option(help="The file to write, for --kv-theta.")],
    limit: Annotated[int, typer.Option(min=1, help="Training questions of each task.")] = 100,
    policy: Annotated[str, typer.Option(help="best_first, mcts or both.")] = "best_first",
    width: Annotated[int, typer.Option(help="Trajectories to finish.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of questions and searches.")] = 0,
    dials: Dials = None,
    model: Model = None,
    reward_model: RewardModel = None,
    reward_format: RewardFormat = None,
    profile: Profile = None,
    as_json: Json = False,
    switches: dict[str, Any],
) -> None:
    """Fit what arborkv's signals weigh to recorded searches that keep all their KV."""
    from server.calibrate import GO_BACK, Calibration
    from server.calibrate import calibrate as run

    specs, _ = _specs(policy, str(width), str(seed), dials)
    for name in {spec.policy for spec in specs} - set(GO_BACK):
        _fail(f"--policy {name}: one that goes back is needed: {', '.join(GO_BACK)}", WRONG_USE)
    if out.is_dir() or not out.parent.is_dir():
        _fail(f"--out {out}: a file in a folder that exists is needed", WRONG_USE)
    tasks = [_task(name, Split.TRAIN, limit, seed) for name in _parts(task)]
    own = {"reward_format": reward_format, "profile": profile} | _models(model, reward_model)
    settings = _settings(**switches, **own)
    found = _run(run(Calibration(tasks, specs, seed, out), settings, as_json))
    if as_json:
        print(json.dumps(found))


@app.command()
@with_switches
def replay(
    *,
    response: Annotated[Path, typer.Argument(help="A response with its search, or --trees lines.")],
    reward_format: RewardFormat = None,
    url: Url = None,
    as_json: Json = False,
    switches: dict[str, Any],
) -> None:
    """Grow recorded trees again; exit 1 if any of them differs."""
    from server.replay import RecordError, read_records
    from server.solve import replay_all

    try:
        records = read_records(response)
    except RecordError as error:
        _fail(str(error), WRONG_USE)
    own = {"reward_format": reward_format}
    settings = _settings(**switches, **own)
    console = Console(stderr=as_json)
    found = _run(replay_all(records, settings, console, url))
    if as_json:
        print(json.dumps({"rows": found}))
    if not all(row["same"] for row in found):
        raise typer.Exit(FAILED)


@app.command()
@with_switches
def plan(
    *,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 64,
    length: Annotated[int, typer.Option(min=1, help="Tokens that a sequence has.")] = 256,
    new: Annotated[int, typer.Option(min=1, help="Tokens that it is to grow by.")] = 64,
    gpu: Annotated[
        tuple[float, float, float] | None,
        typer.Option(help="Plan for SGLang: a GPU's TFLOP/s, GB/s and GB, bfloat16."),
    ] = None,
    model: Model = None,
    reward_model: RewardModel = None,
    reward_format: RewardFormat = None,
    as_json: Json = False,
    switches: dict[str, Any],
) -> None:
    """Share KV between policy and reward model by the roofline, and say why."""
    from kvpolicy.split import Device, Load
    from server.plan import Machine, make_plan, this_machine

    own = {"reward_format": reward_format} | _models(model, reward_model)
    settings = _settings(**switches, **own)
    try:
        if gpu is None:
            machine = this_machine(settings)
        else:
            tera, giga, memory = gpu
            machine = Machine(Device(1e12 * tera, 1e9 * giga), 1e9 * memory, number_bytes=2)
        found = make_plan(settings, Load(sequences, length, new), machine)
    except (ValueError, OSError) as error:
        _fail(str(error), WRONG_USE)
    if as_json:
        print(json.dumps(found))
        return
    for reason in found["reasons"]:
        print(reason)
    shares = found["roofline"]
    if gpu is None:
        print(f"--kv-tokens {shares['kv_tokens']}, PRM {shares['prm_kv_tokens']} tokens")
    else:
        for name, fraction in found["mem_fraction_static"].items():
            print(f"{name}: --mem-fraction-static {fraction}")


@config.command()
def check(as_json: Json = False) -> None:
    """Say what a server would be started with; exit 2 with one clear line if it could not be."""
    from server.config_check import check as run

    settings = _settings()
    try:
        found = run(settings)
    except SettingsError as error:
        _fail(str(error), WRONG_USE)
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found["settings"].items():
        print(f"{name} = {value}")
    print(f"keys: {', '.join(found['keys'])}")


def main() -> None:
    """The console script."""
    app()


def _settings(**given: Any) -> Settings:
    try:
        return load_settings(**given)
    except SettingsError as error:
        _fail(str(error), WRONG_USE)


def _models(model: str | None, reward_model: str | None) -> dict[str, Any]:
    """Settings of the models that were named."""
    from server.checkpoints import checkpoint

    named = {"policy_model": model, "reward_model": reward_model}
    try:
        return {
            key: name if name == "none" else checkpoint(name)
            for key, name in named.items()
            if name is not None
        }
    except SettingsError as error:
        _fail(str(error), WRONG_USE)


def _task(name: str, split: Split, limit: int, seed: int) -> tuple[Any, list[str]]:
    """A task by name with a split's questions, or one's own from a file."""
    from models.tasks import TASKS
    from server.own_task import SUFFIX, TaskFileError, read_task

    if name in TASKS:
        return TASKS[name], TASKS[name].questions(split.value, limit, seed)
    if not name.endswith(SUFFIX):
        _fail(f"--task {name}: known are {', '.join(TASKS)}, or a file {SUFFIX}", WRONG_USE)
    try:
        own = read_task(Path(name))
    except TaskFileError as error:
        _fail(f"--task {error}", WRONG_USE)
    return own, own.questions(limit)


def _specs(
    policies: str, widths: str, seeds: str, dials: list[str] | None
) -> tuple[list[SearchSpec], list[int]]:
    """A search for every policy and width, and the seeds."""
    numbers = [_number("seed", part) for part in _parts(seeds)]
    wide = [_number("width", part) for part in _parts(widths)]
    if not (numbers and wide and _parts(policies)):
        _fail("--policy, --width, --seed: each needs at least one value", WRONG_USE)
    specs = [_spec(p, w, numbers[0], dials) for p in _parts(policies) for w in wide]
    return specs, list(dict.fromkeys(numbers))


def _spec(policy: str, width: int, seed: int | None, dials: list[str] | None) -> SearchSpec:
    given = dict(_dial(dial) for dial in dials or ())
    fields = {"policy": policy, "width": width, "seed": seed}
    try:
        return SearchSpec.model_validate(given | fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        said = first["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
        switch = f"--{name} " if name in fields else f"--set {name}="
        _fail(f"{switch}{first['input']}: {said}", WRONG_USE)


def _dial(text: str) -> tuple[str, Any]:
    """``name=value`` of ``--set``; the value is JSON, or else a string."""
    name, _, value = text.partition("=")
    free = [field for field in SearchSpec.model_fields if field not in ("policy", "width", "seed")]
    if name not in free:
        _fail(f"--set {text}: must be name=value with one of {', '.join(free)}", WRONG_USE)
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _tree_log(path: Path | None, kind: Any) -> Any:
    try:
        return kind(path)
    except OSError as error:
        _fail(f"--trees {path}: {error.strerror}", WRONG_USE)


def _check_plot(path: Path) -> None:
    """Before hours of work, not after."""
    from server.plot import check_path

    try:
        check_path(path)
    except ValueError as error:
        _fail(f"--plot {error}", WRONG_USE)


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _number(flag: str, text: str) -> int:
    if not text.isdecimal():
        _fail(f"--{flag} {text}: must be whole numbers, separated by commas", WRONG_USE)
    return int(text)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; errors that were foreseen become one line."""
    from search.engine import EngineError
    from server.grower import GrowError

    try:
        return asyncio.run(work)
    except (SettingsError, EngineError, GrowError) as error:
        _fail(str(error), FAILED)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"hedgerow: {message}", err=True)
    raise typer.Exit(code)
