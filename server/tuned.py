"""The file of ``hedgerow tune``: the searches that are worth their tokens on the user's models.

``hedgerow serve --tuned FILE`` uses them for policy ``auto`` and for ``reasoning_effort``.
"""

from __future__ import annotations

import datetime
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from search.spec import SearchSpec

TunedEffort = Literal["low", "medium", "high", "xhigh"]
NEEDED = ("policy", "width")
HEAD = """\
# Written by hedgerow tune: which searches are worth their tokens on these models and questions.
# hedgerow serve --tuned takes them for the policy "auto" and for reasoning_effort.
# Accuracies are of the questions that the searches were chosen by, and so a little too good.
"""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TunedSearch(_Table):
    """A search with its accuracy, the accuracy's 95 % interval, and mean tokens and seconds of a
    search, measured on ``questions`` questions."""

    search: SearchSpec
    accuracy: float | None = Field(default=None, ge=0, le=1)
    accuracy_ci95: list[float] | None = Field(default=None, min_length=2, max_length=2)
    tokens: float | None = Field(default=None, ge=0)
    seconds: float | None = Field(default=None, ge=0)
    questions: int | None = Field(default=None, ge=1)

    @field_validator("search", mode="before")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        """Check that policy and width are there and the seed is not: a request has its own."""
        if not isinstance(value, dict):
            return value
        if missing := [name for name in NEEDED if name not in value]:
            raise ValueError(f"{missing[0]} is missing")
        if "seed" in value:
            raise ValueError("seed: a request's own; leave it out")
        return value

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the search that the file sets."""
        return self.search.model_dump(exclude_unset=True)


class TunedSearches(_Table):
    """The file's content. ``policy_model``, ``reward_model``, ``verifier``: what was tuned."""

    date: datetime.date | None = None
    data: str | None = None
    policy_model: str | None = None
    reward_model: str | None = None
    verifier: str | None = None
    auto: TunedSearch | None = None
    reasoning_effort: dict[TunedEffort, TunedSearch] = Field(default_factory=dict)

    def others_than(self, models: Mapping[str, str | None]) -> list[str]:
        """Those of ``models`` that the file was not tuned on, as ``name: this, not that``; empty if
        the file does not name its models."""
        if self.policy_model is None:
            return []
        return [
            f"{name}: {model}, not {getattr(self, name)}"
            for name, model in models.items()
            if model != getattr(self, name)
        ]


def read_tuned(path: Path) -> TunedSearches:
    """Read a tuned file. Raises ValueError naming the field that is wrong."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(str(error)) from None
    try:
        return TunedSearches.model_validate(tables)
    except ValidationError as error:
        lines = [_line(detail) for detail in error.errors()]
        raise ValueError("; ".join(lines)) from None


def _line(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"] if part != "[key]")
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    value_text = "" if isinstance(error["input"], dict) else f" = {error['input']!r}"
    return f"{name}{value_text}: {message}"


def tuned_toml(tuned: TunedSearches) -> str:
    """The text of a tuned file, in TOML."""
    lines = [HEAD]
    lines += _pairs(tuned.model_dump(exclude={"auto", "reasoning_effort"}))
    tables = {} if tuned.auto is None else {"auto": tuned.auto}
    tables |= {f"reasoning_effort.{name}": row for name, row in tuned.reasoning_effort.items()}
    for name, row in tables.items():
        lines += ["", f"[{name}]", *_pairs(row.model_dump(exclude={"search"}))]
        lines += ["", f"[{name}.search]", *_pairs(row.fields)]
    return "\n".join(lines) + "\n"


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_value(v)}" for name, v in values.items() if v is not None]


def _value(value: Any) -> str:
    """A value in TOML: as in JSON, except for dates, DEL and non-ASCII characters."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
