"""Steps that no reward steers, drawn as one chain: our plug-in on the server knows their ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hedgerow_sglang.plugin_protocol import sampling_seed
from hedgerow_sglang.step_chain import StepChain, StepEnds
from runtime.sglang.replica import Replica
from runtime.sglang.step_request import StepRequest, logits_fields
from search.engine import Branch
from search.tree import Finish

log = logging.getLogger(__name__)

FEWEST_TOKENS = 256
SPARE = 3


@dataclass(slots=True)
class ChainLengths:
    """How much of a chain is asked for at once: SPARE times what chains took on the average so far.

    SGLang lets in fewer requests at a time the more each may draw. A longer chain goes on in a
    request of its own.
    """

    _tokens: int = 0
    _chains: int = 0

    @property
    def most(self) -> int:
        """In tokens."""
        return max(FEWEST_TOKENS, SPARE * self._tokens // max(1, self._chains))

    def saw(self, tokens: int) -> None:
        """One has been drawn."""
        self._tokens += tokens
        self._chains += 1


def is_chain(request: StepRequest) -> bool:
    """Whether a step that is about to begin will be followed by others, whatever rewards say."""
    ahead = request.branch.ahead
    return ahead is not None and ahead.steps > 0 and not request.tokens


def say_chains(replica: Replica) -> None:
    """Chains that no reward steers are one request where a server knows each token before it draws
    the next one; elsewhere they go round by round (``split_chains`` counts them)."""
    if replica.seeds and not replica.chains and not replica.routed:
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
    """The body that asks for a step and those that follow it, ``most`` tokens of them; the
    ``first`` one of a list brings along how steps end."""
    ahead = request.branch.ahead
    assert ahead is not None, "it is a chain"
    seeds = tuple(map(sampling_seed, (request.branch.seed, *ahead.chain_seeds())))
    chain = StepChain(seeds, request.sampling.max_step_tokens, ends.name)
    custom = note.get("custom_params", {}) | chain.param() | (ends.param() if first else {})
    body = request.body({"custom_params": custom})
    most = min(ahead.room, max(most, request.branch.limit))
    logits = logits_fields(request.sampling, len(request.path), most, custom)
    params = body["sampling_params"] | logits | {"max_new_tokens": most, "stop": []}
    return body | {"sampling_params": params}


def take_chain(request: StepRequest, answer: Mapping[str, Any]) -> list[StepRequest]:
    """Give a step what is its own of what was drawn; the steps that follow it, of which the last
    one may have to go on.

    Raises EngineError for an answer without a token.
    """
    end, most = request.take(answer), request.sampling.max_step_tokens
    ahead, drawn_tokens = request.branch.ahead, len(answer["meta_info"]["output_token_logprobs"])
    assert ahead is not None, "it is a chain"
    steps: list[StepRequest] = []
    last = request
    for seed in ahead.chain_seeds():
        if last.finish in (None, Finish.END) or end >= min(drawn_tokens, ahead.room):
            break
        branch = Branch(-1, 0, last.path, seed, min(most, ahead.room - end), -1)
        last = StepRequest(branch, request.sampling, request.stops, request.eos, acknowledged=True)
        end = last.take(answer, end)
        steps.append(last)
    return steps
