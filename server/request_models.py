"""The request bodies of chat and text completions and of ``POST /v1/search``."""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal

from prometheus_client import Counter
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticKnownError

from search.engine import LOGITS_PARAMS, LogitsParams
from search.spec import (
    LogitBias,
    MinP,
    MinTokens,
    Penalty,
    RepetitionPenalty,
    RequestedSearch,
    SearchSpec,
    TopK,
    logits_params_of,
)
from server.api_errors import ApiError, bad_value, echo, unsupported
from server.body_schemas import STRING, object_of, of_type, one_spelling_of
from server.reply_schema import GuidedJson, ResponseFormat, StructuredOutputs
from server.tool_requests import FUNCTION_SCHEMA, choice_schema, tools_schema
from server.unsupported_parameters import CHAT, HARMLESS, TEXT, Neutral, asks_nothing

log = logging.getLogger("hedgerow.requests")

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Role = Literal["system", "developer", "user", "assistant", "tool"]

MOST_NAMES_LOGGED = 200
LONGEST_NAME_LOGGED = 64
MOST_STOPS = 16
LONGEST_STOP = 256
MOST_FIELDS = 256
"""The most fields of one object, because each invalid field makes an error of its own."""
MOST_MESSAGES = 1 << 14
MOST_LOGPROBS = 20
"""The most likeliest tokens at a position, as with OpenAI and vLLM."""
MOST = 2**31 - 1
"""The largest value of any count."""


def _schema(kind: Any) -> dict[str, Any]:
    return TypeAdapter(kind).json_schema()


def _or_null(kind: Any) -> dict[str, Any]:
    return _schema(kind | None)


_TEXT_PART = of_type("text", text=STRING)
_CONTENT_SCHEMA = _or_null(str | list[Annotated[Any, WithJsonSchema(_TEXT_PART)]])
_CALLED = object_of(name=STRING)
_CALL = object_of(function=_CALLED)
_CALLS_SCHEMA = _or_null(list[Annotated[Any, WithJsonSchema(_CALL)]])
_Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
_STOP_SCHEMA = _or_null(_Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS)])
_Prompt = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[Annotated[int, Field(ge=0, le=MOST)]], Field(min_length=1)]
_TOOLS_SCHEMA = tools_schema(of_type("function", function=FUNCTION_SCHEMA))
_CHOICE_SCHEMA = choice_schema(of_type("function", function=_CALLED))
_PROMPT_SCHEMA = _schema(_Prompt | _Ids | Annotated[list[_Prompt | _Ids], Field(min_length=1)])


def whole_number(value: object) -> object:
    """The value unchanged. Raises PydanticKnownError for a string or a bool; 5.0 is accepted."""
    if isinstance(value, str | bool):
        raise PydanticKnownError("int_type")
    return value


# A JSON number: 5 or 5.0, but not "5" or true. Bounds come first, or the schema loses them.
Seed = Annotated[
    int,
    Field(
        ge=-(2**63),
        le=2**64 - 1,
        json_schema_extra={"minimum": 2048 - 2**63, "maximum": 2**64 - 4096},
    ),
    BeforeValidator(whole_number),
]
"""The schema's bounds are within the true ones also as doubles, as many clients read numbers."""
Count = Annotated[int, Field(ge=1, le=MOST), BeforeValidator(whole_number)]
Index = Annotated[int, Field(ge=0, le=MOST), BeforeValidator(whole_number)]
TopLogprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS), BeforeValidator(whole_number)]
Temperature = Annotated[float, Field(ge=0.0, le=2.0, strict=True)]
TopP = Annotated[float, Field(gt=0.0, le=1.0, strict=True)]


def few_fields(value: object) -> object:
    """The value unchanged. Raises ValueError for an object with more than MOST_FIELDS fields."""
    if isinstance(value, dict) and len(value) > MOST_FIELDS:
        raise ValueError(f"at most {MOST_FIELDS} fields are allowed, these are {len(value)}")
    return value


def only_names_of_unread(data: object, fields: AbstractSet[str]) -> object:
    """The body with the values of all but ``fields`` dropped, to save memory while it waits."""
    few_fields(data)
    if isinstance(data, dict):
        for name in data.keys() - fields:
            data[name] = None
    return data


Spec = Annotated[RequestedSearch, BeforeValidator(few_fields)]


