"""How settings are declared, and the types that parse their texts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from models.bundled import BUNDLED_MODELS
from runtime.profiles import PROFILES
from runtime.reward_format import reward_format
from runtime.verifiers.verifier import BUNDLED_VERIFIERS, URLS
from server.machine import SGLANG_ENVIRONMENT, sglang_python
from server.model_settings import (
    AUTO,
    bundled,
    engine_for,
    format_of,
    profile_of,
    served_name,
)
from server.tuned import read_tuned

T = TypeVar("T")

PREFIX = "HEDGEROW_"
EMBEDDED = "--engine embedded"
LAUNCHED = "--engine sglang --launch"
RUNNING = "--engine sglang with --policy-url"
OPENAI = "--engine openai"
OTHERS_RUN = (RUNNING, OPENAI)
ON_SERVERS = (RUNNING, LAUNCHED, OPENAI)
ON_OWN_ENGINES = (EMBEDDED, LAUNCHED, RUNNING)
EVERY_WAY = (EMBEDDED, LAUNCHED, RUNNING, OPENAI)
"""All ways to run an engine."""
FUNCTION = re.compile(r"[^\W\d]\w*(?:\.\w+)*:[^\W\d]\w*(?:\.\w+)*")
HEADER = re.compile(r"[A-Za-z0-9-]+")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


class DeclaredSettings(BaseSettings):
    """The base of settings classes, whose fields are declared by ``setting``."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        enable_decoding=False,
        frozen=True,
        extra="forbid",
        validate_default=True,
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Any, *_: Any, **others: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take values from arguments only: ``load_settings`` reads the environment."""
        return (init_settings,)


def setting(
    default: Any,
    description: str,
    *,
    on: tuple[str, ...] = EVERY_WAY,
    off: object = None,
    flag: str | None = "",
    **limits: Any,
) -> Any:
    """Declare a field of ``Settings``.

    ``on``: the ways to run an engine that act on the setting; with any other it is refused unless
    its value is ``off``, which is how such an engine behaves. ``flag``: its command-line option, by
    default named after it; None: no option.
    """
    extra = {"on": on, "off": off, "flag": flag}
    kind = "default_factory" if callable(default) else "default"
    return Field(description=description, json_schema_extra=extra, **{kind: default}, **limits)


def declared(field: FieldInfo) -> dict[str, Any]:
    """A field's ``on``, ``off`` and ``flag``, as given to ``setting``."""
    assert isinstance(field.json_schema_extra, dict), "every setting is declared by setting()"
    return field.json_schema_extra


def is_secret(field: FieldInfo) -> bool:
    """Whether no output may have a field's value."""
    return "SecretStr" in str(field.annotation)


def allowed_values(field: FieldInfo) -> str:
    """The names that a setting may have, or the bounds of its number; empty for any other kind."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(get_args(field.annotation))
    if field.annotation is bool:
        return "on, off"
    bounds = (
        (sign, getattr(rule, name, None))
        for rule in field.metadata
        for name, sign in _SIGNS.items()
    )
    return ", ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)


def checkpoint(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a model named by its bundled name, by a path, or by its name on the hub such as
    ``Qwen/Qwen3-0.6B``.

    Nothing is downloaded: the name itself is returned if its files must still be downloaded or made
    (see ``server.model_download``). Raises ValueError if ``name`` is none of these.
    """
    if str(name) in BUNDLED_MODELS:
        policy = BUNDLED_MODELS[str(name)].policy
        return Path(name) if callable(policy) else policy
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_NAME.fullmatch(str(name)):
        raise ValueError(f"there is no such folder; bundled are {', '.join(BUNDLED_MODELS)}")
    from huggingface_hub import snapshot_download  # slow to import, so only when needed
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return folder


def _file(path: Path) -> Path:
    if not path.is_file():
        raise ValueError("there is no such file")
    return path


def _tuned(path: Path) -> Path:
    read_tuned(_file(path))
    return path


def _policy(name: Any, info: ValidationInfo) -> Path:
    return checkpoint(name, info.data.get("revision"))


def _reward(name: Any, info: ValidationInfo) -> Path | None:
    """The named reward model's folder; for ``auto`` the one bundled with the policy, if any."""
    bundle = bundled(info.data.get("policy_model"))
    if name == AUTO:
        return bundle.reward if bundle else None
    choice = BUNDLED_MODELS.get(str(name))
    if choice is not None:
        if choice.reward is None:
            raise ValueError("it has no reward model; leave it out")
        return choice.reward
    return None if name is None else checkpoint(name, info.data.get("reward_revision"))


def _draft(name: Any, info: ValidationInfo) -> Path | None:
    bundle = bundled(info.data.get("policy_model"))
    if name == AUTO:
        return bundle.draft if bundle else None
    return None if name is None else checkpoint(name)


