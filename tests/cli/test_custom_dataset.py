"""A user's own problems: what a file must hold, and when an answer is right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli.custom_dataset import DatasetError, read_dataset


def dataset_file(tmp_path: Path, *lines: object) -> Path:
    """Write a file of these lines; a string is written as it is, anything else as JSON."""
    path = tmp_path / "mine.jsonl"
    texts = (x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in lines)
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_problems_keep_the_files_order(tmp_path: Path) -> None:
    """The task is named after the file; blank lines and further fields are ignored.

    Lines end only at line feeds, not at what Unicode calls a line separator.
    """
    path = dataset_file(
        tmp_path,
        {"problem": "b\u2028?", "answer": "2", "level": 5},
        "",
        {"problem": "a?", "answer": 1},
    )
    task = read_dataset(path)
    assert task.name == "mine"
    assert task.questions(10) == ["b\u2028?", "a?"]
    assert task.questions(1) == ["b\u2028?"]


@pytest.mark.parametrize(
    ("expected", "reply", "right"),
    [
        ("1,000", "So \\boxed{1000}.", True),
        (1000, "The answer is 1,000.", True),
        ("So she has 5. #### 18", "The answer is 18", True),
        ("$\\frac{1}{2}$", "Hence \\boxed{\\frac{1}{2}}", True),
        ("18", "The answer is 19.", False),
        ("18", "I do not know.", False),
    ],
)
def test_answers_are_compared_in_canonical_form(
    tmp_path: Path, expected: str | int, reply: str, right: bool
) -> None:
    """Wrapping, thousands and GSM8K's mark are ignored; a reply without an answer is wrong."""
    task = read_dataset(dataset_file(tmp_path, {"problem": "?", "answer": expected}))
    assert task.check("?", reply).correct is right


def test_another_comparison_can_be_handed_in(tmp_path: Path) -> None:
    """``same`` decides whether spellings are equal; a reply without an answer is never right."""
    read = read_dataset(dataset_file(tmp_path, {"problem": "?", "answer": "1/2"}))
    task = replace(read, same=lambda a, b: float(a) == 0.5 and b == "1/2")
    assert task.check("?", "The answer is 0.5.").correct
    assert not task.check("?", "The answer is 0.25.").correct
    assert not task.check("?", "No idea.").correct


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "empty"),
        (["{"], "line 1: not JSON"),
        ([[1]], "line 1: must be an object"),
        ([{"problem": "?", "answer": "1"}, {"answer": "1"}], "line 2: problem = None"),
        ([{"problem": "?", "answer": None}], "line 1: answer = None"),
        ([{"problem": "?", "answer": " "}], "line 1: answer = ' '"),
        ([{"problem": "?", "answer": "1"}] * 2, "line 2: problem: the same"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, lines: list[object], message: str) -> None:
    """The error names the file, the line, the field and the value."""
    with pytest.raises(DatasetError, match=r"mine\.jsonl") as error:
        read_dataset(dataset_file(tmp_path, *lines))
    assert message in str(error.value)
