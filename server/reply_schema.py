"""The JSON schema that a reply is to fit: as OpenAI's and vLLM's clients ask for one."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import WithJsonSchema

from runtime.json_schemas import SchemaRefused, must_compile
from search.engine import Capabilities
from server.api_errors import bad_value, echo, unsupported
from server.body_schemas import STRING, of_type

if TYPE_CHECKING:
    from server.request_models import GenerationRequest

MOST_REMEMBERED = 256
"""Schemas that are known to compile."""
ANY_OBJECT = {"type": "object"}
_ENTRY = {"name": STRING, "schema": {"type": "object"}, "strict": {"type": ["boolean", "null"]}}
_WRAPPED = {"type": "object", "properties": _ENTRY, "required": ["schema"]}
_FORMATS = [{"type": "null"}, of_type("text"), of_type("json_object")]
_FORMAT_SCHEMA = {"anyOf": [*_FORMATS, of_type("json_schema", json_schema=_WRAPPED)]}
TEXT_FORMAT_SCHEMA = {"anyOf": [*_FORMATS, of_type("json_schema", **_ENTRY)]}
"""Of ``/v1/responses``, which names the schema beside the type."""
_OUTPUTS_SCHEMA = {
    "type": ["object", "null"],
    "properties": {"json": {"type": "object"}, "json_object": {"const": True}},
    "maxProperties": 1,
    "additionalProperties": False,
}
ResponseFormat = Annotated[Any, WithJsonSchema(_FORMAT_SCHEMA)]
StructuredOutputs = Annotated[Any, WithJsonSchema(_OUTPUTS_SCHEMA)]
GuidedJson = Annotated[Any, WithJsonSchema({"type": ["object", "null"]})]


def requested_schema(request: GenerationRequest, able: Capabilities) -> AskedSchema | None:
    """What its reply is to fit. Raises ApiError for a field that is wrong, that asks for anything
    else than a schema, or that the engine does not hold to."""
    guided = request.guided_json
    candidates = (
        _of_response_format(request.response_format),
        _of_structured_outputs(request.structured_outputs),
        None if guided is None else AskedSchema("guided_json", guided),
    )
    schemas = [schema for schema in candidates if schema is not None]
    if not schemas:
        return None
    (first, *others) = schemas
    if others:
        raise bad_value(others[0].top, f"leave it out with {first.top}")
    if not able.grammar:
        why = f"the {able.engine} engine's replies are not held to a schema; leave it out"
        raise unsupported(first.top, why)
    if request.ignore_eos:
        raise bad_value("ignore_eos", f"leave it out with {first.top}")
    return first


class AskedSchema(NamedTuple):
    """A schema and the field that it came in."""

    field: str
    schema: Any

    @property
    def top(self) -> str:
        """The request's own field."""
        return self.field.partition(".")[0]

    def canonical(self) -> str:
        """As JSON text on one line. Raises ApiError for what is no object."""
        schema = self.schema
        if isinstance(schema, str):  # as vLLM takes it
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise bad_value(self.field, f"is not valid JSON: {error}") from None
        if not isinstance(schema, dict):
            raise bad_value(self.field, f"must be a JSON schema, an object, got {echo(schema)}")
        try:
            return json.dumps(schema, separators=(",", ":"), allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise bad_value(self.field, f"is no JSON schema: {error}") from None


class CompiledSchemas:
    """Tries schemas before anything is drawn by them, for one caller at a time; a large one takes
    long."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[bytes, None] = OrderedDict()

    def grammar(self, schema: AskedSchema) -> str:
        """It as the engines take it. Raises ApiError naming what in it cannot be held to."""
        grammar = schema.canonical()
        name = hashlib.sha256(grammar.encode()).digest()
        if name not in self._compiled:
            try:
                must_compile(grammar)
            except SchemaRefused as error:
                raise bad_value(schema.field, f"cannot be compiled: {error}") from None
        self._compiled[name] = None
        self._compiled.move_to_end(name)
        if len(self._compiled) > MOST_REMEMBERED:
            self._compiled.popitem(last=False)
        return grammar


def _of_response_format(value: Any) -> AskedSchema | None:
    """Of a chat's ``response_format``."""
    name = "response_format"
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or kind not in ("text", "json_object", "json_schema"):
        raise bad_value(f"{name}.type", f"must be text, json_object or json_schema: {echo(kind)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return AskedSchema(name, ANY_OBJECT)
    entry = value.get("json_schema")
    if not isinstance(entry, Mapping):
        raise bad_value(f"{name}.json_schema", f"must be an object, got {echo(entry)}")
    _check_name(entry, f"{name}.json_schema")
    return AskedSchema(f"{name}.json_schema.schema", entry.get("schema"))


def _check_name(entry: Mapping[str, Any], field: str) -> None:
    """What stands beside a schema: nothing follows from it, as every schema is held to."""
    if not isinstance(entry.get("name", ""), str):
        raise bad_value(f"{field}.name", f"must be a string, got {echo(entry['name'])}")
    if not isinstance(entry.get("strict"), bool | None):
        raise bad_value(f"{field}.strict", f"must be true or false, got {echo(entry['strict'])}")


def _of_structured_outputs(outputs: Any) -> AskedSchema | None:
    """Of vLLM's ``structured_outputs``."""
    name = "structured_outputs"
    if outputs is None:
        return None
    if not isinstance(outputs, Mapping):
        raise bad_value(name, f"must be an object, got {echo(outputs)}")
    options = {key: value for key, value in outputs.items() if value not in (None, False)}
    for key in options.keys() - {"json", "json_object"}:
        raise unsupported(f"{name}.{key}", "json and json_object are")
    if len(options) > 1:
        raise bad_value(name, "json or json_object is needed, not both")
    if "json_object" in options:
        if options["json_object"] is not True:
            raise bad_value(f"{name}.json_object", f"must be true: {echo(options['json_object'])}")
        return AskedSchema(name, ANY_OBJECT)
    return AskedSchema(f"{name}.json", options["json"]) if options else None