class Message(BaseModel):
    """A chat message; any other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    role: Role
    content: Annotated[Any, WithJsonSchema(_CONTENT_SCHEMA)] = None
    tool_calls: Annotated[Any, WithJsonSchema(_CALLS_SCHEMA)] = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: Annotated[Any, WithJsonSchema({"type": "null"})] = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
"""Validation stops at the first invalid message and reports that one."""


class StreamOptions(BaseModel):
    """``include_usage`` requests a final chunk with the usage; other options are ignored."""

    model_config = ConfigDict(extra="ignore")

    include_usage: StrictBool | None = None


class Reasoning(BaseModel):
    """Alternative to ``reasoning_effort``, sent by Open WebUI and OpenRouter clients."""

    model_config = ConfigDict(extra="ignore")

    effort: Effort | None = None


class SamplingParameters(BaseModel):
    """vLLM's sampling parameters other than temperature and top-p. They apply to plain replies, and
    to the draws of a search unless ``search`` sets them."""

    top_k: TopK | None = Field(
        default=None, description="sample from the k most likely tokens; below 1: from all"
    )
    min_p: MinP | None = None
    logit_bias: LogitBias | None = None
    min_tokens: MinTokens | None = Field(
        default=None, description="minimum tokens before the model or a stop string may end a reply"
    )
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    def explicit_params(self) -> dict[str, Any]:
        """The parameters that are set, by name."""
        values = {name: getattr(self, name) for name in LOGITS_PARAMS}
        return {name: value for name, value in values.items() if value is not None}

    def logits_params(self) -> LogitsParams:
        """The parameters as a plain reply uses them."""
        return logits_params_of(self.explicit_params())

    def fill(self, spec: SearchSpec) -> SearchSpec:
        """The search with these parameters where it does not set its own."""
        explicit = self.explicit_params().items()
        fresh = {name: value for name, value in explicit if name not in spec.model_fields_set}
        return spec.model_copy(update=fresh) if fresh else spec


class GenerationRequest(SamplingParameters):
    """Fields shared by chat and text completions. ``temperature`` and ``top_p`` apply to plain
    completions only, as many clients always send 0; a search uses ``search.temperature``.
    """

    model_config = ConfigDict(extra="allow")

    model: str
    n: Count | None = Field(
        default=None, description="number of choices; in a search: distinct answers"
    )
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_tokens: Count | None = Field(default=None, description="maximum tokens per trajectory")
    stop: Annotated[Any, WithJsonSchema(_STOP_SCHEMA)] = None
    ignore_eos: StrictBool | None = Field(
        default=None,
        description="continue past the model's end token: a plain reply up to max_tokens, a search "
        "to its limits",
    )
    seed: Seed | None = Field(default=None, description="random seed, taken modulo 2**63")
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    guided_json: GuidedJson = None
    thinking_token_budget: Count | None = Field(
        default=None, description="searches only: maximum tokens per trajectory"
    )
    search: Spec | None = None

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, data: object) -> object:
        return only_names_of_unread(data, cls.model_fields.keys() | CHAT.keys() | TEXT.keys())


class ChatRequest(GenerationRequest):
    """Request body of ``POST /v1/chat/completions``."""

    messages: Messages
    tools: Annotated[Any, WithJsonSchema(_TOOLS_SCHEMA)] = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE_SCHEMA)] = None
    parallel_tool_calls: StrictBool | None = None
    max_completion_tokens: Count | None = Field(
        default=None, description="takes precedence over max_tokens"
    )
    reasoning_effort: Effort | None = Field(
        default=None, description="takes precedence over reasoning"
    )
    reasoning: Reasoning | None = None
    logprobs: StrictBool | None = None
    top_logprobs: TopLogprobs | None = Field(
        default=None, description="number of most likely tokens per position; needs logprobs true"
    )
    include_reasoning: StrictBool | None = Field(
        default=None, description="report each round of a search as reasoning_content"
    )
    continue_final_message: StrictBool | None = Field(
        default=None, description="continue the assistant's last message in a plain reply"
    )
    add_generation_prompt: StrictBool | None = Field(
        default=None, description="false with continue_final_message, as vLLM's clients send it"
    )


class TextRequest(GenerationRequest):
    """Request body of ``POST /v1/completions``: raw prompts without a chat template."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: TopLogprobs | None = Field(
        default=None, description="number of most likely tokens per position"
    )
    echo: StrictBool | None = Field(default=None, description="return the prompt before each reply")


