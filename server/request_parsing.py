"""Parses request bodies into plain completions or searches, with their prompts."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from search.problem import Problem
from search.spec import SearchSpec
from server.api_errors import bad_value, prompt_too_long
from server.api_keys import ApiKey
from server.continuation import Continuation, read_continuation
from server.plain_completion import PlainCompletion
from server.prompts import (
    build_prompt,
    must_continue,
    plain_messages,
    prompt_tokens,
    question_of,
    thinks,
)
from server.reply_logprobs import chat_top_logprobs, text_top_logprobs
from server.reply_schema import requested_schema
from server.reply_text import first_stop, split_reasoning
from server.request_models import (
    BranchRequest,
    ChatRequest,
    GenerationRequest,
    Message,
    SearchRequest,
    TextRequest,
    prompts_of,
    refuse_unsupported,
    stop_strings,
)
from server.requested_search import (
    SEEDS,
    effort_fields,
    merged_spec,
    plain_params,
    resolve_model,
    seed_of,
    settle,
    spec_of,
)
from server.service import Service
from server.settings import Settings
from server.tool_calls import CallReader, CallsRead
from server.tool_requests import RequestedTools, tools_of
from server.unsupported_parameters import CHAT, TEXT

log = logging.getLogger("hedgerow.requests")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed request. ``spec`` None: plain replies, drawn by ``completions``, which holds a tuple
    for each prompt.

    ``choices``: the number of replies; ``continuation``: steps of an earlier search to continue;
    ``seconds``: the most time for the request, the queue included; ``in_reasoning``: whether the
    prompt opens a thought, None if replies have no thoughts; ``chat``: the answer is a message, not
    a text alone. ``logprobs``: how many likeliest tokens to return beside each token of the reply,
    None: no log-probabilities; ``echoes``: the text before each choice; ``grammar``: the JSON
    schema that replies must fit; ``json_request``: the completion that writes a trajectory of a
    search as JSON under it, its prompt not set yet; ``calls``: reads tool calls from replies.
    """

    id: str
    created: int
    model: str
    key: ApiKey
    messages: list[dict[str, Any]]
    problem: Problem
    seed: int
    spec: SearchSpec | None
    seconds: float
    chat: bool = False
    stop: tuple[str, ...] = ()
    choices: int = 1
    completions: tuple[tuple[PlainCompletion, ...], ...] = ()
    include_usage: bool = False
    include_reasoning: bool = False
    continuation: Continuation | None = None
    in_reasoning: bool | None = None
    logprobs: int | None = None
    echoes: tuple[str, ...] = ()
    grammar: str | None = None
    json_request: PlainCompletion | None = None
    calls: CallReader | None = None

    @property
    def tree(self) -> str:
        """The engine's name for the request's tree, in the cache namespace of its key."""
        return f"{self.key.namespace}/{self.id}" if self.key.namespace else self.id

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts, each counted once."""
        if not self.completions:
            return len(self.problem.prompt)
        return sum(len(draws[0].prompt) for draws in self.completions)

    def cut(self, text: str) -> tuple[str, bool]:
        """The reply before the client's first stop string, and whether there was one."""
        end = first_stop(text, self.stop)
        return text[:end], end is not None

    @property
    def reply_in_reasoning(self) -> bool | None:
        """``in_reasoning`` for the reply's text; None under a schema, where there is no thought."""
        return None if self.grammar is not None else self.in_reasoning

    def split_reasoning(self, text: str) -> tuple[str, str]:
        """A text's thought and its reply; without thoughts all of it is the reply."""
        in_reasoning = self.reply_in_reasoning
        return ("", text) if in_reasoning is None else split_reasoning(text, opened=in_reasoning)

    def read_calls(self, reply: str) -> CallsRead:
        """The text and the tool calls of a reply, whose thought is already removed."""
        return CallsRead(reply) if self.calls is None else self.calls.read(reply)

    def call_id(self, choice: int, place: int) -> str:
        """The id of the choice's tool call at that place."""
        return f"call_{self.id.partition('-')[2]}_{choice}_{place}"


