"""Formats responses: completions and chunks in OpenAI's two formats, ``/v1/search`` documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runtime.text import Text
from search.outcome import Outcome
from search.tree import Finish
from search.tree_json import to_json
from server.api_errors import nothing_finished
from server.plain_completion import PlainReply
from server.reply_logprobs import ReplyToken, chat_logprobs, text_logprobs
from server.request_parsing import ParsedRequest
from server.side_by_side import DrawnReplies
from server.streams import Parts
from server.tool_calls import CallDelta

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class WrittenReplies:
    """The JSON replies written for the trajectories that a search chose, and their reasoning."""

    draws: DrawnReplies
    reasoning: list[str]


class CompletedReply:
    """A finished reply: its choices (text and finish reason), usage and ``search`` object."""

    def __init__(
        self,
        parsed: ParsedRequest,
        outcome: Sequence[PlainReply] | Outcome,
        rounds: str = "",
        logprobs: Sequence[Sequence[ReplyToken]] = (),
        replies: WrittenReplies | None = None,
    ) -> None:
        """``rounds``: lines about the search's rounds; ``logprobs``: of the choices' tokens, if
        asked for; ``replies``: replace the search's own choices, which become reasoning.
        Raises ApiError (504) if the search has no reply."""
        self.rounds, self.logprobs = rounds, logprobs
        self.reasoning = replies.reasoning if replies else []
        self._parsed = parsed
        if isinstance(outcome, Outcome):
            self.search = search_part(parsed, outcome)
            if replies is None:
                self.choices = [choice for _, choice in best_choices(parsed, outcome)]
                self.usage = search_usage(outcome)
                return
            draws, stats = replies.draws, outcome.stats
            self.logprobs = draws.logprobs
            self.choices = [(reply.text, reply.finish_reason) for reply in draws.replies]
            tokens = sum(reply.tokens for reply in draws.replies)
            self.usage = usage(stats.prompt_tokens, stats.generated_tokens + tokens, tokens)
            return
        tokens = sum(reply.tokens for reply in outcome)
        self.choices = [(reply.text, reply.finish_reason) for reply in outcome]
        self.usage = usage(parsed.prompt_tokens, tokens, tokens)
        self.search = None

    def parts(self, index: int) -> tuple[str, str]:
        """A choice's reasoning, without the lines about rounds, and its reply."""
        text, _ = self.choices[index]
        return (
            (self.reasoning[index], text) if self.reasoning else self._parsed.split_reasoning(text)
        )


