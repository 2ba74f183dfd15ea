"""The command ``hedgerow``: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli.arguments import (
    FAILED,
    WRONG_USE,
    EngineCommand,
    GpuPeaks,
    Json,
    Model,
    PoliciesToTry,
    Policy,
    Returns,
    SearchFields,
    Seed,
    ServeCommand,
    Switch,
    TaskSplit,
    Trees,
    Url,
    VotesToTry,
    Width,
    Widths,
    exit_on,
    fail,
    models_ready,
    parts,
    run_to_end,
    settings_of,
    spec_of,
    specs_of,
    task_of,
    tell,
    tree_log_at,
)
from cli.config_commands import config
from server.settings import SettingsError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="OpenAI-compatible test-time search: trees of reasoning steps, scored and voted on.",
)

app.add_typer(config, name="config")


def _version(requested: bool) -> None:
    if requested:
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


@app.command(cls=ServeCommand)
def serve(context: typer.Context, checkpoint: Model = None, *, trees: Trees = None) -> None:
    """Serve OpenAI's API and /v1/search: hedgerow serve [MODEL] [--reward-model MODEL]."""
    from server.assemble import further_models
    from server.lifecycle import serve as run
    from server.lifecycle import start_logging

    settings = settings_of(context.obj, checkpoint)
    start_logging(settings.log_level, settings.log_format)
    say = logging.getLogger("hedgerow").info
    settings = models_ready(settings, say)
    with exit_on(SettingsError):
        further = further_models(settings)
    for model_settings in further:
        models_ready(model_settings, say)
    with tree_log_at(trees) as log:
        run_to_end(run(settings, log))


@app.command(cls=EngineCommand)
def solve(
    context: typer.Context,
    *,
    question: Annotated[str, typer.Argument(help="Question to answer.")],
    policy: Policy = "rebase",
    width: Width = None,
    seed: Seed = None,
    fields: SearchFields = None,
    trees: Trees = None,
    url: Url = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the tree to this SVG file.")] = None,
    as_json: Json = False,
) -> None:
    """Answer one question and show its tree growing in the terminal; --model sets the model."""
    from cli.solve import solve as run

    spec = spec_of(policy, width, seed, fields)
    settings = settings_of(context.obj)
    console = Console(stderr=as_json)
    if url is None:
        settings = models_ready(settings, tell)
    with tree_log_at(trees) as log:
        document = run_to_end(run(question, spec, settings, console, log, url, picture))
    if as_json:
        print(json.dumps(document))


@app.command(name="eval", cls=EngineCommand)
def evaluate(
    context: typer.Context,
    *,
    task: Annotated[str, typer.Option(help="Bundled task, such as game24, or a .jsonl file.")],
    split: Annotated[TaskSplit, typer.Option(help="Split of a bundled task.")] = "test",
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of questions.")] = 100,
    policy: Annotated[str, typer.Option(help="Policies, separated by commas.")] = "rebase",
    width: Widths = None,
    seed: Annotated[str, typer.Option(help="Random seeds, separated by commas.")] = "0",
    fields: SearchFields = None,
    at_once: Annotated[int, typer.Option(min=1, help="Concurrent questions per engine.")] = 8,
    engines: Annotated[
        int, typer.Option(min=0, help="Number of engines; 0: chosen by model size.")
    ] = 0,
    share: Annotated[Switch, typer.Option(help="Draw samples common to searches once.")] = "on",
    plot: Annotated[Path | None, typer.Option(help="Plot accuracy over KV to this file.")] = None,
    plot_anatomy: Annotated[
        Path | None, typer.Option(help="Plot losses, and where they occur, to this file.")
    ] = None,
    trees: Trees = None,
    as_json: Json = False,
) -> None:
    """Measure accuracy and cost of policies and widths on a task.

    Every seed searches the same questions; the first seed also draws them from the split of a
    bundled task. A file has one JSON object per line with the fields problem (or question) and
    answer; its first lines are used, whatever the seed. Seconds measure searches on their own only
    with --share off.
    """
    from cli.evaluation import Evaluation, run_evaluation

    for switch, path in (("--plot ", plot), ("--plot-anatomy ", plot_anatomy)):
        if path is not None:
            from cli.accuracy_plot import check_path

            with exit_on(ValueError, switch):  # check before hours of work
                check_path(path)
    specs, seeds = specs_of(policy, width, seed, fields)
    graded, questions = task_of(task, split, limit, seeds[0])
    settings = models_ready(settings_of(context.obj), tell)
    sharing, rule = share == "on", settings.answers
    plan = Evaluation(graded, questions, seeds, specs, at_once=at_once, share=sharing, answers=rule)
    with tree_log_at(trees) as log:
        rows = run_to_end(run_evaluation(plan, settings, log, as_json, engines))
    if plot is not None:
        from cli.accuracy_plot import plot as draw

        draw(rows, plot)
    if plot_anatomy is not None:
        from cli.anatomy_plot import plot as draw_anatomy

        draw_anatomy(rows, plot_anatomy)
    if as_json:
        print(json.dumps({"rows": rows}))


