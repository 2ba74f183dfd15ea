"""What `loadtest.kv` measures: which searches, under which KV policies, in which budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.configs import CONFIG_L, CONFIG_S, by_levels, scaled
from loadtest.token_eviction.token_eviction_policies import EXTRACTIVE, STREAMS
from models.tasks.task import Split
from runtime.embedded.choices import KvPolicy
from search.spec import SearchSpec

CONFIGS = {"S": CONFIG_S, "L": CONFIG_L}
FULL_RETENTION: KvPolicy = "full"
EXACT: Mapping[str, KvPolicy] = {"full": "full", "lru": "lru", "arborkv": "arborkv"}
GROUPS = {
    "paper": ("extractive", "extractive_never", *STREAMS),
    "ablations": tuple(EXTRACTIVE),
}
"""Names that stand for several policies: tables 1 and 4 of the paper, tables 3 and 7."""
Cell = tuple[str, float]
"""A KV policy and rho: its budget as a share of full retention's peak."""

ROOMY = 16_384
"""KV tokens that hold any of these searches whole."""


@dataclass(frozen=True, slots=True)
class KvPlan:
    """What is measured: every policy at every budget on every search of every task.

    ``expansions``: in place of the configurations'; ``active``: no budget is below what full
    retention's branches read at once, so that nothing waits for room; ``theta``: a file of
    ``hedgerow calibrate``; ``kept_in``: the file of kept searches.
    """

    tasks: Sequence[str] = ("blocksworld", "wordproblem")
    searches: Sequence[str] = ("best_first", "mcts", "rebase")
    configs: Sequence[str] = ("S", "L")
    policies: Sequence[str] = ("full", "lru", "arborkv")
    rhos: Sequence[float] = (1.0, 0.5, 0.25, 0.125)
    parallel: Sequence[int] = (1, 4)
    questions: int = 200
    expansions: int | None = None
    active: bool = False
    seed: int = 0
    threads: int = 0
    theta: Path | None = None
    split: Split = "test"
    kept_in: Path | None = None


QUICK = KvPlan(
    searches=("best_first", "mcts"),
    configs=("S",),
    rhos=(0.25, 0.125),
    parallel=(1,),
    questions=1,
)


@dataclass(frozen=True, slots=True)
class Case:
    """One search on one task's questions."""

    task: str
    search: str
    config: str
    spec: SearchSpec


def cases_of(plan: KvPlan) -> list[Case]:
    """Every search of the plan; those that work level by level have no configuration."""
    cases = []
    for task in plan.tasks:
        for name in plan.searches:
            if name not in ("best_first", "mcts"):
                cases.append(Case(task, name, "level", by_levels(name, task)))
                continue
            for config in plan.configs:
                for parallel in plan.parallel:
                    spec = scaled(CONFIGS[config], task, parallel, name)
                    if plan.expansions is not None:
                        spec = spec.model_copy(update={"expansions": plan.expansions})
                    cases.append(Case(task, name, config, spec))
    return cases
