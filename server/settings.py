"""Every setting of a server, declared once: the environment (``HEDGEROW_...``), the options of the
commands, ``hedgerow config`` and the table in ``docs/settings.md`` follow from the fields here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from models.bundled import SPRIG_FOLDER
from runtime.embedded.choices import (
    DraftMode,
    EmbedderName,
    Kernel,
    KvPolicy,
    KvSplitMode,
    ScheduleOrder,
)
from runtime.servers.routing import PATTERN
from search.spec import AnswerRule
from server.model_settings import AUTO
from server.setting_types import (
    EMBEDDED,
    LAUNCHED,
    ON_SGLANG,
    RUNNING,
    DraftCheckpoint,
    DraftWidths,
    EngineName,
    FormatName,
    FrontEndName,
    LaunchPython,
    LoadSizes,
    Names,
    OptionalCheckpoint,
    OptionalFile,
    OptionalPath,
    OptionalSecret,
    OptionalShares,
    PolicyCheckpoint,
    ProfileName,
    RewardCheckpoint,
    ServedName,
    Urls,
    VerifierName,
    setting,
)

PREFIX = "HEDGEROW_"
API_KEY = "api_key"
"""The one variable that is for clients: ``--url`` sends it."""
UNKNOWN_DEFAULT = "default_factory_not_called"
"""Of kv_theta, where policy_model is wrong; that is said already."""


def _shipped_theta(values: dict[str, Any]) -> Path | None:
    """What was fitted to the bundled policy model, where it is the one and the file is there."""
    path = SPRIG_FOLDER / "theta.json"
    bundled = values.get("policy_model") == SPRIG_FOLDER / "policy"
    return path if bundled and path.is_file() else None


class _Settings(BaseSettings):
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
        """By name alone: ``load_settings`` reads the environment."""
        return (init_settings,)


class ModelSettings(_Settings):
    """The models, and what runs them. A table of ``models_file`` may set those of one model."""

    revision: str | None = setting(None, "of a policy model on the hub: branch, tag or commit")
    policy_model: PolicyCheckpoint = setting(
        "sprig", "a Hugging Face name, a folder, or a bundled name", flag="--model"
    )
    reward_revision: str | None = setting(None, "of a reward model on the hub")
    reward_model: RewardCheckpoint = setting(
        AUTO, "likewise, or none; auto: the bundled model's own, none for any other"
    )
    model: ServedName = setting(
        AUTO,
        "the name that it serves by",
        flag="--served-model-name",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
    )
    models_file: OptionalPath = setting(
        None,
        "TOML, a table a further model",
        on=(EMBEDDED,),
        flag=None,
    )
    profile: ProfileName = setting(AUTO, "how the policy model is asked and ends a step")
    reward_format: FormatName = setting(AUTO, "how rewards are read: a name, or a .json file")
    verifier: VerifierName = setting(None, "judges steps too: arithmetic, module:function or a URL")
    verifier_seconds: float = setting(10.0, "most time for one call of it", gt=0)
    verifier_processes: int = setting(2, "of a Python verifier, a call in each", ge=1, le=256)
    verifier_pure: bool = setting(False, "its numbers follow from question and steps alone")
    verifier_key: OptionalSecret = setting(None, "sent to its URL as a bearer token")
    answers: AnswerRule = setting("auto", "how replies' answers are compared")

    policy_urls: Urls = setting(
        (),
        "SGLang servers of the policy model",
        on=(RUNNING,),
        flag="--policy-url",
    )
    reward_urls: Urls = setting(
        (),
        "SGLang servers of the reward model",
        on=(RUNNING,),
        flag="--reward-url",
    )
    routing: str = setting(
        "none", "what routers at the URLs are told", on=(RUNNING,), off="none", pattern=PATTERN
    )
    start_seconds: float = setting(
        600.0, "for SGLang servers to be there at start", on=ON_SGLANG, gt=0
    )
    connect_seconds: float = setting(10.0, "to reach a SGLang server", on=ON_SGLANG, gt=0)
    answer_seconds: float = setting(600.0, "for its answer to one request", on=ON_SGLANG, gt=0)
    probe_seconds: float = setting(20.0, "for its sign of life", on=ON_SGLANG, gt=0)
    recovery_seconds: float = setting(
        600.0, "that a search waits for a lost one to be back", on=ON_SGLANG, ge=0
    )
    launch: bool = setting(
        False, "start and look after both SGLang servers", on=(LAUNCHED,), off=False
    )
    launch_python: LaunchPython = setting(
        AUTO, "of SGLang's own environment; auto: this one's, or .venv-sglang"
    )
    engine: EngineName = setting(
        AUTO, "what runs the models; auto: SGLang on a GPU, but for bundled models"
    )
    launch_device: Literal["auto", "cuda", "cpu"] = setting(AUTO, "where they run", on=(LAUNCHED,))
    launch_memory: OptionalShares = setting(
        None,
        "of the memory free when each server starts, policy first; none: by sizes and kv_load",
        on=(LAUNCHED,),
    )
    policy_args: str = setting("", "more options for the policy's server", on=(LAUNCHED,))
    reward_args: str = setting("", "more options for the reward model's", on=(LAUNCHED,))

    kv_tokens: int = setting(
        65_536, "KV of the policy model in tokens, all trees", on=(EMBEDDED, LAUNCHED), ge=64
    )
    kv_policy: KvPolicy = setting(
        "arborkv", "what the policy model's KV gives up first", on=(EMBEDDED, LAUNCHED)
    )
    kv_theta: OptionalFile = setting(
        _shipped_theta,
        "what arborkv's signals weigh: a file of hedgerow calibrate; none: the value alone",
        on=(EMBEDDED,),
    )
    prm_kv_tokens: int = setting(
        65_536, "KV of the reward model in tokens", on=(EMBEDDED, LAUNCHED), ge=64
    )
    kv_split: KvSplitMode = setting(
        "given",
        "how the KV bytes of both models are shared; roofline: by what is asked",
        on=(EMBEDDED,),
        off="given",
    )
    kv_load: LoadSizes = setting(
        (64, 256, 64),
        "shared for at first: sequences, tokens each, new ones",
        on=(EMBEDDED, LAUNCHED),
    )
    batch_limit: int = setting(256, "most sequences decoding at once", on=(EMBEDDED,), ge=1)
    draft: DraftMode = setting(
        "off",
        "draft ahead of the policy model; changes time alone",
        on=(EMBEDDED,),
        off="off",
    )
    draft_model: DraftCheckpoint = setting(
        AUTO, "a folder or Hugging Face name; auto: the bundled model's own", on=(EMBEDDED,)
    )
    draft_tokens: int = setting(0, "drafted ahead; 0: what pays", on=(EMBEDDED,), ge=0, le=15)
    k_config: DraftWidths = setting(
        (), "tokens drafted at each depth, such as 2,2,1", on=(EMBEDDED,)
    )
    draft_kv_tokens: int = setting(65_536, "KV of the draft model in tokens", on=(EMBEDDED,), ge=64)
    verify_batch: int = setting(
        0, "sequences whose drafts are checked at once; 0: all", on=(EMBEDDED,), ge=0
    )
    speculate: bool = setting(False, "idle places decode what rounds may ask for next")
    lookahead: bool = setting(True, "what is decoded ahead is scored with the step before it")
    dedup: bool = setting(
        True, "what several sequences have alike is computed once", on=(EMBEDDED,), off=False
    )
    order: ScheduleOrder = setting(
        "prefix", "in which a round's branches are let in", on=(EMBEDDED,)
    )
    threads: int = setting(
        0, "of the engine; 0: as many as are fastest, at most one a core", on=(EMBEDDED,), ge=0
    )
    exact: bool = setting(True, "batch-invariant arithmetic", on=(EMBEDDED,), off=False)
    kernel: Kernel = setting(
        "auto", "what attends: a library that the C compiler builds, or torch", on=(EMBEDDED,)
    )

    embedder: EmbedderName = setting("lexical", "what tells policy ets which steps are alike")
    embedder_layer: int | None = setting(
        None, "hidden: read after so many layers; default: half of them", on=(EMBEDDED,), ge=1
    )
    encoder: OptionalCheckpoint = setting(None, "a sentence encoder's folder or name")
    embeddings_url: str | None = setting(
        None, "whole, ends in /v1/embeddings as a rule", pattern="^https?://"
    )
    embeddings_model: str = setting("default", "its name at embeddings_url")
    embeddings_key: SecretStr | None = setting(None, "sent as a bearer token")


class HttpSettings(_Settings):
    """Where it listens, what it logs, and how long it waits."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "0 lets the system choose", ge=0, le=65535)
    root_path: str = setting("", "where a proxy shows this server", pattern=r"^(/[^/]+)*$")
    front_end: FrontEndName = setting("", "its name among several, which ids end with")
    trusted_proxies: Names = setting((), "whose X-Forwarded headers are read")
    cors_origins: Names = setting((), "none: CORS is off")
    log_format: Literal["text", "json"] = setting("text", "of a log line")
    log_prompts: bool = setting(False, "log what is asked")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "and what is above")
    otlp_endpoint: str | None = setting(
        None, "where spans go, such as http://host:4318", pattern="^https?://"
    )
    head_seconds: float = setting(10.0, "for a request's head to come", gt=0)
    body_seconds: float = setting(60.0, "for a request's body to come", gt=0)
    body_idle_seconds: float = setting(10.0, "of these without a byte", gt=0)
    deadline_seconds: float = setting(600.0, "most time for one request", gt=0)
    keepalive_seconds: float = setting(10.0, "most silence in a stream", gt=0)
    ready_seconds: float = setting(2.0, "most time for the engine's answer", gt=0)
    stall_seconds: float = setting(30.0, "without a sign of life: the engine stands still", gt=0)
    watchdog_seconds: float = setting(1.0, "between looks at the engine", gt=0)
    restart_attempts: int = setting(20, "most in a row that fail, ever longer apart", ge=1)
    retry_after_seconds: int = setting(5, "what a refused client is told", ge=1, le=60)
    retry_seconds: float = setting(
        10.0, "what fails later is not to be retried by the client itself", gt=0
    )
    drain_seconds: int = setting(10, "for running requests at shutdown", ge=1)
    kept_seconds: float = setting(600.0, "a finished search is kept so long", gt=0)
    kept_searches: int = setting(256, "most finished searches that are kept", ge=1)
    kept_bytes: int = setting(64 << 20, "of these together", ge=1024)


