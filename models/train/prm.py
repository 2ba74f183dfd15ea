"""Train the reward model: `python -m models.train.prm --phase compare`, `judge` ...

It starts as the policy with two layers on top, which can compare what the policy expected with
what the step says, and learns, at the tag after each step, `+` (still right and still solvable)
against `-`; also inside the steps, where one goes wrong and how far a plan is from its goal, and in
drills. Samples come from
`models.train.prm_data` and `models.train.tree_data`, derivations are drawn anew at every step.
"""

import copy
import random
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from models.tasks import TASKS
from models.tasks.task import STEP_BREAK
from models.train import block_walks, checkpoint, number_walks, story_walks
from models.train.batches import IGNORED, MicroBatch, Row, load_tokenizer
from models.train.labelled import Labelled, label
from models.train.network import decoder_layers, read_out, streams
from models.train.prm_data import load_samples
from models.train.renaming import renamed
from models.train.rows import IN_PLACE, MOVES_TO_GO, learnt_row, number_ids, sign_ids
from models.train.run import TrainingRun, arguments
from models.train.searched import TreeRounds
from models.train.slips import slipped_drill
from models.train.taught import lesson
from models.train.tokenizer import END, TAG

SEED = 31
KEEP = 0.99
FAULT = 15.0
"""The weight of a step's wrong word beside a right one: one word in two hundred is wrong."""
TAIL, CUT_SHARE = range(1, 4), 0.75
"""Wrong steps that a cut reply keeps, and the share of replies that are cut: what comes after a
wrong step stays wrong, which is soon learnt but makes half of all tokens."""
COUNTED = 4.0
"""The weight of a number of moves to go beside a right word."""
LAYERS_ABOVE = 2
TAUGHT = (*TASKS, *["wordproblem"] * 6)
"""The tasks of derivations, mostly the one that is misread."""

WALKS = {
    "game24": number_walks.walk,
    "countdown": number_walks.walk,
    "blocksworld": block_walks.walk,
    "wordproblem": story_walks.walk,
}
PUZZLES = ("blocksworld", "countdown", "game24")
MOSTLY_PLANS = ("countdown", "game24", *["blocksworld"] * 4)
MOSTLY_NUMBERS = (*["countdown"] * 3, *["game24"] * 3, "blocksworld", *["wordproblem"] * 2)


class RewardPhase(NamedTuple):
    """One run: its minutes, the model to start from, its relative rate, and what it learns.

    `tag`: the weight of a label at a tag beside one at a word; `drills`: rows of drills in a step,
    `drill`: the weight of a label there; `taught`: derivations in a step; `tasks`: whose replies
    are learnt, once for each time a task is named; `walks`: walks in a step, of the tasks `walked`;
    `replies`: replies in a step; all counts are for all processes together. `rounds`: how often
    `trees` trees of every task are grown with the current model, to be learnt from then on.
    `muon`: Muon for the matrices; else they learn as the rest does.
    """

    minutes: float
    start: str
    rate_scale: float
    tag: float
    drills: int
    drill: float
    taught: int
    tasks: tuple[str, ...]
    walks: int = 0
    replies: int = 64
    walked: tuple[str, ...] = PUZZLES
    rounds: int = 0
    trees: int = 0
    muon: bool = True


class LabelIds(NamedTuple):
    """Token ids: of the labels `+` and `-` (2,) and the numbers of moves, and of the tag."""

    signs: Tensor
    numbers: Tensor
    tag: int


def label_ids(tokenizer: PreTrainedTokenizerBase, device: str = "cpu") -> LabelIds:
    """The label ids of a tokenizer."""
    (tag,) = tokenizer.encode(TAG)
    signs, numbers = sign_ids(tokenizer), number_ids(tokenizer)
    return LabelIds(torch.tensor(signs, device=device), torch.tensor(numbers, device=device), tag)


