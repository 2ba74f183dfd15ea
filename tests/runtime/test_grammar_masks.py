"""Replies under a JSON schema fit it, and the mask depends on the reply so far alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.grammar_masks import GrammarMask, GrammarMasks
from runtime.embedded.logits_processors import LogitsProcessors
from runtime.embedded.options import EngineOptions
from runtime.json_schemas import JsonSchemas, SchemaRefused, must_compile
from runtime.text import Text
from search.engine import Branch, EngineError, LogitsParams, Sampling, Step
from search.tree import ROOT, Finish, node_seed
from tests.closing import closing

POLICY = "models/sprig/policy"
TEXT = Text(POLICY)
MOST = 160
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@cache
def schemas() -> JsonSchemas:
    """Schemas compiled for the bundled tokenizer."""
    return JsonSchemas.of(TEXT)


LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -9, "maximum": 99},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"enum": ["left", "right", 3]},
        {"const": {"a": [1, None]}},
    ]
)


def _object(parts: list[dict[str, Any]], needed: int) -> dict[str, Any]:
    names = [f"field {i}" for i in range(len(parts))]
    return {
        "type": "object",
        "properties": dict(zip(names, parts, strict=True)),
        "required": names[:needed],
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda part: st.one_of(
        st.builds(_object, st.lists(part, max_size=3), st.integers(0, 3)),
        part.map(lambda item: {"type": "array", "items": item, "maxItems": 3}),
        st.lists(part, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=5,
)


def logits_after(path: np.ndarray, model: int) -> np.ndarray:
    """Random logits that depend only on ``model`` and the path."""
    seed = [model, *path.tolist()]
    return np.random.default_rng(seed).normal(0, 2, TEXT.vocab_size).astype(np.float32)


def draw_reply(processors: LogitsProcessors, prompt: list[int], seed: int, model: int) -> list[int]:
    """A reply of at most MOST tokens, including its end token if drawn."""
    output: list[int] = []
    while len(output) < MOST and (not output or output[-1] not in TEXT.eos):
        path = np.array(prompt + output)
        output.append(processors.draw(path, seed, logits_after(path, model)))
    return output


@pytest.mark.promise("A plain reply under a JSON schema fits the schema if it ends by itself.")
@given(
    schema=SCHEMAS,
    model=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([0.5, 1.0]),
    params=st.sampled_from([LogitsParams(), LogitsParams(3), LogitsParams(min_tokens=30)]),
)
def test_what_ends_by_itself_fits_the_schema(
    schema: dict[str, Any], model: int, temperature: float, top_p: float, params: LogitsParams
) -> None:
    """Any reply with an end token fits its schema, for any model and sampling parameters."""
    sampling = Sampling(temperature, top_p, logits=params, prompt_tokens=3)
    mask = GrammarMask(schemas(), json.dumps(schema), TEXT.eos)
    processors = LogitsProcessors(sampling, TEXT.eos, mask)
    output = draw_reply(processors, [7, 8, 9], model, model)
    if output[-1] in TEXT.eos:
        processors.may_end(np.array([7, 8, 9, *output[:-1]]), model)
        reply = json.loads(TEXT.decode(output[:-1], [7]))
        jsonschema_rs.validate(schema, reply)


def test_a_reply_that_was_left_changes_no_other() -> None:
    """One reply closes its first inner list; another with the same seed has a comma there and needs
    the next list. llguidance 1.9.1, rolled back to where they part, would let the second one
    end."""
    lists = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
    text = json.dumps({"type": "array", "items": lists, "maxItems": 3})
    first_reply, second_reply = TEXT.encode("[\n[\n]\n ]"), TEXT.encode("[\n[],\n ")
    mask, fresh = (GrammarMask(schemas(), text, TEXT.eos) for _ in range(2))
    for end in range(len(first_reply) + 1):
        mask.apply(np.array(first_reply[:end], dtype=np.int64), 1, np.zeros(TEXT.vocab_size))
    masked, expected = np.zeros(TEXT.vocab_size), np.zeros(TEXT.vocab_size)
    mask.apply(np.array(second_reply, dtype=np.int64), 1, masked)
    fresh.apply(np.array(second_reply, dtype=np.int64), 1, expected)
    assert masked.tolist() == expected.tolist()
    assert masked[TEXT.encode("[")].tolist() == [0.0]


@pytest.mark.slow
@given(schema=SCHEMAS, model=st.integers(0, 1000), data=st.data())
def test_the_mask_follows_from_the_reply_alone(
    schema: dict[str, Any], model: int, data: st.DataObject
) -> None:
    """A mask that was applied to other prefixes of any replies, also ones that do not fit, equals a
    fresh one."""
    text = json.dumps(schema)
    mask = GrammarMask(schemas(), text, TEXT.eos)
    processors = LogitsProcessors(Sampling(), TEXT.eos, mask)
    replies = [draw_reply(processors, [], seed, model) for seed in range(2)]
    for _ in range(6):
        reply = data.draw(st.sampled_from(replies))
        prefix = reply[: data.draw(st.integers(0, len(reply)))]
        prefix += data.draw(st.lists(st.integers(0, TEXT.vocab_size - 1), max_size=2))
        seed, path = data.draw(st.integers(0, 1)), np.array(prefix, dtype=np.int64)
        fresh = GrammarMask(schemas(), text, TEXT.eos)
        masked, expected = logits_after(path, 1).astype(float), logits_after(path, 1).astype(float)
        mask.apply(path, seed, masked)
        fresh.apply(path, 5, expected)
        assert masked.tolist() == expected.tolist()
        assert mask.fault(path, seed) == fresh.fault(path, 5)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "http://example.com/schema"}, "not present"),
        ({"type": "foo"}, "Invalid type"),
        ({"type": "object", "x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
        ({"enum": [str(i) for i in range(100_000)]}, "characters"),
        (False, "object"),
        ({"type": "string", "const": 3}, "nsatisfiable"),
    ],
)
def test_what_cannot_be_held_to_is_refused(schema: Any, why: str) -> None:
    """Unsupported keywords are refused by name, even if the schema asks for lenience."""
    with pytest.raises(SchemaRefused, match=why):
        schemas().compile(json.dumps(schema))
    with pytest.raises(SchemaRefused, match=why):
        must_compile(json.dumps(schema))


def test_a_nesting_too_deep_is_refused() -> None:
    """Deep nesting raises SchemaRefused at once."""
    with pytest.raises(SchemaRefused, match="recursion"):
        schemas().compile('{"type":"array","items":' * 900 + "{}" + "}" * 900)


class ByteTokens:
    """A byte-level vocabulary without the byte 0xF1."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(b"" if i == 0xF1 else bytes([i]) for i in range(256)), b"<end>")

    def __call__(self, data: bytes) -> list[int]:
        """One token for each byte."""
        return list(data)


