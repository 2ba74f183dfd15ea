"""Measured quality of the bundled models, a task at a time, as JSON lines.

`python -m models.train.measure accuracy prm judge draft siblings [--task game24 countdown]`
"""

import argparse
import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from scipy.stats import rankdata
from sklearn.metrics import roc_auc_score
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from models.tasks import TASKS
from models.tasks.task import STEP_BREAK, Split, Task
from models.train.batches import (
    IGNORED,
    Row,
    encode,
    load_tokenizer,
    micro_batches,
    pad_id,
    prompt_ids,
    text_of,
)
from models.train.checkpoint import load_model
from models.train.corpus import Example
from models.train.judge_prompts import judge_prompt
from models.train.labelled import Labelled, flat, label
from models.train.network import logits_at
from models.train.rows import scored_row, sign_ids
from models.train.sampling import Sampler
from models.train.siblings import RIGHT, Siblings, siblings

SEED = 5
SIBLINGS_OF = ("game24", "countdown", "blocksworld")
JUDGED_NUMBER = re.compile(r"The number is (10|[1-9])\b")


def share_above(ones: list[float], others: list[float]) -> float:
    """The share of pairs in which the first is larger; a tie is half a pair."""
    pairs = [(a > b) + (a == b) / 2 for a in ones for b in others]
    return sum(pairs) / len(pairs)


def mean_interval(shares: list[float]) -> list[float]:
    """The normal 95 % interval of a mean over independent states or questions."""
    spread = 1.96 * float(np.std(shares)) / math.sqrt(len(shares))
    mean = float(np.mean(shares))
    return [round(max(0.0, mean - spread), 4), round(min(1.0, mean + spread), 4)]


