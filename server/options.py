"""What the commands take: switches, names and their help, each stated once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, get_args

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


class DraftName(StrEnum):
    """Who is drafted for at once."""

    OFF = "off"
    SERIAL = "serial"
    SCHEDULED = "scheduled"


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
BatchLimit = Annotated[int | None, typer.Option(help="Most branches decoding at once.")]
Draft = Annotated[DraftName | None, typer.Option(help="Draft ahead of the policy model.")]
VerifyBatch = Annotated[
    int | None, typer.Option(help="Branches whose drafts are checked at once; 0: all.")
]
Exact = Annotated[Switch | None, typer.Option(help="Batch-invariant arithmetic.")]
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
