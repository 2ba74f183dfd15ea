"""``POST /v1/score``: the request body, and the replies in it that are to be scored.

It has one reply (``question`` or ``messages``, and ``steps``), many (``items`` of these), or vLLM's
``text_1`` and ``text_2``: questions, and replies that are split into steps here.
"""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from search.context_limit import scored_context
from search.engine import PrefixTooLong
from search.problem import Problem
from server.api_errors import ApiError, bad_value, beyond_context
from server.api_keys import ApiKey
from server.body_schemas import one_spelling_of
from server.prompts import build_prompt, plain_messages
from server.request_models import (
    Count,
    Message,
    Messages,
    only_names_of_unread,
    refuse_unsupported,
    whole_number,
)
from server.requested_search import resolve_model
from server.scoring import ReplySteps
from server.service import Service
from server.unsupported_parameters import SCORE

MOST_ITEMS = 1 << 14
MOST_STEPS = 1 << 14
SEEDS = 1 << 53
"""The number of seeds: whole numbers below it are exact as doubles, too."""

Seed = Annotated[int, Field(ge=0, lt=SEEDS), BeforeValidator(whole_number)]
Words = Annotated[str, Field(min_length=1)]
Steps = Annotated[list[Words], Field(min_length=1, max_length=MOST_STEPS, fail_fast=True)]
Texts = Words | Annotated[list[Words], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]


def _must_be_one_of(request: BaseModel, *spellings: Sequence[str]) -> None:
    """Raises ValueError unless the fields that are set are those of exactly one spelling."""
    names = {name for spelling in spellings for name in spelling}
    fields = {name for name in names if getattr(request, name) is not None}
    if fields not in map(set, spellings):
        choices = ", or ".join(" and ".join(spelling) for spelling in spellings)
        raise ValueError(f"exactly {choices} are needed, got {', '.join(sorted(fields)) or 'none'}")


BY_QUESTION, BY_MESSAGES = ("question", "steps"), ("messages", "steps")
MANY, PAIRS = ("items",), ("text_1", "text_2")


class ScoreItem(BaseModel):
    """A question or a conversation, and the steps of a reply to it."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra=one_spelling_of(BY_QUESTION, BY_MESSAGES)
    )

    question: Words | None = None
    messages: Messages | None = None
    steps: Steps | None = None

    @model_validator(mode="after")
    def _check_spelling(self) -> ScoreItem:
        _must_be_one_of(self, BY_QUESTION, BY_MESSAGES)
        return self


Items = Annotated[list[ScoreItem], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]
SPELLINGS = (BY_QUESTION, BY_MESSAGES, MANY, PAIRS)


class ScoreRequest(BaseModel):
    """Request body of ``POST /v1/score``, in one of its forms."""

    model_config = ConfigDict(extra="allow", json_schema_extra=one_spelling_of(*SPELLINGS))

    model: str | None = None
    question: Words | None = None
    messages: Messages | None = None
    steps: Steps | None = None
    items: Items | None = None
    text_1: Texts | None = Field(
        default=None, description="questions: one for all replies, or one per reply"
    )
    text_2: Texts | None = Field(
        default=None, description="replies, split into steps by the server"
    )
    seed: Seed | None = Field(
        default=None, description="random seed of a judge's verdicts, which makes them repeatable"
    )
    deadline_ms: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, data: object) -> object:
        return only_names_of_unread(data, cls.model_fields.keys() | SCORE.keys())

    @model_validator(mode="after")
    def _check_spelling(self) -> ScoreRequest:
        _must_be_one_of(self, *SPELLINGS)
        return self


@dataclass(frozen=True, slots=True)
class ParsedScore:
    """A parsed request. ``field``: where its steps are; ``seconds``: the most time for the request,
    the queue included."""

    id: str
    created: int
    model: str
    key: ApiKey
    field: str
    replies: tuple[ReplySteps, ...]
    seed: int
    seconds: float

    @property
    def tree(self) -> str:
        """The engine's name for the scored trees, in the cache namespace of the key."""
        return f"{self.key.namespace}/{self.id}" if self.key.namespace else self.id


NO_REWARD_MODEL = (
    "this server has no reward model, nothing here scores steps that a client gives; "
    "start it with --reward-model or --verifier"
)


