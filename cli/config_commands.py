"""The commands under ``hedgerow config``."""

from __future__ import annotations

import json

import typer

from cli.arguments import Json, exit_on, settings_of
from server.settings import SettingsError

config = typer.Typer(no_args_is_help=True, help="Check and list settings, and list known models.")


@config.command()
def check(as_json: Json = False) -> None:
    """Show the settings that a server would start with; exit 2 with the reason if it could not."""
    from cli.config_check import check as run

    settings = settings_of({})
    with exit_on(SettingsError):
        report = run(settings)
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report["settings"].items():
        print(f"{name} = {value}")
    print(f"keys: {', '.join(report['keys'])}")


@config.command()
def table() -> None:
    """List every setting with option, default and description, as in docs/settings.md."""
    from cli.config_check import settings_table

    print(settings_table(), end="")


@config.command(name="models")
def known_models() -> None:
    """List every public model known by name, as in docs/models.md."""
    from cli.models_table import models_table

    print(models_table(), end="")
