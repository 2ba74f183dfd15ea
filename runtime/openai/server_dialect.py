"""What a server's completions can do beside OpenAI's own, found by asking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.servers.server_errors import WrongServer
from runtime.text import Text

Json = Mapping[str, Any]
NAMED_ID = "token_id:"
"""How vLLM spells a token in log-probabilities when ids are asked for."""
FULL_TOP = 16
"""Likeliest tokens that vLLM and SGLang tell."""
EXTRAS: Json = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "include_stop_str_in_output": True,
    "no_stop_trim": True,
    "skip_special_tokens": False,
}
"""Asked of every server: token ids back, nothing cut off. A server takes what it knows."""
SEEDS = (3, 3, 4)
"""Of the draws that tell whether seeds are heeded: the first two are to be equal."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """``logprobs``: it tells them; ``seeds``: the same seed drew the same tokens; ``cached``: it
    tells how many tokens of a prompt were cached."""

    logprobs: bool
    seeds: bool
    cached: bool

    @classmethod
    def of(cls, url: str, answers: Sequence[Json], text: Text) -> Dialect:
        """From the answers to the same prompt under ``SEEDS``.

        Raises WrongServer where no token ids come back, or not the tokenizer's own.
        """
        choices = [answer["choices"][0] for answer in answers]
        drawn = [token_ids(choice) for choice in choices]
        first = drawn[0]
        if first is None:
            raise WrongServer(
                f"{url}: its completions tell no token ids (return_token_ids, "
                "return_tokens_as_token_ids), without which no step can be continued exactly; vLLM "
                "and SGLang do"
            )
        strange = [token for token in first if not 0 <= token < text.model_vocab]
        if strange:
            raise WrongServer(
                f"{url} drew token {strange[0]}; the model of {text.checkpoint} has ids from 0 to "
                f"{text.model_vocab - 1}: name the model that the server serves"
            )
        said, read = str(choices[0].get("text", "")), text.decode(first)
        if said.strip() != read.strip():
            raise WrongServer(
                f"{url} spells the tokens {first} {said!r}, the tokenizer of {text.checkpoint} "
                f"{read!r}: name the model that the server serves"
            )
        return cls(
            logprobs=token_logprobs(choices[0]) is not None,
            seeds=drawn[0] == drawn[1],
            cached=cached_tokens(answers[0]) is not None,
        )


def trial(prompt: Sequence[int], seed: int) -> dict[str, Any]:
    """A body whose answer says how a server speaks, but for the model's name."""
    return {
        "prompt": list(prompt),
        "max_tokens": 8,
        "temperature": 1.0,
        "seed": seed,
        "logprobs": FULL_TOP,
        **EXTRAS,
    }


def token_ids(choice: Json) -> list[int] | None:
    """The ids that a choice drew; None where it does not tell them."""
    ids = choice.get("token_ids")
    if ids is not None:
        return list(ids)
    names = (choice.get("logprobs") or {}).get("tokens")
    if not names or not all(name.startswith(NAMED_ID) for name in names):
        return None
    return [int(name.removeprefix(NAMED_ID)) for name in names]


def token_logprobs(choice: Json) -> list[float] | None:
    """Of each token drawn; None where they are not told."""
    told = (choice.get("logprobs") or {}).get("token_logprobs")
    return None if told is None or None in told else list(told)


def top_logprobs(choice: Json, place: int, most: int) -> list[float]:
    """The likeliest tokens' at a place of what was drawn, at most ``most`` of them."""
    told = (choice.get("logprobs") or {}).get("top_logprobs") or []
    at = told[place] if len(told) > place else None
    return sorted((at or {}).values(), reverse=True)[:most]


def cached_tokens(answer: Json) -> int | None:
    """How many of the prompt's tokens were in the cache; None where that is not told."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details")
    return None if details is None else int(details.get("cached_tokens") or 0)