@app.command(cls=EngineCommand)
def tune(
    context: typer.Context,
    *,
    budget: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate.")],
    data: Annotated[Path | None, typer.Option(help="JSONL file of problems and answers.")] = None,
    task: Annotated[str | None, typer.Option(help="Bundled tasks, separated by commas.")] = None,
    split: Annotated[TaskSplit, typer.Option(help="Split of a bundled task.")] = "dev",
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of questions.")] = 400,
    policy: PoliciesToTry = None,
    width: Annotated[str, typer.Option(help="Widths, separated by commas.")] = "4,16,64",
    vote: VotesToTry = None,
    temperature: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0.7,1",
    seed: Annotated[str, typer.Option(help="Random seeds, separated by commas.")] = "0",
    fields: SearchFields = None,
    at_once: Annotated[int, typer.Option(min=1, help="Concurrent questions per engine.")] = 8,
    engines: Annotated[
        int, typer.Option(min=0, help="Number of engines; 0: chosen by model size.")
    ] = 0,
    share: Annotated[Switch, typer.Option(help="Draw samples common to searches once.")] = "on",
    out: Annotated[Path, typer.Option(help="TOML file for serve --tuned.")] = Path("tuned.toml"),
    keep: Annotated[
        Path | None,
        typer.Option(help="Results file, to resume from; default: OUT with suffix .jsonl."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot accuracy over tokens to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the searches that are worth their tokens on your models and questions.

    Tries all searches on a few questions, and the better ones on more and more, until the budget is
    spent. An interrupted run resumes when it is started again. Use the file with serve --tuned.
    """
    from cli.grid_search import Grid
    from cli.tuning_arguments import grid_of, questions_of
    from cli.tuning_run import TuningRequest, run_tuning

    if plot is not None:
        from cli.accuracy_plot import check_path

        with exit_on(ValueError, "--plot "):
            check_path(plot)
    if out.is_dir() or not out.parent.is_dir():
        fail(f"--out {out}: a file in a folder that exists is needed", WRONG_USE)
    specs, seeds = grid_of(policy, width, vote, temperature, seed, fields)
    questions, name = questions_of(data, task, split, limit, seeds[0])
    settings = models_ready(settings_of(context.obj), tell)
    grid = Grid(
        specs, questions, seeds, at_once=at_once, share=share == "on", answers=settings.answers
    )
    rows_file = keep or out.with_suffix(".jsonl")
    request = TuningRequest(grid, budget, name, out, rows_file, engines, policy is not None)
    report = run_to_end(run_tuning(request, settings, as_json))
    if plot is not None:
        from cli.tuning_plot import plot as draw

        draw(report, plot)
    if as_json:
        print(json.dumps(report))


@app.command(cls=EngineCommand)
def calibrate(
    context: typer.Context,
    *,
    task: Annotated[str, typer.Option(help="Tasks, separated by commas.")],
    out: Annotated[Path, typer.Option(help="File to write, for --kv-theta.")],
    limit: Annotated[int, typer.Option(min=1, help="Maximum training questions per task.")] = 100,
    policy: Annotated[str, typer.Option(help="best_first, mcts or both.")] = "best_first",
    width: Annotated[int, typer.Option(help="Number of trajectories to finish.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of questions and searches.")] = 0,
    fields: SearchFields = None,
    as_json: Json = False,
) -> None:
    """Fit the weights of arborkv's signals to recorded searches that keep all their KV."""
    from cli.calibrate import GO_BACK, Calibration
    from cli.calibrate import calibrate as run

    specs, _ = specs_of(policy, str(width), str(seed), fields)
    for name in {spec.policy for spec in specs} - set(GO_BACK):
        fail(f"--policy {name}: one that goes back is needed: {', '.join(GO_BACK)}", WRONG_USE)
    if out.is_dir() or not out.parent.is_dir():
        fail(f"--out {out}: a file in a folder that exists is needed", WRONG_USE)
    tasks = [task_of(name, "train", limit, seed) for name in parts(task)]
    settings = models_ready(settings_of(context.obj), tell)
    report = run_to_end(run(Calibration(tasks, specs, seed, out), settings, as_json))
    if as_json:
        print(json.dumps(report))


@app.command(cls=EngineCommand)
def replay(
    context: typer.Context,
    *,
    response: Annotated[Path, typer.Argument(help="Response with its search, or a --trees file.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Repeat recorded searches and compare their trees; exit 1 if any tree differs."""
    from cli.replay import RecordError, read_records, replay_all

    with exit_on(RecordError):
        records = read_records(response)
    settings = settings_of(context.obj)
    console = Console(stderr=as_json)
    if url is None:
        settings = models_ready(settings, tell)
    report = run_to_end(replay_all(records, settings, console, url))
    if as_json:
        print(json.dumps({"rows": report}))
    if not all(row["same"] for row in report):
        raise typer.Exit(FAILED)


@app.command()
def export(
    trees: Annotated[Path, typer.Argument(help="File written by --trees.")],
    returns: Annotated[
        Returns, typer.Option(help="Trajectory return: last reward, or the checker's 1 or 0.")
    ] = "reward",
) -> None:
    """Print recorded trees as training rollouts, one line of JSON per step."""
    from cli.export import ExportError, export_steps

    with exit_on(ExportError):
        for step in export_steps(trees, returns):
            print(json.dumps(step))


@app.command(cls=EngineCommand)
def plan(
    context: typer.Context,
    checkpoint: Model = None,
    *,
    sequences: Annotated[int | None, typer.Option(min=1, help="Concurrent sequences.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence.")] = None,
    new: Annotated[int | None, typer.Option(min=1, help="New tokens per sequence.")] = None,
    own: Annotated[
        int | None, typer.Option(min=0, help="Tokens that no other sequence has; 0: all.")
    ] = None,
    gpu: GpuPeaks = None,
    host: Annotated[
        float | None,
        typer.Option("--host-bandwidth", help="With --gpu: GB/s between GPU and host memory."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Split KV memory between policy and reward model by the roofline, and explain the split.

    --sequences, --length and --new default to --kv-load.
    """
    from cli.kv_split_plan import make_plan
    from kvpolicy.roofline import SplitLoad
    from server.gpus import Gpu

    if host is not None and gpu is None:
        fail("--host-bandwidth: --gpu is needed, too", WRONG_USE)
    settings = models_ready(settings_of(context.obj, checkpoint), tell)
    with exit_on((ValueError, OSError)):
        device = None if gpu is None else Gpu("", *gpu)
        load = {"sequences": sequences, "length": length, "new": new, "own": own}
        changes = {name: value for name, value in load.items() if value is not None}
        report = make_plan(settings, replace(SplitLoad(*settings.kv_load), **changes), device, host)
    if as_json:
        print(json.dumps(report))
        return
    for reason in report["reasons"]:
        print(reason)
    shares = report["roofline"]
    if gpu is None:
        print(f"--kv-tokens {shares['kv_tokens']}, PRM {shares['prm_kv_tokens']} tokens")
    else:
        for name, fraction in report["mem_fraction_static"].items():
            print(f"{name}: --mem-fraction-static {fraction}")
        if "draft_args" in report:
            print(f"policy: {report['draft_args']}")
        for name in report["mem_fraction_static"]:
            if report.get("offload", {}).get(name, {}).get("args"):
                print(f"{name}: {report['offload'][name]['args']} (without our plug-in's eviction)")


@app.command(name="check", cls=EngineCommand)
def check_model(
    context: typer.Context,
    checkpoint: Model = None,
    *,
    gpu: Annotated[
        str | None,
        typer.Option(help="Check for this GPU: a name such as h100, or TFLOP/s,GB/s,GB."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Report what would serve a model, in what memory, and what would be refused.

    Starts nothing. Exits with 2 if the model could not be served.
    """
    from cli.model_check import check_models, settings_to_check, show
    from server.gpus import gpu_of

    with exit_on((ValueError, OSError), "--gpu "):
        device = None if gpu is None else gpu_of(gpu)
    with exit_on((ValueError, OSError)):
        settings, here = settings_to_check(context.obj, checkpoint, device)
        report = check_models(settings, device, here)
    if as_json:
        print(json.dumps(report))
    else:
        show(report, Console())
    if report["refused"]:
        raise typer.Exit(WRONG_USE)


def main() -> None:
    """The console script."""
    app()
