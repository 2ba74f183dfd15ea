"""Counts the tokens that each key has used, and checks quotas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from search.events import Event, Expanded
from server.api_errors import NO_RETRY, ApiError
from server.api_keys import ApiKey
from server.prometheus_metrics import Metrics

DAY = 24 * 60 * 60


@dataclass(slots=True)
class KeyUsage:
    """One key's totals. Tokens are counted as in a response's ``usage``.

    ``tokens_today``: prompt and completion tokens since midnight UTC.
    """

    requests: int = 0
    searches: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens_today: int = 0


@dataclass(slots=True)
class ReplyTokens:
    """The prompt and completion tokens of one reply so far. ``abort_tokens``: what was decoded for
    its trees that were aborted, the tokens of their complete rounds included."""

    prompt: int
    completion: int = 0
    abort_tokens: int = 0

    @property
    def drawn(self) -> int:
        """The completion tokens to book."""
        return max(self.completion, self.abort_tokens)

    def on_event(self, event: Event) -> None:
        """Count the tokens of a new step."""
        if isinstance(event, Expanded):
            self.completion += len(event.tokens)


class Quotas:
    """The usage of all keys, also counted in the metrics."""

    def __init__(
        self, names: Sequence[str], metrics: Metrics, clock: Callable[[], float] = time.time
    ) -> None:
        """``clock``: seconds since 1970, UTC."""
        self._accounts = {name: KeyUsage() for name in names}
        self._metrics = metrics
        self._clock = clock
        self._day = 0

    def must_have_left(self, key: ApiKey) -> None:
        """Raises ApiError (429) for a key that has used up its tokens.

        A reply that has started is finished, so the quota may be exceeded by it.
        """
        account = self._account(key.name)
        total = account.prompt_tokens + account.completion_tokens
        if key.tokens_total is not None and total >= key.tokens_total:
            raise _refusal(f"{key.tokens_total} tokens", NO_RETRY)
        if key.tokens_a_day is not None and account.tokens_today >= key.tokens_a_day:
            midnight = DAY - int(self._clock()) % DAY
            headers = {"retry-after": str(midnight)} | NO_RETRY
            raise _refusal(f"{key.tokens_a_day} tokens a day; more from midnight UTC on", headers)

    @contextmanager
    def booking(
        self, key: ApiKey, prompt: int, *, searched: bool, request: bool = True
    ) -> Iterator[ReplyTokens]:
        """Book the tokens of a reply, also if it fails or its client leaves midway.

        A reply with no completion tokens, and no prompt tokens beyond ``prompt``, costs nothing.
        ``request``: count a request; False for a further part of one that is counted already.
        """
        usage = ReplyTokens(prompt)
        try:
            yield usage
        finally:
            if usage.drawn or usage.prompt > prompt:
                self._book(key, usage, searched, request)

    def account(self, name: str) -> dict[str, Any]:
        """One key's name and totals, for the usage routes."""
        return {"key": name, **asdict(self._account(name))}

    def all(self) -> list[dict[str, Any]]:
        """The name and totals of every key."""
        return [self.account(name) for name in self._accounts]

    def _book(self, key: ApiKey, usage: ReplyTokens, searched: bool, request: bool) -> None:
        account = self._account(key.name)
        account.requests += request
        account.searches += searched
        account.prompt_tokens += usage.prompt
        account.completion_tokens += usage.drawn
        account.tokens_today += usage.prompt + usage.drawn
        self._metrics.key_tokens.labels(key.name, "prompt").inc(usage.prompt)
        self._metrics.key_tokens.labels(key.name, "completion").inc(usage.drawn)

    def _account(self, name: str) -> KeyUsage:
        """A key's usage, after resetting all keys' ``tokens_today`` if a new day has begun.

        A clock that is set back does not begin a day again, so no quota is given twice.
        """
        today = int(self._clock()) // DAY
        if today > self._day:
            self._day = today
            for account in self._accounts.values():
                account.tokens_today = 0
        return self._accounts[name]


def _refusal(quota: str, headers: dict[str, str]) -> ApiError:
    message = f"this key has used up its quota of {quota}"
    return ApiError(429, "insufficient_quota", message, headers=headers)
