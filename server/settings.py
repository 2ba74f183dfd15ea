"""Every setting of a server, declared once: environment variables (``HEDGEROW_...``), the commands'
options, ``hedgerow config`` and the table in ``docs/settings.md`` are derived from the fields."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

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
from server.http_settings import HttpSettings, LimitSettings
from server.model_settings import AUTO
from server.setting_types import (
    EMBEDDED,
    LAUNCHED,
    ON_OWN_ENGINES,
    ON_SERVERS,
    OPENAI,
    OTHERS_RUN,
    PREFIX,
    RUNNING,
    DeclaredSettings,
    DraftCheckpoint,
    DraftWidths,
    EngineName,
    FormatName,
    LaunchPython,
    LoadSizes,
    OptionalCheckpoint,
    OptionalFile,
    OptionalHeaders,
    OptionalNumber,
    OptionalPath,
    OptionalSecret,
    OptionalShares,
    OptionalText,
    OptionalUrl,
    PolicyCheckpoint,
    ProfileName,
    RewardCheckpoint,
    ServedName,
    TunedFile,
    Urls,
    VerifierName,
    declared,
    is_secret,
    setting,
)

API_KEY = "api_key"
"""The only variable for clients: commands with ``--url`` send it."""
UNKNOWN_DEFAULT = "default_factory_not_called"
"""The error type of kv_theta if policy_model is invalid, which has an error of its own."""


def _shipped_theta(values: dict[str, Any]) -> Path | None:
    """The theta file of the bundled policy model, if that is the policy and the file exists."""
    path = SPRIG_FOLDER / "theta.json"
    bundled = values.get("policy_model") == SPRIG_FOLDER / "policy"
    return path if bundled and path.is_file() else None


class ModelSettings(DeclaredSettings):
    """The models and their engines. A table of ``models_file`` sets these for one more model."""

    revision: OptionalText = setting(None, "policy model's branch, tag or commit on Hugging Face")
    policy_model: PolicyCheckpoint = setting(
        "sprig", "policy model: Hugging Face name, folder or bundled name", flag="--model"
    )
    reward_revision: OptionalText = setting(
        None, "reward model's branch, tag or commit on Hugging Face"
    )
    reward_model: RewardCheckpoint = setting(
        AUTO,
        "reward model: Hugging Face name, folder, bundled name or none; auto: the one bundled with "
        "the policy model, none for other policy models",
    )
    model: ServedName = setting(
        AUTO,
        "model name used in the API",
        flag="--served-model-name",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
    )
    models_file: OptionalPath = setting(
        None, "TOML file with one table per additional model", on=(EMBEDDED,), flag=None
    )
    profile: ProfileName = setting(
        AUTO, "prompt profile: system message and step delimiter of the policy model"
    )
    reward_format: FormatName = setting(
        AUTO, "how rewards are read from the reward model: format name or .json file"
    )
    verifier: VerifierName = setting(
        None, "verifier that also scores steps: arithmetic, module:function or a URL"
    )
    verifier_seconds: float = setting(10.0, "timeout for one verifier call", gt=0)
    verifier_processes: int = setting(
        2, "maximum processes of a Python verifier, one call in each", ge=1, le=256
    )
    verifier_pure: bool = setting(
        False, "declare that the verifier's scores depend only on question and steps"
    )
    verifier_key: OptionalSecret = setting(None, "bearer token for the verifier's URL")
    answers: AnswerRule = setting("auto", "how answers are extracted from replies and compared")
    tuned: TunedFile = setting(
        None, "file written by hedgerow tune: searches for policy auto and reasoning_effort"
    )

    policy_urls: Urls = setting(
        (), "URLs of the policy model servers", on=OTHERS_RUN, flag="--policy-url"
    )
    reward_urls: Urls = setting(
        (), "URLs of the reward model servers", on=OTHERS_RUN, flag="--reward-url"
    )
    policy_name: OptionalText = setting(
        None, "model name on the policy servers; none: the only model they serve", on=(OPENAI,)
    )
    reward_name: OptionalText = setting(
        None, "model name on the reward servers; none: the only model they serve", on=(OPENAI,)
    )
    policy_key: OptionalSecret = setting(None, "bearer token for policy_urls", on=(OPENAI,))
    reward_key: OptionalSecret = setting(None, "bearer token for reward_urls", on=(OPENAI,))
    server_headers: OptionalHeaders = setting(
        None,
        "HTTP headers for policy_urls and reward_urls: Name: value, separated by commas",
        on=(OPENAI,),
    )
    routing: str = setting(
        "none",
        "routing header sent to routers at the URLs: none, smg or header:NAME",
        on=OTHERS_RUN,
        off="none",
        pattern=PATTERN,
    )
    start_seconds: float = setting(
        600.0, "timeout for model servers to come up at startup", on=ON_SERVERS, gt=0
    )
    connect_seconds: float = setting(
        10.0, "timeout for connecting to a model server", on=ON_SERVERS, gt=0
    )
    answer_seconds: float = setting(
        600.0, "timeout for a model server's answer to one request", on=ON_SERVERS, gt=0
    )
    probe_seconds: float = setting(
        20.0, "timeout for a health check of a model server", on=ON_SERVERS, gt=0
    )
    recovery_seconds: float = setting(
        600.0, "maximum wait of a search for a lost model server to return", on=ON_SERVERS, ge=0
    )
    launch: bool = setting(
        False, "start and supervise the SGLang servers", on=(LAUNCHED,), off=False
    )
    launch_python: LaunchPython = setting(
        AUTO, "Python that has SGLang; auto: the current one if it has it, else .venv-sglang"
    )
    engine: EngineName = setting(
        AUTO,
        "inference engine; auto: sglang with --launch, with URLs, or on a GPU where launch_python "
        "exists (except for bundled models), otherwise embedded",
    )
    launch_device: Literal["auto", "cuda", "cpu"] = setting(
        AUTO, "device of launched servers", on=(LAUNCHED,)
    )
    launch_memory: OptionalShares = setting(
        None,
        "fraction of the free memory that each server takes at its start, policy model first; "
        "none: computed from model sizes and kv_load",
        on=(LAUNCHED,),
    )
    policy_args: str = setting(
        "", "additional SGLang options for the policy model server", on=(LAUNCHED,)
    )
    reward_args: str = setting(
        "", "additional SGLang options for the reward model server", on=(LAUNCHED,)
    )

    kv_tokens: int = setting(
        65_536,
        "KV cache capacity of the policy model in tokens, for all trees; with --launch on a GPU by "
        "default what the server's memory share holds",
        on=(EMBEDDED, LAUNCHED),
        ge=64,
    )
    kv_policy: KvPolicy = setting(
        "arborkv",
        "eviction policy for the policy model's KV cache; full: embedded engine only",
        on=(EMBEDDED, LAUNCHED),
    )
    kv_theta: OptionalFile = setting(
        _shipped_theta,
        "file written by hedgerow calibrate: weights of arborkv's signals; default: the bundled "
        "model's, if it ships one; none: the value alone",
        on=(EMBEDDED,),
    )
    prm_kv_tokens: int = setting(
        65_536,
        "KV cache capacity of the reward model in tokens; with --launch on a GPU as kv_tokens",
        on=(EMBEDDED, LAUNCHED),
        ge=64,
    )
    kv_split: KvSplitMode = setting(
        "given",
        "how KV bytes are split between the models; given: as kv_tokens and prm_kv_tokens set, "
        "even: half of them each, roofline: by kv_load",
        on=(EMBEDDED,),
        off="given",
    )
    kv_load: LoadSizes = setting(
        (64, 256, 64),
        "load for the memory split at startup: sequences, tokens of each, new tokens of each",
        on=(EMBEDDED, LAUNCHED),
    )
    batch_limit: int = setting(256, "maximum sequences per batch", on=(EMBEDDED,), ge=1)
    draft: DraftMode = setting(
        "off", "speculative decoding by draft_model; affects only speed", on=(EMBEDDED,), off="off"
    )
    draft_model: DraftCheckpoint = setting(
        AUTO,
        "draft model: folder or Hugging Face name; auto: the one bundled with the policy model",
        on=(EMBEDDED,),
    )
    draft_tokens: int = setting(
        0, "tokens to draft ahead; 0: adapts to measured speed", on=(EMBEDDED,), ge=0, le=15
    )
    k_config: DraftWidths = setting(
        (), "tokens drafted after each token, by depth, such as 2,2,1; deeper: 1", on=(EMBEDDED,)
    )
    draft_kv_tokens: int = setting(
        65_536, "KV cache capacity of the draft model in tokens", on=(EMBEDDED,), ge=64
    )
    verify_batch: int = setting(
        0, "sequences whose drafts are verified at once; 0: all", on=(EMBEDDED,), ge=0
    )
    speculate: bool = setting(
        False,
        "use idle batch slots to decode steps that later rounds may request",
        on=ON_OWN_ENGINES,
        off=False,
    )
    lookahead: bool = setting(
        True,
        "score a step that was decoded ahead in the same pass as the step before it",
        on=ON_OWN_ENGINES,
        off=False,
    )
    dedup: bool = setting(
        True, "compute identical tokens of several sequences once", on=(EMBEDDED,), off=False
    )
    order: ScheduleOrder = setting(
        "prefix", "order in which the branches of a round are admitted to the batch", on=(EMBEDDED,)
    )
    threads: int = setting(
        0, "compute threads; 0: the fastest number, at most one per core", on=(EMBEDDED,), ge=0
    )
    exact: bool = setting(True, "use batch-invariant arithmetic", on=(EMBEDDED,), off=False)
    kernel: Kernel = setting(
        "auto",
        "attention kernel; native: built by the C compiler; auto: native if available, else torch",
        on=(EMBEDDED,),
    )

    embedder: EmbedderName = setting(
        "lexical",
        "embedder that compares steps for policies ets and dora; hidden: embedded engine only",
    )
    embedder_layer: OptionalNumber = setting(
        None,
        "embedder hidden: number of layers after which states are read; default: half of them",
        on=(EMBEDDED,),
        ge=1,
    )
    encoder: OptionalCheckpoint = setting(
        None, "embedder encoder: sentence encoder, a folder or Hugging Face name"
    )
    embeddings_url: OptionalUrl = setting(
        None, "embedder endpoint: full URL, usually ending in /v1/embeddings"
    )
    embeddings_model: str = setting("default", "model name at embeddings_url")
    embeddings_key: OptionalSecret = setting(None, "bearer token for embeddings_url")


class Settings(LimitSettings, HttpSettings, ModelSettings):
    """All settings of a server. Sizes are in the unit in their name."""

    @property
    def engine_way(self) -> str:
        """How the engine runs, as ``setting(on=...)`` names it."""
        if self.engine == "embedded":
            return EMBEDDED
        if self.engine == "openai":
            return OPENAI
        return RUNNING if self.policy_urls and not self.launch else LAUNCHED


class SettingsError(ValueError):
    """A setting is wrong; the message names the key, its value and what is allowed."""


def option(name: str) -> str | None:
    """A setting's command-line option; None for secrets, as other users can see command lines."""
    field = Settings.model_fields[name]
    flag = declared(field)["flag"]
    return None if flag is None or is_secret(field) else flag or f"--{name.replace('_', '-')}"


