"""How a reward model is asked about a step, as data, and the token path that it reads for one.

A step's ids follow from the step alone, so a path only ever grows at its end and scoring a step
costs a prefill of that step. Rewards are read at a path's last token, wherever else its tag's id
may stand; what is spelled like a control token in questions and steps is encoded as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runtime.text import Text
from search.engine import Trajectory

Reads = Literal["softmax", "mean", "value", "classes", "logprob", "judge", "score"]
Spells = Literal["policy", "once", "dialogue", "reply"]

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "softmax": ("good", "bad"),
    "value": ("head",),
    "classes": ("head",),
    "judge": ("template", "pattern"),
}
Ids = tuple[int, ...]
Spelt = dict[tuple[str, str], Ids]
"""Pieces of one search's paths that are spelt already, by their part and their text."""
_OPENING, _FIRST, _LATER = "opening", "first", "later"
_PROBE = ("What is 1 + 1?", ("1 + 1 = 2.\n\n", "The answer is 2."))


class RewardFormat(BaseModel):
    """What a reward model reads of a trajectory, and what is read of it.

    **The path.** ``spells``: ``policy`` gives it the policy's own ids, prompt included, and only if
    its tokenizer is another one the path is spelt as for ``once``: the question in ``opening`` (or
    in the chat template, after the system message ``system``), then each step's text, stripped,
    after ``first`` or ``later``. ``dialogue``: each step is a user's turn of the chat template, the
    first one after ``opening``; every earlier turn was answered by ``good``. ``reply``, for outcome
    models: the question as for ``once``, then the whole reply's text, stripped, and ``closing``.
    ``{bos}`` and ``{question}`` in ``opening`` stand for the begin token and the user's words.
    Every piece is tokenised alone, once; ``tag`` follows each step as one token and stays in the
    path.

    **The reading**, always at the last token of the path. ``reads``: ``softmax`` is P(``good``)
    against ``bad``, each a token's text or its id; ``mean`` the sigmoid of the mean of the whole
    vocabulary's logits; ``value`` the sigmoid of a scalar head on the final hidden state over
    ``scale``; ``classes`` the softmax of a head with several outputs, of which number ``label`` is
    taken; ``head`` names the head's linear layers in the checkpoint, first to last, a ReLU between
    two. ``logprob`` reads no reward model: exp of the policy's mean log-probability a token.
    ``judge`` asks the policy for ``votes`` verdicts on ``template``, each of up to
    ``verdict_tokens`` tokens; the first group of the last match of ``pattern`` is the number N, and
    the reward the mean of (N - ``lowest``) / (``highest`` - ``lowest``). A verdict without such a
    number within the range is left out; where none is left the reward is ``unparsed``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    reads: Reads
    spells: Spells = "policy"
    opening: str = "{bos}{question}\n"
    system: str | None = None
    first: str = ""
    later: str = ""
    tag: str = ""
    closing: str = ""
    good: str | int = ""
    bad: str | int = ""
    head: tuple[str, ...] = ()
    label: int = Field(default=1, ge=0)
    scale: float = Field(default=1.0, gt=0.0, le=1e6)
    template: str = ""
    pattern: str = ""
    votes: int = Field(default=3, ge=1, le=64)
    temperature: float = Field(default=1.0, ge=0.0, le=5.0)
    verdict_tokens: int = Field(default=128, ge=1, le=8192)
    lowest: int = 1
    highest: int = 10
    unparsed: float = Field(default=0.0, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _complete(self) -> RewardFormat:
        for part in _NEEDED.get(self.reads, ()):
            if getattr(self, part) in ("", ()):
                raise ValueError(f"{part}: empty; reads {self.reads!r} needs it")
        if self.spells == "dialogue" and not (isinstance(self.good, str) and self.good):
            raise ValueError(f"good: {self.good!r}; spells 'dialogue' answers steps with its text")
        if self.reads == "judge":
            self._judges()
        return self

    def _judges(self) -> None:
        for part in ("{question}", "{steps}"):
            if part not in self.template:
                raise ValueError(f"template: without {part}")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern: {self.pattern!r}; {error}") from None
        if not groups:
            raise ValueError(f"pattern: {self.pattern!r}; a group for the number is needed")
        if self.lowest >= self.highest:
            raise ValueError(f"lowest: {self.lowest}; less than highest, {self.highest}, is needed")

    @property
    def needs_model(self) -> bool:
        """Whether a reward model is read at all."""
        return self.reads not in ("logprob", "judge", "score")

    @property
    def by_score_route(self) -> bool:
        """Whether another Hedgerow's ``/v1/score`` gives the rewards."""
        return self.reads == "score"

    @property
    def outcome(self) -> bool:
        """Whether finished replies alone have a reward, and single steps none."""
        return self.spells == "reply"

    @property
    def reads_hidden(self) -> bool:
        """Whether the final hidden state is read instead of logits."""
        return self.reads in ("value", "classes")


