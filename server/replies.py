"""What goes back: completions, their chunks, and the documents of ``/v1/search``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from search.outcome import Outcome
from search.tree import Finish
from search.tree_json import to_json
from server.api_errors import nothing_finished
from server.plain_completion import PlainReply
from server.request_parsing import ParsedRequest

SCHEMA_VERSION = 1


def search_part(parsed: ParsedRequest, outcome: Outcome) -> dict[str, Any]:
    """The response's own ``search`` object: enough to grow the same tree again.

    ``votes`` and ``unanswered``, the replies without an answer, add up to the finished ones.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "policy": outcome.spec.policy,
        "width": outcome.spec.width,
        "seed": outcome.spec.seed,
        "answer": outcome.answer,
        "votes": votes(outcome),
        "unanswered": outcome.stats.finished - sum(a.count for a in outcome.answers),
        "vote": outcome.vote,
        "stop_reason": outcome.stop_reason.value,
        "stats": asdict(outcome.stats),
        "tree_digest": outcome.digest,
        "reproducible": outcome.reproducible,
        "spec": outcome.spec.model_dump(),
        "messages": parsed.messages,
    }


def votes(outcome: Outcome) -> list[dict[str, Any]]:
    """Classes of equal answers, the heaviest first."""
    return [asdict(answer) for answer in outcome.answers]


def search_usage(outcome: Outcome) -> dict[str, Any]:
    """OpenAI's usage of a search: the committed tree, the prompt once."""
    stats = outcome.stats
    return usage(stats.prompt_tokens, stats.generated_tokens, stats.reply_tokens)


def usage(prompt: int, generated: int, reply: int) -> dict[str, Any]:
    """OpenAI's usage object, in tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "completion_tokens_details": {"reasoning_tokens": generated - reply},
    }


class CompletedReply:
    """A finished reply: its choices (text and why it ended), its usage, its ``search`` object."""

    def __init__(self, parsed: ParsedRequest, done: Sequence[PlainReply] | Outcome) -> None:
        """Raises ApiError (504) when the search finished no trajectory."""
        if isinstance(done, Outcome):
            self.choices = _best_choices(parsed, done)
            self.usage = search_usage(done)
            self.search = search_part(parsed, done)
            return
        tokens = sum(reply.tokens for reply in done)
        self.choices = [(reply.text, reply.finish_reason) for reply in done]
        self.usage = usage(len(parsed.problem.prompt), tokens, tokens)
        self.search = None

    def completion(self, parsed: ParsedRequest, fingerprint: str) -> dict[str, Any]:
        """The whole response."""
        choices = [
            parsed.reply_format.choice(i, *parsed.split_reasoning(text), ended)
            for i, (text, ended) in enumerate(self.choices)
        ]
        body = _head(parsed, parsed.reply_format.kind, fingerprint)
        body |= {"choices": choices, "usage": self.usage, "seed": parsed.seed}
        return body if self.search is None else body | {"search": self.search}


def chunk(parsed: ParsedRequest, fingerprint: str, choice: dict[str, Any] | None) -> dict[str, Any]:
    """One chunk of a stream."""
    choices = [] if choice is None else [choice]
    body = _head(parsed, parsed.reply_format.chunk_kind, fingerprint) | {"choices": choices}
    return body | {"usage": None} if parsed.include_usage else body


def usage_chunk(parsed: ParsedRequest, fingerprint: str, used: dict[str, Any]) -> dict[str, Any]:
    """The last chunk, for clients that asked for the usage."""
    return _head(parsed, parsed.reply_format.chunk_kind, fingerprint) | {
        "choices": [],
        "usage": used,
    }


def _best_choices(parsed: ParsedRequest, done: Outcome) -> list[tuple[str, str]]:
    """The replies of the best distinct answers, as many as were wanted and are there."""
    if done.chosen is None:
        raise nothing_finished(done.stop_reason.value, done.spec.policy)
    nodes = [answer.reply for answer in done.answers] or [done.chosen]
    choices = []
    for node in nodes[: parsed.choices]:
        text, stopped = parsed.cut(done.tree.text(node))
        ended = stopped or done.tree[node].finish is Finish.END
        choices.append((text, "stop" if ended else "length"))
    return choices


def search_document(parsed: ParsedRequest, outcome: Outcome, fingerprint: str) -> dict[str, Any]:
    """The response of ``POST /v1/search``, tree included."""
    part = search_part(parsed, outcome)
    return {
        "id": parsed.id,
        "object": "search",
        "created": parsed.created,
        "model": parsed.model,
        "status": "done",
        "text": (parsed.continuation.text if parsed.continuation else "") + outcome.text,
        "answers": part.pop("votes"),
        "usage": search_usage(outcome),
        **part,
        "tree": to_json(outcome.tree),
        "system_fingerprint": fingerprint,
        **({} if parsed.continuation is None else {"branched_from": parsed.continuation.shown()}),
    }


def _head(parsed: ParsedRequest, kind: str, fingerprint: str) -> dict[str, Any]:
    return {
        "id": parsed.id,
        "object": kind,
        "created": parsed.created,
        "model": parsed.model,
        "system_fingerprint": fingerprint,
    }
