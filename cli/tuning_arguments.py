"""Parses ``hedgerow tune``'s grid and questions. A wrong argument ends the command."""

from __future__ import annotations

from itertools import chain, zip_longest
from pathlib import Path
from typing import get_args

from cli.arguments import WRONG_USE, TaskSplit, exit_on, fail, numbers, parts, spec_of, task_of
from cli.custom_dataset import DatasetError, read_dataset
from cli.grid_search import GridQuestion
from cli.search_grid import USUAL_POLICIES, USUAL_VOTES, crossed
from search.spec import AUTO_POLICY, SearchSpec, VoteName


def grid_of(
    policies: str | None,
    widths: str,
    votes: str | None,
    temperatures: str,
    seeds: str,
    fields: list[str] | None,
) -> tuple[list[SearchSpec], list[int]]:
    """The searches to try, and the seeds."""
    policy_list = USUAL_POLICIES if policies is None else parts(policies)
    vote_list = USUAL_VOTES if votes is None else parts(votes)
    if AUTO_POLICY in policy_list:
        fail(f"--policy {AUTO_POLICY}: this is what is to be found; name others", WRONG_USE)
    for rule in vote_list:
        if rule not in get_args(VoteName):
            fail(f"--vote {rule}: known are {', '.join(get_args(VoteName))}", WRONG_USE)
    temperature_list = [_temperature(part) for part in parts(temperatures)]
    width_list, seed_list = numbers("width", widths), numbers("seed", seeds)
    if not (policy_list and vote_list and temperature_list and width_list and seed_list):
        message = "--policy, --width, --vote, --temperature, --seed: each needs at least one value"
        fail(message, WRONG_USE)

    for text in fields or ():
        if text.partition("=")[0] in ("vote", "temperature"):
            fail(f"--set {text}: --vote and --temperature say which are tried", WRONG_USE)

    def make(policy: str, width: int, vote: str, temperature: float) -> SearchSpec:
        return spec_of(policy, width, None, fields, vote=vote, temperature=temperature)

    return crossed(policy_list, width_list, vote_list, temperature_list, make), seed_list


def questions_of(
    data: Path | None, tasks: str | None, split: TaskSplit, limit: int, seed: int
) -> tuple[list[GridQuestion], str]:
    """The questions, alternating between several tasks, and their name for the report."""
    if (data is None) == (tasks is None):
        fail("exactly one of --data and --task is needed", WRONG_USE)
    if data is not None:
        with exit_on(DatasetError, "--data "):
            dataset = read_dataset(data)
        return [GridQuestion(dataset, text) for text in dataset.questions(limit)], data.name
    names = parts(tasks or "")
    if not names:
        fail("--task: at least one is needed", WRONG_USE)
    share = -(-limit // len(names))
    by_task = [
        [GridQuestion(graded, text) for text in texts]
        for graded, texts in (task_of(name, split, share, seed) for name in names)
    ]
    in_turn = chain.from_iterable(zip_longest(*by_task))
    return [q for q in in_turn if q is not None][:limit], f"{', '.join(names)} ({split})"


def _temperature(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        fail(f"--temperature {text}: must be numbers, separated by commas", WRONG_USE)
