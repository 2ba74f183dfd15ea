"""Vectors from an OpenAI-compatible embeddings server that the operator names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from search.engine import EmbeddingMissing


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """``url``: in full, such as ``http://127.0.0.1:8080/v1/embeddings``. ``model``: its name there.

    ``key`` is sent as a bearer token. ``seconds``: most time for an answer.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    seconds: float = 30.0


class Endpoint:
    """Sends all texts in one request. Its vectors are not covered by the promise of exactness."""

    def __init__(self, options: EndpointOptions) -> None:
        """No connection is made yet."""
        self._options = options
        headers = {} if options.key is None else {"Authorization": f"Bearer {options.key}"}
        self._client = httpx.AsyncClient(headers=headers, timeout=options.seconds)

    async def embed_texts(self, texts: Sequence[str]) -> list[tuple[float, ...]]:
        """A vector a text, in order. Raises EmbeddingMissing, without the address, if it fails.

        A full stop replaces a text of nothing but white space, because servers refuse empty texts.
        """
        if not texts:
            return []
        inputs = [text.strip() or "." for text in texts]
        body = {"model": self._options.model, "input": inputs, "encoding_format": "float"}
        try:
            async with asyncio.timeout(self._options.seconds):  # httpx's restarts at each byte
                answer = await self._client.post(self._options.url, json=body)
            answer.raise_for_status()
            vectors = _vectors(answer.json())
        except (TimeoutError, httpx.TimeoutException) as error:
            limit = f"within {self._options.seconds:g} s"
            raise EmbeddingMissing(f"the embeddings endpoint gave no answer {limit}") from error
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            raise EmbeddingMissing(
                f"the embeddings endpoint answered with status {status}"
            ) from error
        except httpx.HTTPError as error:
            reason = type(error).__name__
            raise EmbeddingMissing(f"the embeddings endpoint does not answer: {reason}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise EmbeddingMissing("the embeddings endpoint answered with no embeddings") from error
        if len(vectors) != len(texts):
            count = f"{len(vectors)} embeddings for {len(texts)} texts"
            raise EmbeddingMissing(f"the embeddings endpoint answered with {count}")
        return vectors

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _vectors(answer: Any) -> list[tuple[float, ...]]:
    """The embeddings of an OpenAI answer's ``data``, in the order of ``index``."""
    rows = sorted(answer["data"], key=lambda row: row["index"])
    return [tuple(float(x) for x in row["embedding"]) for row in rows]