def variable(name: str) -> str:
    """A setting's environment variable."""
    return f"{PREFIX}{name.upper()}"


class _Variables(EnvSettingsSource):
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(Settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._environ.items()}


def load_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Load settings from the environment; ``overrides`` that are not None take precedence.

    Raises SettingsError with a line for each key, also for an unknown ``HEDGEROW_`` variable and
    for a setting that the engine does not act on.
    """
    environ = os.environ if environ is None else environ
    keys = [name.removeprefix(PREFIX).lower() for name in environ if name.startswith(PREFIX)]
    unknown = [key for key in keys if key not in {*Settings.model_fields, API_KEY}]
    if unknown:
        raise SettingsError("\n".join(map(_unknown_line, unknown)))
    options = {name: value for name, value in overrides.items() if value is not None}
    values = _Variables(environ)() | options
    return settings_by_name({name: value for name, value in values.items() if value != AUTO})


def _unknown_line(key: str) -> str:
    near = difflib.get_close_matches(key, Settings.model_fields, 1)
    hint = f"; did you mean {variable(near[0])}?" if near else ""
    return f"{variable(key)}: there is no such setting{hint}"


def settings_by_name(values: Mapping[str, Any], label: Callable[[str], str] = variable) -> Settings:
    """Settings from values that must all have an effect; ``label`` names a setting in errors.

    Raises SettingsError with a line for each key.
    """
    try:
        settings = Settings(**values)
    except ValidationError as error:
        lines = [_line(e, label) for e in error.errors() if e["type"] != UNKNOWN_DEFAULT]
        raise SettingsError("\n".join(lines)) from None
    way = settings.engine_way
    lines = [
        f"{label(name)} = {_shown(name, values[name])!r}: not acted on by {way}; "
        f"leave it out, or take {' or '.join(declared(Settings.model_fields[name])['on'])}"
        for name in values
        if _ignored(settings, name)
    ]
    if lines:
        raise SettingsError("\n".join(lines))
    return settings


def _ignored(settings: Settings, name: str) -> bool:
    """Whether a setting asks for something that the engine does not act on."""
    declaration = declared(Settings.model_fields[name])
    return settings.engine_way not in declaration["on"] and getattr(settings, name) not in (
        None,
        (),
        declaration["off"],
    )


def _line(error: Any, label: Callable[[str], str]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    return f"{label(name)} = {_shown(name, error['input'])!r}: {message}"


def _shown(name: str, value: Any) -> str:
    """A setting's value as an error shows it: not if it is a secret. ``name`` may be of a part."""
    field = Settings.model_fields.get(name.partition(".")[0])
    secret = field is not None and is_secret(field)
    return "..." if secret else re.sub(r"//[^/@]*@", "//...@", str(value))
