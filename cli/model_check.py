"""``hedgerow check``: what would serve a model, in what memory, and what would be refused.

Nothing is started and no weights are read; for a model on the hub its small files are downloaded.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hedgerow_sglang.plugin_protocol import REWARD_CLASSES
from models.bundled import BUNDLED_MODELS, bundled_name
from models.catalog import hub_name, public_policy, public_reward_model
from runtime.checkpoint import LANGUAGE, Checkpoint, check_weights
from runtime.embedded.model.config import (
    ARCHITECTURES,
    ModelConfig,
    UnsupportedModel,
    footprint,
    weight_bytes,
)
from runtime.reward_format import RewardFormat, reward_format
from runtime.reward_reader import Reader
from runtime.sglang.expected_server import ExpectedServer
from runtime.sglang.launched_server import LaunchOptions
from runtime.sglang.sglang_scorer import RewardRequest
from runtime.text import Text
from search.engine import EngineError
from search.outcome_rewards import outcome_policies
from server import machine
from server.assemble import server_options, sglang_options
from server.gpus import Gpu, local_gpu
from server.launch_memory import DEFAULT_SHARES, room_on
from server.model_download import is_whole, with_models
from server.model_settings import bundled
from server.reward_settings import known_format
from server.setting_types import OTHERS_RUN
from server.settings import Settings, SettingsError, load_settings

HALF, FLOAT = 2, 4
"""Bytes of a number: bfloat16 on a GPU, float32 on the embedded engine."""
GIGA = 1e9
MODELS = ("policy", "reward_model")
SGLANG_NAMES = {*ARCHITECTURES, *REWARD_CLASSES} - {
    "MistralForSequenceClassification",
    "LlamaForTokenClassification",
    "Qwen2ForTokenClassification",
}
"""Classes that SGLang 0.5.23 has, of those that the embedded engine runs and our plug-in brings."""


def settings_to_check(
    options: Mapping[str, Any], model: str | None, gpu: Gpu | None
) -> tuple[Settings, str]:
    """The settings to check, and why this machine cannot run the models (empty if it can).

    With a ``gpu`` they are those of launched SGLang servers, unless options say otherwise. Raises
    SettingsError for errors that do not depend on the machine.
    """
    model_option: dict[str, Any] = {} if model is None else {"policy_model": model}
    values: dict[str, Any] = {**options, **model_option}
    launch_option: dict[str, Any] = {} if "policy_urls" in values else {"launch": True}
    elsewhere: dict[str, Any] = {"engine": "sglang", **launch_option, **values}
    if "engine" in values:
        return with_models(load_settings(**values), weights=False), ""
    there = with_models(load_settings(**elsewhere), weights=False)
    if gpu is not None:
        return there, ""
    try:
        return with_models(load_settings(**values), weights=False), ""
    except SettingsError as error:
        return there, str(error)


def check_models(settings: Settings, gpu: Gpu | None = None, here: str = "") -> dict[str, Any]:
    """A report on serving ``settings``, on ``gpu`` if given; ``here``: why this machine cannot.

    The report's ``refused`` is empty if the models could be served. Raises ValueError and OSError
    for unreadable folders.
    """
    prm = settings.reward_model
    form = reward_format(known_format(settings)) if prm else reward_format("none")
    broken = list(_folder_refusals(settings, form))
    device = gpu or (local_gpu() if settings.engine == "sglang" else None)
    refusals = {
        "embedded": [*broken, *_embedded_refusals(settings, form)],
        "sglang": [*broken, *_sglang_refusals(settings, form)],
    }
    number = FLOAT if settings.engine == "embedded" else HALF
    bundle = bundled(settings.policy_model)
    name = _bundled_policy(settings)
    is_known = name is not None or public_policy(settings.policy_model) is not None
    models = {"policy": _model_row(settings.policy_model, number, is_known), "reward_model": None}
    if prm is not None:
        is_known = (bundle is not None and prm == bundle.reward) or (
            public_reward_model(prm) is not None
        )
        models["reward_model"] = _model_row(prm, number, is_known)
    memory, misfit = _memory(settings, device, form)
    reasons = [*([here] if here and gpu is None else []), *refusals[settings.engine], *misfit]
    return {
        **models,
        "profile": settings.profile,
        "reward_format": form.name,
        "reward_read_from": _read_from(form),
        "engine": settings.engine_way,
        "engines": refusals,
        "memory": memory,
        "refused": reasons,
        "notes": list(_notes(settings, form)),
        "command": "" if reasons else _command(settings, memory),
        "server_commands": [] if reasons else _server_commands(settings, memory),
    }


def _name(folder: Path) -> str:
    """A model's name on the hub or its folder; SGLang takes both."""
    return hub_name(folder) or str(folder)


def _bundled_policy(settings: Settings) -> str | None:
    """The policy's bundled name, if any; generated models are in folders named after them."""
    folder, name = settings.policy_model, settings.model
    is_copy = name in BUNDLED_MODELS and folder.name.startswith(f"{name}-")
    return bundled_name(folder) or (name if is_copy else None)


