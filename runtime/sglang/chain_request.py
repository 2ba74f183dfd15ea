"""Chains of steps that no reward steers, drawn in one request: our plug-in finds step ends."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hedgerow_sglang.plugin_protocol import sampling_seed
from hedgerow_sglang.step_chain import StepChain, StepEnds
from runtime.sglang.replica import Replica
from runtime.sglang.step_request import Key, StepRequest
from search.tree import Finish

log = logging.getLogger(__name__)

FEWEST_TOKENS = 256
SPARE = 3


@dataclass(slots=True)
class ChainLengths:
    """How many tokens of a chain are asked for at once: SPARE times the mean of chains so far.

    SGLang admits fewer requests at a time the more each may draw. A longer chain continues in
    another request.
    """

    _tokens: int = 0
    _chains: int = 0

    @property
    def most(self) -> int:
        """Most tokens of a chain to ask for at once."""
        return max(FEWEST_TOKENS, SPARE * self._tokens // max(1, self._chains))

    def record(self, tokens: int) -> None:
        """Record a drawn chain of ``tokens`` tokens."""
        self._tokens += tokens
        self._chains += 1


def is_chain(request: StepRequest) -> bool:
    """Whether a step that has no tokens yet will be followed by others regardless of rewards."""
    ahead = request.branch.ahead
    return ahead is not None and ahead.steps > 0 and not request.tokens


def say_chains(replica: Replica) -> None:
    """Warn if a server cannot draw chains in one request because it draws tokens before the last
    one is known; chains go round by round there (``split_chains`` counts them)."""
    if replica.seeds and not (replica.chains or replica.routed or replica.schedulers > 1):
        log.warning(
            "%s draws tokens before the last one is known (SGLang's overlap scheduler, drafts): "
            "self_consistency and best_of_n go round by round there; "
            "--disable-overlap-schedule has them go as one request",
            replica.url,
        )


def chain_body(
    request: StepRequest,
    note: Mapping[str, Any],
    ends: StepEnds,
    *,
    most: int,
    first: bool,
) -> dict[str, Any]:
    """The body that asks for a step and those after it, about ``most`` tokens in all; the
    ``first`` one of a list carries ``ends``."""
    ahead = request.branch.ahead
    assert ahead is not None, "it is a chain"
    seeds = tuple(map(sampling_seed, (request.branch.seed, *ahead.chain_seeds())))
    chain = StepChain(seeds, request.sampling.max_step_tokens, ends.name)
    custom = note.get("custom_params", {}) | chain.param() | (ends.param() if first else {})
    most = min(ahead.room, max(most, request.branch.limit))
    body = request.body({"custom_params": custom}, most=most)
    return body | {"sampling_params": body["sampling_params"] | {"stop": []}}


def take_chain(request: StepRequest, answer: Mapping[str, Any]) -> list[StepRequest]:
    """Give a step its share of the drawn tokens; returns the steps after it. If the chain goes on,
    the last one is not complete.

    Raises EngineError for an answer without a token.
    """
    end, drawn_tokens = request.take(answer), len(answer["meta_info"]["output_token_logprobs"])
    steps: list[StepRequest] = []
    child = next_in_chain(request)
    while child is not None:
        steps.append(child)
        if end == drawn_tokens:
            break
        end = child.take(answer, end)
        child = next_in_chain(child)
    return steps


def next_in_chain(request: StepRequest) -> StepRequest | None:
    """The step that is sure to follow a complete one, without tokens; None if there is none."""
    branch, ahead, sampling = request.branch, request.branch.ahead, request.sampling
    if ahead is None or not ahead.steps or request.finish in (None, Finish.END):
        return None
    room = branch.early_limit(len(request.tokens), ahead.room)
    if room < 1:
        return None
    steps = ahead.steps - 1
    child = replace(
        branch.early_child(0, request.tokens, sampling.max_step_tokens),
        parent=-1,
        ahead=replace(ahead, path=(*ahead.path, 0), room=room, steps=steps) if steps else None,
    )
    return StepRequest(child, sampling, request.stops, request.eos, acknowledged=True)


def open_tails(
    requests: Iterable[StepRequest], following: Mapping[Key, StepRequest]
) -> list[StepRequest]:
    """The last steps, not complete, of the chains that go on from a round's complete steps."""
    tails: list[StepRequest] = []
    for request in requests:
        last, child = request, next_in_chain(request)
        while child is not None and child.key in following:
            last = following[child.key]
            child = next_in_chain(last)
        if last is not request and last.finish is None:
            tails.append(last)
    return tails


def first_draws(requests: Sequence[StepRequest]) -> list[StepRequest]:
    """What to draw first so that chains go on together, not each in a round of its own: partial
    steps, if there are any, before chains begin."""
    partial = any(request.tokens for request in requests)
    return [request for request in requests if not partial or not is_chain(request)]
