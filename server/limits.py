"""What a key may ask for: its quota, specs within its limits, and what its models can read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from search.engine import Capabilities
from search.events import Event, Expanded
from search.outcome import Outcome
from search.policies.policy import Scores
from search.policies.registry import POLICIES
from search.policies.visit_counts import ExpansionBudget
from search.spec import SearchSpec
from search.vote import VOTE_SCORES, vote_name
from server.api_errors import NO_RETRY, ApiError, bad_value
from server.api_keys import ApiKey
from server.prometheus_metrics import Metrics

DAY = 24 * 60 * 60


@dataclass(slots=True)
class KeyUsage:
    """One key's sums. Tokens are logical, as in a response's ``usage``.

    ``tokens_today``: of both kinds, since midnight UTC.
    """

    requests: int = 0
    searches: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens_today: int = 0


@dataclass(slots=True)
class ReplyTokens:
    """What one reply has come to so far, in tokens."""

    prompt: int
    completion: int = 0

    def on_event(self, event: Event) -> None:
        """Count the tokens of a step."""
        if isinstance(event, Expanded):
            self.completion += len(event.tokens)


class Quotas:
    """The accounts of all keys, told to the metrics too."""

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

        A reply that was begun before that is finished, and may overdraw the quota.
        """
        account = self._account(key.name)
        used = account.prompt_tokens + account.completion_tokens
        if key.tokens_total is not None and used >= key.tokens_total:
            raise _used_up(f"{key.tokens_total} tokens", NO_RETRY)
        if key.tokens_a_day is not None and account.tokens_today >= key.tokens_a_day:
            midnight = DAY - int(self._clock()) % DAY
            headers = {"retry-after": str(midnight)} | NO_RETRY
            raise _used_up(f"{key.tokens_a_day} tokens a day; more from midnight UTC on", headers)

    @contextmanager
    def booking(
        self, key: ApiKey, prompt: int, *, searched: bool, request: bool = True
    ) -> Iterator[ReplyTokens]:
        """Books what a reply comes to, also if it fails or its client leaves midway.

        One that has drawn nothing costs nothing. ``request``: it is one, and no further part of one
        that is booked already.
        """
        spent = ReplyTokens(prompt)
        try:
            yield spent
        finally:
            if spent.completion:
                self._book(key, spent, searched, request)

    @contextmanager
    def booking_scores(self, key: ApiKey) -> Iterator[ReplyTokens]:
        """Books what was scored, also if it fails or its client leaves midway.

        What is read is a prompt's; a search's reading by a reward model costs its key nothing.
        """
        spent = ReplyTokens(0)
        try:
            yield spent
        finally:
            if spent.prompt:
                self._book(key, spent, searched=False)

    def account(self, name: str) -> dict[str, Any]:
        """One key's sums under its name."""
        return {"key": name, **asdict(self._account(name))}

    def all(self) -> list[dict[str, Any]]:
        """Every key's sums."""
        return [self.account(name) for name in self._accounts]

    def _book(self, key: ApiKey, spent: ReplyTokens, searched: bool, request: bool = True) -> None:
        account = self._account(key.name)
        account.requests += request
        account.searches += searched
        account.prompt_tokens += spent.prompt
        account.completion_tokens += spent.completion
        account.tokens_today += spent.prompt + spent.completion
        self._metrics.key_tokens.labels(key.name, "prompt").inc(spent.prompt)
        self._metrics.key_tokens.labels(key.name, "completion").inc(spent.completion)

    def _account(self, name: str) -> KeyUsage:
        """A key's account; a new day begins with none of its tokens.

        Days go forwards only: a clock that is set back gives no quota twice.
        """
        today = int(self._clock()) // DAY
        if today > self._day:
            self._day = today
            for account in self._accounts.values():
                account.tokens_today = 0
        return self._accounts[name]


def _used_up(quota: str, headers: dict[str, str]) -> ApiError:
    message = f"this key has used up its quota of {quota}"
    return ApiError(429, "insufficient_quota", message, headers=headers)


