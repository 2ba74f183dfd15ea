"""``POST /v1/score``, and ``/score`` as with vLLM: rewards for steps that clients send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from search.engine import PrefixTooLong
from server.admission import QueueSlot, seconds_after_turn
from server.api_errors import beyond_context
from server.middleware import forget_body
from server.score_request import ParsedScore, ScoreRequest, parse_score
from server.scoring import Rewards
from server.service import Service


def score_routes(service: Service) -> APIRouter:
    """Create the routes of a service."""
    router = APIRouter()

    @router.post("/score")
    @router.post("/v1/score")
    async def score(body: ScoreRequest, request: Request) -> Response:
        target = service.serving(body.model)
        parsed = await parse_score(body, target, request.state.key)
        forget_body(request)
        slot = request.state.slot
        return JSONResponse(await target.runner.run(_score(parsed, target, slot), slot))

    return router


async def _score(parsed: ParsedScore, service: Service, slot: QueueSlot) -> dict[str, Any]:
    """Score when it is the request's turn; return the response. Tokens are booked as prompt tokens
    as they are read. (In a search, tokens that a reward model reads cost the key nothing.)"""
    seconds = await seconds_after_turn(slot, parsed.seconds)
    service.quotas.must_have_left(parsed.key)
    with service.quotas.booking(parsed.key, 0, searched=False) as usage:

        def on_scored(tokens: int) -> None:
            usage.prompt += tokens

        try:
            replies = await service.runner.score(
                parsed.replies, parsed.tree, seed=parsed.seed, seconds=seconds, on_scored=on_scored
            )
        except PrefixTooLong as error:
            raise beyond_context(parsed.field, str(error)) from None
    return _document(parsed, replies, usage.prompt, service)


def _document(
    parsed: ParsedScore, replies: Sequence[Rewards], tokens: int, service: Service
) -> dict[str, Any]:
    """The response in vLLM's shape; ``score``: the last step's reward; ``rewards``: one a step."""
    return {
        "id": parsed.id,
        "object": "list",
        "created": parsed.created,
        "model": parsed.model,
        "data": [
            {"index": i, "object": "score", "score": rewards[-1], "rewards": rewards}
            for i, rewards in enumerate(replies)
        ],
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
        "seed": parsed.seed,
        "reproducible": service.runner.engine.capabilities.reproducible,
        "system_fingerprint": service.fingerprint,
    }
