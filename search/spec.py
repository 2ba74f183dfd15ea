"""The parameters of a search and their ranges, declared once for requests, CLI, benchmarks."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from search.engine import LOGITS_PARAMS, LogitsParams

PolicyName = Literal[
    "best_of_n",
    "self_consistency",
    "beam",
    "dvts",
    "particle_filter",
    "rebase",
    "dora",
    "ets",
    "ets_kv",
    "best_first",
    "mcts",
    "tot_bfs",
    "adaptive",
]
AUTO_POLICY: Literal["auto"] = "auto"
VoteName = Literal[
    "weighted_majority",
    "majority",
    "confidence",
    "lowest_confidence",
    "lineages",
    "best_last",
    "best_min",
    "best_prod",
    "best_mean",
]
AnswerRule = Literal["auto", "text", "maths"]
CostName = Literal["nodes", "tokens"]
SolverName = Literal["highs", "cbc"]

TopK = Annotated[int, Field(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Field(ge=0.0, le=1.0)]
MinTokens = Annotated[int, Field(ge=0, le=131072)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=2.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


def _ids_as_numbers(value: Any) -> Any:
    """Turn keys into token ids: JSON's keys are strings."""
    if not isinstance(value, dict):
        return value
    ids = ((str(key), bias) for key, bias in value.items())
    return {int(key) if _TOKEN_ID.fullmatch(key) else key: bias for key, bias in ids}


