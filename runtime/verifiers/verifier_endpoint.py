"""A verifier behind HTTP, at a URL that the operator names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx

from runtime.verifiers.verifier import Judged, VerifierOptions, fingerprint_of, must_be_scores
from search.engine import VerifierFailed

MOST_BYTES = 1 << 20
"""Most bytes of an answer."""


class VerifierEndpoint:
    """``POST`` of ``{"inputs": [{"question": ..., "steps": [...]}, ...]}``, answered with
    ``{"scores": [...]}``. Errors do not name the address, because clients see them."""

    def __init__(self, options: VerifierOptions) -> None:
        """No connection is made yet."""
        self.pure = options.pure
        self.fingerprint = fingerprint_of(options.name, str(options.pure))
        self._url = options.name
        self._seconds = options.seconds
        headers = {} if options.key is None else {"Authorization": f"Bearer {options.key}"}
        self._client = httpx.AsyncClient(headers=headers, timeout=options.seconds)

    async def verify(self, batch: Sequence[Judged]) -> list[float]:
        """A number in [0, 1] for each, rounded. Raises VerifierFailed."""
        message = f"the verifier gave no answer within {self._seconds:g} s"
        try:
            async with asyncio.timeout(self._seconds):  # httpx's restarts at each byte
                answer = await self._post({"inputs": list(batch)})
        except (TimeoutError, httpx.TimeoutException):
            raise VerifierFailed(message) from None
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            raise VerifierFailed(f"the verifier answered with status {status}") from error
        except httpx.HTTPError as error:
            reason = type(error).__name__
            raise VerifierFailed(f"the verifier does not answer: {reason}") from error
        except ValueError as error:
            raise VerifierFailed("the verifier answered with no JSON") from error
        if not isinstance(answer, dict) or "scores" not in answer:
            raise VerifierFailed("the verifier answered without scores")
        return must_be_scores(answer["scores"], len(batch))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _post(self, body: dict[str, Any]) -> Any:
        async with self._client.stream("POST", self._url, json=body) as response:
            response.raise_for_status()
            content = b""
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > MOST_BYTES:
                    raise VerifierFailed(f"the verifier's answer has more than {MOST_BYTES} bytes")
        return json.loads(content)
