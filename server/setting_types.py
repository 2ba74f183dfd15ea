"""How a setting is declared, and what its text may stand for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from runtime.reward_format import reward_format
from runtime.text import PROFILES

EMBEDDED = "--engine embedded"
LAUNCHED = "--engine sglang --launch"
RUNNING = "--engine sglang with --policy-url"
EVERY_WAY = (EMBEDDED, LAUNCHED, RUNNING)
"""To run an engine."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def setting(
    default: Any,
    description: str,
    *,
    on: tuple[str, ...] = EVERY_WAY,
    off: object = None,
    flag: str | None = "",
    **limits: Any,
) -> Any:
    """A field of ``Settings``.

    ``on``: the ways to run an engine that act on it; any other refuses it, except for ``off``,
    which says what an engine without the setting does. ``flag``: its option on the command line, by
    default its own name, None for none.
    """
    extra = {"on": on, "off": off, "flag": flag}
    kind = "default_factory" if callable(default) else "default"
    return Field(description=description, json_schema_extra=extra, **{kind: default}, **limits)


def checkpoint(name: str | Path) -> Path:
    """The folder that ``name`` stands for: a path, or a name such as ``Qwen/Qwen3-0.6B``.

    Names are looked up among what Hugging Face's tools have already downloaded; nothing is fetched
    here. Raises ValueError that says how to get what is missing.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_NAME.fullmatch(str(name)):
        raise ValueError("there is no such folder")
    from huggingface_hub import snapshot_download  # takes a while: only who needs it waits
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except LocalEntryNotFoundError:
        missing = f"neither a folder nor downloaded; get it with: hf download {name}"
        raise ValueError(missing) from None


def _file(path: Path) -> Path:
    if not path.is_file():
        raise ValueError("there is no such file")
    return path


def _optional(value: Any) -> Any:
    return None if value in ("", "none") else value


def _format(name: str) -> str:
    reward_format(name)
    return name


def _profile(name: str) -> str:
    if name not in PROFILES:
        raise ValueError(f"known are {', '.join(PROFILES)}")
    return name


def _by_commas(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def _url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError(f"{value!r} must start with http:// or https://")
    return value.rstrip("/")


Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
FormatName = Annotated[str, AfterValidator(_format)]
ProfileName = Annotated[str, AfterValidator(_profile)]
Names = Annotated[tuple[str, ...], BeforeValidator(_by_commas)]
DraftWidths = Annotated[
    tuple[Annotated[int, Field(ge=1, le=4)], ...],
    Field(max_length=15),
    BeforeValidator(_by_commas),
]
LoadSizes = Annotated[tuple[Positive, Positive, Positive], BeforeValidator(_by_commas)]
Urls = Annotated[tuple[Annotated[str, AfterValidator(_url)], ...], BeforeValidator(_by_commas)]
Shares = Annotated[tuple[Share, Share], BeforeValidator(_by_commas)]
OptionalSecret = Annotated[SecretStr | None, BeforeValidator(_optional)]
OptionalPath = Annotated[Path | None, BeforeValidator(_optional)]
Checkpoint = Annotated[Path, AfterValidator(checkpoint)]
OptionalCheckpoint = Annotated[Checkpoint | None, BeforeValidator(_optional)]
OptionalFile = Annotated[Annotated[Path, AfterValidator(_file)] | None, BeforeValidator(_optional)]
