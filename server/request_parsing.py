"""From a request to what is to be done: a plain completion or a search, with its prompt."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from jinja2 import TemplateError

from search.controller import Problem
from search.engine import PrefixTooLong
from search.spec import PolicyName, SearchSpec
from server.api_errors import ApiError, bad_value, prompt_too_long, unknown_model
from server.api_keys import ApiKey
from server.continuation import Continuation, continuation_at
from server.limits import apply_limits, needs_rewards, policy_needs_rewards
from server.plain_completion import PlainCompletion, first_stop
from server.reply_formats import CHAT, TEXT, ReplyFormat, opens_reasoning, split_reasoning
from server.request_models import (
    BranchRequest,
    ChatRequest,
    GenerationRequest,
    Message,
    SearchRequest,
    TextRequest,
    plain_messages,
    prompt_text,
    question_of,
    refuse_unsupported,
    stop_strings,
)
from server.service import ChatText, Service
from server.settings import Settings

log = logging.getLogger("hedgerow.requests")

EFFORT_POLICY: PolicyName = "ets"
"""The policy behind ``reasoning_effort``: the one place to change it."""
EFFORT_WIDTH = {"low": 4, "medium": 16, "high": 64, "xhigh": 256}
LISTED_WIDTHS = (4, 16, 64)
SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request understood. ``spec`` None: plain replies, drawn as ``completions`` say.

    ``choices``: how many replies are wanted; ``continuation``: steps of an earlier search that it
    goes on from; ``seconds``: the most time for all of it, the queue included; ``in_reasoning``:
    whether the prompt opens a thought that the reply goes on with, None where nothing is one.
    """

    id: str
    created: int
    model: str
    key: ApiKey
    messages: list[dict[str, str]]
    problem: Problem
    seed: int
    spec: SearchSpec | None
    seconds: float
    reply_format: ReplyFormat = CHAT
    stop: tuple[str, ...] = ()
    choices: int = 1
    completions: tuple[PlainCompletion, ...] = ()
    include_usage: bool = False
    include_reasoning: bool = False
    continuation: Continuation | None = None
    in_reasoning: bool | None = None

    @property
    def tree(self) -> str:
        """The engine's name for its tree, in the cache namespace of its key."""
        return f"{self.key.namespace}/{self.id}" if self.key.namespace else self.id

    def cut(self, text: str) -> tuple[str, bool]:
        """The reply before the client's first stop string, and whether there was one."""
        end = first_stop(text, self.stop)
        return text[:end], end is not None

    def split_reasoning(self, text: str) -> tuple[str, str]:
        """A text's thought and its reply; all of it is the reply where nothing is a thought."""
        return (
            ("", text)
            if self.in_reasoning is None
            else split_reasoning(text, opened=self.in_reasoning)
        )


async def parse_chat(request: ChatRequest, service: Service, key: ApiKey) -> ParsedRequest:
    """Understand a chat request. Raises ApiError naming what is wrong with it."""
    service.ignored.note(refuse_unsupported(request))
    limit = request.max_completion_tokens or request.max_tokens
    asked = request.reasoning and request.reasoning.effort
    effort = EFFORT_WIDTH.get(request.reasoning_effort or asked or "none")
    by_effort = None if effort is None else SearchSpec(policy=EFFORT_POLICY, width=effort)
    spec = _spec_of(request, by_effort, service, key, limit)
    messages = plain_messages(request.messages, service.settings.max_messages)
    problem = await build_prompt(messages, service, key)
    parsed = _ask(request, CHAT, messages, problem, spec, limit, service, key)
    opened = thinks(problem.prompt, service)
    return replace(parsed, include_reasoning=bool(request.include_reasoning), in_reasoning=opened)


async def parse_completion(request: TextRequest, service: Service, key: ApiKey) -> ParsedRequest:
    """Understand a request for a text completion. Raises ApiError naming what is wrong with it."""
    service.ignored.note(refuse_unsupported(request))
    spec = _spec_of(request, None, service, key, request.max_tokens)
    text = prompt_text(request.prompt)
    prompt = await _tokens(lambda own: own.encode_prompt(text), len(text), "prompt", service, key)
    problem = Problem(prompt=prompt, question=text, delimiter=service.delimiter)
    return _ask(request, TEXT, [], problem, spec, request.max_tokens, service, key)


