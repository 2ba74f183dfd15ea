"""From a request to what is to be done: a plain completion or a search, with its prompt."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
import uuid
from dataclasses import dataclass
from typing import Any, get_args

from jinja2 import TemplateError

from search.controller import Problem
from search.spec import PolicyName, SearchSpec
from server.completion import Completion, first_stop
from server.errors import ApiError, bad_value, prompt_too_long, unknown_model
from server.room import needs_rewards, policy_needs_rewards
from server.service import Service
from server.settings import Settings
from server.wire import (
    ChatRequest,
    Message,
    SearchRequest,
    plain_messages,
    question_of,
    refuse_unsupported,
    stop_strings,
)

EFFORT_POLICY: PolicyName = "rebase"
"""The policy behind ``reasoning_effort``: the one place to change it."""
EFFORT_WIDTH = {"low": 4, "medium": 16, "high": 64, "xhigh": 256}
LISTED_WIDTHS = (4, 16, 64)
SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Ask:
    """A request understood. ``spec`` None: a plain completion, drawn as ``completion`` says."""

    id: str
    created: int
    model: str
    messages: list[dict[str, str]]
    problem: Problem
    seed: int
    stop: tuple[str, ...]
    spec: SearchSpec | None
    completion: Completion
    include_usage: bool = False

    def cut(self, text: str) -> tuple[str, bool]:
        """The reply before the client's first stop string, and whether there was one."""
        end = first_stop(text, self.stop)
        return text[:end], end is not None


async def ask_chat(request: ChatRequest, service: Service) -> Ask:
    """Understand a chat request. Raises ApiError naming what is wrong with it."""
    settings = service.settings
    service.ignored.note(refuse_unsupported(request))
    alias = resolve_model(request.model, settings)
    stop = stop_strings(request.stop, settings.max_stop_strings)
    seed = secrets.randbelow(SEEDS) if request.seed is None else request.seed % SEEDS
    limit = request.max_completion_tokens or request.max_tokens
    spec = _spec_of(request, alias)
    if spec is not None:
        spec = settle(spec, settings, seed=seed, trajectory_tokens=limit)
        seed = spec.seed or 0
        check_rewards(spec, service)
    messages = plain_messages(request.messages, settings.max_messages)
    problem = await pose(messages, service)
    return Ask(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=request.model,
        messages=messages,
        problem=problem,
        seed=seed,
        stop=stop,
        spec=spec,
        completion=Completion(
            prompt=problem.prompt,
            limit=limit or settings.default_max_tokens,
            piece=settings.step_tokens,
            seed=seed,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            stop=stop,
            seconds=settings.deadline_seconds,
        ),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
    )


async def ask_search(request: SearchRequest, service: Service) -> tuple[Ask, SearchSpec]:
    """Understand a ``/v1/search`` request. Raises ApiError naming what is wrong with it."""
    settings = service.settings
    model = request.model or settings.model
    fields = _explicit(request.search)
    spec = SearchSpec(**(resolve_model(model, settings) | fields))
    spec = settle(spec, settings, seed=secrets.randbelow(SEEDS))
    check_rewards(spec, service)
    if (request.question is None) == (request.messages is None):
        raise bad_value("question", "exactly one of question and messages is needed")
    asked = request.messages or [Message(role="user", content=request.question)]
    messages = plain_messages(asked, settings.max_messages)
    problem = await pose(messages, service)
    ask = Ask(
        id=f"search-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        messages=messages,
        problem=problem,
        seed=spec.seed or 0,
        stop=(),
        spec=spec,
        completion=Completion(problem.prompt, 1, 1, 0),
    )
    return ask, spec


def resolve_model(name: str, settings: Settings) -> dict[str, Any]:
    """What an alias such as ``sprig:rebase-16`` asks of a search; {} for the model's own name.

    Raises ApiError when there is no such model.
    """
    if name == settings.model:
        return {}
    policies = "|".join(get_args(PolicyName))
    alias = re.fullmatch(rf"{re.escape(settings.model)}:({policies})-([1-9]\d{{0,5}})", name)
    if alias is None or int(alias[2]) > settings.max_width:
        known = f"{settings.model!r} and aliases such as {settings.model + ':rebase-16'!r}"
        raise unknown_model(name, known)
    return {"policy": alias[1], "width": int(alias[2])}


def model_names(settings: Settings) -> list[str]:
    """The model and the aliases worth listing."""
    aliases = [
        f"{settings.model}:{policy}-{width}"
        for policy in get_args(PolicyName)
        for width in LISTED_WIDTHS
        if width <= settings.max_width
    ]
    return [settings.model, *aliases]


def settle(
    spec: SearchSpec, settings: Settings, *, seed: int, trajectory_tokens: int | None = None
) -> SearchSpec:
    """The spec with a seed and within the server's limits.

    ``seed`` is taken when the spec has none; of two limits on a trajectory the smaller holds.
    """
    if spec.width > settings.max_width:
        allowed = f"at most {settings.max_width} on this server, got {spec.width}"
        raise bad_value("search.width", allowed)
    given = spec.model_fields_set
    changes: dict[str, Any] = {}
    if spec.seed is None:
        changes["seed"] = seed
    if trajectory_tokens is not None:
        own = spec.trajectory_tokens if "trajectory_tokens" in given else trajectory_tokens
        changes["trajectory_tokens"] = min(own, trajectory_tokens)
    return spec.model_copy(update=changes)


def check_rewards(spec: SearchSpec, service: Service) -> None:
    """Raise ApiError for a search that needs rewards of an engine without a reward model."""
    if needs_rewards(spec) and not service.forest.engine.capabilities.scores:
        name = "policy" if policy_needs_rewards(spec) else "vote"
        allowed = "this server has no reward model; self_consistency with vote majority needs none"
        raise bad_value(f"search.{name}", allowed)


async def pose(messages: list[dict[str, str]], service: Service) -> Problem:
    """Messages under the chat template. Raises ApiError if they do not fit the context.

    A long text takes the tokenizer a while, so it runs beside the event loop.
    """
    try:
        async with service.tokenizing:
            prompt = await asyncio.to_thread(service.text.encode_chat, messages)
    except TemplateError as error:
        raise bad_value("messages", f"the model's chat template refuses them: {error}") from None
    context = service.forest.engine.capabilities.context_tokens
    if len(prompt) >= context:
        raise prompt_too_long(len(prompt), context)
    if not prompt:
        raise ApiError(400, "invalid_value", "messages: nothing to reply to", param="messages")
    return Problem(
        prompt=tuple(prompt), question=question_of(messages), delimiter=service.delimiter
    )


def _spec_of(request: ChatRequest, alias: dict[str, Any]) -> SearchSpec | None:
    """The search asked for: by field, then by alias, then by effort; None for a plain reply."""
    if request.search is not None:
        return SearchSpec(**(alias | _explicit(request.search)))
    if alias:
        return SearchSpec(**alias)
    width = EFFORT_WIDTH.get(request.reasoning_effort or "none")
    return None if width is None else SearchSpec(policy=EFFORT_POLICY, width=width)


def _explicit(spec: SearchSpec) -> dict[str, Any]:
    return spec.model_dump(exclude_unset=True)
