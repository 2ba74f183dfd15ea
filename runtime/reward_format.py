"""Reward formats: what a reward model is given for a step and how its reward is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

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
"""The ids of pieces of one search's paths that are tokenised already, by part and text."""


class RewardFormat(BaseModel):
    """What a reward model reads of a trajectory, and what is read of it.

    **The path.** ``spells``: ``policy`` gives it the policy's own ids, prompt included, and only if
    its tokenizer differs is the path spelt as for ``once``: the question in ``opening`` (or
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
    taken, counting from 0; ``head`` names the head's linear layers in the checkpoint, first to
    last, a ReLU between two. ``logprob`` reads no reward model: exp of the policy's mean
    log-probability a token. ``judge`` asks the policy for ``votes`` verdicts on ``template``, each
    of up to ``verdict_tokens`` tokens; the first group of the last match of ``pattern`` is the
    number N, and the reward the mean of (N - ``lowest``) / (``highest`` - ``lowest``). A verdict
    without such a number within the range is left out; where none is left the reward is
    ``unparsed``.
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
        """Whether rewards need a reward model."""
        return self.reads not in ("logprob", "judge", "score")

    @property
    def by_score_route(self) -> bool:
        """Whether rewards come from another Hedgerow's ``/v1/score``."""
        return self.reads == "score"

    @property
    def outcome(self) -> bool:
        """Whether only finished replies have a reward, and single steps none."""
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
    """The built-in format ``name``, or the one that the ``.json`` file ``name`` describes.

    The file holds fields of ``RewardFormat``, which override those of the format named by its
    optional ``extends``; ``name`` defaults to the file's. Raises ValueError naming what is wrong.
    """
    if name in REWARD_FORMATS:
        return REWARD_FORMATS[name]
    if name.endswith(".json"):
        return _from_file(Path(name))
    raise ValueError(f"reward_format: {name!r}; one of {_format_names()} or a .json file is needed")


def local_reward_format(name: str) -> RewardFormat:
    """``reward_format`` for an engine that cannot ask another Hedgerow. Raises ValueError."""
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


def fill_template(template: str, words: Mapping[str, str]) -> str:
    """The template with each ``{name}`` of ``words`` replaced once; the words stay as they are."""
    names = "|".join(words)
    return re.sub(rf"\{{({names})\}}", lambda match: words[match[1]], template)
