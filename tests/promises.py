"""Print docs/promises.md: every ``promise`` marker of the tests, beside its test.

``python -m tests.promises > docs/promises.md``
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
HEAD = """# Guarantees

The same seed gives the same tree: an optimisation changes time and memory, never the result. Each
sentence below stands beside the test that fails when it is no longer true. The sentences are the
tests' `@pytest.mark.promise` markers; `python -m tests.promises` prints this page. `make check`
runs the tests, except those marked `nightly` (`make nightly`) and those on vLLM (`make test-vllm`).
"""


def promises_in(source: str) -> Iterator[tuple[str, str]]:
    """The sentence and the test of each promise, in the order of the file."""
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                name, marks = node.name, node.decorator_list
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=mark)):
                marks = [mark]
            case _:
                continue
        for mark in marks:
            match mark:
                case ast.Call(
                    func=ast.Attribute(attr="promise"), args=[ast.Constant(value=str(sentence))]
                ):
                    yield sentence, name


def page(tests: Path = TESTS) -> str:
    """The page: a table of promises for each folder of the tests."""
    rooms: dict[str, list[str]] = defaultdict(list)
    for path in sorted(tests.rglob("test_*.py")):
        place = path.relative_to(tests)
        room = "whole project" if len(place.parts) == 1 else "/".join(place.parts[:-1])
        for sentence, name in promises_in(path.read_text(encoding="utf-8")):
            rooms[room].append(f"| {sentence} | `{place}::{name}` |\n")
    tables = [
        f"\n## {room}\n\n| guarantee | test |\n|---|---|\n{''.join(rooms[room])}"
        for room in sorted(rooms, key=lambda room: (room != "whole project", room))
    ]
    return HEAD + "".join(tables)


if __name__ == "__main__":
    print(page(), end="")
