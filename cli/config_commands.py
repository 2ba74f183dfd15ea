"""The commands under ``hedgerow config``."""

from __future__ import annotations

import json

import typer

from cli.arguments import Json, exit_on, settings_of
from server.settings import SettingsError

config = typer.Typer(no_args_is_help=True, help="The settings a server would be started with.")


@config.command()
def check(as_json: Json = False) -> None:
    """Say what a server would be started with; exit 2 with one clear line if it could not be."""
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
    """Every setting with its option, default and meaning, as the table of docs/settings.md."""
    from cli.config_check import settings_table

    print(settings_table(), end="")


@config.command(name="models")
def known_models() -> None:
    """Every public model that is known by name, as the tables of docs/models.md."""
    from cli.models_table import models_table

    print(models_table(), end="")