class SearchRequest(BaseModel):
    """Request body of ``POST /v1/search``: a question or messages, and how to search."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra=one_spelling_of(["question"], ["messages"])
    )

    model: str | None = None
    question: str | None = Field(default=None, min_length=1)
    messages: Messages | None = None
    search: Spec = RequestedSearch()
    stream: StrictBool = False
    background: StrictBool = Field(
        default=False, description="run in the background, even if the client leaves"
    )
    dry_run: StrictBool = Field(default=False, description="estimate the cost without searching")

    _bounded = model_validator(mode="before")(few_fields)


class BranchRequest(BaseModel):
    """Request body of ``POST /v1/search/{id}/branch``: continue from a node. ``search`` overrides
    the earlier spec, whose seed is drawn anew. Budgets count from the node on."""

    model_config = ConfigDict(extra="forbid")

    node: Index
    search: Spec = RequestedSearch()
    stream: StrictBool = False
    background: StrictBool = False

    _bounded = model_validator(mode="before")(few_fields)


class IgnoredFields:
    """Logs the name of each ignored unknown field once, and counts them all."""

    def __init__(self, count: Counter) -> None:
        self._logged: set[str] = set()
        self._count = count

    def note(self, names: set[str]) -> None:
        """Count unknown top-level fields and log the names that are new."""
        self._count.inc(len(names))
        for name in sorted(names):
            short = name[:LONGEST_NAME_LOGGED]
            if short not in self._logged and len(self._logged) < MOST_NAMES_LOGGED:
                self._logged.add(short)
                log.info("ignoring the unknown request field %r (said once)", short)


def refuse_unsupported(request: BaseModel, parameters: Neutral) -> set[str]:
    """Raise ApiError for a known field that this server does not support; return unknown names."""
    extra = request.model_extra or {}
    for name, neutral in parameters.items():
        if name in extra and not asks_nothing(extra[name], neutral):
            values = " or ".join(repr(value) for value in neutral if value is not None)
            raise unsupported(name, f"leave it out{f' or send {values}' if values else ''}")
    return set(extra) - parameters.keys() - HARMLESS


def stop_strings(stop: Any, most: int) -> tuple[str, ...]:
    """``stop`` as a tuple, empty for null and []. Raises ApiError for anything but strings."""
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list):
        raise bad_value("stop", f"must be a string or a list of strings, got {echo(stop)}")
    if len(strings) > most:
        raise bad_value("stop", f"at most {most} strings are allowed, got {len(strings)}")
    for i, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            raise bad_value(f"stop[{i}]", f"must be a string and not empty, got {echo(string)}")
        if len(string) > LONGEST_STOP:
            rule = f"at most {LONGEST_STOP} characters are allowed"
            raise bad_value(f"stop[{i}]", f"{rule}, got {len(string)}")
        encodable(string, f"stop[{i}]")
    return tuple(strings)


Prompt = str | tuple[int, ...]


def prompts_of(prompt: Any) -> dict[str, Prompt]:
    """The prompts of a text completion by field name, from a text, token ids or a list of those.
    Raises ApiError naming a prompt that is neither."""
    if not isinstance(prompt, list) or _are_ids(prompt):
        return {"prompt": _prompt(prompt, "prompt")}
    if not prompt:
        raise bad_value("prompt", "at least one prompt is needed, got []")
    names = ["prompt"] if len(prompt) == 1 else [f"prompt[{i}]" for i in range(len(prompt))]
    return {name: _prompt(entry, name) for name, entry in zip(names, prompt, strict=True)}


def _prompt(prompt: Any, name: str) -> Prompt:
    if _are_ids(prompt):
        return tuple(map(int, prompt))
    if not isinstance(prompt, str) or not prompt:
        raise bad_value(name, f"must be text or token ids, and not empty, got {echo(prompt)}")
    return encodable(prompt, name)


def _are_ids(value: Any) -> bool:
    """Whether this is a list of whole numbers and not empty; 5.0 is whole."""
    return bool(isinstance(value, list) and value) and all(
        type(token) is int or (type(token) is float and token.is_integer()) for token in value
    )


def encodable(text: str, name: str) -> str:
    """The text unchanged. Raises ApiError for lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"character {error.start}"
        raise ApiError(
            400, "invalid_value", f"{name}: not valid Unicode at {place}", param=name
        ) from None
    return text
