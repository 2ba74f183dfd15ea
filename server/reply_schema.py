"""The JSON schema that a reply must fit, from the request fields of OpenAI and of vLLM."""

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
"""The most schemas remembered as known to compile."""
ANY_OBJECT = {"type": "object"}
_ENTRY = {"name": STRING, "schema": {"type": "object"}, "strict": {"type": ["boolean", "null"]}}
_WRAPPED = {"type": "object", "properties": _ENTRY, "required": ["schema"]}
_FORMATS = [{"type": "null"}, of_type("text"), of_type("json_object")]
_FORMAT_SCHEMA = {"anyOf": [*_FORMATS, of_type("json_schema", json_schema=_WRAPPED)]}
TEXT_FORMAT_SCHEMA = {"anyOf": [*_FORMATS, of_type("json_schema", **_ENTRY)]}
"""For ``/v1/responses``, whose format has the schema's name beside the type."""
_OUTPUTS_SCHEMA = {
    "type": ["object", "null"],
    "properties": {"json": {"type": "object"}, "json_object": {"const": True}},
    "maxProperties": 1,
    "additionalProperties": False,
}
ResponseFormat = Annotated[Any, WithJsonSchema(_FORMAT_SCHEMA)]
StructuredOutputs = Annotated[Any, WithJsonSchema(_OUTPUTS_SCHEMA)]
GuidedJson = Annotated[Any, WithJsonSchema({"type": ["object", "null"]})]


def requested_schema(request: GenerationRequest, able: Capabilities) -> RequestedSchema | None:
    """The schema that a request asks for, None without one. Raises ApiError for an invalid field,
    an unsupported constraint, or an engine that cannot constrain replies to a schema."""
    guided = request.guided_json
    candidates = (
        _of_response_format(request.response_format),
        _of_structured_outputs(request.structured_outputs),
        None if guided is None else RequestedSchema("guided_json", guided),
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


class RequestedSchema(NamedTuple):
    """A schema and the request field that it came in."""

    field: str
    schema: Any

    @property
    def top(self) -> str:
        """The top-level field of the request."""
        return self.field.partition(".")[0]

    def canonical(self) -> str:
        """The schema as JSON text on one line. Raises ApiError if it is not a JSON object."""
        schema = self.schema
        if isinstance(schema, str):  # vLLM accepts text too
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
    """Compiles schemas before anything is drawn under them; for one caller at a time. A large
    schema takes long."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[bytes, None] = OrderedDict()

    def grammar(self, schema: RequestedSchema) -> str:
        """The schema as engines take it. Raises ApiError naming what in it cannot be compiled."""
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


def _of_response_format(value: Any) -> RequestedSchema | None:
    """The schema of a chat's ``response_format``, None if it asks for text."""
    name = "response_format"
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or kind not in ("text", "json_object", "json_schema"):
        raise bad_value(f"{name}.type", f"must be text, json_object or json_schema: {echo(kind)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return RequestedSchema(name, ANY_OBJECT)
    entry = value.get("json_schema")
    if not isinstance(entry, Mapping):
        raise bad_value(f"{name}.json_schema", f"must be an object, got {echo(entry)}")
    _check_name(entry, f"{name}.json_schema")
    return RequestedSchema(f"{name}.json_schema.schema", entry.get("schema"))


def _check_name(entry: Mapping[str, Any], field: str) -> None:
    """Check ``name`` and ``strict`` beside a schema; they change nothing: all are strict."""
    if not isinstance(entry.get("name", ""), str):
        raise bad_value(f"{field}.name", f"must be a string, got {echo(entry['name'])}")
    if not isinstance(entry.get("strict"), bool | None):
        raise bad_value(f"{field}.strict", f"must be true or false, got {echo(entry['strict'])}")


def _of_structured_outputs(outputs: Any) -> RequestedSchema | None:
    """The schema of vLLM's ``structured_outputs``, None without one."""
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
        return RequestedSchema(name, ANY_OBJECT)
    return RequestedSchema(f"{name}.json", options["json"]) if options else None
