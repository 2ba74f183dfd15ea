"""Do replies under published schemas fit them, are they the same whatever runs, what does it cost?

`python -m loadtest.structured_output [--model smollm2] [--quick] [--json]`

The suite is what the functions of the Berkeley Function Calling Leaderboard ask for: some 3,370
distinct schemas in the PyPI package ``bfcl-eval``, whose wheel is read and not installed
(``pip download --no-deps -d build bfcl-eval==2026.3.23``), each with a question that it belongs
to; BFCL's names of types become JSON Schema's. Servers run in processes of their own.
``jsonschema_rs`` validates, which has nothing to do with what compiles; a number beyond a double's
range counts as the largest one. ``same`` is always about the bundled models, as it needs drafts.
A row a part:

- ``compiled``: ``schemas``, ``compiled``, ``share``; ``refused``: how many by which reason;
  ``p50_ms`` and ``most_ms`` of a schema.
- ``plain``, ``searched``: ``schemas`` asked, ``stopped`` and ``cut`` replies; of the stopped ones
  ``valid``; ``failed``: answers that were errors.
- ``same``: of ``schemas`` with three replies each, under every set-up in ``set_ups``, ``equal``:
  with the tokens and log-probabilities of the first one, which shares and drafts nothing.
- ``cost``: replies with and without a schema by turns, eight at a time, of ``tokens`` at most:
  medians of ``tokens_a_second``; ``ratio``: with over without, the median over the turns' pairs.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jsonschema_rs

from loadtest.options import BenchmarkParser
from loadtest.report import publish, say
from loadtest.searches import side_by_side
from loadtest.served import Served
from loadtest.turns import in_turns
from runtime.json_schemas import SchemaRefused, must_compile

SUITE = Path("build/bfcl_eval-2026.3.23-py3-none-any.whl")
NO_FUNCTIONS = ("possible_answer", "format_sensitivity", "memory_prereq")
TYPES = {
    **dict.fromkeys(("dict", "HashMap", "Hashtable"), "object"),
    **dict.fromkeys(("tuple", "list", "Array", "ArrayList", "Queue", "Stack"), "array"),
    **dict.fromkeys(("float", "double"), "number"),
    **dict.fromkeys(("byte", "short", "long", "Bigint"), "integer"),
    **dict.fromkeys(("any", "Any", "String", "char"), "string"),
    "bool": "boolean",
}
"""BFCL's names of types; the others are JSON Schema's."""
AT_ONCE, SECONDS = 8, 1800.0
TOKENS = 160
SEARCH = {"policy": "self_consistency", "width": 4, "seed": 1, "trajectory_tokens": 96}
MODEL = "sprig"
SET_UPS: dict[str, dict[str, Any]] = {
    "nothing": {"dedup": "off"},
    "dedup": {"dedup": "on"},
    "drafts": {"dedup": "on", "draft": "scheduled"},
    "evicting": {"dedup": "on", "draft": "scheduled", "kv_tokens": 2500, "batch_limit": 4},
}
COLUMNS = ("part", "schemas", "result")


class Conversation(NamedTuple):
    """A schema of the suite and a question that it belongs to."""

    schema: dict[str, Any]
    question: str

    def body(self, model: str, **more: Any) -> dict[str, Any]:
        """The body of a chat request."""
        schema_spec = {"name": "arguments", "schema": self.schema}
        response_format = {"type": "json_schema", "json_schema": schema_spec}
        messages = [{"role": "user", "content": self.question[:400]}]
        body = {"model": model, "messages": messages, "seed": 1, "max_tokens": TOKENS}
        return body | {"response_format": response_format} | more


def suite(wheel: Path) -> list[Conversation]:
    """Every distinct schema of the package's functions, in the files' order."""
    distinct: dict[str, Conversation] = {}
    with zipfile.ZipFile(wheel) as files:
        for name in sorted(files.namelist()):
            if name.endswith(".json") and not any(word in name for word in NO_FUNCTIONS):
                for line in files.read(name).decode().splitlines():
                    for chat in chats_in(line):
                        distinct.setdefault(json.dumps(chat.schema), chat)
    return [*distinct.values()]


def chats_in(line: str) -> Iterator[Conversation]:
    """The conversations in a line of a file; none if it is only a part of a JSON document."""
    try:
        entry = json.loads(line)
    except ValueError:
        return
    if not isinstance(entry, dict):
        return
    functions = entry.get("function", [entry])
    for function in functions if isinstance(functions, list) else [functions]:
        if isinstance(function, dict) and isinstance(function.get("parameters"), dict):
            turns = json.dumps(entry.get("question", function["name"]))
            yield Conversation(renamed(function["parameters"]), turns)


def renamed(part: Any) -> Any:
    """A schema with JSON Schema's names of types."""
    if isinstance(part, list):
        return [renamed(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        key: TYPES.get(value, value) if key == "type" and isinstance(value, str) else renamed(value)
        for key, value in part.items()
    }


def compiled(chats: Sequence[Conversation]) -> tuple[dict[str, Any], list[Conversation]]:
    """Compile all schemas; the row, and the conversations whose schemas compile."""
    good, refused, times = [], Counter[str](), []
    for chat in chats:
        start = time.perf_counter()
        try:
            must_compile(json.dumps(chat.schema))
            good.append(chat)
        except SchemaRefused as error:
            refused[str(error)[:60]] += 1
        times.append(1e3 * (time.perf_counter() - start))
    share = len(good) / len(chats)
    result = f"{share:.1%} compiled"
    row = {"part": "compiled", "schemas": len(chats), "compiled": len(good), "share": share}
    more = {"refused": dict(refused), "p50_ms": statistics.median(times), "most_ms": max(times)}
    return row | more | {"result": result}, good


def spread(chats: Sequence[Conversation], count: int) -> list[Conversation]:
    """``count`` of them, spread evenly over the suite."""
    count = min(count, len(chats))
    return [chats[i * len(chats) // count] for i in range(count)]


class Target(NamedTuple):
    """A server and the model that it is asked for."""

    url: str
    model: str


async def each(
    target: Target, chats: Sequence[Conversation], more: Callable[[], dict[str, Any]]
) -> list[httpx.Response]:
    """Ask all of them, AT_ONCE at a time; the answers."""
    async with httpx.AsyncClient(base_url=target.url, timeout=SECONDS) as client:

        async def post(chat: Conversation) -> httpx.Response:
            body = chat.body(target.model, **more())
            return await client.post("/v1/chat/completions", json=body)

        return await side_by_side(post, chats, AT_ONCE)


async def validity_row(
    part: str, target: Target, chats: Sequence[Conversation], more: dict[str, Any]
) -> dict[str, Any]:
    """Ask for replies under their schemas; the row of how many fit."""
    answers = await each(target, chats, lambda: more)
    counts: Counter[str] = Counter(dict.fromkeys(("stopped", "cut", "valid", "failed"), 0))
    for chat, answer in zip(chats, answers, strict=True):
        if answer.status_code != 200:
            counts["failed"] += 1
            say(f"{answer.status_code}: {answer.text[:300]}")
            continue
        [choice] = answer.json()["choices"]
        counts["stopped" if choice["finish_reason"] == "stop" else "cut"] += 1
        if choice["finish_reason"] == "stop":
            counts["valid"] += valid(chat.schema, choice["message"]["content"])
    result = f"{counts['valid']} valid of {counts['stopped']} that ended, {counts['cut']} cut"
    return {"part": part, "schemas": len(chats), **counts, "result": result}


def valid(schema: dict[str, Any], content: str) -> bool:
    """Whether a reply is JSON that fits its schema."""
    try:
        reply = json.loads(content, parse_float=within_range)
        fits = jsonschema_rs.is_valid(schema, reply)
    except ValueError:
        fits = False
    if not fits:
        say(f"not valid: {content[:300]} by {json.dumps(schema)[:900]}")
    return fits


def within_range(number: str) -> float:
    """A number of any size as a double."""
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


async def same(chats: Sequence[Conversation]) -> dict[str, Any]:
    """The row of replies under several set-ups."""
    replies: list[list[Any]] = []
    for name, settings in SET_UPS.items():
        with Served(**settings) as served:
            more = {"n": 3, "logprobs": True, "top_logprobs": 2, "max_tokens": 80}
            answers = await each(Target(served.url, MODEL), chats, lambda more=more: more)
        replies.append([answer.raise_for_status().json()["choices"] for answer in answers])
        say(f"set-up {name}")
    first, *others = replies
    equal = sum(all(other[i] == first[i] for other in others) for i in range(len(chats)))
    row = {"part": "same", "schemas": len(chats), "set_ups": [*SET_UPS], "equal": equal}
    return row | {"result": f"{equal} of {len(chats)} equal under {len(SET_UPS)} set-ups"}


async def cost(
    target: Target, chats: Sequence[Conversation], turns: int, tokens: int
) -> dict[str, Any]:
    """The row of what schemas cost in tokens a second."""
    free: dict[str, Any] = {"response_format": None, "ignore_eos": True}
    seeds = {"without": count(), "with": count()}  # both sides of a turn use the same seeds

    async def draw(side: str, more: dict[str, Any]) -> int:
        answers = await each(
            target, chats, lambda: more | {"max_tokens": tokens, "seed": next(seeds[side])}
        )
        return sum(a.raise_for_status().json()["usage"]["completion_tokens"] for a in answers)

    calls = {"without": lambda: draw("without", free), "with": lambda: draw("with", {})}
    await in_turns(calls, 1)  # warms up
    times = await in_turns(calls, turns)
    speeds = {side: times.rates(side) for side in calls}
    pairs = zip(speeds["with"], speeds["without"], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    row = {"part": "cost", "schemas": len(chats), "tokens": tokens, "tokens_a_second": medians}
    return row | {"ratio": ratio, "result": f"{ratio:.2f} of the tokens a second"}


async def measure(model: str, chats: Sequence[Conversation], quick: bool) -> list[dict[str, Any]]:
    """Measure all parts; a row for each."""
    first, good = compiled(chats)
    plain, searched, few = (30, 5, 5) if quick else (400, 50, 40)
    parts: list[Callable[[Target], Awaitable[dict[str, Any]]]] = [
        lambda at: validity_row("plain", at, spread(good, plain), {}),
        lambda at: validity_row("searched", at, spread(good, searched), {"search": SEARCH}),
        lambda at: cost(at, spread(good, 16), 2 if quick else 9, 64),
    ]
    rows = [first]
    with Served(*([] if model == MODEL else [model])) as served:
        for part in parts:
            rows.append(await part(Target(served.url, model)))
            say(json.dumps(rows[-1]))
    return [*rows, await same(spread(good, few))]


def main() -> None:
    """Print a table, or one JSON document with ``--json``."""
    parser = BenchmarkParser(
        "structured_output", __doc__, quick="30 schemas, 5 searched, 5 compared"
    )
    parser.add_argument("--suite", type=Path, default=SUITE, help="the wheel of bfcl-eval")
    parser.add_argument("--model", default=MODEL, help="what `hedgerow serve` serves by this name")
    options = parser.parse_args()
    chats = suite(options.suite)
    rows = asyncio.run(measure(options.model, chats, options.quick))
    publish({"rows": rows}, options.json, "replies under the schemas of BFCL", COLUMNS)


if __name__ == "__main__":
    main()
