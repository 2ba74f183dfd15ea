"""The settings of the HTTP server and its limits; those of models are in ``settings``."""

from __future__ import annotations

from typing import Literal

from pydantic import SecretStr

from server.setting_types import (
    DeclaredSettings,
    FrontEndName,
    Names,
    OptionalPath,
    OptionalSecret,
    setting,
)


class HttpSettings(DeclaredSettings):
    """Where the server listens, what it logs, and how long it waits."""

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


class LimitSettings(DeclaredSettings):
    """Who may send requests, and the limits of requests."""

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
