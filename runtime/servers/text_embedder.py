"""Vectors of steps' texts, computed on this side because servers return no hidden states."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from runtime.embedders.endpoint import Endpoint, EndpointOptions
from runtime.embedders.lexical import embed_texts
from search.engine import Trajectory

EmbedderName = Literal["lexical", "encoder", "endpoint"]


class TextEmbedder:
    """Embeds texts by n-grams of letters, a sentence encoder, or an embeddings server."""

    def __init__(
        self, name: EmbedderName, encoder: str | Path | None, endpoint: EndpointOptions | None
    ) -> None:
        """``encoder``: a checkpoint's folder, read by ``load``. No connection is made yet."""
        self._encoder = encoder if name == "encoder" else None
        self._endpoint = Endpoint(endpoint) if name == "endpoint" and endpoint else None
        self._embed_texts = embed_texts

    async def load(self) -> None:
        """Read the encoder, if one is used. Raises ValueError for a folder without one."""
        if self._encoder is not None:
            from runtime.embedders.encoder import Encoder  # torch: only who needs it waits

            encoder = await asyncio.to_thread(Encoder, self._encoder)
            self._embed_texts = encoder.embed_texts

    async def embed(self, trajectories: Sequence[Trajectory]) -> list[tuple[float, ...]]:
        """One vector for the last step of each trajectory. Raises EmbeddingMissing."""
        texts = [trajectory.texts[-1] for trajectory in trajectories]
        if self._endpoint is not None:
            return await self._endpoint.embed_texts(texts)
        return await asyncio.to_thread(self._embed_texts, texts)

    async def close(self) -> None:
        """Close the endpoint's connections."""
        if self._endpoint is not None:
            await self._endpoint.close()