def _model_row(folder: Path, number_bytes: int, is_known: bool) -> dict[str, Any]:
    checkpoint = Checkpoint.of(folder)
    model = {
        "checkpoint": _name(folder),
        "class": checkpoint.architecture,
        "known": is_known,
        "context": Text(folder).context,
        "weights_here": is_whole(folder),
    }
    try:
        sizes = ModelConfig.sizes_of(folder)
    except UnsupportedModel as error:
        return model | {"weight_bytes": None, "kv_bytes": None, "unknown": str(error)}
    return model | {
        "weight_bytes": weight_bytes(sizes, number_bytes),
        "kv_bytes": int(footprint(sizes, number_bytes).kv_bytes),
    }


def _folder_refusals(settings: Settings, form: RewardFormat) -> Iterator[str]:
    """Yield what is wrong with the models' folders for every engine."""
    prm = settings.reward_model
    for folder in filter(None, (settings.policy_model, prm)):
        try:
            _ = Text(folder).vocab_size
        except (ValueError, OSError) as error:
            yield str(error)
        if (
            settings.engine_way not in OTHERS_RUN
            and hub_name(folder) is None
            and not is_whole(folder)
        ):
            yield f"{folder}: holds no weights, or not all of them"
        elif is_whole(folder):
            try:
                check_weights(folder)
            except ValueError as error:
                yield str(error)
    if prm is not None and form.reads in ("softmax", "mean"):
        kind = Checkpoint.of(prm).architecture
        if not kind.endswith(LANGUAGE):
            yield (
                f"{prm}: {kind} has a reward head and writes no verdicts, which reward format "
                f"{form.name!r} reads; leave --reward-format out, or take one that reads a head"
            )


def _embedded_refusals(settings: Settings, form: RewardFormat) -> Iterator[str]:
    """Yield why the embedded engine cannot run the models."""
    size = 0
    for folder in filter(None, (settings.policy_model, settings.reward_model)):
        try:
            size += weight_bytes(ModelConfig.from_checkpoint(folder), FLOAT)
        except UnsupportedModel as error:
            yield f"{_name(folder)}: {error}"
    free = machine.free_memory()
    if free is not None and size > free:
        yield f"{size / GIGA:.1f} GB of weights in float32, {free / GIGA:.1f} GB are free here"
    prm = settings.reward_model
    if prm is not None and (not form.reads_hidden or is_whole(prm)):
        try:
            Reader.of(form, Text(prm), Text(settings.policy_model))
        except (ValueError, EngineError, OSError) as error:
            yield str(error)


def _sglang_refusals(settings: Settings, form: RewardFormat) -> Iterator[str]:
    """Yield why SGLang's servers cannot run the models."""
    prm = settings.reward_model
    try:
        sglang_options(settings, ("http://policy",), ("http://reward",))
        if prm is not None:
            text = Text(prm)
            RewardRequest.of(form, text, Text(settings.policy_model))
            checkpoint = Checkpoint.of(prm)
            outputs = checkpoint.head_outputs()
            expected = ExpectedServer("reward", text, form)
            yield from expected.head_faults(outputs, checkpoint.architecture)
        _launch_options(settings)
    except (ValueError, EngineError, OSError) as error:
        yield str(error)


def _launch_options(settings: Settings) -> list[LaunchOptions]:
    """The options of launched servers on any machine with SGLang and a GPU, without their memory.
    Raises ValueError for options that are refused."""
    overrides = {"launch_python": Path(sys.executable), "launch_device": "cuda"}
    shares = {"launch_memory": settings.launch_memory or DEFAULT_SHARES}
    return server_options(settings.model_copy(update=overrides | shares))


def _memory(
    settings: Settings, gpu: Gpu | None, form: RewardFormat
) -> tuple[dict[str, Any], list[str]]:
    """Each server's share of a GPU's memory, and the reasons if the models do not fit."""
    if gpu is None:
        return {}, []
    memory: dict[str, Any] = {"gpu": gpu.name, "bytes": gpu.memory * GIGA}
    if settings.launch_memory is not None:
        return memory | {"shares": dict(zip(MODELS, settings.launch_memory, strict=True))}, []
    try:
        room = room_on(gpu, settings, settings.reward_model if form.needs_model else None)
    except ValueError as error:
        return memory, [str(error)]
    if room is None:
        return memory, []
    shares = dict(zip(MODELS, room.fractions, strict=False))
    return memory | {
        "shares": shares,
        "kv_tokens": dict(zip(shares, room.kv_tokens, strict=True)),
    }, []