def _served_name(name: str, info: ValidationInfo) -> str:
    return served_name(info.data.get("policy_model")) if name == AUTO else name


def _python(path: Path) -> Path:
    return sglang_python() if path == Path(AUTO) else path


def _engine(name: str, info: ValidationInfo) -> str:
    """The engine's name; for ``auto`` by ``--launch`` or URLs, else what can run the models."""
    if name != AUTO:
        return name
    values = info.data
    if values.get("launch") or values.get("policy_urls"):
        return "sglang"
    return engine_for(
        values.get("policy_model"),
        values.get("reward_model"),
        values.get("launch_python", SGLANG_ENVIRONMENT),
    )


def _optional(value: Any) -> Any:
    return None if value in ("", "none") else value


def _format(name: str, info: ValidationInfo) -> str:
    if name == AUTO:
        return format_of(info.data.get("policy_model"), info.data.get("reward_model"))
    reward_format(name)
    return name


def _verifier(name: str) -> str:
    if name.startswith(URLS):
        return _full_url(name)
    if name in BUNDLED_VERIFIERS or FUNCTION.fullmatch(name):
        return name
    bundled_ones = ", ".join(BUNDLED_VERIFIERS)
    raise ValueError(f"{bundled_ones}, a Python module:function or an http(s) URL is needed")


def _profile(name: str, info: ValidationInfo) -> str:
    if name == AUTO:
        return profile_of(info.data.get("policy_model"))
    if name not in PROFILES:
        raise ValueError(f"known are {', '.join(PROFILES)}")
    return name


def _by_commas(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def headers_of(text: str) -> dict[str, str]:
    """Parse ``Name: value`` pairs separated by commas. Raises ValueError for anything else."""
    parts = [part.partition(":") for part in text.split(",") if part.strip()]
    if not all(colon and HEADER.fullmatch(name.strip()) for name, colon, _ in parts):
        raise ValueError("Name: value is needed, several by commas")
    return {name.strip(): value.strip() for name, _, value in parts}


def _headers(secret: SecretStr) -> SecretStr:
    headers_of(secret.get_secret_value())
    return secret


def _full_url(value: str) -> str:
    if not value.startswith(URLS):
        raise ValueError(f"{value!r} must start with http:// or https://")
    if "@" in value.partition("://")[2].partition("/")[0]:
        raise ValueError(
            "a name or password in a URL would be logged; use a key or headers setting"
        )
    return value


def _base_url(value: str) -> str:
    return _full_url(value).rstrip("/")


OptionalOf = Annotated[T | None, BeforeValidator(_optional)]
Positive = Annotated[int, Field(ge=1)]
FrontEndName = Annotated[str, Field(pattern=r"^[a-z0-9]{0,16}$")]
Share = Annotated[float, Field(gt=0, lt=1)]
FormatName = Annotated[str, AfterValidator(_format)]
VerifierName = OptionalOf[Annotated[str, AfterValidator(_verifier)]]
ProfileName = Annotated[str, AfterValidator(_profile)]
Names = Annotated[tuple[str, ...], BeforeValidator(_by_commas)]
DraftWidths = Annotated[
    tuple[Annotated[int, Field(ge=1, le=4)], ...],
    Field(max_length=15),
    BeforeValidator(_by_commas),
]
LoadSizes = Annotated[tuple[Positive, Positive, Positive], BeforeValidator(_by_commas)]
Urls = Annotated[tuple[Annotated[str, AfterValidator(_base_url)], ...], BeforeValidator(_by_commas)]
OptionalHeaders = OptionalOf[Annotated[SecretStr, AfterValidator(_headers)]]
OptionalShares = OptionalOf[Annotated[tuple[Share, Share], BeforeValidator(_by_commas)]]
OptionalText = OptionalOf[str]
OptionalUrl = OptionalOf[Annotated[str, AfterValidator(_full_url)]]
OptionalNumber = OptionalOf[int]
OptionalSecret = OptionalOf[SecretStr]
OptionalPath = OptionalOf[Path]
PolicyCheckpoint = Annotated[Path, BeforeValidator(_policy)]
RewardCheckpoint = Annotated[Path | None, BeforeValidator(_reward), BeforeValidator(_optional)]
DraftCheckpoint = Annotated[Path | None, BeforeValidator(_draft), BeforeValidator(_optional)]
OptionalCheckpoint = OptionalOf[Annotated[Path, AfterValidator(checkpoint)]]
ServedName = Annotated[str, AfterValidator(_served_name)]
EngineName = Annotated[Literal["auto", "embedded", "sglang", "openai"], AfterValidator(_engine)]
LaunchPython = Annotated[Path, AfterValidator(_python)]
OptionalFile = OptionalOf[Annotated[Path, AfterValidator(_file)]]
TunedFile = OptionalOf[Annotated[Path, AfterValidator(_tuned)]]