def apply_limits(
    spec: SearchSpec, key: ApiKey, *, seed: int, trajectory_tokens: int | None = None
) -> SearchSpec:
    """The spec with a seed and within the key's limits. Raises ApiError naming what is over one.

    ``seed`` is taken when the spec has none; of two limits on a trajectory the smaller holds. What
    is not given is lowered to the limit without a word, what is given never.
    """
    set_fields = spec.model_fields_set
    changes: dict[str, Any] = {}
    for name, most in (("width", key.width), ("max_depth", key.depth)):
        if name in set_fields:
            _must_not_exceed(name, getattr(spec, name), most)
        elif getattr(spec, name) > most:
            changes[name] = most
    if spec.seed is None:
        changes["seed"] = seed
    if trajectory_tokens is not None:
        own = spec.trajectory_tokens if "trajectory_tokens" in set_fields else trajectory_tokens
        changes["trajectory_tokens"] = min(own, trajectory_tokens)
    settled = spec.model_copy(update=changes)
    if spec.max_tokens is not None:
        _must_not_exceed("max_tokens", spec.max_tokens, key.tree_tokens)
    elif most_tokens(settled) > key.tree_tokens:
        settled = settled.model_copy(update={"max_tokens": key.tree_tokens})
    return settled


def lowered(fields: dict[str, Any], key: ApiKey) -> dict[str, Any]:
    """Fields of a search that its client did not give, within the key's limits."""
    most = {"width": key.width, "max_depth": key.depth, "max_tokens": key.tree_tokens}
    return {
        name: min(value, most[name]) if name in most and value is not None else value
        for name, value in fields.items()
    }


def most_tokens(spec: SearchSpec) -> int:
    """The most that a tree can come to: every round as wide as may be, every step as long.

    No round draws more children than the width. A policy that goes level by level has a round a
    level; one with expansions has more of them, but draws no more than these come to. Chains and
    the tree that they seed share the width.
    """
    step = min(spec.step_tokens or spec.max_step_tokens, spec.trajectory_tokens)
    by_expansions = isinstance(POLICIES[spec.policy](spec), ExpansionBudget)
    nodes = spec.expansions * spec.branch if by_expansions else spec.width * spec.max_depth
    most = nodes * step
    return most if spec.max_tokens is None else min(most, spec.max_tokens)


def _must_not_exceed(name: str, value: int, most: int) -> None:
    if value > most:
        raise bad_value(f"search.{name}", f"at most {most} on this server, got {value}")


def policy_needs_rewards(spec: SearchSpec) -> bool:
    """Whether the policy itself compares rewards."""
    return POLICIES[spec.policy](spec).scores is not Scores.NONE


def needs_rewards(spec: SearchSpec) -> bool:
    """Whether a search as the spec says asks for rewards at all."""
    return policy_needs_rewards(spec) or VOTE_SCORES[vote_name(spec)] is not Scores.NONE


def context_for(spec: SearchSpec, engine: Capabilities) -> int:
    """Most tokens of prompt and reply: the context, less what a reward format reads with them.

    It follows from the spec and the model alone, and so does the tree.
    """
    if not needs_rewards(spec):
        return engine.context_tokens
    once, each = engine.score_tokens
    read = scored_context(engine) - once - spec.max_depth * each
    return max(1, min(engine.context_tokens, read))


def scored_context(engine: Capabilities) -> int:
    """Most tokens of a path that the reward model reads, its own tags among them."""
    return engine.scored_tokens or engine.context_tokens


MOST_KINDS = 1024


class TypicalCost:
    """What searches of each policy and width have cost on this server so far."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], tuple[int, int, float]] = {}

    def note(self, outcome: Outcome) -> None:
        """Take in a search that ended."""
        kind = outcome.spec.policy, outcome.spec.width
        if kind in self._sums or len(self._sums) < MOST_KINDS:
            count, tokens, seconds = self._sums.get(kind, (0, 0, 0.0))
            stats = outcome.stats
            self._sums[kind] = (
                count + 1,
                tokens + stats.generated_tokens,
                seconds + stats.seconds,
            )

    def typical(self, policy: str, width: int) -> dict[str, Any] | None:
        """Means over the searches of this kind, None if there was none."""
        if (policy, width) not in self._sums:
            return None
        count, tokens, seconds = self._sums[policy, width]
        return {
            "completion_tokens": round(tokens / count),
            "seconds": round(seconds / count, 3),
            "searches": count,
        }