def _notes(settings: Settings, form: RewardFormat) -> Iterator[str]:
    """Yield notes on behaviour that users may not expect."""
    if settings.reward_model is None:
        yield "no reward model: rewards are the policy's mean log-probabilities (--reward-model)"
    elif not form.needs_model:
        yield f"reward format {form.name!r} reads no reward model: it is not loaded"
    elif (kind := Checkpoint.of(settings.reward_model).architecture) in REWARD_CLASSES:
        yield f"{kind}: SGLang needs our plug-in's distribution in its environment for it"
    if form.outcome:
        yield (
            f"reward format {form.name!r} scores finished replies alone: policies "
            f"{' and '.join(outcome_policies())} (best_of_n where a request names none)"
        )
    if settings.verifier is not None:
        alone = form.reads == "logprob"
        how = "are its numbers" if alone else "are multiplied by its numbers"
        yield f"verifier {settings.verifier}: rewards {how}"
    if not _has_template(settings.policy_model):
        yield "the policy has no chat template: messages are joined by newlines, as for base models"
    for folder in filter(None, (settings.policy_model, settings.reward_model)):
        kind = Checkpoint.of(folder).architecture
        if settings.engine == "sglang" and kind not in SGLANG_NAMES:
            yield f"{kind}: whether SGLang has this class it says itself, at its start"


def _has_template(folder: Path) -> bool:
    about = folder / "tokenizer_config.json"
    stored = about.is_file() and json.loads(about.read_text(encoding="utf-8"))
    return (
        bool(stored and stored.get("chat_template")) or (folder / "chat_template.jinja").is_file()
    )


def _read_from(form: RewardFormat) -> str:
    if form.needs_model:
        return "a head's outputs" if form.reads_hidden else "log-probabilities of verdicts"
    return "the policy's verdicts" if form.reads == "judge" else "the policy's log-probabilities"


def _command(settings: Settings, memory: dict[str, Any]) -> str:
    """The command line that serves the models."""
    policy = _bundled_policy(settings) or _name(settings.policy_model)
    line = ["hedgerow", "serve", policy]
    bundle = bundled(settings.policy_model)
    if settings.reward_model is not None and not (
        bundle and settings.reward_model == bundle.reward
    ):
        line += ["--reward-model", _name(settings.reward_model)]
        line += ["--reward-format", settings.reward_format]
    if settings.engine == "embedded":
        return shlex.join(line)
    line += ["--engine", "sglang", "--launch"]
    if shares := [str(share) for share in memory.get("shares", {}).values()]:
        line += ["--launch-memory", ",".join((shares * 2)[:2])]
    return shlex.join(line)


def _server_commands(settings: Settings, memory: dict[str, Any]) -> list[str]:
    """The command lines that start SGLang's servers by hand; empty for the embedded engine."""
    if settings.engine == "embedded":
        return []
    lines, shares = [], memory.get("shares", {})
    for port, kind, server in zip((30000, 30001), MODELS, _launch_options(settings), strict=False):
        needs = [f"{k}={v}" for k, v in server.own_environment().items() if k != "HF_HUB_OFFLINE"]
        share = shares.get(kind, server.memory)
        options = replace(server, model=_name(Path(server.model)), memory=share)
        lines.append(shlex.join(["env", *needs, "python", *options.command(port)[1:]]))
    return lines


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report as a table, then refusals, notes and the commands to type."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name in MODELS:
        model = report[name]
        table.add_row(name.replace("_", " "), "none" if not model else _model_line(model))
    table.add_row("profile", report["profile"])
    table.add_row(
        "reward format", f"{report['reward_format']}, read from {report['reward_read_from']}"
    )
    table.add_row("engine", report["engine"])
    for engine, why in report["engines"].items():
        table.add_row(f"  {engine}", "; ".join(why) or "could run them")
    if memory := report["memory"]:
        table.add_row("memory", _memory_line(memory))
    console.print(table)
    for kind in ("refused", "notes"):
        for line in report[kind]:
            console.print(f"{kind.removesuffix('s')}: {line}", soft_wrap=True, markup=False)
    lines = {"serve": [report["command"]], "or servers of one's own": report["server_commands"]}
    for label, commands in lines.items():
        for line in filter(None, commands):
            console.print(f"{label}: {line}", soft_wrap=True, markup=False, highlight=False)


def _model_line(model: dict[str, Any]) -> str:
    note = "" if model["known"] else ", not in docs/models.md"
    summary = f"{model['checkpoint']}: {model['class']}{note}, context {model['context']}"
    if model["weight_bytes"] is None:
        return f"{summary}; memory is not known: {model['unknown']}"
    weights = f"{model['weight_bytes'] / GIGA:.2f} GB of weights"
    download_note = "" if model["weights_here"] else " (not downloaded)"
    return f"{summary}; {weights}{download_note}, {model['kv_bytes'] / 1e3:.1f} kB of KV a token"


def _memory_line(memory: dict[str, Any]) -> str:
    if "shares" not in memory:
        return f"{memory['gpu']}: {memory['bytes'] / GIGA:.0f} GB"
    tokens = memory.get("kv_tokens", {})
    parts = [
        f"{name.replace('_', ' ')} {share:g} of what is free"
        + (f", {tokens[name]:,} tokens of KV" if name in tokens else "")
        for name, share in memory["shares"].items()
    ]
    return f"{memory['gpu']}, {memory['bytes'] / GIGA:.0f} GB: {'; '.join(parts)}"
