"""What a search has reasoned, written down under a JSON schema: the reply's own text.

The tree knows nothing of the schema. Each trajectory that is chosen is gone on with by one plain
reply, within what the search has left of its tokens and its time.
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
"""Between a trajectory and what is written of it."""
TIME_TO_WRITE = 0.2
"""Of a request's time, which its search leaves."""
NOTHING = PlainReply("", 0, "length")


@dataclass(frozen=True, slots=True)
class _Trajectory:
    """One that was chosen: its ids from the prompt on, and its text."""

    tokens: tuple[int, ...]
    text: str

    def reasoning(self, opened: bool | None) -> str:
        """It as it is told: without the tags of a thought."""
        if opened is None:
            return self.text
        parts = split_reasoning(self.text, opened=opened)
        return "\n\n".join(part for part in parts if part)

    def connection(self, opened: bool | None) -> str:
        """What stands between it and what is written."""
        thinks = opened or (opened is not None and self.text.lstrip().startswith(OPENS))
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
    """Write each choice, within ``seconds``. Raises ApiError (504) for a search without a reply,
    and as a plain reply does."""
    assert parsed.written is not None, "nothing is to be written"
    chosen = [_trajectory(outcome, node, service) for node, _ in best_choices(parsed, outcome)]
    reasoning = [one.reasoning(parsed.in_reasoning) for one in chosen]
    if tell is not None and reasoning[0]:
        tell(ReasoningPart(reasoning[0]))
    wanted = [
        await _wanted(parsed.written, one, i, parsed, service) for i, one in enumerate(chosen)
    ]
    most = _room(outcome, wanted, service)
    if most < 1:
        return WrittenReplies(DrawnReplies([NOTHING] * len(chosen), []), reasoning)
    with service.quotas.booking(parsed.key, 0, searched=False, request=False) as spent:
        drawn = await draw_side_by_side(
            [(replace(one, limit=min(one.limit, most)),) for one in wanted],
            f"{parsed.tree}.written",
            service,
            spent,
            seconds=seconds,
            logprobs=parsed.logprobs,
            tell=tell,
        )
    return WrittenReplies(drawn, reasoning)


def _trajectory(outcome: Outcome, node: int, service: Service) -> _Trajectory:
    """Without its end token."""
    tree = outcome.tree
    tokens = tree.tokens(node)
    if tree[node].finish is Finish.END and not service.text.piece(tokens[-1]):
        tokens = tokens[:-1]
    return _Trajectory(tokens, tree.text(node))


async def _wanted(
    written: PlainCompletion,
    one: _Trajectory,
    place: int,
    parsed: ParsedRequest,
    service: Service,
) -> PlainCompletion:
    words = one.connection(parsed.in_reasoning)
    ids = await service.tokenizing.run(
        service.text, len(words), lambda own: own.encode_step(words, "")
    )
    return replace(written, prompt=(*one.tokens, *ids), draw=place)


def _room(outcome: Outcome, wanted: list[PlainCompletion], service: Service) -> int:
    """The most tokens that each may come to."""
    context = service.runner.engine.capabilities.context_tokens
    room = context - max(len(one.prompt) for one in wanted)
    if outcome.spec.max_tokens is not None:
        left = outcome.spec.max_tokens - outcome.stats.generated_tokens
        room = min(room, left // len(wanted))
    return room
