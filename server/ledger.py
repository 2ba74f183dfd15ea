"""What each key has used since the server started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from server.keys import Key
from server.metrics import Metrics


@dataclass(slots=True)
class Account:
    """One key's sums. Tokens are logical, as in a response's ``usage``."""

    requests: int = 0
    searches: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Ledger:
    """The accounts of all keys, told to the metrics too."""

    def __init__(self, names: Sequence[str], metrics: Metrics) -> None:
        self._accounts = {name: Account() for name in names}
        self._metrics = metrics

    def used(self, key: Key, usage: dict[str, Any], *, searched: bool) -> None:
        """Book a finished reply by its usage object."""
        account = self._accounts[key.name]
        account.requests += 1
        account.searches += searched
        account.prompt_tokens += usage["prompt_tokens"]
        account.completion_tokens += usage["completion_tokens"]
        for kind in ("prompt", "completion"):
            self._metrics.key_tokens.labels(key.name, kind).inc(usage[f"{kind}_tokens"])

    def refused(self, code: str) -> None:
        """Count a request that was turned away before it cost anything."""
        self._metrics.refusals.labels(code).inc()

    def account(self, name: str) -> dict[str, Any]:
        """One key's sums under its name."""
        return {"key": name, **asdict(self._accounts[name])}

    def all(self) -> list[dict[str, Any]]:
        """Every key's sums."""
        return [self.account(name) for name in self._accounts]
