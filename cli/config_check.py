"""``hedgerow config check``: finds all that a start would refuse, without starting a server or
engine. A verifier function is imported, in a process of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from server.api_keys import ApiKeys
from server.assemble import further_models
from server.setting_types import EMBEDDED, EVERY_WAY, LAUNCHED, OPENAI, RUNNING, allowed_values
from server.settings import Settings, SettingsError, declared, option, variable


def check(settings: Settings) -> dict[str, Any]:
    """Check the settings; return them by variable, secrets hidden, and the API keys' names.

    Raises SettingsError naming the first setting that a server could not start with.
    """
    from server.assemble import (
        check_verifier,
        engine_options,
        model_flops,
        openai_options,
        server_options,
        sglang_options,
    )

    options_of = {
        EMBEDDED: engine_options,
        LAUNCHED: server_options,
        RUNNING: sglang_options,
        OPENAI: openai_options,
    }
    keys = ApiKeys.load(settings)
    try:
        for model in (settings, *further_models(settings)):
            options_of[model.engine_way](model)
            model_flops(model)
            asyncio.run(check_verifier(model))
    except (ValueError, OSError) as error:
        raise SettingsError(str(error)) from error
    names = sorted(Settings.model_fields)
    values = {variable(name): _display(getattr(settings, name)) for name in names}
    return {"settings": values, "keys": keys.names}


def _display(value: object) -> object:
    if isinstance(value, SecretStr):
        return "(set)" if value.get_secret_value() else ""
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def settings_table() -> str:
    """A Markdown table of every setting, which ``docs/settings.md`` contains."""
    lines = [
        "| variable | option | default | allowed | description | applies to |",
        "|---|---|---|---|---|---|",
    ]
    for name, field in Settings.model_fields.items():
        ways = declared(field)["on"]
        cells = (
            f"`{variable(name)}`",
            f"`{flag}`" if (flag := option(name)) else "",
            _default(field),
            allowed_values(field),
            (field.description or "").replace("|", "\\|"),
            "" if ways == EVERY_WAY else ", ".join(f"`{way}`" for way in ways),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    default = field.get_default()
    if field.default_factory is not None or default is None or default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
