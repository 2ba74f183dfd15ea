"""What a server's completions can do beyond OpenAI's, found out by trial requests."""

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
"""vLLM's prefix for a token in log-probabilities when ids are asked for."""
EXTRAS: Json = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "include_stop_str_in_output": True,
    "no_stop_trim": True,
    "skip_special_tokens": False,
}
"""Fields for every server that accepts them: they ask for token ids and for uncut text."""
GRAMMAR_FIELDS = ("structured_outputs", "response_format")
"""vLLM's field, and OpenAI's, which some servers accept for completions too."""
SEEDS = (3, 3, 4)
"""Seeds of trial requests that show whether seeds count: the first two must give equal draws."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """``extras``: it accepts ``EXTRAS``; ``ids``: it returns token ids, not only text;
    ``logprobs``: and their log-probabilities; ``seeds``: equal seeds gave equal draws; ``cached``:
    it says how many tokens of a prompt were cached; ``stops``: the stop string is included at the
    end of its text; ``grammar``: the field that makes it follow a JSON schema."""

    extras: bool
    ids: bool
    logprobs: bool
    seeds: bool
    cached: bool
    stops: bool = True
    grammar: str | None = None

    @classmethod
    def of(cls, url: str, answers: Sequence[Json], text: Text, *, extras: bool) -> Dialect:
        """The dialect that the answers to one prompt under ``SEEDS`` show.

        Raises WrongServer if token ids are not the tokenizer's, or if there is no output.
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
        """How many tokens the server drew for an answer, if stop strings do not stop it; 0 if they
        do, or if it does not say."""
        return 0 if self.stops else int((answer.get("usage") or {}).get("completion_tokens") or 0)

    def lacks(self) -> list[str]:
        """Descriptions of what is missing on such a server, and what that means for trees."""
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
    """Raises WrongServer if the tokenizer here has a different text for these ids, or none."""
    unknown = [token for token in ids if not 0 <= token < text.model_vocab]
    if unknown:
        raise WrongServer(
            f"{url} drew token {unknown[0]}; the model of {text.checkpoint} has ids from 0 to "
            f"{text.model_vocab - 1}: name the model that the server serves"
        )
    own_text = text.decode(ids)
    if _whole(server_text) != _whole(own_text):
        raise WrongServer(
            f"{url} spells the tokens {ids} {server_text!r}, the tokenizer of {text.checkpoint} "
            f"{own_text!r}: name the model that the server serves"
        )


def _whole(text: str) -> str:
    """A text without space around it, nor the rest of a character that its last token begins, which
    some servers leave out."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}").strip()


def trial(prompt: Sequence[int], seed: int, *, extras: bool = True) -> dict[str, Any]:
    """A body whose answer shows the server's dialect, without the model's name."""
    body = {"prompt": list(prompt), "max_tokens": 8, "temperature": 1.0, "seed": seed}
    return body | {"logprobs": TOP, **EXTRAS} if extras else body


def stop_trial(prompt: Sequence[int], stop: str | None, *, extras: bool) -> dict[str, Any]:
    """A ``trial`` body at temperature 0, with ``stop`` as its stop string if it is given."""
    body = trial(prompt, 0, extras=extras) | {"temperature": 0.0}
    return body if stop is None else body | {"stop": [stop]}


def grammar_fields(name: str | None, grammar: str) -> dict[str, Any]:
    """The body's field that asks for a JSON schema. Raises EngineError if ``name`` is None."""
    schema = json.loads(grammar)
    match name:
        case "structured_outputs":
            return {name: {"json": schema}}
        case "response_format":
            response_format = {"name": "reply", "schema": schema, "strict": True}
            return {name: {"type": "json_schema", "json_schema": response_format}}
    raise EngineError("grammar: the server holds to no schema")


def token_ids(choice: Json) -> list[int] | None:
    """The token ids of a choice; None if it does not state them."""
    ids = choice.get("token_ids")
    if ids is not None:
        return list(ids)
    names = (choice.get("logprobs") or {}).get("tokens")
    if not names or not all(name.startswith(NAMED_ID) for name in names):
        return None
    return [int(name.removeprefix(NAMED_ID)) for name in names]


def ids_of_text(choice: Json, stops: Sequence[str], text: Text) -> list[int]:
    """The ids of a choice that has only text. The end token is added if the choice stopped without
    a stop string: the model has drawn it then."""
    reply = str(choice.get("text") or "")
    ids = text.encode_after(reply)
    by_stop = reply.endswith(tuple(stops))
    if choice.get("finish_reason") == "stop" and not by_stop and not text.eos & {*ids[-1:]}:
        ids.append(text.end)
    return ids


def token_logprobs(choice: Json) -> list[float] | None:
    """The log-probability of each token drawn; None if the choice does not state them all."""
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    return None if logprobs is None or None in logprobs else list(logprobs)


def top_logprobs(choice: Json, place: int, most: int) -> list[float]:
    """The highest log-probabilities at a place of the drawn tokens, at most ``most``."""
    positions = (choice.get("logprobs") or {}).get("top_logprobs") or []
    at = positions[place] if len(positions) > place else None
    return sorted((at or {}).values(), reverse=True)[:most]


def cached_tokens(answer: Json) -> int | None:
    """How many of the prompt's tokens were in the cache; None if the answer does not say."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details")
    return None if details is None else int(details.get("cached_tokens") or 0)
