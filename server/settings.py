"""Every knob and limit of a server, by name: from the environment (``HEDGEROW_...``) or the CLI."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
)

import models
from runtime.reward_format import reward_format
from search.spec import AnswerRule
from server.engine_settings import ignored_settings

PREFIX = "HEDGEROW_"
API_KEY = "api_key"
"""The one variable that is for clients: ``--url`` sends it."""
BUNDLED = Path(models.__file__ or ".").parent / "sprig"


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError("there is no such folder")
    return path


def _file(path: Path) -> Path:
    if not path.is_file():
        raise ValueError("there is no such file")
    return path


def _shipped_theta(given: dict[str, Any]) -> Path | None:
    """What was fitted to the bundled policy model, where it is the one and the file is there."""
    path = BUNDLED / "theta.json"
    return path if given.get("policy_model") == BUNDLED / "policy" and path.is_file() else None


def _optional(value: Any) -> Any:
    return None if value in ("", "none") else value


def _format(name: str) -> str:
    reward_format(name)
    return name


FormatName = Annotated[str, AfterValidator(_format)]


def _listed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def _url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError(f"{value!r} must start with http:// or https://")
    return value.rstrip("/")


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Widths = Annotated[
    tuple[Annotated[int, Field(ge=1, le=4)], ...], Field(max_length=15), BeforeValidator(_listed)
]
Load = Annotated[
    tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]],
    BeforeValidator(_listed),
]
Urls = Annotated[tuple[Annotated[str, AfterValidator(_url)], ...], BeforeValidator(_listed)]
Share = Annotated[float, Field(gt=0, lt=1)]
Shares = Annotated[tuple[Share, Share], BeforeValidator(_listed)]
OptionalSecret = Annotated[SecretStr | None, BeforeValidator(_optional)]
OptionalPath = Annotated[Path | None, BeforeValidator(_optional)]
Checkpoint = Annotated[Path, AfterValidator(_folder)]
OptionalCheckpoint = Annotated[Checkpoint | None, BeforeValidator(_optional)]
OptionalFile = Annotated[Annotated[Path, AfterValidator(_file)] | None, BeforeValidator(_optional)]


class Settings(BaseModel):
    """What a server is started with. Sizes are in the unit that the name says."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535, description="0 lets the system choose")
    root_path: str = Field(default="", pattern=r"^(/[^/]+)*$", description="behind a proxy")
    trusted_proxies: Names = Field(default=(), description="whose X-Forwarded headers are read")
    log_format: Literal["text", "json"] = "text"
    log_prompts: bool = False
    answers: AnswerRule = Field(default="auto", description="how replies' answers are compared")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otlp_endpoint: str | None = Field(
        default=None, pattern="^https?://", description="where spans go, such as http://host:4318"
    )

    engine: Literal["embedded", "sglang"] = "embedded"
    model: str = Field(default="sprig", pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    policy_model: Checkpoint = BUNDLED / "policy"
    reward_model: OptionalCheckpoint = BUNDLED / "prm"
    reward_format: FormatName = Field(default="math-shepherd", description="or a .json file")
    profile: str = "sprig"
    models_file: OptionalPath = Field(default=None, description="TOML, a table a further model")
    kv_tokens: int = Field(default=65_536, ge=64, description="KV of the policy model, all trees")
    kv_policy: Literal["full", "lru", "arborkv"] = Field(
        default="arborkv", description="what the policy model's KV gives up first"
    )
    kv_theta: OptionalFile = Field(
        default_factory=_shipped_theta,
        description="what arborkv's signals weigh, from hedgerow calibrate; none: the value alone",
    )
    prm_kv_tokens: int = Field(default=65_536, ge=64, description="KV of the reward model")
    kv_split: Literal["given", "even", "roofline"] = Field(
        default="given", description="how the KV bytes of both models are shared"
    )
    kv_load: Load = Field(
        default=(64, 256, 64),
        description="shared for at first: sequences, tokens each, new ones",
    )
    batch_limit: int = Field(default=256, ge=1, description="most branches decoding at once")
    draft: Literal["off", "serial", "scheduled"] = Field(
        default="off", description="draft ahead of the policy model; changes time alone"
    )
    draft_model: OptionalCheckpoint = BUNDLED / "draft"
    draft_rule: Literal["coupled", "leviathan"] = Field(
        default="coupled", description="leviathan: by rejection; trees keep no digests"
    )
    draft_tokens: int = Field(default=0, ge=0, le=15, description="drafted ahead; 0: what pays")
    k_config: Widths = Field(default=(), description="tokens drafted at each depth, such as 2,2,1")
    draft_kv_tokens: int = Field(default=65_536, ge=64, description="KV of the draft model")
    verify_batch: int = Field(
        default=0, ge=0, description="branches whose drafts are checked at once; 0: all"
    )
    speculate: bool = Field(
        default=False, description="idle places draw what rounds may ask for next"
    )
    lookahead: bool = Field(
        default=True, description="what is drawn ahead is scored with the step before it"
    )
    dedup: bool = Field(default=True, description="what branches have drawn alike is computed once")
    order: Literal["prefix", "fcfs", "random"] = Field(
        default="prefix", description="in which a round's branches are let in"
    )
    threads: int = Field(
        default=0, ge=0, description="of the engine; 0: as many as are fastest, at most one a core"
    )
    exact: bool = Field(default=True, description="batch-invariant arithmetic")
    kernel: Literal["auto", "native", "torch"] = Field(
        default="auto", description="what attends: a library that the C compiler builds, or torch"
    )

    policy_urls: Urls = Field(default=(), description="SGLang servers of the policy, by commas")
    reward_urls: Urls = Field(default=(), description="SGLang servers of the reward model")
    launch: bool = Field(default=False, description="start and look after both SGLang servers")
    launch_python: Path = Field(
        default=Path(".venv-sglang/bin/python"), description="of SGLang's own environment"
    )
    launch_device: Literal["cuda", "cpu"] = "cuda"
    launch_memory: Shares = Field(
        default=(0.6, 0.75),
        description="of the device's memory that is free when each server starts, policy first",
    )
    policy_args: str = Field(default="", description="more options for the policy's server")
    reward_args: str = Field(
        default="", description="more of SGLang's options for the reward model"
    )

    embedder: Literal["hidden", "lexical", "encoder", "endpoint"] = Field(
        default="lexical", description="what tells policy ets which steps are alike"
    )
    embedder_layer: int | None = Field(
        default=None, ge=1, description="hidden: read after so many layers; default: half of them"
    )
    encoder: OptionalCheckpoint = Field(default=None, description="a sentence encoder's folder")
    embeddings_url: str | None = Field(
        default=None, pattern="^https?://", description="whole, ends in /v1/embeddings as a rule"
    )
    embeddings_model: str = Field(default="default", description="its name at embeddings_url")
    embeddings_key: SecretStr | None = Field(default=None, description="sent as a bearer token")

    max_body_bytes: int = Field(default=2 << 20, ge=1024)
    head_seconds: float = Field(default=10.0, gt=0, description="for a request's head to come")
    body_seconds: float = Field(default=60.0, gt=0, description="for a request's body to come")
    body_idle_seconds: float = Field(default=10.0, gt=0, description="of these without a byte")
    max_connections: int = Field(default=8192, ge=1, description="open at once, idle ones included")
    max_bodies: int = Field(default=4096, ge=1, description="on their way at once")
    max_bodies_by_address: int = Field(default=1024, ge=1, description="of these, of one address")
    max_bodies_bytes: int = Field(
        default=256 << 20, ge=1024, description="of these, and of open requests"
    )
    max_messages: int = Field(default=1024, ge=1)
    max_stop_strings: int = Field(default=16, ge=1, le=16)
    max_width: int = Field(default=1024, ge=1, le=1024)
    default_max_tokens: int = Field(default=1024, ge=1, description="of one trajectory")
    step_tokens: int = Field(default=16, ge=1, description="a streamed piece of a plain reply")
    deadline_seconds: float = Field(default=600.0, gt=0, description="most time for one request")
    keepalive_seconds: float = Field(default=10.0, gt=0, description="most silence in a stream")
    ready_seconds: float = Field(default=2.0, gt=0, description="most time for the engine's answer")
    stall_seconds: float = Field(
        default=30.0, gt=0, description="without a sign of life: the engine stands still"
    )
    watchdog_seconds: float = Field(default=1.0, gt=0, description="between looks at the engine")
    retry_after_seconds: int = Field(default=5, ge=1, le=60)
    retry_seconds: float = Field(
        default=10.0, gt=0, description="what fails later is not to be retried by the client itself"
    )
    drain_seconds: int = Field(default=10, ge=1, description="for running requests at shutdown")
    kept_seconds: float = Field(
        default=600.0, gt=0, description="a finished search is kept so long"
    )
    kept_searches: int = Field(default=256, ge=1)
    kept_bytes: int = Field(default=64 << 20, ge=1024)

    api_keys: SecretStr = Field(default=SecretStr(""), description="name:key, by commas")
    api_keys_file: OptionalPath = Field(default=None, description="TOML, a table a key")
    metrics_key: OptionalSecret = Field(default=None, description="opens /metrics")
    admin_key: OptionalSecret = Field(default=None, description="opens /admin; without it: closed")
    share_cache: bool = Field(default=False, description="cached prefixes serve all keys")
    cors_origins: Names = Field(default=(), description="by commas; none: CORS is off")
    max_running: int = Field(default=64, ge=1, description="requests whose trees grow at once")
    max_queued: int = Field(default=1024, ge=0, description="requests that may wait")
    key_running: int = Field(default=64, ge=1, description="of one key at once")
    key_queued: int | None = Field(
        default=None, ge=0, description="of one key; none: half of max_queued, without keys all"
    )
    key_tokens_a_day: int | None = Field(default=None, ge=1, description="of one key, by UTC")
    key_tokens_total: int | None = Field(default=None, ge=1, description="of one key, since start")
    max_depth: int = Field(default=200, ge=1, le=200)
    max_prompt_tokens: int = Field(default=1 << 20, ge=1)
    max_choices: int = Field(default=16, ge=1, description="n of a request")
    max_tree_tokens: int = Field(default=1 << 20, ge=1, description="of one request's tree")


class SettingsError(ValueError):
    """A setting is wrong; the message names the key, its value and what is allowed."""


def load_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Settings from the environment; ``overrides`` that are not None win.

    Raises SettingsError, one line a key. An unknown ``HEDGEROW_`` variable is an error too.
    """
    environ = os.environ if environ is None else environ
    given: dict[str, Any] = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX)
    }
    given.pop(API_KEY, None)
    for name in given:
        if name not in Settings.model_fields:
            near = difflib.get_close_matches(name, Settings.model_fields, 1)
            hint = f"; did you mean {PREFIX}{near[0].upper()}?" if near else ""
            raise SettingsError(f"{PREFIX}{name.upper()}: there is no such setting{hint}")
    given |= {name: value for name, value in overrides.items() if value is not None}
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise SettingsError("\n".join(_line(e) for e in error.errors())) from None
    values = {name: getattr(settings, name) for name in given}
    ignored = ignored_settings(settings.engine, settings.launch, values)
    if ignored:
        lines = [_refusal(name, given[name], reason) for name, reason in ignored.items()]
        raise SettingsError("\n".join(lines))
    return settings


def _line(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    said = error["msg"].removeprefix("Value error, ")
    return _refusal(name, "..." if "key" in name else error["input"], said)


def _refusal(name: str, value: Any, reason: str) -> str:
    return f"{PREFIX}{name.upper()} = {str(value)!r}: {reason}"
