"""Known public checkpoints, listed in ``catalog.toml``, and how a checkpoint is recognised.

A checkpoint is recognised by its name on the hub (given as such, or read off the folder to which
the hub's tools downloaded it), by the name in its ``config.json``, or by its folder's name.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from runtime.checkpoint import architecture, config_of

CATALOG = Path(__file__).with_name("catalog.toml")
_SNAPSHOTS = "snapshots"


@dataclass(frozen=True, slots=True)
class PublicPolicy:
    """A family of policy models. ``architecture``: the class its ``config.json`` names;
    ``profile``: a name of ``runtime.profiles.PROFILES``."""

    names: tuple[str, ...]
    architecture: str
    profile: str
    license: str


@dataclass(frozen=True, slots=True)
class PublicRewardModel:
    """A family of reward models. ``format``: a name of ``runtime.reward_format.REWARD_FORMATS``,
    which defines the tag and the head; ``only``: the class alone decides the format."""

    names: tuple[str, ...]
    architecture: str
    format: str
    license: str
    only: bool = False


@cache
def public_policies() -> tuple[PublicPolicy, ...]:
    """The catalog's policy models, in its order."""
    return tuple(PublicPolicy(**_row(row)) for row in _catalog()["policy"])


@cache
def public_reward_models() -> tuple[PublicRewardModel, ...]:
    """The catalog's reward models, in its order."""
    return tuple(PublicRewardModel(**_row(row)) for row in _catalog()["reward_model"])


def public_policy(checkpoint: Path) -> PublicPolicy | None:
    """The catalog's entry for a policy model, a folder or a hub name; None if it has none."""
    names = names_of(checkpoint)
    return next((row for row in public_policies() if _called(names, row.names)), None)


def public_reward_model(checkpoint: Path) -> PublicRewardModel | None:
    """The catalog's entry for a reward model, by name or decisive class; None if it has none."""
    names, class_name = names_of(checkpoint), architecture(checkpoint)
    rows = public_reward_models()
    by_name = (row for row in rows if _called(names, row.names))
    by_class = (row for row in rows if row.only and row.architecture == class_name)
    return next(by_name, None) or next(by_class, None)


def hub_name(checkpoint: Path) -> str | None:
    """The hub name of a folder in the hub tools' cache, or of ``owner/name``; else None."""
    parts = checkpoint.parts
    if len(parts) > 2 and parts[-2] == _SNAPSHOTS and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/", 1)
    return None if checkpoint.is_dir() or len(parts) != 2 else str(checkpoint)


def names_of(checkpoint: Path) -> set[str]:
    """A checkpoint's possible names in lower case, with and without their owner."""
    origins = {hub_name(checkpoint), str(config_of(checkpoint).get("_name_or_path") or "") or None}
    names = {name.rstrip("/") for name in origins if name}
    short_names = {name.rpartition("/")[2] for name in names}
    if hub_name(checkpoint) is None:
        short_names.add(checkpoint.name)
    return {name.lower() for name in names | short_names}


def _called(names: set[str], table_names: tuple[str, ...]) -> bool:
    full_names = {name.lower() for name in table_names}
    owned_names = {name for name in names if "/" in name}
    if owned_names & full_names:
        return True
    return bool(names & {name.rpartition("/")[2] for name in full_names})


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"names": tuple(row["names"])}


@cache
def _catalog() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(CATALOG.read_text(encoding="utf-8"))
