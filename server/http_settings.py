"""The settings of the HTTP server and its limits; those of models are in ``settings``."""

from __future__ import annotations

from typing import Literal

from pydantic import SecretStr

from server.setting_types import (
    DeclaredSettings,
    FrontEndName,
    Names,
    OptionalNumber,
    OptionalPath,
    OptionalSecret,
    OptionalUrl,
    setting,
)


class HttpSettings(DeclaredSettings):
    """Where the server listens, what it logs, and how long it waits."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: chosen by the system", ge=0, le=65535)
    root_path: str = setting(
        "", "URL path under which a proxy exposes this server", pattern=r"^(/[^/]+)*$"
    )
    front_end: FrontEndName = setting("", "name of this front end among several; appended to ids")
    trusted_proxies: Names = setting((), "proxies whose X-Forwarded headers are trusted")
    cors_origins: Names = setting((), "allowed CORS origins; none: CORS is off")
    log_format: Literal["text", "json"] = setting("text", "format of log lines")
    log_prompts: bool = setting(False, "log the prompts of requests")
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "minimum level of log messages"
    )
    otlp_endpoint: OptionalUrl = setting(
        None, "OTLP endpoint for trace spans, such as http://host:4318"
    )
    head_seconds: float = setting(10.0, "timeout for receiving the head of a request", gt=0)
    body_seconds: float = setting(60.0, "timeout for receiving the body of a request", gt=0)
    body_idle_seconds: float = setting(
        10.0, "maximum time without a byte while a body is received", gt=0
    )
    deadline_seconds: float = setting(600.0, "maximum time for one request", gt=0)
    keepalive_seconds: float = setting(
        10.0, "maximum silence in a stream before a keepalive is sent", gt=0
    )
    ready_seconds: float = setting(
        2.0, "timeout for the engine's answer to /ready and /metrics", gt=0
    )
    stall_seconds: float = setting(
        30.0, "silence after which an engine that owes an answer counts as down", gt=0
    )
    watchdog_seconds: float = setting(1.0, "interval between health checks of the engine", gt=0)
    restart_attempts: int = setting(
        20, "maximum engine restarts that fail in a row, at growing intervals", ge=1
    )
    retry_after_seconds: int = setting(5, "Retry-After header of refused requests", ge=1, le=60)
    retry_seconds: float = setting(
        10.0,
        "errors sent later than this tell clients not to retry (x-should-retry: false)",
        gt=0,
    )
    drain_seconds: int = setting(10, "time for running requests to finish at shutdown", ge=1)
    kept_seconds: float = setting(600.0, "time that a finished search is kept", gt=0)
    kept_searches: int = setting(256, "maximum finished searches that are kept", ge=1)
    kept_bytes: int = setting(
        64 << 20, "maximum total size of finished searches that are kept", ge=1024
    )


class LimitSettings(DeclaredSettings):
    """Who may send requests, and the limits of requests."""

    api_keys: SecretStr = setting(SecretStr(""), "client API keys: name:key, separated by commas")
    api_keys_file: OptionalPath = setting(None, "TOML file with one table per client API key")
    metrics_key: OptionalSecret = setting(None, "key required for /metrics; none: /metrics is open")
    admin_key: OptionalSecret = setting(None, "key required for /admin; none: /admin is closed")
    share_cache: bool = setting(False, "share cached prefixes between API keys")
    max_running: int = setting(64, "maximum requests running at once", ge=1)
    max_queued: int = setting(1024, "maximum requests waiting in the queue", ge=0)
    key_running: int = setting(64, "maximum requests running at once per API key", ge=1)
    key_queued: OptionalNumber = setting(
        None,
        "maximum waiting requests per API key; none: half of max_queued, all of it without keys",
        ge=0,
    )
    key_tokens_a_day: OptionalNumber = setting(None, "token quota per API key and UTC day", ge=1)
    key_tokens_total: OptionalNumber = setting(
        None, "token quota per API key since the server started", ge=1
    )
    max_body_bytes: int = setting(2 << 20, "maximum size of a request body", ge=1024)
    max_connections: int = setting(8192, "maximum open connections, including idle ones", ge=1)
    max_bodies: int = setting(4096, "maximum bodies being received at once", ge=1)
    max_bodies_by_address: int = setting(
        1024, "maximum bodies being received at once from one address", ge=1
    )
    max_bodies_bytes: int = setting(
        256 << 20,
        "maximum total bytes of bodies being received, and of bodies of open requests",
        ge=1024,
    )
    max_messages: int = setting(1024, "maximum messages in a request", ge=1)
    max_stop_strings: int = setting(16, "maximum stop strings in a request", ge=1, le=16)
    max_choices: int = setting(16, "maximum n of a request", ge=1)
    max_width: int = setting(1024, "maximum width of a search", ge=1, le=1024)
    max_depth: int = setting(200, "maximum depth of a search", ge=1, le=200)
    max_prompt_tokens: int = setting(1 << 20, "maximum tokens in a prompt", ge=1)
    max_tree_tokens: int = setting(1 << 20, "maximum tokens in a request's tree", ge=1)
    default_max_tokens: int = setting(1024, "default max_tokens of a plain reply", ge=1)
    step_tokens: int = setting(16, "tokens in each streamed chunk of a plain reply", ge=1)
