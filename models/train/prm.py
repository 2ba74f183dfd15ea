"""Train the reward model: `python -m models.train.prm --minutes 20`, after the samples.

It starts as the policy and learns, at the tag after each step, `+` (still right and still
solvable) against `-`. Samples come from `models.train.prm_data` and `models.train.tree_data`.
"""

import random
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from models.train import checkpoint
from models.train.batches import IGNORED, MicroBatch, Row, load_tokenizer
from models.train.network import logits_at
from models.train.prm_data import load_samples
from models.train.rows import scored_row, sign_ids
from models.train.run import Run, arguments

SEED = 31
ROWS_A_STEP = 64
"""In all processes together."""
RATE_SCALE = 0.3
KEEP = 0.99


def epochs(rows: list[Row], rank: int, world: int) -> Callable[[random.Random, int], list[Row]]:
    """What a process learns at a step: the rows, reshuffled each time round, without end."""
    share = ROWS_A_STEP // world
    steps = len(rows) // ROWS_A_STEP

    @lru_cache(1)
    def order(epoch: int) -> list[Row]:
        return random.Random(f"{SEED} {epoch}").sample(rows, len(rows))

    def draw(_: random.Random, step: int) -> list[Row]:
        epoch, place = divmod(step, steps)
        start = place * ROWS_A_STEP + rank * share
        return order(epoch)[start : start + share]

    return draw


def tag_losses(model: LlamaForCausalLM, signs: Tensor, batch: MicroBatch) -> Tensor:
    """The loss of `+` against `-` at every tag, row by row."""
    where = batch.labels != IGNORED
    logits = logits_at(model, batch.ids, where)[:, signs]
    return F.cross_entropy(logits, batch.labels[where], reduction="none")


def main() -> None:
    """Train or resume the reward model."""
    parser = arguments(__doc__, 20)
    parser.add_argument("--start", choices=("policy", "prm"), default="policy")
    options = parser.parse_args()
    tokenizer, model = load_tokenizer(), checkpoint.load_model(options.start)
    signs = torch.tensor(sign_ids(tokenizer))
    rows = [scored_row(tokenizer, row) for row in load_samples()]
    Run(
        "prm",
        model,
        epochs(rows, options.rank, options.world),
        lambda batch: tag_losses(model, signs, batch),
        lambda average: checkpoint.export(average, tokenizer, "prm"),
        options,
        RATE_SCALE,
        KEEP,
    ).train()


if __name__ == "__main__":
    main()
