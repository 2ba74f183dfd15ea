"""What the commands take: switches, names and their help, each stated once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from search.spec import AnswerRule, PolicyName


class Switch(StrEnum):
    """A switch on the command line."""

    ON = "on"
    OFF = "off"


class EngineName(StrEnum):
    """The engines there are."""

    EMBEDDED = "embedded"
    SGLANG = "sglang"


class KvPolicyName(StrEnum):
    """The rules by which KV is given up."""

    FULL = "full"
    LRU = "lru"
    ARBORKV = "arborkv"


class KvSplitName(StrEnum):
    """How the KV bytes of both models are shared."""

    GIVEN = "given"
    EVEN = "even"
    ROOFLINE = "roofline"


class DraftName(StrEnum):
    """Who is drafted for at once."""

    OFF = "off"
    SERIAL = "serial"
    SCHEDULED = "scheduled"


class KernelName(StrEnum):
    """What computes attention."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class OrderName(StrEnum):
    """How branches stand in the queue for the batch."""

    PREFIX = "prefix"
    FCFS = "fcfs"
    RANDOM = "random"


class Split(StrEnum):
    """The splits of a task."""

    TRAIN = "train"
    DEV = "dev"
    TEST = "test"


Engine = Annotated[EngineName | None, typer.Option(help="Engine to run on.")]
PolicyUrls = Annotated[
    list[str] | None,
    typer.Option("--policy-url", help="SGLang server of the policy model; may be repeated."),
]
RewardUrls = Annotated[
    list[str] | None,
    typer.Option("--reward-url", help="SGLang server of the reward model; may be repeated."),
]
Launch = Annotated[bool, typer.Option("--launch", help="Start and look after the SGLang servers.")]
KvTokens = Annotated[int | None, typer.Option(help="KV budget of the policy model, in tokens.")]
KvPolicy = Annotated[KvPolicyName | None, typer.Option(help="What KV is given up first.")]
KvTheta = Annotated[
    str | None, typer.Option(help="What arborkv's signals weigh: a file of hedgerow calibrate.")
]
KvSplit = Annotated[
    KvSplitName | None,
    typer.Option(help="How both models share KV bytes; roofline: by what is asked."),
]
BatchLimit = Annotated[int | None, typer.Option(help="Most branches decoding at once.")]
Draft = Annotated[DraftName | None, typer.Option(help="Draft ahead of the policy model.")]
VerifyBatch = Annotated[
    int | None, typer.Option(help="Branches whose drafts are checked at once; 0: all.")
]
Exact = Annotated[Switch | None, typer.Option(help="Batch-invariant arithmetic.")]
Kernel = Annotated[
    KernelName | None, typer.Option(help="What attends: a library that is built here, or torch.")
]
Speculate = Annotated[
    Switch | None, typer.Option(help="Idle places draw what rounds may ask for next.")
]
Order = Annotated[
    OrderName | None, typer.Option(help="Order in which a round's branches are let in.")
]
Lookahead = Annotated[
    Switch | None, typer.Option(help="What is drawn ahead is scored with the step before it.")
]
Dedup = Annotated[
    Switch | None, typer.Option(help="What branches have drawn alike is computed once.")
]
RewardFormat = Annotated[
    str | None, typer.Option(help="How rewards are read: a name, or a .json file.")
]
Trees = Annotated[Path | None, typer.Option(help="Append every tree to this file, a line each.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document alone on stdout.")]
Url = Annotated[str | None, typer.Option(help="Use the server at this URL, not an own engine.")]
Policy = Annotated[str, typer.Option(help=f"Search policy: {', '.join(get_args(PolicyName))}.")]
Answers = Annotated[
    str | None, typer.Option(help=f"How answers are compared: {', '.join(get_args(AnswerRule))}.")
]
Dials = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other field of a search, as name=value; may be repeated."),
]
Seed = Annotated[int | None, typer.Option(help="Seed; drawn at random if not given.")]
Model = Annotated[str | None, typer.Option(help="Policy model: a folder or Hugging Face name.")]
RewardModel = Annotated[
    str | None, typer.Option(help="Reward model: a folder, a Hugging Face name, or none.")
]
Profile = Annotated[str | None, typer.Option(help="How the policy model writes, such as llama.")]

SWITCHES: dict[str, Any] = {
    "engine": Engine,
    "policy_urls": PolicyUrls,
    "reward_urls": RewardUrls,
    "launch": Launch,
    "kv_policy": KvPolicy,
    "kv_theta": KvTheta,
    "kv_tokens": KvTokens,
    "kv_split": KvSplit,
    "batch_limit": BatchLimit,
    "draft": Draft,
    "verify_batch": VerifyBatch,
    "speculate": Speculate,
    "lookahead": Lookahead,
    "dedup": Dedup,
    "order": Order,
    "exact": Exact,
    "kernel": Kernel,
}
"""What every command takes that starts an engine: settings by name."""


def with_switches(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the engine's switches; it gets those that are set as one dict ``switches``."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    taken = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in SWITCHES.items()
    ]
    parameters = [*(p for p in own if p.name != "switches"), *taken]

    @wraps(command)
    def run(**given: Any) -> None:
        asked = {name: given.pop(name) for name in SWITCHES}
        given["switches"] = {n: _setting(v) for n, v in asked.items() if _named(v)}
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _named(value: Any) -> bool:
    return value is not None and value is not False and value != []


def _setting(value: Any) -> Any:
    """A setting's value: a switch is a truth, a name its text."""
    if isinstance(value, Switch):
        return value is Switch.ON
    return value.value if isinstance(value, StrEnum) else value
