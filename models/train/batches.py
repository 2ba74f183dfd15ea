"""Examples as token rows, and rows as right-padded micro-batches of similar length."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from models.bundled import SPRIG_FOLDER
from models.tasks.task import STEP_BREAK
from models.train.corpus import Example, example
from models.train.drills import DRILLS
from models.train.tokenizer import ASSISTANT, END, PAD, USER
from models.train.verdicts import Verdicts

IGNORED = -100
MICRO_TOKENS = 2560
BREAKS_BEFORE_STEPS = 2
"""Step breaks in a judge prompt before its steps: after the opening and the question."""


class Row(NamedTuple):
    """Token ids and, position by position, the label to learn there (IGNORED: nothing).

    `labels[i]` is what the model must predict *at* position i.
    """

    kind: str
    ids: list[int]
    labels: list[int]


class MicroBatch(NamedTuple):
    """Right-padded rows."""

    ids: Tensor
    labels: Tensor
    kinds: list[str]

    def to(self, device: torch.device) -> "MicroBatch":
        """The same rows on a device."""
        return MicroBatch(self.ids.to(device), self.labels.to(device), self.kinds)


def load_tokenizer() -> PreTrainedTokenizerBase:
    """The bundled tokenizer."""
    return AutoTokenizer.from_pretrained(SPRIG_FOLDER / "policy")


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the padding token."""
    (pad,) = tokenizer.encode(PAD)
    return pad


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text of a reply, without its end token."""
    return str(tokenizer.decode(ids)).removesuffix(END)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, user: str, system: str = "") -> list[int]:
    """The prompt's ids by the chat template, up to where the reply starts."""
    return tokenizer.encode(f"{system}{USER}{user}{ASSISTANT}")


def encode(tokenizer: PreTrainedTokenizerBase, dialogue: Example) -> Row:
    """Encode a dialogue as one row; its labels are the reply, and a sign after each step to judge.

    In a drill only the tokens after its marking word are labelled.

    Predictions inside the prompt are never used: the signs there only teach the model to know, by
    the time it replies, which steps are good.
    """
    prompt = prompt_ids(tokenizer, dialogue.user, dialogue.system)
    reply = tokenizer.encode(f"{dialogue.reply}{END}")
    targets = reply
    if dialogue.kind in DRILLS:
        (word,) = tokenizer.encode(DRILLS[dialogue.kind])
        pairs = zip([None, *reply], reply, strict=False)
        targets = [token if before == word else IGNORED for before, token in pairs]
    labels = [IGNORED] * (len(prompt) - 1) + targets + [IGNORED]
    (step_break,) = tokenizer.encode(STEP_BREAK)
    plus, minus = (tokenizer.encode(sign)[0] for sign in "+-")
    breaks = [i for i, token in enumerate(prompt) if token == step_break]
    for place, good in zip(breaks[BREAKS_BEFORE_STEPS:], dialogue.marks, strict=False):
        labels[place] = plus if good else minus
    return Row(dialogue.kind, prompt + reply, labels)


def micro_batches(rows: list[Row], pad: int, limit: int = MICRO_TOKENS) -> Iterator[MicroBatch]:
    """The rows, shortest first, in batches of at most `limit` tokens, padding included."""
    group: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if group and len(row.ids) * (len(group) + 1) > limit:
            yield _padded(group, pad)
            group = []
        group.append(row)
    if group:
        yield _padded(group, pad)


def _padded(rows: list[Row], pad: int) -> MicroBatch:
    length = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), length), pad)
    labels = torch.full((len(rows), length), IGNORED)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        labels[i, : len(row.labels)] = torch.tensor(row.labels)
    return MicroBatch(ids, labels, [row.kind for row in rows])


def draw_rows(
    tokenizer: PreTrainedTokenizerBase,
    rng: random.Random,
    mixture: dict[str, float],
    count: int,
    verdicts: Verdicts | None = None,
) -> list[Row]:
    """Draw `count` new examples of the mixture, as rows."""
    return [encode(tokenizer, example(rng, mixture, verdicts)) for _ in range(count)]
