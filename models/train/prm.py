"""Train the reward model: `python -m models.train.prm --minutes 12`, after `prm_data`.

It starts as the policy and learns, at the tag after each step, `+` (still right and still
solvable) against `-`.
"""

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from models.train import checkpoint
from models.train.batches import IGNORED, Row, load_tokenizer, micro_batches, pad_id
from models.train.checkpoint import load_model
from models.train.network import logits_at
from models.train.optimizer import optimizers, set_rate
from models.train.prm_data import load_samples
from models.train.rows import scored_row, sign_ids

SEED = 31
ROWS_A_STEP = 64
RATE_SCALE = 0.3
LOG_EVERY = 20


def epochs(rows: list[Row], rng: random.Random) -> Iterator[list[Row]]:
    """Steps' worth of rows, reshuffled each time round, without end."""
    while True:
        order = rng.sample(rows, len(rows))
        for start in range(0, len(order) - ROWS_A_STEP + 1, ROWS_A_STEP):
            yield order[start : start + ROWS_A_STEP]


def train(minutes: float, start: str) -> None:
    """Train on the cached samples and export."""
    tokenizer, model = load_tokenizer(), load_model(start)
    signs = torch.tensor(sign_ids(tokenizer))
    built, average = optimizers(model, RATE_SCALE), checkpoint.Average(model, 0.99)
    rows = [scored_row(tokenizer, row) for row in load_samples()]
    started, sums = time.monotonic(), defaultdict(lambda: [0.0, 0])
    for number, group in enumerate(epochs(rows, random.Random(SEED)), 1):
        progress = (time.monotonic() - started) / (minutes * 60)
        if progress >= 1:
            break
        learnt = sum(label != IGNORED for row in group for label in row.labels)
        for batch in micro_batches(group, pad_id(tokenizer)):
            where = batch.labels != IGNORED
            logits = logits_at(model, batch.ids, where)[:, signs]
            losses = F.cross_entropy(logits, batch.labels[where], reduction="none")
            (losses.sum() / learnt).backward()
            for kind, part in zip(
                batch.kinds, losses.detach().split(where.sum(1).tolist()), strict=True
            ):
                sums[kind][0] += part.sum().item()
                sums[kind][1] += len(part)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        set_rate(built, progress)
        for optimizer in built:
            optimizer.step()
            optimizer.zero_grad()
        average.update(model)
        if number % LOG_EVERY == 0:
            losses = {kind: round(total / count, 4) for kind, (total, count) in sums.items()}
            epoch = round(number * ROWS_A_STEP / len(rows), 2)
            print(json.dumps({"step": number, "epoch": epoch} | losses), flush=True)
            sums.clear()
    checkpoint.export(average.model, tokenizer, "prm")


def main() -> None:
    """Train the reward model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--start", choices=("policy", "prm"), default="policy")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.minutes, options.start)


if __name__ == "__main__":
    main()