PHASES = {
    "compare": RewardPhase(10, "policy", 0.6, 1.0, 48, 1.0, 0, ("wordproblem",)),
    "judge": RewardPhase(19, "prm", 0.6, 10.0, 8, 1.0, 0, tuple(TASKS)),
    "widen": RewardPhase(50, "prm", 0.6, 10.0, 8, 1.0, 20, tuple(TASKS)),
    "settle": RewardPhase(25, "prm", 0.6, 10.0, 40, 5.0, 20, tuple(TASKS)),
    "number": RewardPhase(9, "prm", 0.5, 10.0, 8, 5.0, 4, (*TASKS, *["game24"] * 3)),
    "follow": RewardPhase(10, "prm", 0.5, 10.0, 8, 5.0, 8, (*TASKS, "game24")),
    "walk": RewardPhase(55, "prm", 0.5, 10.0, 8, 5.0, 12, tuple(TASKS), 32, 32),
    "plan": RewardPhase(
        55, "prm", 0.5, 10.0, 8, 5.0, 12, (*TASKS, "blocksworld"), 32, 32, MOSTLY_PLANS
    ),
    "mend": RewardPhase(50, "prm", 0.5, 10.0, 8, 5.0, 12, tuple(TASKS), 36, 28, MOSTLY_NUMBERS),
    "search": RewardPhase(
        8.2, "prm", 0.6, 10.0, 24, 5.0, 24, tuple(TASKS), 160, 160, tuple(TASKS), 3, 64
    ),
    "story": RewardPhase(
        25,
        "prm",
        0.2,
        10.0,
        0,
        5.0,
        4,
        ("wordproblem",),
        8,
        20,
        (*TASKS, "wordproblem"),
        muon=False,
    ),
    "order": RewardPhase(
        2.5, "prm", 0.4, 10.0, 8, 5.0, 32, PUZZLES, 192, 96, (*TASKS, "game24", "game24"), 1, 64
    ),
}


