"""Writes a search's result as JSON under a schema, which becomes the reply's text.

The tree is grown without the schema. Each chosen trajectory is continued by one plain reply, within
the tokens and the time that the search has left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from search.outcome import Outcome
from search.tree import Finish
from server.plain_completion import PlainCompletion, PlainReply
from server.replies import WrittenReplies, best_choices
from server.reply_events import ReasoningPart, Tell
from server.reply_text import CLOSES, OPENS, split_reasoning
from server.request_parsing import ParsedRequest
from server.service import Service
from server.side_by_side import DrawnReplies, draw_side_by_side

CONNECTION = "The answer as JSON:\n"
"""The text between a trajectory and its JSON."""
TIME_TO_WRITE = 0.2
"""The share of a request's time that is reserved for writing JSON after the search."""
NOTHING = PlainReply("", 0, "length")


@dataclass(frozen=True, slots=True)
class _Trajectory:
    """A chosen trajectory: its token ids, prompt included, and its text."""

    tokens: tuple[int, ...]
    text: str

    def reasoning(self, in_reasoning: bool | None) -> str:
        """The trajectory's text as reasoning: without the tags of a thought."""
        if in_reasoning is None:
            return self.text
        parts = split_reasoning(self.text, opened=in_reasoning)
        return "\n\n".join(part for part in parts if part)

    def connection(self, in_reasoning: bool | None) -> str:
        """The text between the trajectory and its JSON; it closes an open thought."""
        thinks = in_reasoning or (in_reasoning is not None and self.text.lstrip().startswith(OPENS))
        closing = f"\n{CLOSES}" if thinks and CLOSES not in self.text else ""
        apart = "" if not closing and self.text.endswith("\n") else "\n\n"
        return closing + apart + CONNECTION


async def write(
    parsed: ParsedRequest,
    outcome: Outcome,
    service: Service,
    *,
    seconds: float,
    tell: Tell | None,
) -> WrittenReplies:
    """Write each choice as JSON within ``seconds``. Raises ApiError (504) for a search without a
    reply, and what a plain reply raises."""
    assert parsed.json_request is not None, "nothing is to be written"
    paths = [_trajectory(outcome, node, service) for node, _ in best_choices(parsed, outcome)]
    reasoning = [path.reasoning(parsed.in_reasoning) for path in paths]
    if tell is not None and reasoning[0]:
        tell(ReasoningPart(reasoning[0]))
    requests = [
        await _request(parsed.json_request, path, i, parsed, service)
        for i, path in enumerate(paths)
    ]
    most = _room(outcome, requests, service, parsed.key.tree_tokens)
    if most < 1:
        return WrittenReplies(DrawnReplies([NOTHING] * len(paths), []), reasoning)
    with service.quotas.booking(parsed.key, 0, searched=False, request=False) as usage:
        draws = await draw_side_by_side(
            [(replace(r, limit=min(r.limit, most)),) for r in requests],
            f"{parsed.tree}.written",
            service,
            usage,
            seconds=seconds,
            logprobs=parsed.logprobs,
            tell=tell,
        )
    return WrittenReplies(draws, reasoning)


def _trajectory(outcome: Outcome, node: int, service: Service) -> _Trajectory:
    """The trajectory of a node, without an end token."""
    tree = outcome.tree
    tokens = tree.tokens(node)
    if tree[node].finish is Finish.END and not service.text.piece(tokens[-1]):
        tokens = tokens[:-1]
    return _Trajectory(tokens, tree.text(node))


async def _request(
    template: PlainCompletion,
    path: _Trajectory,
    place: int,
    parsed: ParsedRequest,
    service: Service,
) -> PlainCompletion:
    words = path.connection(parsed.in_reasoning)
    ids = await service.tokenizing.run(
        service.text, len(words), lambda text: text.encode_step(words, "")
    )
    return replace(template, prompt=(*path.tokens, *ids), draw=place)


def _room(
    outcome: Outcome, requests: list[PlainCompletion], service: Service, tree_tokens: int
) -> int:
    """The most tokens that each reply may have, by the context and by what the tree has left of
    ``max_tokens``, or else of the key's ``tree_tokens``."""
    context = service.runner.engine.capabilities.context_tokens
    room = context - max(len(request.prompt) for request in requests)
    most = tree_tokens if outcome.spec.max_tokens is None else outcome.spec.max_tokens
    return min(room, (most - outcome.stats.generated_tokens) // len(requests))
