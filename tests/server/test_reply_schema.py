"""Structured output, asked for as OpenAI's and vLLM's clients do; tokens are characters here."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from server.reply_schema import RequestedSchema
from server.service import create_service
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import PlainText, question, refusal, saying

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


class Step(BaseModel):
    """One step of a derivation."""

    left: int
    why: str


class Derivation(BaseModel):
    """The type that a client wants to read."""

    steps: list[Step]
    answer: int


SCHEMA = Derivation.model_json_schema()
REPLY = '{"steps": [{"left": 3, "why": "<think>"}], "answer": 7}'
ANY = '{"type":"object"}'


@pytest.fixture
def engine() -> ScriptedEngine:
    """An engine that is held to schemas, as far as a script can be."""
    return ScriptedEngine(grammar=True, say=saying(REPLY))


def format_of(schema: Any, **changes: Any) -> dict[str, Any]:
    """Return OpenAI's ``response_format`` for a schema."""
    fields = {"name": "derivation", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": fields | changes}


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "sprig", "messages": question(), "max_tokens": 200, "seed": 1},
    TEXT: {"model": "sprig", "prompt": "abc", "max_tokens": 200, "seed": 1},
}
SPELLINGS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": format_of(SCHEMA)}, SCHEMA),
    ({"response_format": {"type": "json_object"}}, {"type": "object"}),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA),
    ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
    ({"guided_json": SCHEMA}, SCHEMA),
    ({"guided_json": json.dumps(SCHEMA), "response_format": {"type": "text"}}, SCHEMA),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": {}, "guided_json": None}, None),
]


@pytest.mark.parametrize(("fields", "schema"), SPELLINGS)
@pytest.mark.parametrize("path", BODIES)
async def test_the_engine_is_told_the_schema(
    http: httpx2.AsyncClient, engine: ScriptedEngine, path: str, fields: dict[str, Any], schema: Any
) -> None:
    """Every spelling reaches it, the same for all pieces of a reply."""
    answer = await http.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    grammars = {sampling.grammar for sampling in engine.samplings}
    assert [None if grammar is None else json.loads(grammar) for grammar in grammars] == [schema]
    prompt = "user: What is it?\n" if path == CHAT else "abc"
    assert engine.samplings[0].prompt_tokens == len(prompt)


@pytest.mark.promise(
    "OpenAI's client reads typed replies with `.parse`, from chat and from responses."
)
async def test_openais_client_parses_a_reply(openai: AsyncOpenAI) -> None:
    """The client's schema is understood, and a thought's tag inside the JSON is only text."""
    chat = await openai.chat.completions.parse(
        model="sprig", messages=question(), response_format=Derivation, max_tokens=200
    )
    [choice] = chat.choices
    assert choice.message.parsed == Derivation.model_validate_json(REPLY)
    assert choice.finish_reason == "stop"
    response = await openai.responses.parse(model="sprig", input="What?", text_format=Derivation)
    assert response.output_parsed == choice.message.parsed
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    text = ""
    async with openai.chat.completions.stream(
        model="sprig", messages=question(), response_format=Derivation, max_tokens=200
    ) as stream:
        async for event in stream:
            if event.type == "content.delta":
                text += event.delta
        final = await stream.get_final_completion()
    assert text == REPLY
    assert final.choices[0].message.parsed == choice.message.parsed


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "json"}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "'grammar'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
        (
            {"response_format": format_of(None)},
            "response_format.json_schema.schema",
            "must be a JSON schema",
        ),
        (
            {"response_format": format_of({"type": "array", "uniqueItems": True})},
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
        (
            {"response_format": format_of({}, name=5)},
            "response_format.json_schema.name",
            "must be a string",
        ),
        ({"response_format": format_of({}, strict=1)}, "response_format.json_schema.strict", "1"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", "not supported"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", "not supported"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", '["not"]'),
        ({"structured_outputs": ["json"]}, "structured_outputs", "must be an object"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": {}, "response_format": format_of({})}, "guided_json", "leave it out"),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos", "guided_json"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    http: httpx2.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any], param: str, words: str
) -> None:
    """The error names the field, before any draw."""
    error = await refusal(http, CHAT, BODIES[CHAT] | fields)
    assert error["param"] == param
    assert words in error["message"]
    assert not engine.expanded


@pytest.mark.parametrize(
    ("text_format", "param"),
    [
        ({"type": "json_schema", "name": "a", "schema": {"not": {}}}, "text.format.schema"),
        ({"type": "xml"}, "text.format.type"),
    ],
)
async def test_a_response_names_its_own_fields(
    http: httpx2.AsyncClient, text_format: dict[str, Any], param: str
) -> None:
    """The error has the names of ``/v1/responses``."""
    body = {"model": "sprig", "input": "What?", "text": {"format": text_format}}
    error = await refusal(http, RESPONSES, body)
    assert error["param"] == param
    assert error["message"].startswith(param)


async def test_an_engine_that_cannot_is_named(
    http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """An engine without grammars refuses: a reply that fits by chance would be no promise."""
    engine.grammar = False
    error = await refusal(http, CHAT, BODIES[CHAT] | {"response_format": format_of({})})
    assert (error["param"], error["code"]) == ("response_format", "unsupported_parameter")
    assert "scripted engine" in error["message"]


async def test_a_schema_is_compiled_beside_the_event_loop() -> None:
    """A large schema compiles in a thread; a waiter that gives up does not let others overtake it,
    and a compiled schema is cached."""
    wide = RequestedSchema("guided_json", {"properties": {f"p{i}": {} for i in range(1500)}})
    service, turns = create_service(Settings(), ScriptedEngine(), PlainText()), 0
    compiling = asyncio.ensure_future(service.grammar(wide))
    while not compiling.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 10
    assert json.loads(compiling.result()) == wide.schema
    abandoned = asyncio.ensure_future(service.grammar(wide))
    await asyncio.sleep(0)
    abandoned.cancel()
    assert await service.grammar(RequestedSchema("guided_json", {"type": "object"})) == ANY