def with_layers_above(policy: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """The policy with `layers` more on top, which add nothing to the stream yet."""
    config = copy.deepcopy(policy.config)
    has = config.num_hidden_layers
    config.num_hidden_layers = has + layers
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    model.load_state_dict(policy.state_dict(), strict=False)
    for layer in decoder_layers(model)[has:]:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def epochs(
    rows: list[Labelled], count: int, rank: int, world: int
) -> Callable[[int], list[Labelled]]:
    """A function from a step to the process's share of its `count` rows; reshuffled each epoch."""
    share = count // world
    steps = len(rows) // count

    @lru_cache(1)
    def order(epoch: int) -> list[Labelled]:
        return random.Random(f"{SEED} {epoch}").sample(rows, len(rows))

    def draw(step: int) -> list[Labelled]:
        epoch, place = divmod(step, steps)
        start = place * count + rank * share
        return order(epoch)[start : start + share]

    return draw


def collected(phase: RewardPhase, rank: int, world: int) -> Callable[[int], list[Labelled]]:
    """A function from a step to the process's share of its replies, from the cache."""
    samples = load_samples()
    replies = [row for name in phase.tasks for row in samples if row.task == name]
    return epochs(replies, phase.replies, rank, world)


def label_losses(
    model: LlamaForCausalLM, ids: LabelIds, phase: RewardPhase, batch: MicroBatch
) -> Tensor:
    """The loss wherever there is a label, weighted by where it stands: of `+` against `-`, of the
    number of moves to go, or of whether a block has to move.

    Logits of words are read before the last layer, so that it can pass the findings on to the tags;
    those of blocks two layers earlier, so that moves can be counted from them.
    """
    where = (batch.labels != IGNORED).flatten().nonzero()[:, 0]
    labels, at_tag = batch.labels.flatten()[where], batch.ids.flatten()[where] == ids.tag
    *_, early, _, before, last = streams(model, batch.ids)
    early, before, last = (
        stream.flatten(0, 1).index_select(0, where) for stream in (early, before, last)
    )
    placed = labels >= IN_PLACE
    stream = torch.where(at_tag[:, None], last, torch.where(placed[:, None], early, before))
    logits, counted = read_out(model, stream), (labels >= MOVES_TO_GO) & ~placed
    sign = ~(counted | placed)
    losses = logits.new_zeros(len(labels))
    losses[sign] = _cross_entropy(logits[sign][:, ids.signs], labels[sign])
    moves = labels[counted] - MOVES_TO_GO
    losses[counted] = _cross_entropy(logits[counted][:, ids.numbers], moves)
    staying = labels[placed] - IN_PLACE
    losses[placed] = _cross_entropy(logits[placed][:, ids.numbers[:2]], staying)
    of_task = torch.tensor([kind in TASKS for kind in batch.kinds], device=labels.device)
    replies = of_task[where // batch.ids.shape[1]]
    weights = torch.where(at_tag, phase.tag, torch.where(replies, 1.0, phase.drill))
    weights[replies & ~at_tag & (labels == 1)] = FAULT
    weights[counted] = COUNTED
    return losses * weights


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def walked(
    tokenizer: PreTrainedTokenizerBase, names: tuple[str, ...], rng: random.Random
) -> Labelled:
    """A walk on a new train question of one of the tasks."""
    task = TASKS[rng.choice(names)]
    question = task.lesson(rng)[0]
    reply = STEP_BREAK.join(WALKS[task.name](question, rng)) + END
    return label(tokenizer, task, question, tokenizer.encode(reply))


def shortened(row: Labelled, rng: random.Random) -> Labelled:
    """The reply, mostly cut a few steps after its first wrong one."""
    if rng.random() >= CUT_SHARE:
        return row
    length = sum(row.labels) + rng.choice(TAIL)
    return row._replace(steps=row.steps[:length], labels=row.labels[:length])


def main() -> None:
    """Train or resume a phase."""
    parser = arguments(__doc__, 0)
    parser.add_argument("--phase", choices=PHASES, required=True)
    options = parser.parse_args()
    phase, tokenizer = PHASES[options.phase], load_tokenizer()
    options.minutes = options.minutes or phase.minutes
    model = checkpoint.load_model(phase.start)
    if phase.start == "policy":
        model = with_layers_above(model, LAYERS_ABOVE)
    ids = label_ids(tokenizer, options.device)
    derivations, walks = phase.taught // options.world, phase.walks // options.world
    trees = None
    if phase.rounds:
        trees = TreeRounds(tokenizer, options.device, phase.tasks, phase.trees, SEED)
    replies = collected(phase, options.rank, options.world)

    def draw(rng: random.Random, step: int) -> list[Row]:
        examples = replies(step) if trees is None else trees.draw(rng, phase.replies)
        examples += [lesson(tokenizer, TASKS[rng.choice(TAUGHT)], rng) for _ in range(derivations)]
        examples += [walked(tokenizer, phase.walked, rng) for _ in range(walks)]
        rows = [learnt_row(tokenizer, shortened(row, rng)) for row in examples]
        rows = [renamed(tokenizer, r, rng) if r.kind == "wordproblem" else r for r in rows]
        return rows + [slipped_drill(tokenizer, rng) for _ in range(phase.drills // options.world)]

    run = TrainingRun(
        f"prm.{options.phase}",
        model,
        draw,
        lambda batch: label_losses(model, ids, phase, batch),
        lambda average: checkpoint.export(average, tokenizer, "prm"),
        options,
        phase.rate_scale,
        KEEP,
        muon=phase.muon,
    )
    if trees is not None:
        for number in range(1, phase.rounds + 1):
            run.spend(trees.grow(run.average.model, options.workers))
            run.train_until(number / phase.rounds * run.budget_s)
    run.train()


if __name__ == "__main__":
    main()
