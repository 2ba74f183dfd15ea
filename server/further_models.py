"""More models in one server: a TOML table each, with the settings in which it differs."""

from __future__ import annotations

import tomllib
from typing import Any

from pydantic import ValidationError

from server.settings import Settings, SettingsError

OWN = (
    "policy_model",
    "reward_model",
    "reward_format",
    "profile",
    "answers",
    "kv_tokens",
    "kv_policy",
    "kv_theta",
    "prm_kv_tokens",
    "kv_split",
    "kv_load",
    "batch_limit",
    "draft",
    "draft_model",
    "draft_rule",
    "draft_tokens",
    "k_config",
    "draft_kv_tokens",
    "verify_batch",
    "threads",
    "exact",
    "kernel",
    "embedder",
    "embedder_layer",
    "encoder",
)
"""What a table may set; everything else is the server's."""


def further_models(settings: Settings) -> list[Settings]:
    """The settings of each model of ``models_file``, in its order; none without a file.

    Raises SettingsError naming the file, the table and the field.
    """
    path = settings.models_file
    if path is None:
        return []
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"HEDGEROW_MODELS_FILE = '{path}': {error}") from None
    if settings.model in tables:
        raise SettingsError(f"{path}, [{settings.model}]: this is HEDGEROW_MODEL's own name")
    return [_settings(settings, name, table, f"{path}, [{name}]") for name, table in tables.items()]


def _settings(settings: Settings, name: str, table: Any, where: str) -> Settings:
    if not isinstance(table, dict):
        raise SettingsError(f"{where}: must be a table")
    unknown = [field for field in table if field not in OWN]
    if unknown:
        raise SettingsError(f"{where}: {unknown[0]}: not a model's; known are {', '.join(OWN)}")
    given = settings.model_dump() | {"models_file": None, "model": name}
    if "policy_model" in table:
        del given["kv_theta"]  # fitted to another model
    try:
        return Settings(**(given | table))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{where}: {field} = {first['input']!r}: {said}") from None
