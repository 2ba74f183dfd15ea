"""How many replicas does a number of users need, and how much KV?

`python -m loadtest.capacity [--gpu NAME] [--policy NAME] [--reward NAME] [--width N] ... [--json]`.
A roofline of two models on one GPU per replica: datasheet numbers, a stated efficiency, a stated
share of its throughput that is planned with, searches that come at random and share it. `--check`
measures on this machine's CPU, with the bundled models, what the model says of KV and of time as a
search grows wider (`loadtest/capacity_check.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loadtest.options import BenchmarkParser
from loadtest.report import publish, say
from server.gpus import GPUS as GPUS_BY_NAME
from server.gpus import Gpu

HALF = 2
"""Bytes of a weight or of a KV entry in bf16."""
ROOM = 0.9
"""Share of the memory that weights and KV may take; SGLang's own default is near it."""
EFFICIENCY = 0.5
"""Share of the roofline that serving reaches; a guess to be replaced by a measurement of yours."""
BUSY = 0.7
"""Share of a replica's throughput that is planned with: above it queues grow without bound."""
KEPT_SHARE, SPREAD = 0.4, 0.9
"""Defaults of a search, as ``--check`` measures them with rebase on countdown, rounded."""
HOUR = 3600.0


GPUS = {name: GPUS_BY_NAME[name] for name in ("h200", "h100", "a100", "l40s")}
"""The data-centre GPUs that hold both models of the tables."""


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters and the shape of the KV, from the checkpoint's config.json."""

    parameters: float
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def weights(self) -> float:
        """Bytes of the weights."""
        return HALF * self.parameters

    @property
    def kv(self) -> float:
        """Bytes of a token's keys and values."""
        return 2 * HALF * self.layers * self.kv_heads * self.head_dim


MODELS = {
    "llama-3.2-1b": Model(1.24e9, 16, 8, 64),
    "qwen2.5-1.5b": Model(1.54e9, 28, 2, 128),
    "qwen2.5-7b": Model(7.6e9, 28, 4, 128),
    "llama-3.1-8b": Model(8.03e9, 32, 8, 128),
}


@dataclass(frozen=True, slots=True)
class Search:
    """What one request grows: ``depth`` rounds of ``width`` steps of ``step`` tokens.

    ``kept``: share of an earlier round's steps that still have a living descendant. ``spread``: how
    the number of different steps grows with the width; equal ones are held once.
    """

    width: int
    depth: float
    step: float
    prompt: float
    kept: float = KEPT_SHARE
    spread: float = SPREAD

    @property
    def kv_tokens(self) -> float:
        """Tokens held in the last round: the prompt once, all of the newest steps, and those of the
        earlier steps that have descendants. [our reading of a level-synchronous search]
        """
        rounds = 1 + self.kept * (self.depth - 1)
        return self.prompt + self.step * rounds * self.width**self.spread

    @property
    def kv_tokens_mean(self) -> float:
        """Tokens held on average over its time, if all rounds take equally long: half of the
        newest steps are drawn, and half of the rounds are over. [our reading, as ``kv_tokens``]
        """
        rounds = (1 + self.kept * (self.depth - 1)) / 2
        return self.prompt + self.step * rounds * self.width**self.spread

    @property
    def path(self) -> float:
        """Tokens that a row attends to, on average over the search."""
        return self.prompt + self.step * self.depth / 2


def pass_seconds(gpu: Gpu, model: Model, tokens: float, path: float = 0) -> float:
    """Seconds of a pass over ``tokens``: max(FLOPs/peak, bytes/bandwidth), the roofline of DESIGN
    section 9 (after FlashTTS, its roofline-guided KV allocation). Weights are read once; where each
    token is a row of its own, it also reads the KV of its ``path``.
    """
    flops = 2 * model.parameters * tokens
    read = model.weights + tokens * path * model.kv
    return max(flops / (1e12 * gpu.teraflops), read / (1e9 * gpu.bandwidth))


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """A GPU with both models, growing searches of one kind."""

    gpu: Gpu
    policy: Model
    reward: Model
    search: Search

    @property
    def kv_bytes(self) -> float:
        """KV of one search in its last round, of both models: the reward model reads what the
        policy wrote."""
        return self.search.kv_tokens * (self.policy.kv + self.reward.kv)

    @property
    def kv_bytes_mean(self) -> float:
        """KV of one search, of both models, on average over its time."""
        return self.search.kv_tokens_mean * (self.policy.kv + self.reward.kv)

    @property
    def kv_room(self) -> float:
        """Tokens whose KV, of both models, fits beside the weights."""
        return self._kv_budget / (self.policy.kv + self.reward.kv)

    @property
    def room(self) -> int:
        """Searches whose KV fits beside the weights. Raises ValueError if none does."""
        fit = math.floor(self.kv_room / self.search.kv_tokens)
        if fit < 1:
            raise ValueError(
                f"a search of width {self.search.width} holds {self.kv_bytes / 1e9:.1f} GB of KV; "
                f"{self._kv_budget / 1e9:.1f} GB are left beside the weights"
            )
        return fit

    @property
    def _kv_budget(self) -> float:
        return max(0.0, ROOM * 1e9 * self.gpu.memory - self.policy.weights - self.reward.weights)

    def drawing(self, at_once: float) -> float:
        """Seconds of a search's decoding with ``at_once`` in step: ``step`` passes a round."""
        rows = at_once * self.search.width
        pass_time = pass_seconds(self.gpu, self.policy, rows, self.search.path)
        return self.search.depth * self.search.step * pass_time / EFFICIENCY

    def scoring(self, at_once: float) -> float:
        """Seconds of a search's scoring: each round is one reward-model pass over its new steps."""
        tokens = at_once * self.search.width * self.search.step
        return self.search.depth * pass_seconds(self.gpu, self.reward, tokens) / EFFICIENCY

    def seconds(self, at_once: float) -> float:
        """Seconds of a search with ``at_once`` searches in step."""
        return self.drawing(at_once) + self.scoring(at_once)

    def rate(self, at_once: float) -> float:
        """Searches a second with ``at_once`` in step."""
        return at_once / self.seconds(at_once)


