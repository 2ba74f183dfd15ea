"""Every setting of a server, declared once: environment variables (``HEDGEROW_...``), the commands'
options, ``hedgerow config`` and the table in ``docs/settings.md`` are derived from the fields."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    EnvSettingsSource,
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
    OptionalPath,
    OptionalSecret,
    OptionalShares,
    PolicyCheckpoint,
    ProfileName,
    RewardCheckpoint,
    ServedName,
    TunedFile,
    Urls,
    VerifierName,
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
    """The models and their engines. A table of ``models_file`` sets those of a further model."""

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
        None, "TOML, a table a further model", on=(EMBEDDED,), flag=None
    )
    profile: ProfileName = setting(AUTO, "how the policy model is asked and ends a step")
    reward_format: FormatName = setting(AUTO, "how rewards are read: a name, or a .json file")
    verifier: VerifierName = setting(None, "judges steps too: arithmetic, module:function or a URL")
    verifier_seconds: float = setting(10.0, "most time for one call of it", gt=0)
    verifier_processes: int = setting(2, "of a Python verifier, a call in each", ge=1, le=256)
    verifier_pure: bool = setting(False, "its numbers follow from question and steps alone")
    verifier_key: OptionalSecret = setting(None, "sent to its URL as a bearer token")
    answers: AnswerRule = setting("auto", "how replies' answers are compared")
    tuned: TunedFile = setting(
        None, "hedgerow tune's file: searches for policy auto and reasoning_effort"
    )

    policy_urls: Urls = setting(
        (), "servers of the policy model", on=OTHERS_RUN, flag="--policy-url"
    )
    reward_urls: Urls = setting(
        (), "servers of the reward model", on=OTHERS_RUN, flag="--reward-url"
    )
    policy_name: str | None = setting(
        None, "what the policy's servers call it; none: the only one they have", on=(OPENAI,)
    )
    reward_name: str | None = setting(None, "likewise of the reward model", on=(OPENAI,))
    policy_key: OptionalSecret = setting(
        None, "sent to policy_urls as a bearer token", on=(OPENAI,)
    )
    reward_key: OptionalSecret = setting(
        None, "sent to reward_urls as a bearer token", on=(OPENAI,)
    )
    server_headers: OptionalHeaders = setting(
        None, "sent to both: Name: value, by commas", on=(OPENAI,)
    )
    routing: str = setting(
        "none", "what routers at the URLs are told", on=OTHERS_RUN, off="none", pattern=PATTERN
    )
    start_seconds: float = setting(600.0, "for servers to be there at start", on=ON_SERVERS, gt=0)
    connect_seconds: float = setting(10.0, "to reach a server", on=ON_SERVERS, gt=0)
    answer_seconds: float = setting(600.0, "for its answer to one request", on=ON_SERVERS, gt=0)
    probe_seconds: float = setting(20.0, "for its sign of life", on=ON_SERVERS, gt=0)
    recovery_seconds: float = setting(
        600.0, "that a search waits for a lost one to be back", on=ON_SERVERS, ge=0
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
    speculate: bool = setting(
        False, "idle places decode what rounds may ask for next", on=ON_OWN_ENGINES, off=False
    )
    lookahead: bool = setting(
        True,
        "what is decoded ahead is scored with the step before it",
        on=ON_OWN_ENGINES,
        off=False,
    )
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


def declared(field: FieldInfo) -> dict[str, Any]:
    """A field's ``on``, ``off`` and ``flag``, as given to ``setting``."""
    assert isinstance(field.json_schema_extra, dict), "every setting is declared by setting()"
    return field.json_schema_extra


def option(name: str) -> str | None:
    """A setting's command-line option; None for secrets, as other users can see command lines."""
    field = Settings.model_fields[name]
    flag = declared(field)["flag"]
    secret = "SecretStr" in str(field.annotation)
    return None if flag is None or secret else flag or f"--{name.replace('_', '-')}"


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
    for name in environ:
        key = name.removeprefix(PREFIX).lower()
        if name.startswith(PREFIX) and key not in {*Settings.model_fields, API_KEY}:
            near = difflib.get_close_matches(key, Settings.model_fields, 1)
            hint = f"; did you mean {variable(near[0])}?" if near else ""
            raise SettingsError(f"{variable(key)}: there is no such setting{hint}")
    options = {name: value for name, value in overrides.items() if value is not None}
    values = _Variables(environ)() | options
    return settings_by_name({name: value for name, value in values.items() if value != AUTO})


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
        f"{label(name)} = {str(values[name])!r}: not acted on by {way}; "
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
    value = "..." if "key" in name else str(error["input"])
    return f"{label(name)} = {value!r}: {message}"
