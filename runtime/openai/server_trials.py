"""Finds out, by trial requests, what a policy server can do."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from runtime.openai.completion_server import COMPLETIONS, CompletionServer, Json
from runtime.openai.server_dialect import (
    GRAMMAR_FIELDS,
    SEEDS,
    Dialect,
    grammar_fields,
    stop_trial,
    trial,
)
from runtime.servers.server_errors import WrongServer
from runtime.text import Text
from search.engine import EngineDown, EngineError

log = logging.getLogger(__name__)

TRIAL_PROMPT = "Three and four are"
"""The prompt of a policy server's trial requests."""
CONSTANT = 7193
"""A number that no reply states by chance, only under a schema."""


async def dialect_of(server: CompletionServer, text: Text) -> Dialect:
    """The server's dialect. Raises WrongServer if it cannot serve trees; EngineDown."""
    prompt = text.encode(TRIAL_PROMPT)
    extras = True
    try:
        first = await ask_trial(server, COMPLETIONS, trial(prompt, SEEDS[0]))
    except WrongServer as refusal:  # perhaps only of EXTRAS
        extras = False
        try:
            first = await ask_trial(server, COMPLETIONS, trial(prompt, SEEDS[0], extras=False))
        except WrongServer:
            raise refusal from None
    bodies = [trial(prompt, seed, extras=extras) for seed in SEEDS[1:]]
    answers = [await ask_trial(server, COMPLETIONS, body) for body in bodies]
    dialect = Dialect.of(server.url, [first, *answers], text, extras=extras)
    dialect = replace(dialect, grammar=await _grammar_field(server, prompt, extras=extras))
    if dialect.ids:
        return dialect
    return replace(dialect, stops=await _keeps_stops(server, prompt, extras=extras))


def say(server: CompletionServer, dialect: Dialect) -> None:
    """Log everything that the server lacks."""
    for missing in dialect.lacks():
        log.warning("%s does not tell %s", server.url, missing)
    if not (dialect.extras or server.vllm):
        log.warning("%s takes OpenAI's fields alone: API keys share its prefix cache", server.url)
    if not dialect.cached:
        log.info(
            "%s does not tell what was cached (vLLM: --enable-prompt-tokens-details)", server.url
        )


async def ask_trial(server: CompletionServer, path: str, body: Any) -> Json:
    """The answer to a trial. Raises WrongServer if it is refused, EngineDown without an answer."""
    try:
        return await server.ask(path, body)
    except EngineDown:
        raise
    except EngineError as error:
        raise WrongServer(f"{server.url}{path}: {error}") from error


async def _grammar_field(
    server: CompletionServer, prompt: list[int], *, extras: bool
) -> str | None:
    """The field that makes a server reply as a schema demands; None if none does."""
    for name in GRAMMAR_FIELDS:
        fields = grammar_fields(name, f'{{"const":{CONSTANT}}}')
        try:
            reply = await _text_of(server, stop_trial(prompt, None, extras=extras) | fields)
        except WrongServer:
            continue
        if reply.lstrip().startswith(str(CONSTANT)):  # an end token's name may follow
            return name
    return None


async def _keeps_stops(server: CompletionServer, prompt: list[int], *, extras: bool) -> bool:
    """Whether a reply that is stopped at its own first letter comes back with that letter."""
    words = await _text_of(server, stop_trial(prompt, None, extras=extras))
    letters = words.strip()
    if not letters:
        return False
    return letters[0] in await _text_of(server, stop_trial(prompt, letters[0], extras=extras))


async def _text_of(server: CompletionServer, body: Any) -> str:
    answer = await ask_trial(server, COMPLETIONS, body)
    return str(answer["choices"][0].get("text") or "")
