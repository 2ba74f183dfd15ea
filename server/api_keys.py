"""API keys: which clients there are, and their limits. Only the SHA-256 of a key is kept."""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from server.api_errors import ApiError
from server.settings import Settings, SettingsError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
HEX = r"^[0-9a-fA-F]{64}$"
ANYBODY = "anybody"
BEARER = b"bearer "


class ApiKey(BaseModel):
    """One client's name and limits; a limit that is not set is the server's.

    ``weight``: its share of the places when there are too few. ``running`` and ``queued``: how many
    of its trees may grow and wait at once. ``prompt_tokens``, ``tree_tokens``, ``width``,
    ``depth``: most for one request. ``tokens_a_day``, ``tokens_total``: most for all its requests,
    prompts included. ``namespace``: only trees of the same namespace share cached prefixes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    namespace: str = ""
    weight: float = Field(default=1.0, gt=0, le=1000)
    running: int = Field(ge=1)
    queued: int = Field(ge=0)
    width: int = Field(ge=1, le=1024)
    depth: int = Field(ge=1, le=200)
    prompt_tokens: int = Field(ge=1)
    tree_tokens: int = Field(ge=1)
    tokens_a_day: int | None = Field(default=None, ge=1)
    tokens_total: int | None = Field(default=None, ge=1)


class ApiKeys:
    """All keys of a server. Without any key, every client is ``ANYBODY`` and sends none."""

    def __init__(self, keys: Sequence[tuple[bytes, ApiKey]], anybody: ApiKey) -> None:
        """``keys``: SHA-256 digests of the secrets, each with the key's name and limits."""
        self._keys = list(keys)
        self.anybody = anybody
        self.required = bool(keys)

    @classmethod
    def load(cls, settings: Settings) -> ApiKeys:
        """Load the keys in the settings and their file. Raises SettingsError naming the entry."""
        entries = _from_environment(settings)
        if settings.api_keys_file is not None:
            entries += _from_file(settings.api_keys_file)
        keys = [(bytes.fromhex(e.pop("sha256")), _key(e, settings, where)) for where, e in entries]
        names = [key.name for _, key in keys]
        clash = next((name for name in names if names.count(name) > 1), None)
        if clash is not None:
            raise SettingsError(f"api keys: {clash!r} is there twice; every name once is needed")
        owners: dict[bytes, str] = {}
        for digest, key in keys:
            if (first := owners.setdefault(digest, key.name)) != key.name:
                message = f"{first!r} and {key.name!r} have the same secret; each its own is needed"
                raise SettingsError(f"api keys: {message}")
        return cls(keys, _key({"name": ANYBODY}, settings, "limits"))

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def names(self) -> list[str]:
        """The names of all keys, or ``ANYBODY`` alone: every name that usage is counted under."""
        return [key.name for _, key in self._keys] or [self.anybody.name]

    def find(self, authorization: Sequence[bytes]) -> ApiKey:
        """The key that the request's ``authorization`` headers hold. Raises ApiError (401).

        All keys are compared, each in constant time, so that the time taken reveals nothing.
        """
        digest = sha256(bearer(authorization))
        match = None
        for key_digest, key in self._keys:
            if hmac.compare_digest(key_digest, digest):
                match = key
        if match is None:
            raise unauthorised("this API key is not known")
        return match


def bearer(authorization: Sequence[bytes]) -> bytes:
    """The token of the one ``Authorization: Bearer`` header. Raises ApiError (401)."""
    if len(authorization) != 1:
        message = "more than one was sent" if authorization else "none was sent"
        raise unauthorised(f"one header 'Authorization: Bearer KEY' is needed, {message}")
    scheme, token = authorization[0][: len(BEARER)], authorization[0][len(BEARER) :].strip()
    if scheme.lower() != BEARER or not token:
        raise unauthorised("the header must read 'Authorization: Bearer KEY'")
    return token


def must_hold(secret: SecretStr | None, authorization: Sequence[bytes]) -> None:
    """Check that the headers hold ``secret``, if it is not None. Raises ApiError (401)."""
    if secret is None:
        return
    if not hmac.compare_digest(
        sha256(secret.get_secret_value().encode()), sha256(bearer(authorization))
    ):
        raise unauthorised("this key does not open this route")


def sha256(token: bytes) -> bytes:
    """The SHA-256 digest of a key's secret, which is kept in its place."""
    return hashlib.sha256(token).digest()


def unauthorised(message: str) -> ApiError:
    """The ApiError (401) for a missing or wrong key."""
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, "invalid_api_key", f"api key: {message}", headers=headers)


def _from_environment(settings: Settings) -> list[tuple[str, dict[str, Any]]]:
    """Parse HEDGEROW_API_KEYS: ``name:key`` or ``name:sha256=HEX``, separated by commas."""
    entries = []
    for part in settings.api_keys.get_secret_value().split(","):
        if not part.strip():
            continue
        name, _, secret = part.strip().partition(":")
        if not NAME.fullmatch(name) or not secret:
            raise SettingsError("HEDGEROW_API_KEYS: must be name:key, separated by commas")
        where = f"HEDGEROW_API_KEYS, {name}"
        digest = secret.removeprefix("sha256=")
        if digest == secret:
            digest = sha256(secret.encode()).hex()
        elif not re.match(HEX, digest):
            raise SettingsError(f"{where}: sha256 must be 64 hexadecimal digits")
        entries.append((where, {"name": name, "sha256": digest}))
    return entries


def _from_file(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Parse the keys' file: a TOML table for each key, with its ``sha256`` and its own limits."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"HEDGEROW_API_KEYS_FILE = '{path}': {error}") from None
    entries = []
    for name, table in tables.items():
        where = f"{path}, [{name}]"
        if not isinstance(table, dict) or not NAME.fullmatch(name):
            raise SettingsError(f"{where}: must be a table named by letters, digits, '-' and '_'")
        if not isinstance(table.get("sha256"), str) or not re.match(HEX, table["sha256"]):
            raise SettingsError(f"{where}: sha256 must be there, 64 hexadecimal digits")
        entries.append((where, table | {"name": name}))
    return entries


def _key(entry: dict[str, Any], settings: Settings, where: str) -> ApiKey:
    limits = {
        "running": settings.key_running,
        "queued": _queued(entry["name"], settings),
        "width": settings.max_width,
        "depth": settings.max_depth,
        "prompt_tokens": settings.max_prompt_tokens,
        "tree_tokens": settings.max_tree_tokens,
        "tokens_a_day": settings.key_tokens_a_day,
        "tokens_total": settings.key_tokens_total,
    }
    has_namespace = entry["name"] != ANYBODY and not settings.share_cache
    namespace = entry["name"] if has_namespace else ""
    try:
        return ApiKey.model_validate({"namespace": namespace} | limits | entry)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise SettingsError(f"{where}: {field} = {first['input']!r}: {first['msg']}") from None


def _queued(name: str, settings: Settings) -> int:
    """How many requests of a key may wait by default: half of ``max_queued``, without keys all."""
    if settings.key_queued is not None:
        return settings.key_queued
    return settings.max_queued if name == ANYBODY else (settings.max_queued + 1) // 2