async def parse_chat(request: ChatRequest, service: Service, key: ApiKey) -> ParsedRequest:
    """Parse a chat request. Raises ApiError naming what is wrong with it."""
    service.ignored.note(refuse_unsupported(request, CHAT))
    limit = request.max_completion_tokens or request.max_tokens
    nested = request.reasoning and request.reasoning.effort
    effort, able = request.reasoning_effort or nested or "none", service.runner.engine.capabilities
    by_effort = effort_fields(effort, able, service.tuned)
    spec = spec_of(request, by_effort, service, key, limit)
    messages = plain_messages(request.messages, service.settings.max_messages)
    continues = must_continue(request, messages, searched=spec is not None)
    searched = spec is not None
    tools = await tools_of(request, service) if _sets_any(request, "tools", "tool_choice") else None
    prompt_tools = tools.tools if tools else ()
    problem = await build_prompt(
        messages, service, key, searched=searched, continues=continues, tools=prompt_tools
    )
    with_logprobs = _sets_any(request, "logprobs", "top_logprobs")
    return _completion(
        request,
        messages,
        problem,
        spec,
        limit,
        service,
        key,
        chat=True,
        include_reasoning=bool(request.include_reasoning),
        in_reasoning=thinks(problem.prompt, service),
        logprobs=chat_top_logprobs(request, able) if with_logprobs else None,
        grammar=await _grammar(request, service, tools),
        calls=tools.reader if tools else None,
    )


async def parse_completion(request: TextRequest, service: Service, key: ApiKey) -> ParsedRequest:
    """Parse a request for a text completion. Raises ApiError naming what is wrong with it."""
    service.ignored.note(refuse_unsupported(request, TEXT))
    spec = spec_of(request, None, service, key, request.max_tokens)
    fields = prompts_of(request.prompt)
    if len(fields) > 1 and spec is not None:
        raise bad_value("prompt", f"one at a time is searched for, got {len(fields)}")
    if len(fields) > key.width:
        raise bad_value("prompt", f"at most {key.width} on this server, these are {len(fields)}")
    prompts = [await prompt_tokens(name, prompt, service, key) for name, prompt in fields.items()]
    first = next(iter(fields.values()))
    question = first if isinstance(first, str) else service.text.decode(first)
    problem = Problem(prompts[0], question, service.profile.delimiter)
    _log_prompt([*fields.values()], service.settings)
    limit, able = request.max_tokens, service.runner.engine.capabilities
    more: dict[str, Any] = {"logprobs": text_top_logprobs(request, able)}
    more["grammar"] = await _grammar(request, service)
    if request.echo:
        values = fields.values()
        texts = [text if isinstance(text, str) else service.text.decode(text) for text in values]
        more["echoes"] = tuple(text for text in texts for _ in range(request.n or 1))
    return _completion(request, [], problem, spec, limit, service, key, prompts=prompts, **more)


async def parse_search(
    request: SearchRequest, service: Service, key: ApiKey | None = None
) -> ParsedRequest:
    """Parse a ``/v1/search`` request. Raises ApiError naming what is wrong with it."""
    settings, key = service.settings, key or service.keys.anybody
    model = request.model or settings.model
    spec = merged_spec(request.search, resolve_model(model, settings), service, key)
    spec = settle(spec, service, key, secrets.randbelow(SEEDS))
    if (request.question is None) == (request.messages is None):
        raise bad_value("question", "exactly one of question and messages is needed")
    conversation = request.messages or [Message(role="user", content=request.question)]
    messages = plain_messages(conversation, settings.max_messages)
    field = "messages" if request.question is None else "question"
    problem = await build_prompt(messages, service, key, searched=True, field=field)
    _log_prompt(messages, settings)
    thinking = thinks(problem.prompt, service)
    return _build(
        "search", model, key, messages, problem, spec, spec.seed, settings, in_reasoning=thinking
    )


async def parse_branch(
    request: BranchRequest, document: bytes, service: Service, key: ApiKey
) -> ParsedRequest:
    """Parse a request to continue from a node. Raises ApiError naming what is wrong with it."""
    async with service.reading:  # a document may be megabytes long
        search, continuation = await asyncio.to_thread(read_continuation, document, request.node)
    service = service.serving(search["model"])
    context = service.runner.engine.capabilities.context_tokens
    if len(continuation.tokens) >= context:
        raise prompt_too_long(len(continuation.tokens), context, "node")
    spec = merged_spec(request.search, search["spec"] | {"seed": None}, service, key)
    spec = settle(spec, service, key, secrets.randbelow(SEEDS))
    messages = search["messages"]
    return _build(
        "search",
        search["model"],
        key,
        messages,
        Problem(continuation.tokens, question_of(messages), service.profile.delimiter),
        spec,
        spec.seed,
        service.settings,
        continuation=continuation,
        in_reasoning=thinks(continuation.prompt, service),
    )


