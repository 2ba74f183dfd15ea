"""More models in one server: a TOML table each, with the settings in which it differs."""

from __future__ import annotations

import tomllib
from typing import Any

from server.setting_types import EMBEDDED
from server.settings import (
    ModelSettings,
    Settings,
    SettingsError,
    declared,
    settings_by_name,
    variable,
)

OWN = [
    name
    for name, field in ModelSettings.model_fields.items()
    if EMBEDDED in declared(field)["on"] and name not in ("engine", "model", "models_file")
]
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
        raise SettingsError(f"{variable('models_file')} = '{path}': {error}") from None
    if settings.model in tables:
        raise SettingsError(f"{path}, [{settings.model}]: this is HEDGEROW_MODEL's own name")
    return [_settings(settings, name, table, f"{path}, [{name}]") for name, table in tables.items()]


def _settings(settings: Settings, name: str, table: Any, where: str) -> Settings:
    if not isinstance(table, dict):
        raise SettingsError(f"{where}: must be a table")
    unknown = [field for field in table if field not in OWN]
    if unknown:
        raise SettingsError(f"{where}: {unknown[0]}: not a model's; known are {', '.join(OWN)}")
    servers = settings.model_dump(exclude_unset=True) | {"models_file": None, "model": name}
    if "policy_model" in table:
        servers.pop("kv_theta", None)  # fitted to another model
    try:
        return settings_by_name(servers | table, str)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None