async def parse_search(
    request: SearchRequest, service: Service, key: ApiKey | None = None
) -> tuple[ParsedRequest, SearchSpec]:
    """Understand a ``/v1/search`` request. Raises ApiError naming what is wrong with it."""
    settings, key = service.settings, key or service.keys.anybody
    model = request.model or settings.model
    fields = _explicit(request.search)
    spec = SearchSpec(**(resolve_model(model, settings) | fields))
    spec = apply_limits(spec, key, seed=secrets.randbelow(SEEDS))
    require_reward_model(spec, service)
    if (request.question is None) == (request.messages is None):
        raise bad_value("question", "exactly one of question and messages is needed")
    asked = request.messages or [Message(role="user", content=request.question)]
    messages = plain_messages(asked, settings.max_messages)
    problem = await build_prompt(messages, service, key)
    _tell(messages, settings)
    reasoning = thinks(problem.prompt, service)
    return _search(model, key, messages, problem, spec, settings, in_reasoning=reasoning), spec


async def parse_branch(
    request: BranchRequest, document: bytes, service: Service, key: ApiKey
) -> tuple[ParsedRequest, SearchSpec]:
    """Understand a request to go on from a node. Raises ApiError naming what is wrong with it."""
    async with service.reading:  # a document may have megabytes
        kept, continuation = await asyncio.to_thread(_read, document, request.node)
    service = service.serving(kept["model"])
    context = service.runner.engine.capabilities.context_tokens
    if len(continuation.tokens) >= context:
        raise prompt_too_long(len(continuation.tokens), context, "node")
    fields = kept["spec"] | {"seed": None} | _explicit(request.search)
    spec = apply_limits(SearchSpec(**fields), key, seed=secrets.randbelow(SEEDS))
    require_reward_model(spec, service)
    messages = kept["messages"]
    problem = Problem(continuation.tokens, question_of(messages), service.delimiter)
    parsed = _search(
        kept["model"],
        key,
        messages,
        problem,
        spec,
        service.settings,
        continuation=continuation,
        in_reasoning=thinks(continuation.prompt, service),
    )
    return parsed, spec


def _search(
    model: str,
    key: ApiKey,
    messages: list[dict[str, str]],
    problem: Problem,
    spec: SearchSpec,
    settings: Settings,
    **more: Any,
) -> ParsedRequest:
    return ParsedRequest(
        id=f"search-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        key=key,
        messages=messages,
        problem=problem,
        seed=spec.seed or 0,
        spec=spec,
        seconds=_seconds(spec, settings),
        **more,
    )


def _read(document: bytes, node: int) -> tuple[dict[str, Any], Continuation]:
    kept = json.loads(document)
    return kept, continuation_at(kept, node)


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


def require_reward_model(spec: SearchSpec, service: Service) -> None:
    """Raise ApiError for a search that needs rewards of an engine without a reward model."""
    if needs_rewards(spec) and not service.runner.engine.capabilities.scores:
        name = "policy" if policy_needs_rewards(spec) else "vote"
        allowed = "this server has no reward model; self_consistency with vote majority needs none"
        raise bad_value(f"search.{name}", allowed)


def thinks(prompt: Sequence[int], service: Service) -> bool:
    """Whether a conversation's prompt has opened the reply's thought: as the template does, not as
    somebody's words may."""
    return service.thinks and opens_reasoning(prompt, service.text.encode)


async def build_prompt(messages: list[dict[str, str]], service: Service, key: ApiKey) -> Problem:
    """Messages under the chat template. Raises ApiError if they do not fit the context."""
    size = sum(len(message["content"]) for message in messages)
    try:
        prompt = await _tokens(
            lambda own: own.encode_chat(messages), size, "messages", service, key
        )
    except TemplateError as error:
        raise bad_value("messages", f"the model's chat template refuses them: {error}") from None
    return Problem(prompt=prompt, question=question_of(messages), delimiter=service.delimiter)