_JUDGE_TEMPLATE = (
    "Judge these steps.\n\n{question}\n\n{steps}\n\n"
    "How surely do they lead to a correct answer, from 1 to 10?"
)
_QWEN_SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."

REWARD_FORMATS: Mapping[str, RewardFormat] = {
    form.name: form
    for form in (
        RewardFormat(
            name="math-shepherd",
            reads="softmax",
            opening="{bos}{question}",
            first=" ",
            later="\n",
            tag="ки",
            good="+",
            bad="-",
        ),
        RewardFormat(name="llemma", reads="mean", later="\n", tag="ки"),
        RewardFormat(
            name="rlhflow",
            reads="softmax",
            spells="dialogue",
            opening="{question} ",
            good="+",
            bad="-",
        ),
        RewardFormat(
            name="skywork", reads="value", spells="once", tag="\n", head=("v_head.summary",)
        ),
        RewardFormat(
            name="qwen2.5-math-prm",
            reads="classes",
            spells="once",
            system=_QWEN_SYSTEM,
            tag="<extra_0>",
            head=("score.0", "score.2"),
        ),
        RewardFormat(
            name="qwen2.5-math-rm",
            reads="value",
            spells="reply",
            system=_QWEN_SYSTEM,
            closing="<|im_end|>\n",
            head=("score.0", "score.2"),
        ),
        RewardFormat(name="logit", reads="softmax", later="\n\n", good="+", bad="-"),
        RewardFormat(
            name="generative",
            reads="judge",
            template=_JUDGE_TEMPLATE,
            pattern=r"[Tt]he number is:?\s*(\d+)",
        ),
        RewardFormat(name="none", reads="logprob"),
        RewardFormat(name="score", reads="score"),
    )
}


def reward_format(name: str) -> RewardFormat:
    """The format of that name, or the one a ``.json`` file describes.

    The file holds fields of ``RewardFormat``, over those of the format that ``extends`` names if it
    is there; ``name`` defaults to the file's. Raises ValueError naming what is wrong.
    """
    if name in REWARD_FORMATS:
        return REWARD_FORMATS[name]
    if name.endswith(".json"):
        return _from_file(Path(name))
    raise ValueError(f"reward_format: {name!r}; one of {_format_names()} or a .json file is needed")


def format_read_here(name: str) -> RewardFormat:
    """As ``reward_format``, for an engine that cannot ask another Hedgerow. Raises ValueError."""
    form = reward_format(name)
    if form.by_score_route:
        raise ValueError(
            f"reward_format: {name!r}: asks another Hedgerow, which --engine openai alone does"
        )
    return form


def _from_file(path: Path) -> RewardFormat:
    try:
        own = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"reward_format: '{path}' cannot be read: {error}") from None
    if not isinstance(own, dict):
        raise ValueError(f"reward_format: '{path}' holds no object")
    base = own.pop("extends", None)
    if base is not None and base not in REWARD_FORMATS:
        raise ValueError(f"reward_format: '{path}': extends {base!r}; {_format_names()} are known")
    inherited = {} if base is None else REWARD_FORMATS[base].model_dump(mode="json")
    try:
        return RewardFormat.model_validate_json(json.dumps(inherited | {"name": path.stem} | own))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "format"
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"reward_format: '{path}': {where}: {message}") from None


def _format_names() -> str:
    return ", ".join(REWARD_FORMATS)


class Paths(Protocol):
    """How a format spells what the reward model reads."""

    def opening(self, prompt: Sequence[int], question: str, spelt: Spelt) -> Ids:
        """What every path over this question begins with; may be empty."""
        ...

    def path(
        self, prompt: Sequence[int], question: str, trajectory: Trajectory, spelt: Spelt
    ) -> Ids:
        """The whole path, to be read at its last token. Adds to ``spelt`` what it spells."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyIds:
    """The policy's own ids: the prompt, and each step with the tag after it.

    A step that ends with the tag's id gets no second one.
    """

    tag: int | None

    def opening(self, prompt: Sequence[int], question: str, spelt: Spelt) -> Ids:
        """The policy's prompt."""
        return tuple(prompt)

    def path(
        self, prompt: Sequence[int], question: str, trajectory: Trajectory, spelt: Spelt
    ) -> Ids:
        """Prompt, step, tag, step, tag."""
        path = list(prompt)
        for step in trajectory.steps:
            path += step
            if self.tag is not None and step[-1] != self.tag:
                path.append(self.tag)
        return tuple(path)