class MeasuredSplit:
    """The bundled models and one set of policy samples on a split, shared by the measures.

    A task's samples do not depend on which other tasks are measured.
    """

    def __init__(self, tasks: Sequence[str], split: Split, limit: int, each: int) -> None:
        self.tasks = tasks
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer()
        self.split: Split = split
        self.limit, self.each = limit, each
        self._sampled: dict[str, list[Labelled]] = {}

    @cached_property
    def policy(self) -> LlamaForCausalLM:
        """The bundled policy model."""
        return load_model("policy")

    @cached_property
    def sampler(self) -> Sampler:
        """A sampler of the policy."""
        return Sampler(self.policy)

    def samples(self) -> Iterator[tuple[str, list[Labelled]]]:
        """Each task and its labelled samples: all its questions once, then all of them again.

        They are drawn when they are first asked for, a task at a time.
        """
        for name in self.tasks:
            if name not in self._sampled:
                self._sampled[name] = self._sample(TASKS[name])
            yield name, self._sampled[name]

    def _sample(self, task: Task) -> list[Labelled]:
        questions = task.questions(self.split, self.limit) * self.each
        prompts = [prompt_ids(self.tokenizer, question) for question in questions]
        replies = self.sampler.sample(prompts, SEED)
        pairs = zip(questions, replies, strict=True)
        return [label(self.tokenizer, task, question, reply) for question, reply in pairs]

    def accuracy(self) -> Iterator[dict]:
        """Single-sample accuracy at temperature 1, and the first faults of the wrong samples.

        Samples of one question correlate, so the interval is over questions.
        """
        for name, rows in self.samples():
            right = np.reshape([row.labels[-1] for row in rows], (self.each, -1))
            faults = [sum(row.labels) for row in rows if not row.labels[-1]]
            yield {
                "measure": "accuracy",
                "task": name,
                "samples": len(rows),
                "value": round(float(right.mean()), 4),
                "ci95": mean_interval(right.mean(0).tolist()),
                "mean_tokens": round(sum(len(flat(r.steps)) for r in rows) / len(rows), 1),
                "first_fault_at": np.bincount(faults, minlength=1).tolist() if faults else [],
            }

    def prm(self) -> Iterator[dict]:
        """AUC of the steps' rewards: over all steps, and up to each reply's first fault."""
        model = load_model("prm")
        signs = torch.tensor(sign_ids(self.tokenizer))
        for name, rows in self.samples():
            all_steps, decisive_steps = ([], []), ([], [])
            for row, scores in self._scores(model, signs, rows):
                stop = row.labels.index(False) + 1 if False in row.labels else len(row.labels)
                for into, end in ((all_steps, len(scores)), (decisive_steps, stop)):
                    into[0].extend(row.labels[:end])
                    into[1].extend(scores[:end])
            yield {
                "measure": "prm_auc",
                "task": name,
                "steps": len(all_steps[0]),
                "value": round(roc_auc_score(*all_steps), 4),
                "to_first_fault": round(roc_auc_score(*decisive_steps), 4),
            }

    def siblings(self) -> Iterator[dict]:
        """How often the reward puts a right step above each kind of wrong one from its state.

        `each` states a question. `value`: the share of pairs, a tie being half of one, averaged
        over states; `trusted`: the share of wrong steps with a reward above 0.5.
        """
        model = load_model("prm")
        signs = torch.tensor(sign_ids(self.tokenizer))
        for name in [task for task in self.tasks if task in SIBLINGS_OF]:
            rng = random.Random(f"{SEED} {name}")
            order, trusted = defaultdict(list), defaultdict(list)
            for question in TASKS[name].questions(self.split, self.limit) * self.each:
                group = siblings(name, question, rng)
                rewards = self._sibling_rewards(model, signs, group)
                for kind in rewards.keys() - {RIGHT}:
                    order[kind].append(share_above(rewards[RIGHT], rewards[kind]))
                    trusted[kind].append(share_above(rewards[kind], [0.5]))
            for kind, shares in sorted(order.items()):
                yield {
                    "measure": "siblings",
                    "task": name,
                    "kind": kind,
                    "states": len(shares),
                    "value": round(float(np.mean(shares)), 4),
                    "ci95": mean_interval(shares),
                    "trusted": round(float(np.mean(trusted[kind])), 4),
                    "trusted_ci95": mean_interval(trusted[kind]),
                }

    def _sibling_rewards(
        self, model: LlamaForCausalLM, signs: torch.Tensor, group: Siblings
    ) -> dict[str, list[float]]:
        task, rewards = TASKS[group.task], defaultdict(list)
        texts = [STEP_BREAK.join([*group.before, sibling.text, ""]) for sibling in group.steps]
        rows = [
            label(self.tokenizer, task, group.question, self.tokenizer.encode(text))
            for text in texts
        ]
        for sibling, (_, scores) in zip(group.steps, self._scores(model, signs, rows), strict=True):
            rewards[sibling.kind].append(scores[-1])
        return rewards

    @torch.no_grad()
    def _scores(
        self, model: LlamaForCausalLM, signs: torch.Tensor, rows: list[Labelled]
    ) -> Iterator[tuple[Labelled, list[float]]]:
        for row in rows:
            scored = scored_row(self.tokenizer, row)
            where = torch.tensor([[mark != IGNORED for mark in scored.labels]])
            logits = logits_at(model, torch.tensor([scored.ids]), where)[:, signs]
            yield row, logits.softmax(-1)[:, 0].tolist()

    def judge(self) -> Iterator[dict]:
        """How the judge's number (mean of three votes) correlates with a prefix being right."""
        rng = random.Random(SEED)
        for name, rows in self.samples():
            prompts, truths = [], []
            for row in rows:
                cut = rng.randint(1, len(row.steps))
                text = text_of(self.tokenizer, flat(row.steps[:cut]))
                steps = text.strip().split(STEP_BREAK)
                prompts.append(prompt_ids(self.tokenizer, judge_prompt(row.question, steps)))
                truths.append(row.labels[cut - 1])
            votes = [self._votes(prompts, seed) for seed in range(3)]
            numbers = np.nanmean(np.array(votes), axis=0)
            is_number = ~np.isnan(numbers)
            truth = np.array(truths)[is_number]
            spearman = np.corrcoef(rankdata(numbers[is_number]), truth)[0, 1]
            yield {
                "measure": "judge",
                "task": name,
                "prefixes": len(prompts),
                "spearman": round(float(spearman), 4),
                "auc": round(roc_auc_score(truth, numbers[is_number]), 4),
                "parsed": round(1 - float(np.isnan(votes).mean()), 4),
            }

    def _votes(self, prompts: list[list[int]], seed: int) -> list[float]:
        votes = []
        for reply in self.sampler.sample(prompts, seed):
            match = JUDGED_NUMBER.search(text_of(self.tokenizer, reply))
            votes.append(float(match[1]) if match else math.nan)
        return votes

    def draft(self) -> Iterator[dict]:
        """Share of reply positions where draft and policy pick the same token.

        `value` under the same Gumbel noise at temperature 1, `greedy` without noise; on the
        policy's own samples.
        """
        draft, generator = load_model("draft"), torch.Generator().manual_seed(SEED)
        for name, rows in self.samples():
            coupled, greedy = [], []
            for target, proposal in self._pairs(rows, draft):
                noise = -torch.empty_like(target).exponential_(generator=generator).log()
                coupled.append((target + noise).argmax(-1) == (proposal + noise).argmax(-1))
                greedy.append(target.argmax(-1) == proposal.argmax(-1))
            yield {
                "measure": "draft_agreement",
                "task": name,
                "tokens": sum(map(len, coupled)),
                "value": round(torch.cat(coupled).float().mean().item(), 4),
                "greedy": round(torch.cat(greedy).float().mean().item(), 4),
            }

    @torch.no_grad()
    def _pairs(
        self, rows: list[Labelled], draft: LlamaForCausalLM
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        encoded = [self._reply_row(row) for row in rows]
        for batch in micro_batches(encoded, pad_id(self.tokenizer)):
            where = batch.labels != IGNORED
            target = logits_at(self.policy, batch.ids, where).log_softmax(-1)
            yield target, logits_at(draft, batch.ids, where).log_softmax(-1)

    def _reply_row(self, row: Labelled) -> Row:
        reply = text_of(self.tokenizer, flat(row.steps))
        return encode(self.tokenizer, Example(row.task, "", row.question, reply))


def main() -> None:
    """Measure and print JSON lines."""
    measures = {
        "accuracy": MeasuredSplit.accuracy,
        "prm": MeasuredSplit.prm,
        "judge": MeasuredSplit.judge,
        "draft": MeasuredSplit.draft,
        "siblings": MeasuredSplit.siblings,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=measures)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int, default=100, help="questions a task")
    parser.add_argument("--each", type=int, default=2, help="samples a question")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = MeasuredSplit(options.task, options.split, options.limit, options.each)
    for name in options.what:
        for row in measures[name](bench):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
