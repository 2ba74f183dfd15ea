"""Distil the draft: `python -m models.train.draft --minutes 8 [--start draft]`.

The draft learns the policy's whole distribution at each reply position, not only the token that
the teacher wrote: agreement under shared noise needs the distribution.
"""

import random

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from models.train import checkpoint
from models.train.batches import IGNORED, MicroBatch, Row, draw_rows, load_tokenizer
from models.train.corpus import DISTILLED
from models.train.network import logits_at, new_model
from models.train.run import TrainingRun, arguments

SEED = 41
EXAMPLES_A_STEP = 48
"""In all processes together."""


def divergence(teacher: LlamaForCausalLM, model: LlamaForCausalLM, batch: MicroBatch) -> Tensor:
    """KL from the teacher's distribution at every reply position, in nats."""
    where = batch.labels != IGNORED
    with torch.no_grad():
        target = logits_at(teacher, batch.ids, where).log_softmax(-1)
    log_probs = logits_at(model, batch.ids, where).log_softmax(-1)
    return F.kl_div(log_probs, target, reduction="none", log_target=True).sum(-1)


def main() -> None:
    """Distil the draft."""
    parser = arguments(__doc__, 8)
    parser.add_argument("--start", choices=("nothing", "draft"), default="nothing")
    options = parser.parse_args()
    tokenizer = load_tokenizer()
    teacher = checkpoint.load_model("policy").requires_grad_(False)
    again = options.start == "draft"
    model = checkpoint.load_model("draft") if again else new_model("draft", tokenizer, SEED)

    def draw(rng: random.Random, _: int) -> list[Row]:
        return draw_rows(tokenizer, rng, DISTILLED, EXAMPLES_A_STEP // options.world)

    TrainingRun(
        f"draft.{options.start}",
        model,
        draw,
        lambda batch: divergence(teacher, model, batch),
        lambda average: checkpoint.export(average, tokenizer, "draft"),
        options,
    ).train()


if __name__ == "__main__":
    main()