async def _tokens(
    encode: Callable[[ChatText], list[int]], size: int, field: str, service: Service, key: ApiKey
) -> tuple[int, ...]:
    """A prompt's ids, of ``size`` characters."""
    try:
        prompt = await service.tokenizing.run(service.text, size, encode)
    except PrefixTooLong as error:
        said = f"{field}: beyond this model's maximum context length: {error}"
        raise ApiError(400, "context_length_exceeded", said, param=field) from None
    context = service.runner.engine.capabilities.context_tokens
    if len(prompt) >= context:
        raise prompt_too_long(len(prompt), context, field)
    if len(prompt) > key.prompt_tokens:
        raise bad_value(field, f"at most {key.prompt_tokens} tokens, these are {len(prompt)}")
    if not prompt:
        raise ApiError(400, "invalid_value", f"{field}: nothing to reply to", param=field)
    return tuple(prompt)


def _ask(
    request: GenerationRequest,
    reply_format: ReplyFormat,
    messages: list[dict[str, str]],
    problem: Problem,
    spec: SearchSpec | None,
    limit: int | None,
    service: Service,
    key: ApiKey,
) -> ParsedRequest:
    settings = service.settings
    choices = _choices(request.n or 1, spec, settings)
    seed = _seed(request) if spec is None else spec.seed or 0
    stop = stop_strings(request.stop, settings.max_stop_strings)
    tokens = limit or min(settings.default_max_tokens, key.tree_tokens // choices or 1)
    if spec is None and choices * tokens > key.tree_tokens:
        allowed = f"{choices} replies of at most {key.tree_tokens // choices} tokens are allowed"
        raise bad_value("max_tokens", f"{allowed}, got {tokens}")
    _tell(messages or problem.question, settings)
    first = PlainCompletion(
        prompt=problem.prompt,
        limit=tokens,
        piece=settings.step_tokens,
        seed=seed,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        stop=stop,
        ignore_eos=bool(request.ignore_eos),
    )
    return ParsedRequest(
        id=f"{reply_format.prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=request.model,
        key=key,
        messages=messages,
        problem=problem,
        seed=seed,
        spec=spec,
        seconds=_seconds(spec, settings),
        reply_format=reply_format,
        stop=stop,
        choices=choices,
        completions=tuple(replace(first, draw=i) for i in range(choices)),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
    )


def _spec_of(
    request: GenerationRequest,
    by_effort: SearchSpec | None,
    service: Service,
    key: ApiKey,
    limit: int | None,
) -> SearchSpec | None:
    """The search asked for: by field, then by alias, then by effort; None for a plain reply."""
    alias = resolve_model(request.model, service.settings)
    spec = by_effort
    if request.search is not None:
        spec = SearchSpec(**(alias | _explicit(request.search)))
    elif alias:
        spec = SearchSpec(**alias)
    if spec is not None:
        if request.ignore_eos:
            spec = spec.model_copy(update={"ignore_eos": True})
        spec = apply_limits(spec, key, seed=_seed(request), trajectory_tokens=limit)
        require_reward_model(spec, service)
    return spec


def _choices(n: int, spec: SearchSpec | None, settings: Settings) -> int:
    most = settings.max_choices if spec is None else min(settings.max_choices, spec.width)
    if n > most:
        why = "" if spec is None or n <= settings.max_choices else " with this search.width"
        raise bad_value("n", f"at most {most} choices are offered{why}, got {n}")
    return n


def _seed(request: GenerationRequest) -> int:
    return secrets.randbelow(SEEDS) if request.seed is None else request.seed % SEEDS


def _seconds(spec: SearchSpec | None, settings: Settings) -> float:
    if spec is None or spec.deadline_ms is None:
        return settings.deadline_seconds
    return min(settings.deadline_seconds, spec.deadline_ms / 1000)


def _tell(asked: object, settings: Settings) -> None:
    """Log what is asked, where the operator wants that."""
    if settings.log_prompts:
        log.info("asked", extra={"fields": {"prompt": asked}})


def _explicit(spec: SearchSpec) -> dict[str, Any]:
    return spec.model_dump(exclude_unset=True)