def _completion(
    request: GenerationRequest,
    messages: list[dict[str, Any]],
    problem: Problem,
    spec: SearchSpec | None,
    limit: int | None,
    service: Service,
    key: ApiKey,
    *,
    prompts: Sequence[tuple[int, ...]] | None = None,
    **more: Any,
) -> ParsedRequest:
    settings = service.settings
    n, prompts = _choices(request.n or 1, spec, settings), prompts or [problem.prompt]
    choices = n * len(prompts)
    seed = seed_of(request) if spec is None else spec.seed
    stop = stop_strings(request.stop, settings.max_stop_strings)
    if spec is None or more["grammar"] is not None:
        able = service.runner.engine.capabilities
        tokens = limit or min(settings.default_max_tokens, key.tree_tokens // choices or 1)
        if choices * tokens > key.tree_tokens:
            rule = f"{choices} replies of at most {key.tree_tokens // choices} tokens are"
            raise bad_value("max_tokens", f"{rule} allowed, got {tokens}")
        first = PlainCompletion(
            prompt=problem.prompt,
            limit=tokens,
            piece=tokens if able.grammar_at_once and more["grammar"] else settings.step_tokens,
            seed=seed or 0,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            grammar=more["grammar"],
        )
        if spec is None:
            params = plain_params(request, tokens, service)
            first = replace(first, stop=stop, ignore_eos=bool(request.ignore_eos), logits=params)
            more["completions"] = tuple(
                tuple(replace(first, prompt=prompt, draw=i) for i in range(n)) for prompt in prompts
            )
        else:
            more["json_request"] = replace(first, temperature=request.temperature or 0.0)
    if messages:
        _log_prompt(messages, settings)
    usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    prefix = "chatcmpl" if "chat" in more else "cmpl"
    more |= {"stop": stop, "choices": choices, "include_usage": usage}
    return _build(prefix, request.model, key, messages, problem, spec, seed, settings, **more)


def _build(
    prefix: str,
    model: str,
    key: ApiKey,
    messages: list[dict[str, Any]],
    problem: Problem,
    spec: SearchSpec | None,
    seed: int | None,
    settings: Settings,
    **more: Any,
) -> ParsedRequest:
    seconds = settings.deadline_seconds
    if spec is not None and spec.deadline_ms is not None:
        seconds = min(seconds, spec.deadline_ms / 1000)
    suffix = f"-{settings.front_end}" if settings.front_end else ""
    return ParsedRequest(
        id=f"{prefix}-{uuid.uuid4().hex}{suffix}",
        created=int(time.time()),
        model=model,
        key=key,
        messages=messages,
        problem=problem,
        seed=seed or 0,
        spec=spec,
        seconds=seconds,
        **more,
    )


async def _grammar(
    request: GenerationRequest, service: Service, tools: RequestedTools | None = None
) -> str | None:
    """The schema that replies must fit, as engines take it, or None. Raises ApiError."""
    schema = None
    if _sets_any(request, "response_format", "structured_outputs", "guided_json"):
        schema = requested_schema(request, service.runner.engine.capabilities)
    if tools is not None:
        if schema is not None:  # no tool call would fit it
            raise bad_value(schema.top, "leave it out with tools that may be called")
        schema = tools.schema
    return None if schema is None else await service.grammar(schema)


def _sets_any(request: GenerationRequest, *names: str) -> bool:
    """Whether the request sets any of these fields."""
    return any(getattr(request, name) is not None for name in names)


def _choices(n: int, spec: SearchSpec | None, settings: Settings) -> int:
    most = settings.max_choices if spec is None else min(settings.max_choices, spec.width)
    if n > most:
        why = " with this search.width" if most < settings.max_choices else ""
        raise bad_value("n", f"at most {most} choices are offered{why}, got {n}")
    return n


def _log_prompt(prompt: object, settings: Settings) -> None:
    """Log the prompt if the operator has set ``log_prompts``."""
    if settings.log_prompts:
        log.info("asked", extra={"fields": {"prompt": prompt}})
