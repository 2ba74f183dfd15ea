"""Labelled steps for the reward model: the policy's own samples and some teacher derivations.

`python -m models.train.prm_data --minutes 8` appends rounds to the cache until the time is up,
`--fresh` one reply each to questions of their own.
Each round samples train questions from scratch, then again from prefixes that are still good, as
a search would: that is where the deep decisions are. Some prefixes are spoilt by a small slip
first, and some derivations hold one slip and go on as if it were not there: a slip has to be
remembered however well the reply goes on.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerBase

from models.tasks import TASKS
from models.tasks.task import STEP_BREAK, Task, split_steps
from models.train.batches import load_tokenizer, prompt_ids, text_of
from models.train.checkpoint import CACHE, load_model
from models.train.judge_prompts import corrupt
from models.train.labelled import Labelled, flat, label
from models.train.sampling import Sampler
from models.train.taught import taught
from models.train.verdicts import Reply, Verdicts

SAMPLES = "prm_samples.*.jsonl"
"""In the cache, one file a seed: processes with different seeds collect side by side."""
QUESTIONS_A_ROUND = {"game24": 80, "countdown": 80, "blocksworld": 50, "wordproblem": 40}
EACH = 3
CONTINUED = 4
SPOILT = 2
TEACHER_SHARE = 0.15
SLIPPED_SHARE = 0.15
RIVAL_SHARE = 0.5
TOO_LONG = 480


def load_samples() -> list[Labelled]:
    """Everything collected so far."""
    lines = [line for path in sorted(CACHE.glob(SAMPLES)) for line in path.read_text().splitlines()]
    return [Labelled(*json.loads(line)) for line in lines]


def load_verdicts(tokenizer: PreTrainedTokenizerBase) -> Verdicts:
    """The collected samples as replies to judge."""
    return Verdicts([_reply(tokenizer, row) for row in load_samples()])


def _reply(tokenizer: PreTrainedTokenizerBase, row: Labelled) -> Reply:
    steps = split_steps(text_of(tokenizer, flat(row.steps)))
    return Reply(row.task, row.question, steps, sum(row.labels[: len(steps)]))


def train_questions(task: Task, rng: random.Random, count: int) -> list[str]:
    """Train questions; game24 has few puzzles, so half of its questions get another target."""
    questions = [task.lesson(rng)[0] for _ in range(count)]
    if task.name != "game24":
        return questions
    return [task.rival(q, rng) if rng.random() < RIVAL_SHARE else q for q in questions]


class Collector:
    """Samples and labels, one round after the other."""

    def __init__(self, seed: int) -> None:
        self.tokenizer = load_tokenizer()
        self.sampler = Sampler(load_model("policy"))
        self.rng = random.Random(seed)

    def round(self, names: list[str]) -> Iterator[Labelled]:
        """Samples from scratch, from good and from spoilt prefixes; derivations, some slipped."""
        for name in names:
            task, count = TASKS[name], QUESTIONS_A_ROUND[name]
            questions = train_questions(task, self.rng, count)
            replies = list(self._samples(task, [(q, []) for q in questions for _ in range(EACH)]))
            yield from replies
            starts = [(row.question, self._good_prefix(row)) for row in replies]
            starts = [start for start in starts if start[1]]
            selection = self.rng.sample(starts, min(count, len(starts)))
            yield from self._samples(task, [start for start in selection for _ in range(CONTINUED)])
            starts = [self._spoilt_start(task, question) for question in questions[: count // 2]]
            yield from self._samples(task, [start for start in starts for _ in range(SPOILT)])
            for question in questions:
                if self.rng.random() < TEACHER_SHARE * EACH:
                    yield taught(self.tokenizer, task, question, self.rng, slipped=False)
                if self.rng.random() < SLIPPED_SHARE * EACH:
                    yield taught(self.tokenizer, task, question, self.rng, slipped=True)

    def fresh(self, names: list[str]) -> Iterator[Labelled]:
        """Sample one reply each to many questions, so that memorising them is of no use."""
        for name in names:
            task = TASKS[name]
            questions = train_questions(task, self.rng, QUESTIONS_A_ROUND[name] * EACH * CONTINUED)
            yield from self._samples(task, [(question, []) for question in questions])

    def _good_prefix(self, row: Labelled) -> list[int]:
        good = [steps for steps, right in zip(row.steps, row.labels, strict=True) if right]
        if len(good) == len(row.steps):
            good = good[: self.rng.randint(1, max(1, len(good) - 2))]
        return flat(good)

    def _spoilt_start(self, task: Task, question: str) -> tuple[str, list[int]]:
        steps = task.solve(question, self.rng)[:-1]
        cut = self.rng.randrange(len(steps))
        prefix = [*steps[:cut], corrupt(steps[cut], self.rng), ""]
        return question, self.tokenizer.encode(STEP_BREAK.join(prefix))

    def _samples(self, task: Task, starts: list[tuple[str, list[int]]]) -> Iterator[Labelled]:
        prompts = [prompt_ids(self.tokenizer, question) + prefix for question, prefix in starts]
        replies = self.sampler.sample(prompts, self.rng.getrandbits(40), TOO_LONG)
        for (question, prefix), reply in zip(starts, replies, strict=True):
            yield label(self.tokenizer, task, question, prefix + reply)


def main() -> None:
    """Collect rounds until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--fresh", action="store_true", help="one reply a question")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    collector, start = Collector(options.seed), time.monotonic()
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / SAMPLES.replace("*", str(options.seed))).open("a") as out:
        while time.monotonic() - start < options.minutes * 60:
            draw = collector.fresh if options.fresh else collector.round
            rows = list(draw(options.tasks))
            out.writelines(json.dumps(row) + "\n" for row in rows)
            out.flush()
            shares = {
                name: round(_good_share([row for row in rows if row.task == name]), 3)
                for name in options.tasks
            }
            line = {"s": round(time.monotonic() - start), "rows": len(rows), "good": shares}
            print(json.dumps(line), flush=True)


def _good_share(rows: list[Labelled]) -> float:
    labels = [right for row in rows for right in row.labels]
    return sum(labels) / len(labels)


if __name__ == "__main__":
    main()