@dataclass(frozen=True, slots=True)
class OwnIds:
    """The reward model's own words: an opening, then each step's text, tokenised alone.

    A step's text is stripped of white space, and of the tag where it ends with it.
    """

    form: RewardFormat
    text: Text
    tag: int | None

    def opening(self, prompt: Sequence[int], question: str, spelt: Spelt) -> Ids:
        """The question as the format puts it."""
        if (_OPENING, question) not in spelt:
            spelt[_OPENING, question] = self._open(question)
        return spelt[_OPENING, question]

    def path(
        self, prompt: Sequence[int], question: str, trajectory: Trajectory, spelt: Spelt
    ) -> Ids:
        """Opening, step, tag, step, tag."""
        path = list(self.opening(prompt, question, spelt))
        for place, words in enumerate(trajectory.texts):
            key = (_LATER if place else _FIRST), words
            if key not in spelt:
                spelt[key] = self._spell(words, self.form.later if place else self.form.first)
            path += spelt[key]
        return tuple(path)

    def _open(self, question: str) -> Ids:
        if self.form.system is None:
            begin = self.text.bos if self.form.opening.startswith("{bos}") else None
            words = self.text.encode(_fill_opening(self.form.opening, self.text.plain(question)))
            return tuple(words) if begin is None else (begin, *words)
        system = {"role": "system", "content": self.form.system}
        user = {"role": "user", "content": self.text.plain(question)}
        return tuple(self.text.encode(self.text.render_chat([system, user])))

    def _spell(self, words: str, before: str) -> Ids:
        bare = words.strip()
        if self.form.tag.strip():
            bare = bare.removesuffix(self.form.tag.strip()).rstrip()
        ids = self.text.encode_after(before + self.text.plain(bare))
        return tuple(ids) if self.tag is None else (*ids, self.tag)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Each step is a user's turn; the reward model is read where it would answer ``good`` or
    ``bad``, and every earlier turn was answered by ``good``.

    A piece, tokenised alone, runs from the answer to the turn before to the end of its own turn's
    opening for the assistant.
    """

    form: RewardFormat
    text: Text
    good: str

    @classmethod
    def of(cls, form: RewardFormat, text: Text) -> Dialogue:
        """Raises ValueError if the chat template cannot be cut into such pieces."""
        made = cls(form, text, str(form.good))
        made._must_cut()
        return made

    def opening(self, prompt: Sequence[int], question: str, spelt: Spelt) -> Ids:
        """Nothing: the question is part of the first turn."""
        return ()

    def path(
        self, prompt: Sequence[int], question: str, trajectory: Trajectory, spelt: Spelt
    ) -> Ids:
        """Turn, good, turn, good, ..., turn."""
        path: list[int] = []
        for place, words in enumerate(trajectory.texts):
            key = (_LATER if place else _FIRST), words
            if key not in spelt:
                piece = self._later(words) if place else self._first(question, words)
                spelt[key] = tuple(self.text.encode_after(piece))
            path += spelt[key]
        return tuple(path)

    def _first(self, question: str, words: str) -> str:
        asked = _fill_opening(self.form.opening, self.text.plain(question))
        content = asked + self.text.plain(words.strip())
        return self.text.render_chat([{"role": "user", "content": content}])

    def _later(self, words: str) -> str:
        """What a turn adds to a conversation of one answered turn."""
        before = [{"role": "user", "content": "?"}]
        answer = {"role": "assistant", "content": self.good}
        after = [*before, answer, {"role": "user", "content": self.text.plain(words.strip())}]
        return self.text.render_chat(after)[len(self.text.render_chat(before)) :]

    def _must_cut(self) -> None:
        question, steps = _PROBE
        contents = [_fill_opening(self.form.opening, question) + steps[0].strip(), steps[1]]
        answer = {"role": "assistant", "content": self.good}
        turns = [{"role": "user", "content": content} for content in contents]
        whole = self.text.render_chat([turns[0], answer, turns[1]])
        pieces = [self._first(question, steps[0]), self._later(steps[1])]
        ids = [token for piece in pieces for token in self.text.encode_after(piece)]
        answered = pieces[1].lstrip().startswith(self.good)
        if ids != self.text.encode_after(whole) or not answered:
            raise ValueError(
                f"reward_format {self.form.name!r}: the chat template of {self.text.checkpoint} "
                f"does not put {self.good!r} right after the assistant's opening, turn by turn"
            )


def _fill_opening(template: str, question: str) -> str:
    """The template with the user's words in it and without its begin token."""
    return fill_template(template.removeprefix("{bos}"), {"question": question})


def fill_template(template: str, words: Mapping[str, str]) -> str:
    """The template with each ``{name}`` of ``words`` replaced, what was put in left alone."""
    names = "|".join(words)
    return re.sub(rf"\{{({names})\}}", lambda match: words[match[1]], template)
