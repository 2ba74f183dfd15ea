"""What a server's completions can do beside OpenAI's own, found by asking."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.servers.drawn_step import TOP
from runtime.servers.server_errors import WrongServer
from runtime.text import Text
from search.engine import EngineError

Json = Mapping[str, Any]
NAMED_ID = "token_id:"
"""How vLLM spells a token in log-probabilities when ids are asked for."""
EXTRAS: Json = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "include_stop_str_in_output": True,
    "no_stop_trim": True,
    "skip_special_tokens": False,
}
"""Asked of every server that does not refuse them: token ids back, nothing cut off."""
GRAMMAR_FIELDS = ("structured_outputs", "response_format")
"""vLLM's, and OpenAI's, which some take for completions too."""
SEEDS = (3, 3, 4)
"""Of the draws that tell whether seeds are heeded: the first two are to be equal."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """``extras``: it does not refuse what is not OpenAI's; ``ids``: it tells token ids, not text
    alone; ``logprobs``: and their log-probabilities; ``seeds``: the same seed drew the same;
    ``cached``: it tells how many tokens of a prompt were cached; ``stops``: what stopped it is at
    the end of what it tells; ``grammar``: the field by which it holds to a JSON schema."""

    extras: bool
    ids: bool
    logprobs: bool
    seeds: bool
    cached: bool
    stops: bool = True
    grammar: str | None = None

    @classmethod
    def of(cls, url: str, answers: Sequence[Json], text: Text, *, extras: bool) -> Dialect:
        """From the answers to the same prompt under ``SEEDS``.

        Raises WrongServer where token ids come back that are not the tokenizer's own, or nothing.
        """
        choices = [answer["choices"][0] for answer in answers]
        draws = [token_ids(choice) for choice in choices]
        if draws[0] is not None:
            _must_be_spelt(url, draws[0], str(choices[0].get("text", "")), text)
        elif not any(choice.get("text") for choice in choices):
            raise WrongServer(f"{url}: its completions tell neither token ids nor text")
        ids = draws[0] is not None
        return cls(
            extras=extras,
            ids=ids,
            logprobs=ids and token_logprobs(choices[0]) is not None,
            seeds=draws[0] == draws[1] if ids else choices[0]["text"] == choices[1]["text"],
            cached=cached_tokens(answers[0]) is not None,
        )

    def drawn_tokens(self, answer: Json) -> int:
        """The tokens that an answer was drawn for, where what stops a step does not stop the
        server; 0 where it does, or does not say."""
        return 0 if self.stops else int((answer.get("usage") or {}).get("completion_tokens") or 0)

    def lacks(self) -> list[str]:
        """What trees go without on such a server, in words."""
        texts = "token ids: each step's text is tokenised here (retokenized_steps counts them)"
        waste = "what stopped a step: it draws on, and is cut here"
        abilities = {
            texts: self.ids,
            waste: self.stops,
            "log-probabilities: rewards without a reward model need them": self.logprobs,
            "the same draws for the same seed: trees are drawn anew each time": self.seeds,
        }
        return [words for words, able in abilities.items() if not able]


def _must_be_spelt(url: str, ids: Sequence[int], server_text: str, text: Text) -> None:
    """Raises WrongServer where the tokenizer here has other words for these ids, or none."""
    unknown = [token for token in ids if not 0 <= token < text.model_vocab]
    if unknown:
        raise WrongServer(
            f"{url} drew token {unknown[0]}; the model of {text.checkpoint} has ids from 0 to "
            f"{text.model_vocab - 1}: name the model that the server serves"
        )
    own_text = text.decode(ids)
    if server_text.strip() != own_text.strip():
        raise WrongServer(
            f"{url} spells the tokens {ids} {server_text!r}, the tokenizer of {text.checkpoint} "
            f"{own_text!r}: name the model that the server serves"
        )


def trial(prompt: Sequence[int], seed: int, *, extras: bool = True) -> dict[str, Any]:
    """A body whose answer says how a server speaks, but for the model's name."""
    body = {"prompt": list(prompt), "max_tokens": 8, "temperature": 1.0, "seed": seed}
    return body | {"logprobs": TOP, **EXTRAS} if extras else body


def stop_trial(prompt: Sequence[int], stop: str | None, *, extras: bool) -> dict[str, Any]:
    """As ``trial``, the likeliest tokens; with ``stop`` they are to end with it."""
    body = trial(prompt, 0, extras=extras) | {"temperature": 0.0}
    return body if stop is None else body | {"stop": [stop]}


def grammar_fields(name: str | None, grammar: str) -> dict[str, Any]:
    """The field of a body that asks for a JSON schema. Raises EngineError where none does."""
    schema = json.loads(grammar)
    match name:
        case "structured_outputs":
            return {name: {"json": schema}}
        case "response_format":
            response_format = {"name": "reply", "schema": schema, "strict": True}
            return {name: {"type": "json_schema", "json_schema": response_format}}
    raise EngineError("grammar: the server holds to no schema")


def token_ids(choice: Json) -> list[int] | None:
    """The ids that a choice drew; None where it does not tell them."""
    ids = choice.get("token_ids")
    if ids is not None:
        return list(ids)
    names = (choice.get("logprobs") or {}).get("tokens")
    if not names or not all(name.startswith(NAMED_ID) for name in names):
        return None
    return [int(name.removeprefix(NAMED_ID)) for name in names]


def ids_of_text(choice: Json, stops: Sequence[str], text: Text) -> list[int]:
    """The ids of a choice that tells text alone, with the end token where the model drew it: what
    stopped it is no stop string then."""
    reply = str(choice.get("text") or "")
    ids = text.encode_after(reply)
    by_stop = reply.endswith(tuple(stops))
    if choice.get("finish_reason") == "stop" and not by_stop and not text.eos & {*ids[-1:]}:
        ids.append(text.end)
    return ids


def token_logprobs(choice: Json) -> list[float] | None:
    """Of each token drawn; None where they are not told."""
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    return None if logprobs is None or None in logprobs else list(logprobs)


def top_logprobs(choice: Json, place: int, most: int) -> list[float]:
    """The likeliest tokens' at a place of what was drawn, at most ``most`` of them."""
    positions = (choice.get("logprobs") or {}).get("top_logprobs") or []
    at = positions[place] if len(positions) > place else None
    return sorted((at or {}).values(), reverse=True)[:most]


def cached_tokens(answer: Json) -> int | None:
    """How many of the prompt's tokens were in the cache; None where that is not told."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details")
    return None if details is None else int(details.get("cached_tokens") or 0)
