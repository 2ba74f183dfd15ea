"""What searches ask of a policy's server, recorded round by round, to be served again by a replay.

The requests are those that the engine for SGLang sends: prefixes of several that may not be cached
are read first, then a round's steps are drawn in the order of their prefixes, and the first request
of a round brings the hint. The steps are those that the recorded engine drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hedgerow_sglang.plugin_protocol import NAME, Note, custom_params
from runtime.engine_wrapper import EngineWrapper
from runtime.servers.remote_server import ServerTimes
from runtime.sglang.plugin_notes import PluginNotes
from runtime.sglang.replica import Replica
from runtime.sglang.step_request import forked_prefixes
from search.engine import Branch, Engine, Hint, Sampling, Step
from search.tree import Finish

Path = tuple[int, ...]


def plugged_server() -> Replica:
    """A server with our plug-in, to which nothing is sent."""
    server = Replica("http://nowhere", ServerTimes(connect=1, answer=1, probe=1, stall=30))
    server.plugged = True
    return server


@dataclass(slots=True)
class RecordedSearch:
    """One search's rounds so far."""

    tree: str
    server: Replica = field(default_factory=plugged_server)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    _notes: PluginNotes = field(init=False)
    _fresh: set[Path] = field(default_factory=set)
    _prompt: int = 1

    def __post_init__(self) -> None:
        self._notes = PluginNotes(self.tree)

    def hint(self, hint: Hint) -> None:
        """A round begins."""
        self._notes.take(hint)

    def round(self, branches: Sequence[Branch], steps: Sequence[Step]) -> None:
        """A round was drawn."""
        self._prompt = min(len(branch.tokens) for branch in branches)
        forks = forked_prefixes((branch.tokens for branch in branches), self._fresh)
        reads = [self._request(path, (), 0, None) for path in forks]
        drawn = sorted(zip(branches, steps, strict=True), key=lambda pair: pair[0].tokens)
        draws = [self._request(b.tokens, s.tokens, b.limit, b.step) for b, s in drawn]
        self._fresh = {
            (*branch.tokens, *step.tokens)
            for branch, step in drawn
            if step.finish is not Finish.END
        }
        self.rounds.append({"reads": reads, "draws": draws})

    def document(self) -> dict[str, Any]:
        """What a replay needs."""
        over = custom_params(Note(self.tree, self._prompt, over=(self.tree,)))[NAME]
        return {"tree": self.tree, "rounds": self.rounds, "over": over}

    def _request(
        self, prefix: Path, step: Path, limit: int, about: tuple[int, int] | None
    ) -> list[Any]:
        note = self._notes.on(self.server, self._prompt, about)["custom_params"][NAME]
        return [prefix, step, limit, note]


class RecordingEngine(EngineWrapper):
    """An engine whose searches are recorded, by tree."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.searches: dict[str, RecordedSearch] = {}

    def hint(self, tree: str, hint: Hint) -> None:
        """As the engine does."""
        super().hint(tree, hint)
        self._of(tree).hint(hint)

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """As the engine does."""
        steps = await super().expand(tree, branches, sampling)
        if branches:
            self._of(tree).round(branches, steps)
        return steps

    def _of(self, tree: str) -> RecordedSearch:
        if tree not in self.searches:
            self.searches[tree] = RecordedSearch(tree)
        return self.searches[tree]