@dataclass(frozen=True, slots=True)
class Company:
    """Means over time: searches ``at_once`` under way, those ``waiting`` for a place, and the share
    of the time that a replica is ``busy`` with at least one.
    """

    at_once: float
    waiting: float
    busy: float


def company(rate: Callable[[int], float], most: int, arrivals: float) -> Company:
    """The company on a replica that completes ``rate(n)`` searches a second with ``n`` under way.
    Of the ``arrivals`` a second, those that find ``most`` under way wait.

    Processor sharing whose speed depends on the number: ``P(n) = P(0) * product over k <= n of
    arrivals / rate(min(k, most))``, for any distribution of the searches' sizes while none waits
    (F. P. Kelly, Reversibility and Stochastic Networks, 1979, section 3.3). Time follows by
    Little's law. Where ``seconds(n) = a + b * n`` and none waits this is, with ``load = arrivals *
    b``: ``at_once = arrivals * seconds(1) / (1 - load)``, ``busy = 1 - (1 - load) ** (seconds(1) /
    b)``. Raises ValueError if the replica cannot keep up.
    """
    load = arrivals / rate(most)
    if load >= 1:
        raise ValueError(f"{arrivals:.3g} a second arrive, {rate(most):.3g} are the most that end")
    logs = [0.0]
    for under_way in range(1, most + 1):
        logs.append(logs[-1] + math.log(arrivals / rate(under_way)))
    top = max(logs)
    chances = [math.exp(value - top) for value in logs]  # a product may not fit a float
    queued = chances[-1] * load / (1 - load)
    total = sum(chances) + queued
    growing = sum(n * chance for n, chance in enumerate(chances)) + most * queued
    return Company(growing / total, queued / (1 - load) / total, 1 - chances[0] / total)


def row(users: int, asks_an_hour: float, replica: ReplicaModel) -> dict[str, Any]:
    """The number of replicas for ``users``, and how each of them is loaded.

    ``searches_at_once``: on a replica, on average; ``busy``: the share of time with at least one;
    ``seconds`` to the answer: searches that wait or are under way over their rate of arrival
    (Little's law). ``drawing_share``: the policy's share of a search's time, beside as many others
    as an arrival meets; where each model has GPUs of its own, the policy's share of the GPUs.
    ``kv_tokens_room``: tokens that a replica has room for. Expected KV is of all replicas: the
    number under way times what a search holds on average over its time.
    """
    arrivals = users * asks_an_hour / HOUR
    replicas = max(1, math.ceil(arrivals / (BUSY * replica.rate(replica.room))))
    means = company(replica.rate, replica.room, arrivals / replicas)
    at_arrival = min(replica.room, means.at_once + 1)
    under_way = replicas * means.at_once
    return {
        "users": users,
        "arrivals_per_second": arrivals,
        "replicas": replicas,
        "searches_at_once": means.at_once,
        "most_at_once": replica.room,
        "busy": means.busy,
        "seconds": (means.at_once + means.waiting) * replicas / arrivals,
        "drawing_share": replica.drawing(at_arrival) / replica.seconds(at_arrival),
        "kv_tokens_room": replica.kv_room,
        "expected_kv_tokens": under_way * replica.search.kv_tokens_mean,
        "expected_kv_bytes": under_way * replica.kv_bytes_mean,
    }


def main() -> None:
    """Print tables, or one JSON document with ``--json``."""
    parser = BenchmarkParser("capacity", __doc__, quick="a shorter --check")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100")
    parser.add_argument("--policy", choices=sorted(MODELS), default="qwen2.5-1.5b")
    parser.add_argument("--reward", choices=sorted(MODELS), default="qwen2.5-7b")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=10, help="steps of a solution")
    parser.add_argument("--step-tokens", type=int, default=60)
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--users", default="1,10,1000,100000", help="by commas")
    parser.add_argument("--asks-an-hour", type=float, default=6.0, help="of one user")
    parser.add_argument("--check", action="store_true", help="measure on this machine, too")
    args = parser.parse_args()
    search = Search(args.width, args.depth, args.step_tokens, args.prompt_tokens)
    replica = ReplicaModel(GPUS[args.gpu], MODELS[args.policy], MODELS[args.reward], search)
    try:
        rows = [row(int(n), args.asks_an_hour, replica) for n in args.users.split(",")]
    except ValueError as error:
        parser.error(str(error))
    document: dict[str, Any] = {"rows": rows}
    if args.check:
        from loadtest.capacity_check import check

        say("measuring searches of three widths on the bundled models")
        document["check"] = asyncio.run(check(args.quick))
    title = f"{args.policy} and {args.reward} on {args.gpu}, width {args.width}"
    publish(document, args.json, title, tuple(rows[0]))
    if args.check and not args.json:
        publish({"rows": document["check"]}, False, "measured here", tuple(document["check"][0]))


if __name__ == "__main__":
    main()
