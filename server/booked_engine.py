"""Books what a tree has cost that is given up before its round is complete."""

from __future__ import annotations

from runtime.engine_wrapper import EngineWrapper
from search.counters import Counters
from search.engine import Engine
from server.quotas import ReplyTokens


class BookedEngine(EngineWrapper):
    """An engine for the trees of one reply, which are aborted if its client leaves."""

    def __init__(self, engine: Engine, usage: ReplyTokens) -> None:
        super().__init__(engine)
        self._usage = usage

    async def abort(self, tree: str) -> Counters:
        """Abort a tree and count what was decoded for it: events tell of complete rounds alone."""
        cost = await super().abort(tree)
        self._usage.abort_tokens += cost.decoded_tokens - cost.speculated_wasted
        return cost
