"""What the commands take: their own options, each stated once, and every setting as an option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, make_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from search.spec import PolicyName
from server.settings import ModelSettings, Settings, declared


class Switch(StrEnum):
    """A switch on the command line."""

    ON = "on"
    OFF = "off"


class TaskSplit(StrEnum):
    """The splits of a task."""

    TRAIN = "train"
    DEV = "dev"
    TEST = "test"


Trees = Annotated[Path | None, typer.Option(help="Append every tree to this file, a line each.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document alone on stdout.")]
Url = Annotated[str | None, typer.Option(help="Use the server at this URL, not an own engine.")]
Policy = Annotated[str, typer.Option(help=f"Search policy: {', '.join(get_args(PolicyName))}.")]
SearchFields = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other field of a search, as name=value; may be repeated."),
]
Seed = Annotated[int | None, typer.Option(help="Seed; drawn at random if not given.")]


def setting_options(fields: Mapping[str, FieldInfo]) -> list[Any]:
    """The options that typer makes of settings: choices, switches, lists, their descriptions."""
    kinds = {name: _option(name, about) for name, about in fields.items()}
    taken = [(name, kind, field(default=None)) for name, kind in kinds.items() if kind is not None]
    template = typer.Typer(add_completion=False)
    template.command()(make_dataclass("SettingOptions", taken))
    return [one for one in typer.main.get_command(template).params if one.name in kinds]


def option_of(name: str, field: FieldInfo) -> str | None:
    """A setting's option; None for secrets, as command lines are seen by others."""
    flag = declared(field)["flag"]
    secret = "SecretStr" in str(field.annotation)
    return None if flag is None or secret else flag or f"--{name.replace('_', '-')}"


def _option(name: str, field: FieldInfo) -> Any:
    """The option's type as typer takes it, None for no option."""
    flag = option_of(name, field)
    if flag is None:
        return None
    text = field.description or ""
    shown = typer.Option(flag, help=f"{text[:1].upper()}{text[1:]}.", rich_help_panel="Settings")
    if name == "launch":
        return Annotated[bool, shown]
    kind: Any = str
    if field.annotation is bool:
        kind = Literal["on", "off"]
    elif get_origin(field.annotation) is Literal:
        kind = field.annotation
    elif name.endswith("_urls"):
        kind = list[str]
    return Annotated[kind | None, shown]


class EngineCommand(TyperCommand):
    """A command that starts an engine: it takes the settings of models, too.

    Those that are given are ``context.obj``, by name.
    """

    fields: Mapping[str, FieldInfo] = ModelSettings.model_fields

    def __init__(self, *args: Any, params: list[Any] | None = None, **more: Any) -> None:
        super().__init__(*args, params=[*(params or []), *setting_options(self.fields)], **more)

    def invoke(self, ctx: Any) -> Any:
        """Run it."""
        values = {name: ctx.params.pop(name) for name in self.fields if name in ctx.params}
        ctx.obj = {name: value for name, value in values.items() if _given(ctx, name)}
        return super().invoke(ctx)


def _given(ctx: Any, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


class ServeCommand(EngineCommand):
    """A command that takes every setting but secrets."""

    fields = Settings.model_fields
