"""Tool calls in replies: how they are read, whole and while the reply grows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tool_calls import CLOSES, OPENS, Call, CallReader, CallStream

NAMES = ("add", "weather")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["}", '"{']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), JSON, max_size=3)
INDENT = st.sampled_from([None, 1])


def tagged(name: str = "add", **arguments: Any) -> str:
    """Return a call as Qwen's models write it."""
    return f"{OPENS}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CLOSES}"


def add_up_deltas(reader: CallReader, text: str, cuts: list[int]) -> tuple[str, list[Call]]:
    """Stream a text in pieces; return the text and the calls that the deltas add up to."""
    stream, content, calls = CallStream(reader), "", []
    for cut in (*sorted(cuts), None):
        new, deltas = stream.more(text[:cut], whole=cut is None)
        content += new
        for index, name, arguments in deltas:
            if name is not None:
                assert index == len(calls)
                calls.append(Call(name, ""))
            calls[index] = Call(calls[index].name, calls[index].arguments + arguments)
    return content, calls


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("It is 5.", "It is 5.", []),
        (tagged(a=1), "", ["add"]),
        (f"Let me see.\n{tagged(a=1)}\n{tagged('weather')}\n", "Let me see.", ["add", "weather"]),
        (f"{OPENS}\n" + '{"name": "add", "arguments": {}}', "", ["add"]),
        (f"{OPENS}none{CLOSES}", f"{OPENS}none{CLOSES}", []),
        (tagged("sing"), tagged("sing"), []),
        (f'{OPENS}{{"name": "add", "arguments": 5}}{CLOSES}', None, []),
        (f"{OPENS}{{", f"{OPENS}{{", []),
    ],
)
def test_tagged_calls(text: str, content: str | None, names: list[str]) -> None:
    """A reply may have any number amid text; a call of an unknown tool stays text."""
    read = CallReader("tagged", NAMES).read(text)
    assert read.text == (text if content is None else content)
    assert [call.name for call in read.calls] == names


def test_one_call_alone() -> None:
    """Without ``parallel`` the first call ends the reply."""
    read = CallReader("tagged", NAMES, parallel=False).read(f"So: {tagged(a=1)}{tagged(a=2)} Yes.")
    assert read == ("So:", (Call("add", '{"a": 1}'),))


def test_a_bare_call() -> None:
    """In Llama's form a reply is either one call or text."""
    reader = CallReader("bare", NAMES)
    call = ' {"name": "add", "parameters": {"a": 1}} '
    assert reader.read(call) == ("", (Call("add", '{"a": 1}'),))
    assert reader.read(f"{call} and more") == (f"{call} and more", ())
    assert reader.read('{"name": "sing"}').calls == ()
    assert reader.read(call[:9], whole=False) == ("", ())
    assert reader.read("Yes", whole=False) == ("Yes", ())


def test_a_reply_that_is_cut_has_what_is_there() -> None:
    """A call under a grammar, cut by ``max_tokens``, has the name and the arguments so far."""
    choice = CallReader("choice", NAMES)
    assert choice.read('{"name": "ad') == ("", ())
    assert choice.read('{"name": "add", "arguments": {"a": {}') == ("", (Call("add", '{"a": {}'),))
    assert CallReader("arguments", ("add",)).read('{"a"') == ("", (Call("add", '{"a"'),))
    assert CallReader("arguments", ("add",)).read("") == ("", ())


@given(st.text(max_size=8), ARGUMENTS, INDENT, st.lists(st.integers(0, 80), max_size=6))
def test_streams_say_what_is_said_whole(
    prose: str, arguments: dict[str, Any], indent: int | None, cuts: list[int]
) -> None:
    """The deltas add up to the whole reply's text and calls, in every form."""
    inside = json.dumps(arguments, indent=indent)
    choice = json.dumps({"name": "weather", "arguments": arguments}, indent=indent)
    tagged_call = f"{prose}{OPENS}{choice}{CLOSES}"
    for form, text in {
        "arguments": inside,
        "choice": choice,
        "bare": choice,
        "tagged": tagged_call + prose + tagged_call,
    }.items():
        reader = CallReader(form, ("weather",))  # type: ignore[arg-type]
        read = reader.read(text)
        assert add_up_deltas(reader, text, cuts) == (read.text, list(read.calls))
        assert [json.loads(call.arguments) for call in read.calls] == [arguments] * len(read.calls)
        assert len(read.calls) == (2 if form == "tagged" and OPENS not in prose else 1)


@given(st.text(alphabet="<tool_ca>{} /", max_size=30), st.lists(st.integers(0, 30), max_size=5))
def test_odd_replies_are_streamed_whole(text: str, cuts: list[int]) -> None:
    """Text that only looks like the start of a call is sent at the end at the latest."""
    for form in ("tagged", "bare", "choice"):
        reader = CallReader(form, NAMES)  # type: ignore[arg-type]
        read = reader.read(text)
        assert add_up_deltas(reader, text, cuts) == (read.text, list(read.calls))


@pytest.mark.parametrize("depth", [400, 990, 5_000, 100_000])
def test_a_model_may_open_brackets_for_ever(depth: int) -> None:
    """A call that is nested too deep to be parsed is text, or a call like any other."""
    reader = CallReader("tagged", NAMES)
    nested = '{"a": ' * depth + "1" + "}" * depth
    text = f'{OPENS}{{"name": "add", "arguments": {nested}}}{CLOSES}'
    reply = reader.read(text, whole=True)
    assert [call.name for call in reply.calls] in ([], ["add"])
    assert reply.text == ("" if reply.calls else text)
