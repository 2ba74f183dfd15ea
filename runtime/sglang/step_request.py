"""A step drawn by SGLang: its request, and what is taken from the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hedgerow_sglang.plugin_protocol import output_param, sampling_seed
from runtime.servers.drawn_step import TOP, DrawnStep, entropy
from runtime.sglang.replica import Replica
from search.engine import LOGITS_PARAMS, EngineError, Sampling, TokenLogprob

WHOLE = 1 << 20
"""Tokens between two events of a list's item: more than it has, so only its end is sent."""

Key = tuple[tuple[int, ...], int]
"""A step's prefix and its seed."""


@dataclass(slots=True, eq=False)
class StepRequest(DrawnStep):
    """A step being drawn.

    ``at_once``: the most tokens that its first request asks for, 0 for all. ``acknowledged``: the
    server knows that the step is complete, or need not know.
    """

    at_once: int = 0
    acknowledged: bool = False

    def continue_from(self, request: StepRequest) -> None:
        """Take over the tokens that an early request has drawn of the same step."""
        self.tokens, self.logprob, self.logprobs = request.tokens, request.logprob, request.logprobs
        self.entropy, self.finish, self.acknowledged = (
            request.entropy,
            request.finish,
            request.acknowledged,
        )

    def body(self, note: Mapping[str, Any], *, most: int = 0) -> dict[str, Any]:
        """The body that asks for the rest of the step, or for ``most`` tokens; ``note``: more
        sampling parameters."""
        sampling, remaining = self.sampling, self.remaining
        whole = self.tokens or not self.at_once or sampling.grammar is not None
        most = most or (remaining if whole else min(remaining, self.at_once))
        grammar = {} if sampling.grammar is None else {"json_schema": sampling.grammar}
        return {
            "input_ids": list(self.path),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": max(TOP, sampling.logprobs or 0),
            "sampling_params": {
                "max_new_tokens": most,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "stop": list(sampling.stop),
                "stop_token_ids": sorted(self.eos),
                "no_stop_trim": True,
                "stream_interval": WHOLE,
                "skip_special_tokens": False,
                "sampling_seed": sampling_seed(self.branch.seed),
                **grammar,
                **note,
                **logits_fields(sampling, len(self.path), most, note.get("custom_params", {})),
            },
        }

    @property
    def key(self) -> Key:
        """The prefix and the seed, by which a step that was drawn early is found."""
        return self.branch.tokens, self.branch.seed

    def take(self, answer: Mapping[str, Any], start: int = 0) -> int:
        """Add the tokens from place ``start`` of the answer up to the step's end; returns the place
        behind the last one added. Sets ``finish`` if the step ends.

        Raises EngineError for an answer without a token.
        """
        meta = answer["meta_info"]
        entries = meta["output_token_logprobs"]
        if not entries:
            raise EngineError(
                f"SGLang drew nothing after {meta['prompt_tokens']} tokens: "
                f"{meta.get('finish_reason')}"
            )
        end = start + self.add((token, logprob) for logprob, token, *_ in entries[start:])
        tops = meta["output_top_logprobs"]
        self.entropy = entropy([p for p, *_ in tops[end - 1]])
        if (count := self.sampling.logprobs) is not None:
            for (logprob, *_), top in zip(entries[start:end], tops[start:end], strict=True):
                likeliest = sorted((-p, token) for p, token, *_ in top)[:count]
                self.logprobs.append(
                    TokenLogprob(logprob, tuple((token, -p) for p, token in likeliest))
                )
        return end


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def honoured_params(replicas: Iterable[Replica]) -> tuple[str, ...]:
    """The ``LogitsParams`` that act over whole trajectories on all of these servers; penalties are
    among them if our plug-in counts earlier output everywhere."""
    counts_output = all(replica.outputs for replica in replicas)
    return tuple(name for name in LOGITS_PARAMS if counts_output or name not in PENALTIES)


def logits_fields(
    sampling: Sampling, path: int, most: int, custom: Mapping[str, Any]
) -> dict[str, Any]:
    """The logits fields of a request for ``most`` tokens after ``path`` tokens; ``custom``: its
    other custom parameters, to which the start of the output is added for our plug-in."""
    params = sampling.logits
    if not params.active():
        return {}
    return {
        "top_k": params.top_k if params.top_k > 0 else -1,
        "min_p": params.min_p,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
        "min_new_tokens": sampling.min_tokens_left(path, most),
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "custom_params": {**custom, **output_param(sampling.prompt_tokens)},
    }


@dataclass(frozen=True, slots=True)
class PathRead:
    """A path to read, with nothing drawn, for its log-probabilities from position ``start`` on.

    ``node``: where it ends, if children are to be drawn from it; ``step``: the node and its parent,
    if the server must learn that its step is complete.
    """

    path: tuple[int, ...]
    start: int
    node: int | None = None
    step: tuple[int, int] | None = None

    def body(self, note: Mapping[str, Any]) -> dict[str, Any]:
        """The body of the request; ``note``: more sampling parameters."""
        return {
            "input_ids": list(self.path),
            "return_logprob": True,
            "logprob_start_len": self.start,
            "top_logprobs_num": 0,
            "sampling_params": {"max_new_tokens": 0, **note},
        }


def forked_prefixes(
    prefixes: Iterable[tuple[int, ...]], fresh: Collection[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """The prefixes that a round draws from more than once and that may not be cached: all but the
    ones drawn just before (``fresh``). They are read once, before the round."""
    counts = Counter(prefixes)
    return [path for path, count in counts.items() if count > 1 and path not in fresh]