class LimitSettings(_Settings):
    """Who may ask, and for how much."""

    api_keys: SecretStr = setting(SecretStr(""), "name:key, by commas")
    api_keys_file: OptionalPath = setting(None, "TOML, a table a key")
    metrics_key: OptionalSecret = setting(None, "opens /metrics")
    admin_key: OptionalSecret = setting(None, "opens /admin; without it: closed")
    share_cache: bool = setting(False, "cached prefixes serve all keys")
    max_running: int = setting(64, "requests whose trees grow at once", ge=1)
    max_queued: int = setting(1024, "requests that may wait", ge=0)
    key_running: int = setting(64, "of these, of one key", ge=1)
    key_queued: int | None = setting(
        None, "of one key; none: half of max_queued, without keys all", ge=0
    )
    key_tokens_a_day: int | None = setting(None, "of one key, by UTC", ge=1)
    key_tokens_total: int | None = setting(None, "of one key, since start", ge=1)
    max_body_bytes: int = setting(2 << 20, "of one request", ge=1024)
    max_connections: int = setting(8192, "open at once, idle ones included", ge=1)
    max_bodies: int = setting(4096, "on their way at once", ge=1)
    max_bodies_by_address: int = setting(1024, "of these, of one address", ge=1)
    max_bodies_bytes: int = setting(256 << 20, "of these, and of open requests", ge=1024)
    max_messages: int = setting(1024, "of one request", ge=1)
    max_stop_strings: int = setting(16, "of one request", ge=1, le=16)
    max_choices: int = setting(16, "n of a request", ge=1)
    max_width: int = setting(1024, "of a search", ge=1, le=1024)
    max_depth: int = setting(200, "of a search", ge=1, le=200)
    max_prompt_tokens: int = setting(1 << 20, "of one request", ge=1)
    max_tree_tokens: int = setting(1 << 20, "of one request's tree", ge=1)
    default_max_tokens: int = setting(1024, "of one trajectory", ge=1)
    step_tokens: int = setting(16, "a streamed piece of a plain reply", ge=1)