def test_what_a_model_has_no_token_for_is_refused() -> None:
    """A schema that needs the missing byte is refused; free strings compile without it."""
    few = JsonSchemas(ByteTokens(), 257, [256])
    few.compile('{"type": "string", "description": "\\u00e9"}')
    with pytest.raises(SchemaRefused, match="0xf1"):
        few.compile(json.dumps({"const": "\U00040000"}))


def test_an_engine_is_told_which_field_it_is() -> None:
    """A refused schema raises EngineError naming ``grammar``."""
    with pytest.raises(EngineError, match=r"grammar: .*uniqueItems"):
        GrammarMasks(TEXT).of('{"uniqueItems": true}')


PLAIN = EngineOptions(policy=POLICY, kv_tokens=4000, batch_limit=64, dedup=False, strict=True)
DRAFTED = replace(PLAIN, dedup=True, draft="scheduled", draft_model="models/sprig/draft")
NULL = '{"type": "null"}'
TIGHT = replace(DRAFTED, kv_tokens=420, batch_limit=3)


async def steps(
    options: EngineOptions, sampling: Sampling, pieces: int = 1, company: int = 0
) -> list[list[Step]]:
    """Four siblings' replies in ``pieces`` pieces, beside ``company`` branches without a schema."""
    prompt = tuple(TEXT.encode_chat([{"role": "user", "content": "Use 1 2 3 4."}]))
    sampling = replace(sampling, prompt_tokens=len(prompt))
    limit = sampling.max_step_tokens // pieces

    def branches(ends: Mapping[int, tuple[int, ...]]) -> list[Branch]:
        """Branches for the next piece of each reply."""
        return [
            Branch(ROOT, i, end, node_seed(3, "step", (i,)), limit, i + 1)
            for i, end in ends.items()
        ]

    async with closing(await EmbeddedEngine.start(options)) as engine:
        beside = branches(dict.fromkeys(range(company), prompt))
        others = asyncio.ensure_future(
            engine.expand("elm", beside, replace(sampling, grammar=None))
        )
        replies: list[list[Step]] = [[] for _ in range(4)]
        going = dict.fromkeys(range(4), prompt)
        for _ in range(pieces):
            draw_reply = await engine.expand("oak", branches(going), sampling)
            for i, step in zip(list(going), draw_reply, strict=True):
                replies[i].append(step)
                going[i] += step.tokens
                if step.finish is Finish.END:
                    del going[i]
        await others
        return replies


@pytest.mark.slow
@pytest.mark.promise(
    "A reply under a JSON schema has the same token ids with drafts, sharing, other requests and "
    "little KV as without."
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_nothing_but_the_reply_decides(temperature: float) -> None:
    """Replies are bit-equal with drafts, little memory, company, and in pieces."""
    sampling = Sampling(
        temperature, 0.9, stop=(), max_step_tokens=60, grammar=json.dumps(PERSON), logprobs=2
    )
    plain = await steps(PLAIN, sampling)
    assert {step.finish for (step,) in plain} <= {Finish.END, Finish.LENGTH}
    for (step,) in plain:
        if step.finish is Finish.END:
            jsonschema_rs.validate(PERSON, json.loads(step.text))
    assert await steps(DRAFTED, sampling) == plain
    assert await steps(TIGHT, sampling, company=3) == plain
    in_pieces = await steps(DRAFTED, sampling, pieces=5)
    for (whole,), parts in zip(plain, in_pieces, strict=True):
        assert tuple(token for part in parts for token in part.tokens) == whole.tokens


async def test_a_wrong_grammar_ends_its_call_alone() -> None:
    """A wrong grammar fails its own call, naming the field; the engine goes on."""
    async with closing(await EmbeddedEngine.start(PLAIN)) as engine:
        branch = Branch(ROOT, 0, (5, 6), 1, 8, 1)
        with pytest.raises(EngineError, match=r"grammar: .*not"):
            await engine.expand("oak", [branch], Sampling(grammar='{"not": {}}'))
        assert await engine.expand("ash", [branch], Sampling(grammar=NULL, prompt_tokens=2))
        assert engine.capabilities.grammar