_TOKEN_ID = re.compile("[0-9]{1,9}")
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]],
    Field(max_length=1024),
    BeforeValidator(_ids_as_numbers),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": 1024,
            "propertyNames": {"pattern": f"^{_TOKEN_ID.pattern}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
"""What is added to the logits, by token id."""

Consensus = Literal["certain"] | float
MOST = 2**31 - 1
"""The most tokens of a whole tree that a spec may ask for: far above what a server allows."""
_CONSENSUS_JSON = Literal["certain"] | Annotated[float, Field(gt=0.5, lt=1.0)] | None


def logits_params_of(params: dict[str, Any]) -> LogitsParams:
    """A request's parameters as an engine takes them: the bias is sorted by token id."""
    bias = tuple(sorted(params.get("logit_bias", {}).items()))
    return LogitsParams(**{**params, "logit_bias": bias})


class StopReason(StrEnum):
    """Why a search ended; whichever was met first."""

    ANSWERED = "answered"
    WIDTH_SPENT = "width_spent"
    DEPTH = "depth"
    MAX_TOKENS = "max_tokens"
    KV = "kv"
    DEADLINE = "deadline"
    CONSENSUS = "consensus"
    CANCELLED = "cancelled"


class SearchSpec(BaseModel):
    """The fields that a client may set in ``search``; unknown fields are rejected by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    policy: PolicyName = "rebase"
    width: int = Field(default=16, ge=1, le=1024, description="number of trajectories to finish")
    seed: int | None = Field(
        default=None, ge=0, le=2**63 - 1, json_schema_extra={"maximum": 2**63 - 1024}
    )
    """The schema's maximum is the largest seed that a double holds, as many clients use doubles."""
    temperature: float = Field(default=1.0, ge=0.0, le=5.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: TopK = Field(
        default=0, description="sample from the k most likely tokens, as in vLLM; below 1: from all"
    )
    min_p: MinP = 0.0
    logit_bias: LogitBias = {}
    min_tokens: MinTokens = Field(
        default=0, description="minimum tokens of a trajectory before it may end"
    )
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = Field(
        default=0.0, description="applies to tokens anywhere in the trajectory, as all penalties do"
    )
    frequency_penalty: Penalty = 0.0
    max_depth: int = Field(default=25, ge=1, le=200, description="maximum steps per trajectory")
    max_step_tokens: int = Field(default=256, ge=1, le=8192)
    step_tokens: int | None = Field(
        default=None,
        ge=1,
        le=8192,
        description="end steps at this many tokens instead of at the delimiter",
    )
    trajectory_tokens: int = Field(default=1024, ge=1, le=131072)
    ignore_eos: bool = Field(
        default=False,
        description="continue trajectories past the model's end token, up to their limits",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MOST,
        description="maximum generated tokens in the whole committed tree",
    )
    max_kv_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MOST,
        description="maximum unique tokens on the paths of nodes that may still grow, including "
        "the prompt",
    )
    deadline_ms: int | None = Field(default=None, ge=1, le=86_400_000)
    vote: VoteName | None = Field(
        default=None,
        description="how trajectories vote for the answer; default: weighted_majority, but "
        "majority for self_consistency, best_last for beam with distinct leaves, lineages for dora",
    )
    answers: AnswerRule | None = Field(
        default=None,
        description="how answers are read from replies and compared; default: the server's",
    )
    consensus: Consensus | None = Field(
        default=None,
        description="stop once outstanding votes cannot change the answer (certain), or once the "
        "leading answer is more likely than the second with this probability (a number)",
    )
    reward_temperature: float = Field(
        default=0.2,
        gt=0.0,
        le=10.0,
        description="temperature of the softmax over rewards, T_R in REBASE",
    )
    mass: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="rebase, adaptive: exponent of the number of times that a step was drawn; 1: "
        "as in the paper, 0: equal steps count once",
    )
    floor_levels: int = Field(
        default=0,
        ge=0,
        le=200,
        description="rebase, dora, adaptive: down to this depth, prune no distinct step while a "
        "child is available for it",
    )
    similarity_temperature: float = Field(
        default=0.01,
        gt=0.0,
        le=10.0,
        description="dora: temperature of the softmax over step similarities; higher values merge "
        "more steps into one direction",
    )
    ess_threshold: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="particle_filter: resample where the effective sample size is at most this "
        "fraction of the particles; 1: at every level",
    )
    soft_start: bool = Field(
        default=False,
        description="particle_filter: soften the odds by particles / effective sample size, less "
        "with each level",
    )
    restarts: int | None = Field(
        default=None,
        ge=0,
        le=16,
        description="rebase, ets, ets_kv, dora, adaptive: give up levels without a step worth "
        "expanding and start again at the root, which gets at most restarts + 1 times width "
        "children; default: 2 for adaptive, 0 for the others, as in their papers",
    )
    hopeless_below: float = Field(
        default=0.3,
        ge=0.0,
        le=1.0,
        description="restarts: the tree restarts if a level's best step and all finished "
        "trajectories have rewards below this",
    )
    chains: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="adaptive: number of chains drawn first, at most the width; default: the "
        "square root of width, rounded up",
    )
    agreement: float = Field(
        default=1.0,
        gt=0.5,
        le=1.0,
        description="adaptive: fraction of the chains that must agree to settle the answer",
    )
    beam_width: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="beam: number of leaves kept; dvts: number of subtrees; default: the square "
        "root of width, rounded up",
    )
    filter_duplicates: bool = Field(
        default=True, description="beam: count equal leaves as one kept leaf"
    )
    budget_weight: float = Field(
        default=1.0,
        ge=0.0,
        le=100.0,
        description="ETS: weight of the KV cost, lambda_b in the paper",
    )
    diversity_weight: float = Field(
        default=1.0,
        ge=0.0,
        le=100.0,
        description="ETS: weight of step diversity, lambda_d in the paper; ets_kv ignores it",
    )
    cost: CostName = Field(
        default="nodes",
        description="ETS: unit of the KV cost: steps (nodes) or tokens, including the prompt",
    )
    cluster_threshold: float | None = Field(
        default=None,
        ge=0.0,
        le=2.0,
        description="ETS: cosine distance above which steps differ; default: set by the embedder",
    )
    solver: SolverName = Field(default="highs", description="ETS: solver of the integer program")
    branch: int = Field(
        default=3, ge=1, le=64, description="best_first, mcts, tot_bfs: children per expansion"
    )
    parallel: int = Field(
        default=4, ge=1, le=1024, description="best_first, mcts: nodes expanded per round"
    )
    expansions: int = Field(
        default=64, ge=1, le=65536, description="best_first, mcts: maximum number of expansions"
    )
    exploration: float | None = Field(
        default=None,
        ge=0.0,
        le=100.0,
        description="weight of less visited nodes; default: 0.7071 for best_first, 1.25 for mcts",
    )
    early_stop: float = Field(
        default=0.8,
        ge=0.0,
        le=100.0,
        description="best_first: stop an exploited path below this fraction of the mean reward so "
        "far",
    )
    deep_seek: float = Field(
        default=0.8,
        ge=0.0,
        le=100.0,
        description="best_first: follow an explored path from this fraction of the mean reward on",
    )
    enough_answers: int = Field(
        default=5,
        ge=1,
        le=65536,
        description="best_first: stop after this many answers if no open step has a higher reward",
    )
    breadth: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="tot_bfs: leaves kept per level; default: width / branch",
    )

    @property
    def logits_params(self) -> LogitsParams:
        """The sampling parameters beside temperature and top-p."""
        return logits_params_of({name: getattr(self, name) for name in LOGITS_PARAMS})

    @field_validator("*", mode="before")
    @classmethod
    def _whole_number(cls, value: Any) -> Any:
        """Turn whole floats into integers: JSON has one kind of number, so 16.0 is 16."""
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @field_validator("consensus", mode="plain", json_schema_input_type=_CONSENSUS_JSON)
    @classmethod
    def _check_consensus(cls, value: Any, others: ValidationInfo) -> Consensus | None:
        if value is None or value == "certain":
            return value
        if not isinstance(value, float) or not 0.5 < value < 1.0:
            raise ValueError("must be 'certain' or a number between 0.5 and 1, both excluded")
        if str(others.data.get("vote")).startswith("best_"):
            raise ValueError(
                "a probability goes with votes that count: majority, weighted_majority, lineages, "
                "confidence, lowest_confidence"
            )
        return value


class RequestedSearch(SearchSpec):
    """A search as requested: policy ``auto`` lets the server choose."""

    model_config = ConfigDict(title="SearchSpec")

    policy: Literal[PolicyName, "auto"] = "rebase"  # type: ignore[assignment]
