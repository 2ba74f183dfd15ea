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
    """What a client may set in ``search``; unknown fields are refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    policy: PolicyName = "rebase"
    width: int = Field(default=16, ge=1, le=1024, description="trajectories to finish")
    seed: int | None = Field(
        default=None, ge=0, le=2**63 - 1, json_schema_extra={"maximum": 2**63 - 1024}
    )
    """The schema's maximum is the largest seed that a double holds, as many clients use doubles."""
    temperature: float = Field(default=1.0, ge=0.0, le=5.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: TopK = Field(default=0, description="as vLLM's; below 1: of all tokens")
    min_p: MinP = 0.0
    logit_bias: LogitBias = {}
    min_tokens: MinTokens = Field(default=0, description="of a trajectory, before it may end")
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = Field(
        default=0.0, description="for what the trajectory holds, as all penalties"
    )
    frequency_penalty: Penalty = 0.0
    max_depth: int = Field(default=25, ge=1, le=200, description="steps a trajectory")
    max_step_tokens: int = Field(default=256, ge=1, le=8192)
    step_tokens: int | None = Field(
        default=None, ge=1, le=8192, description="cut steps by length instead of the delimiter"
    )
    trajectory_tokens: int = Field(default=1024, ge=1, le=131072)
    ignore_eos: bool = Field(
        default=False, description="trajectories go on after the model's end, to their limits"
    )
    max_tokens: int | None = Field(
        default=None, ge=1, le=MOST, description="generated tokens of the whole committed tree"
    )
    max_kv_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MOST,
        description="unique tokens on the paths of nodes that may still grow, prompt included",
    )
    deadline_ms: int | None = Field(default=None, ge=1, le=86_400_000)
    vote: VoteName | None = Field(
        default=None,
        description="default: weighted majority; majority for self_consistency, best_last for beam "
        "whose leaves are distinct, lineages for dora",
    )
    answers: AnswerRule | None = Field(
        default=None,
        description="how replies' answers are read and compared; default: the server's",
    )
    consensus: Consensus | None = Field(
        default=None,
        description="stop early: when the votes still out cannot change the answer (certain), or "
        "when the leading class is the more frequent one with this probability",
    )
    reward_temperature: float = Field(
        default=0.2, gt=0.0, le=10.0, description="T_R of REBASE's softmax over rewards"
    )
    mass: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="rebase, adaptive: the power to which it counts how often a step was drawn; 1 "
        "is the paper's, at 0 equal steps count once",
    )
    floor_levels: int = Field(
        default=0,
        ge=0,
        le=200,
        description="rebase, dora, adaptive: down to this depth no distinct step is given up while "
        "there is a child for it",
    )
    similarity_temperature: float = Field(
        default=0.01,
        gt=0.0,
        le=10.0,
        description="dora: of the softmax over steps' similarities; the larger, the more steps are "
        "one direction",
    )
    ess_threshold: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="particle_filter: draws again where the effective sample size is at most this "
        "share of the particles; 1: at every level",
    )
    soft_start: bool = Field(
        default=False,
        description="particle_filter: softens the odds by particles / effective sample size, ever "
        "less from level to level",
    )
    restarts: int | None = Field(
        default=None,
        ge=0,
        le=16,
        description="rebase, ets, ets_kv, dora, adaptive: how often a tree starts again at the "
        "root, where no step of a level is worth going on with; default: 2 for adaptive, 0 for the "
        "others, as in their papers",
    )
    hopeless_below: float = Field(
        default=0.3,
        ge=0.0,
        le=1.0,
        description="restarts: the reward that a level's best step and all finished trajectories "
        "then miss",
    )
    chains: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="adaptive: chains drawn first, at most the width; default: the rounded-up root "
        "of width",
    )
    agreement: float = Field(
        default=1.0,
        gt=0.5,
        le=1.0,
        description="adaptive: the share of the chains that settles the answer",
    )
    beam_width: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="leaves that beam, and subtrees that dvts keeps; default: the rounded-up root "
        "of width",
    )
    filter_duplicates: bool = Field(
        default=True, description="beam: equal leaves are one of the kept ones"
    )
    budget_weight: float = Field(
        default=1.0, ge=0.0, le=100.0, description="ETS: what KV costs, the paper's lambda_b"
    )
    diversity_weight: float = Field(
        default=1.0,
        ge=0.0,
        le=100.0,
        description="ETS: what unlike steps are worth, the paper's lambda_d; ets_kv has none",
    )
    cost: CostName = Field(
        default="nodes", description="ETS: KV is counted in steps or in tokens, prompt included"
    )
    cluster_threshold: float | None = Field(
        default=None,
        ge=0.0,
        le=2.0,
        description="ETS: cosine distance at which steps are unlike; default: the embedder's own",
    )
    solver: SolverName = Field(default="highs", description="ETS: what solves its integer program")
    branch: int = Field(
        default=3, ge=1, le=64, description="best_first, mcts, tot_bfs: children of an expansion"
    )
    parallel: int = Field(
        default=4, ge=1, le=1024, description="best_first, mcts: nodes expanded a round"
    )
    expansions: int = Field(
        default=64, ge=1, le=65536, description="best_first, mcts: nodes expanded at most"
    )
    exploration: float | None = Field(
        default=None,
        ge=0.0,
        le=100.0,
        description="weight of what was visited less; default: best_first 0.7071, mcts 1.25",
    )
    early_stop: float = Field(
        default=0.8,
        ge=0.0,
        le=100.0,
        description="best_first: a followed path stops below this share of the mean reward so far",
    )
    deep_seek: float = Field(
        default=0.8,
        ge=0.0,
        le=100.0,
        description="best_first: an explored leaf is taken deep from this share of the mean on",
    )
    enough_answers: int = Field(
        default=5,
        ge=1,
        le=65536,
        description="best_first: stops after these if no open step beats the best",
    )
    breadth: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="tot_bfs: leaves kept a level; default: width / branch",
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
    """A search as it is asked for: which policy may be left to the server (``auto``)."""

    model_config = ConfigDict(title="SearchSpec")

    policy: Literal[PolicyName, "auto"] = "rebase"  # type: ignore[assignment]
