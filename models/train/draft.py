"""Distil the draft: `python -m models.train.draft --minutes 8`.

The draft learns the policy's whole distribution at each reply position, not only the token that
the teacher wrote: agreement under shared noise needs the distribution.
"""

import argparse
import json
import random
import time

import torch
import torch.nn.functional as F

from models.train import checkpoint
from models.train.batches import IGNORED, draw_rows, load_tokenizer, micro_batches, pad_id
from models.train.checkpoint import load_model
from models.train.corpus import MIXTURE
from models.train.network import logits_at, new_model
from models.train.optimizer import optimizers, set_rate

SEED = 41
EXAMPLES_A_STEP = 48
LOG_EVERY = 20


def train(minutes: float) -> None:
    """Distil on fresh corpus examples and export."""
    tokenizer, teacher = load_tokenizer(), load_model("policy").requires_grad_(False)
    model = new_model("draft", tokenizer, SEED)
    built, average = optimizers(model), checkpoint.Average(model)
    rng, started, number = random.Random(SEED), time.monotonic(), 0
    while (progress := (time.monotonic() - started) / (minutes * 60)) < 1:
        rows = draw_rows(tokenizer, rng, MIXTURE, EXAMPLES_A_STEP)
        learnt = sum(label != IGNORED for row in rows for label in row.labels)
        total = 0.0
        for batch in micro_batches(rows, pad_id(tokenizer)):
            where = batch.labels != IGNORED
            with torch.no_grad():
                target = logits_at(teacher, batch.ids, where).log_softmax(-1)
            said = logits_at(model, batch.ids, where).log_softmax(-1)
            loss = F.kl_div(said, target, reduction="sum", log_target=True) / learnt
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        set_rate(built, progress)
        for optimizer in built:
            optimizer.step()
            optimizer.zero_grad()
        average.update(model)
        number += 1
        if number % LOG_EVERY == 0:
            print(json.dumps({"step": number, "kl": round(total, 4)}), flush=True)
    checkpoint.export(average.model, tokenizer, "draft")


def main() -> None:
    """Distil the draft."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.minutes)


if __name__ == "__main__":
    main()