class ReplyFormat:
    """``/v1/chat/completions``: formats the replies to one request, whole or in chunks."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, parsed: ParsedRequest, fingerprint: str, text: Text) -> None:
        self._parsed = parsed
        self._fingerprint = fingerprint
        self._text = text

    def completion(self, reply: CompletedReply) -> dict[str, Any]:
        """The whole response."""
        parsed = self._parsed
        choices = []
        for i, (_, finish) in enumerate(reply.choices):
            thought, content = reply.parts(i)
            reasoning = thought if i else reply.rounds + thought
            tokens = reply.logprobs[i] if reply.logprobs else None
            parts = parsed.read_calls(content)
            deltas = [CallDelta(place, *call) for place, call in enumerate(parts.calls)]
            message = self._message(reasoning, self._echo(i) + parts.text, self._calls(i, deltas))
            reason = finish_reason(finish, called=bool(parts.calls))
            choices.append(self._choice(i, reason, tokens) | message)
        body = self._head(self.kind)
        body |= {"choices": choices, "usage": reply.usage, "seed": parsed.seed}
        return body if reply.search is None else body | {"search": reply.search}

    def piece(
        self,
        index: int = 0,
        text: str | None = None,
        finish_reason: str | None = None,
        tokens: Sequence[ReplyToken] | None = None,
    ) -> dict[str, Any]:
        """A chunk of one choice, with an empty delta if ``text`` is None. ``tokens``: those whose
        log-probabilities it has."""
        return self._chunk(self._choice(index, finish_reason, tokens) | self._more(text))

    def opening(self, index: int) -> list[dict[str, Any]]:
        """A stream's first chunks for a choice: the role, or a text completion's echo, if any."""
        forced = self._parsed.calls is not None and self._parsed.calls.forced
        delta = {"role": "assistant", "content": None if forced else ""}
        return [self._chunk(self._choice(index) | {"delta": delta})]

    def reasoning(
        self, index: int, text: str, tokens: Sequence[ReplyToken] | None = None
    ) -> list[dict[str, Any]]:
        """Chunks with a piece of a thought or a line about the search as ``reasoning_content``,
        which several clients show apart from the reply. Empty for formats without such a field."""
        delta = {"reasoning_content": text}
        return [self._chunk(self._choice(index, None, tokens) | {"delta": delta})]

    def pieces(
        self, index: int, parts: Parts, tokens: Sequence[ReplyToken] | None = None
    ) -> list[dict[str, Any]]:
        """The chunks for parts of a choice, any of which may be empty. The last chunk has the
        log-probabilities of ``tokens``."""
        thought, text, calls = parts
        chunks: list[dict[str, Any]] = []
        if thought:
            chunks += self.reasoning(index, thought, None if text or calls else tokens)
        if text:
            chunks.append(self.piece(index, text, tokens=None if calls else tokens))
        if calls:
            pairs = zip(calls, self._calls(index, calls), strict=True)
            delta = {"tool_calls": [{"index": call.place} | part for call, part in pairs]}
            chunks.append(self._chunk(self._choice(index, None, tokens) | {"delta": delta}))
        return chunks

    def usage(self, counts: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, sent to clients that asked for the usage."""
        return self._head(self.chunk_kind) | {"choices": [], "usage": counts}

    def _message(self, thought: str, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        forced = self._parsed.calls is not None and self._parsed.calls.forced
        content = text or (None if calls or forced else "")
        message = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {"message": message | ({"reasoning_content": thought} if thought else {})}

    def _calls(self, index: int, deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
        """The JSON of a choice's calls, whole or in part; the first part has id and name."""
        calls = []
        for place, name, arguments in deltas:
            if name is None:
                calls.append({"function": {"arguments": arguments}})
                continue
            head = {"id": self._parsed.call_id(index, place), "type": "function"}
            calls.append(head | {"function": {"name": name, "arguments": arguments}})
        return calls

    def _choice(
        self,
        index: int,
        finish_reason: str | None = None,
        tokens: Sequence[ReplyToken] | None = None,
    ) -> dict[str, Any]:
        logprobs = None if tokens is None else self._logprobs(index, tokens)
        return {"index": index, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, tokens: Sequence[ReplyToken]) -> dict[str, Any]:
        return chat_logprobs(tokens, self._text)

    def _echo(self, index: int) -> str:
        """The prompt to repeat before a choice's text, empty unless ``echo`` was asked for."""
        return self._parsed.echoes[index] if self._parsed.echoes else ""

    def _more(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        body = self._head(self.chunk_kind) | {"choices": [choice]}
        return body | {"usage": None} if self._parsed.include_usage else body

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._parsed.id,
            "object": kind,
            "created": self._parsed.created,
            "model": self._parsed.model,
            "system_fingerprint": self._fingerprint,
        }


class TextFormat(ReplyFormat):
    """``/v1/completions``: formats texts without roles, reasoning or tool calls."""

    kind = chunk_kind = "text_completion"

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [self.piece(index, echo)] if (echo := self._echo(index)) else []

    def reasoning(
        self, index: int, text: str, tokens: Sequence[ReplyToken] | None = None
    ) -> list[dict[str, Any]]:
        return []

    def _logprobs(self, index: int, tokens: Sequence[ReplyToken]) -> dict[str, Any]:
        return text_logprobs(tokens, self._text, len(self._echo(index)))

    def _message(self, thought: str, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"text": text}

    def _more(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}


def finish_reason(finish: str, *, called: bool) -> str:
    """A choice's ``finish_reason`` in OpenAI's words; ``called``: whether it has a call."""
    return "tool_calls" if called and finish == "stop" else finish


def reply_format(parsed: ParsedRequest, fingerprint: str, text: Text) -> ReplyFormat:
    """The formatter for a request: of chat or of text completions."""
    return (ReplyFormat if parsed.chat else TextFormat)(parsed, fingerprint, text)


def best_choices(parsed: ParsedRequest, outcome: Outcome) -> list[tuple[int, tuple[str, str]]]:
    """The replies with the best distinct answers, at most ``parsed.choices``: each one's node, text
    and finish ("stop" or "length"). Raises ApiError (504) if there is none."""
    if outcome.chosen is None:
        raise nothing_finished(outcome.stop_reason.value, outcome.spec.policy)
    nodes = [answer.reply for answer in outcome.answers] or [outcome.chosen]
    choices = []
    for node in nodes[: parsed.choices]:
        text, stopped = parsed.cut(outcome.tree.text(node))
        complete = stopped or outcome.tree[node].finish is Finish.END
        choices.append((node, (text, "stop" if complete else "length")))
    return choices


def search_usage(outcome: Outcome) -> dict[str, Any]:
    """OpenAI's usage of a search: the tokens of its tree, and the prompt once."""
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


def search_part(parsed: ParsedRequest, outcome: Outcome) -> dict[str, Any]:
    """The response's ``search`` object, with all that is needed to grow the same tree again.

    ``votes``: classes of equal answers, the heaviest first. Their counts and ``unanswered``, the
    number of replies without an answer, add up to the number of finished replies.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "policy": outcome.spec.policy,
        "width": outcome.spec.width,
        "seed": outcome.spec.seed,
        "answer": outcome.answer,
        "votes": [asdict(answer) for answer in outcome.answers],
        "unanswered": outcome.stats.finished - sum(a.count for a in outcome.answers),
        "vote": outcome.vote,
        "stop_reason": outcome.stop_reason.value,
        "stats": asdict(outcome.stats),
        "tree_digest": outcome.digest,
        "reproducible": outcome.reproducible,
        "spec": outcome.spec.model_dump(),
        "messages": parsed.messages,
    }


def search_document(parsed: ParsedRequest, outcome: Outcome, fingerprint: str) -> dict[str, Any]:
    """The response of ``POST /v1/search``, with the tree."""
    part, continuation = search_part(parsed, outcome), parsed.continuation
    return {
        "id": parsed.id,
        "object": "search",
        "created": parsed.created,
        "model": parsed.model,
        "status": "done",
        "text": (continuation.text if continuation else "") + outcome.text,
        "answers": part.pop("votes"),
        "usage": search_usage(outcome),
        **part,
        "tree": to_json(outcome.tree),
        "system_fingerprint": fingerprint,
        **({} if continuation is None else {"branched_from": continuation.document()}),
    }