class Settings(LimitSettings, HttpSettings, ModelSettings):
    """What a server is started with. Sizes are in the unit that the name says."""

    @property
    def engine_way(self) -> str:
        """How the engine runs, as ``setting(on=...)`` names it."""
        if self.engine == "embedded":
            return EMBEDDED
        return RUNNING if self.policy_urls and not self.launch else LAUNCHED


class SettingsError(ValueError):
    """A setting is wrong; the message names the key, its value and what is allowed."""


def declared(field: FieldInfo) -> dict[str, Any]:
    """What ``setting`` says of a field: ``on``, ``off``, ``flag``."""
    assert isinstance(field.json_schema_extra, dict), "every setting is declared by setting()"
    return field.json_schema_extra


def option(name: str) -> str | None:
    """A setting's option; None for secrets, as command lines are seen by others."""
    field = Settings.model_fields[name]
    flag = declared(field)["flag"]
    secret = "SecretStr" in str(field.annotation)
    return None if flag is None or secret else flag or f"--{name.replace('_', '-')}"


def variable(name: str) -> str:
    """A setting's name in the environment."""
    return f"{PREFIX}{name.upper()}"


class _Variables(EnvSettingsSource):
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(Settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._environ.items()}


def load_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Settings from the environment; ``overrides`` that are not None win.

    Raises SettingsError, one line a key. An unknown ``HEDGEROW_`` variable is an error too, and a
    setting that the engine does not act on.
    """
    environ = os.environ if environ is None else environ
    for name in environ:
        key = name.removeprefix(PREFIX).lower()
        if name.startswith(PREFIX) and key not in {*Settings.model_fields, API_KEY}:
            near = difflib.get_close_matches(key, Settings.model_fields, 1)
            hint = f"; did you mean {variable(near[0])}?" if near else ""
            raise SettingsError(f"{variable(key)}: there is no such setting{hint}")
    chosen = {name: value for name, value in overrides.items() if value is not None}
    named = _Variables(environ)() | chosen
    return settings_by_name({name: value for name, value in named.items() if value != AUTO})


def settings_by_name(values: Mapping[str, Any], shown: Callable[[str], str] = variable) -> Settings:
    """Settings that must all have an effect; errors call them as ``shown`` does.

    Raises SettingsError, one line a key.
    """
    try:
        settings = Settings(**values)
    except ValidationError as error:
        lines = [_line(e, shown) for e in error.errors() if e["type"] != UNKNOWN_DEFAULT]
        raise SettingsError("\n".join(lines)) from None
    way = settings.engine_way
    lines = [
        f"{shown(name)} = {str(values[name])!r}: not acted on by {way}; "
        f"leave it out, or take {' or '.join(declared(Settings.model_fields[name])['on'])}"
        for name in values
        if _ignored(settings, name)
    ]
    if lines:
        raise SettingsError("\n".join(lines))
    return settings


def _ignored(settings: Settings, name: str) -> bool:
    """Whether the engine would not act on a setting that asks for something."""
    about = declared(Settings.model_fields[name])
    return settings.engine_way not in about["on"] and getattr(settings, name) not in (
        None,
        (),
        about["off"],
    )


def _line(error: Any, shown: Callable[[str], str]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    value = "..." if "key" in name else str(error["input"])
    return f"{shown(name)} = {value!r}: {message}"