async def parse_score(request: ScoreRequest, service: Service, key: ApiKey) -> ParsedScore:
    """Parse a request for rewards. Raises ApiError naming what is wrong with it."""
    settings, able = service.settings, service.runner.engine.capabilities
    model = request.model or settings.model
    resolve_model(model, settings)
    if not able.scores or able.likelihood:
        raise ApiError(400, "no_reward_model", NO_REWARD_MODEL)
    service.ignored.note(refuse_unsupported(request, SCORE))
    items = list(_items(request, service.profile.delimiter))
    if len(items) > key.width:
        param = "items" if request.items else "text_2"
        raise bad_value(param, f"at most {key.width} on this server, these are {len(items)}")
    reader = _Reader(service, key)
    replies = tuple([await reader.reply(name, item) for name, item in items])
    seconds = settings.deadline_seconds
    if request.deadline_ms is not None:
        seconds = min(seconds, request.deadline_ms / 1000)
    return ParsedScore(
        id=f"score-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        key=key,
        field=next(name for name in ("items", "steps", "text_2") if getattr(request, name)),
        replies=replies,
        seed=secrets.randbelow(SEEDS) if request.seed is None else request.seed,
        seconds=seconds,
    )


def _items(request: ScoreRequest, delimiter: str) -> Iterator[tuple[str, ScoreItem]]:
    """Yield each reply to score with the name of the field that its steps are in."""
    if request.items is not None:
        yield from ((f"items[{i}].steps", item) for i, item in enumerate(request.items))
    elif request.text_1 is None or request.text_2 is None:
        fields = {name: getattr(request, name) for name in ScoreItem.model_fields}
        yield "steps", ScoreItem.model_construct(**fields)
    else:
        questions, replies = _listed(request.text_1), _listed(request.text_2)
        if len(questions) not in (1, len(replies)):
            rule = "one question, or as many questions as replies in text_2, are needed"
            raise bad_value("text_1", f"{rule}, got {len(questions)} for {len(replies)}")
        for i, reply in enumerate(replies):
            question = questions[i % len(questions)]
            steps = steps_of(reply, delimiter)
            yield f"text_2[{i}]", ScoreItem.model_construct(question=question, steps=steps)


def _question_field(name: str, item: ScoreItem) -> str:
    """The field of the question whose steps are in the field ``name``."""
    if name.startswith("text_2"):
        return "text_1"
    return name.removesuffix("steps") + ("question" if item.messages is None else "messages")


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def steps_of(reply: str, delimiter: str) -> list[str]:
    """Split a reply into steps, each with its final delimiter; blank steps are dropped."""
    *pieces, last = reply.split(delimiter)
    steps = [step + delimiter for step in pieces if step.strip()]
    return [*steps, last] if last.strip() else steps or [reply]


@dataclass(slots=True)
class _Reader:
    """Encodes items as token ids, each question once, and checks the key's limits."""

    service: Service
    key: ApiKey
    problems: dict[str, Problem] = field(default_factory=dict)
    tokens: int = 0

    async def reply(self, name: str, item: ScoreItem) -> ReplySteps:
        """Encode one item. Raises ApiError naming what is wrong with it."""
        words, problem = item.steps or [], await self._problem(name, item)
        if len(words) > self.key.depth:
            rule = f"at most {self.key.depth} on this server, these are {len(words)}"
            raise bad_value(name, rule)
        ends = problem.delimiter
        texts = [
            step if step.endswith(ends) or i == len(words) else step + ends
            for i, step in enumerate(words, 1)
        ]
        reply = ReplySteps(problem, await self._steps(name, texts), tuple(texts))
        self._must_fit(name, reply)
        return reply

    async def _problem(self, name: str, item: ScoreItem) -> Problem:
        conversation = item.messages or [Message(role="user", content=item.question)]
        messages = plain_messages(conversation, self.service.settings.max_messages)
        cache_key = json.dumps(messages)
        if cache_key not in self.problems:
            self.problems[cache_key] = await build_prompt(
                messages, self.service, self.key, searched=True, field=_question_field(name, item)
            )
        return self.problems[cache_key]

    async def _steps(self, name: str, texts: list[str]) -> tuple[tuple[int, ...], ...]:
        size, ends = sum(map(len, texts)), self.service.profile.delimiter
        try:
            steps = await self.service.tokenizing.run(
                self.service.text, size, lambda text: [text.encode_step(t, ends) for t in texts]
            )
        except PrefixTooLong as error:
            raise beyond_context(name, str(error)) from None
        for i, ids in enumerate(steps):
            if not ids:
                raise bad_value(f"{name}[{i}]", "nothing of it is left as tokens")
        return tuple(map(tuple, steps))

    def _must_fit(self, name: str, reply: ReplySteps) -> None:
        able = self.service.runner.engine.capabilities
        step_tokens = sum(map(len, reply.steps))
        per_reply, per_step = able.score_tokens
        total = len(reply.problem.prompt) + step_tokens + per_reply + per_step * len(reply.steps)
        if total > scored_context(able):
            message = f"{total} tokens with the question; the context holds {scored_context(able)}"
            raise beyond_context(name, message)
        self.tokens += step_tokens
        if self.tokens > self.key.tree_tokens:
            rule = f"at most {self.key.tree_tokens} tokens in all on this server"
            raise bad_value(name, f"{rule}, these are {self.tokens} so far")
