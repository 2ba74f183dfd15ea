"""What a search did, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import fsum

from search.counters import Counters
from search.policies.policy import Frontier
from search.tree import Node, NodeState, Tree
from search.tree_kv import LogicalKV, path_length


@dataclass(frozen=True, slots=True)
class SearchStats:
    """Counts of the committed tree, and times by the caller's clock.

    ``rounds``: rounds whose results were kept. ``nodes``: steps (the root is none). ``expanded``:
    nodes with children. ``pruned``, ``finished``: nodes in that state. ``depth``: the deepest
    step's. ``generated_tokens``: of all steps; ``reply_tokens``: of the chosen trajectory.
    ``kv_tokens_total``: unique tokens, prompt included, on the paths of a round's candidates (the
    nodes that may still grow and the trajectories it finished, before the next plan prunes any;
    equal token prefixes once), summed over rounds; ``kv_tokens_peak``: the largest of these. What
    the engine held is ``engine.kv_tokens_peak``. ``policy_seconds``: planning.
    ``solver_fallbacks``: rounds that the policy planned by its simpler rule since its solver met a
    limit, ``embedder_fallbacks``: since the embedder failed, with ``embedder_fault`` for a reason.
    ``precise_goodput``: tokens a second, the mean length of the finished trajectories over the mean
    time at which their rounds ended; 0 where nothing finished. ``engine``: what the tree cost it,
    dropped work included; all zero where it did not say so in time (``cost_known`` is False then).
    """

    rounds: int
    nodes: int
    expanded: int
    pruned: int
    finished: int
    depth: int
    generated_tokens: int
    reply_tokens: int
    prompt_tokens: int
    kv_tokens_total: int
    kv_tokens_peak: int
    policy_seconds: float
    solver_fallbacks: int
    embedder_fallbacks: int
    embedder_fault: str | None
    seconds: float
    precise_goodput: float
    engine: Counters
    cost_known: bool = True


@dataclass(slots=True)
class Tally:
    """What has to be noted while the tree grows. ``frontier``: the nodes that may still grow."""

    kv: LogicalKV
    frontier: Frontier = Tree.leaves
    rounds: int = 0
    kv_tokens_total: int = 0
    kv_tokens_peak: int = 0
    policy_seconds: float = 0.0
    solver_fallbacks: int = 0
    embedder_fallbacks: int = 0
    embedder_fault: str | None = None
    finished_after: list[float] = field(default_factory=list)

    def round(self, tree: Tree, children: Iterable[Node], seconds: float) -> None:
        """Note a committed round of ``children``, ``seconds`` after the start."""
        candidates = {node.id for node in self.frontier(tree)}
        for child in children:
            self.kv.add(child)
            if child.state is NodeState.FINISHED:
                candidates.add(child.id)
                self.finished_after.append(seconds)
        held = self.kv.tokens(candidates)
        self.rounds += 1
        self.kv_tokens_total += held
        self.kv_tokens_peak = max(self.kv_tokens_peak, held)

    def held(self, tree: Tree) -> int:
        """Unique tokens, prompt included, on the paths of the nodes that may still grow."""
        return self.kv.tokens(node.id for node in self.frontier(tree))

    def stats(
        self, tree: Tree, chosen: int | None, seconds: float, cost: Counters | None
    ) -> SearchStats:
        """The final numbers, ``seconds`` after the start. ``cost``: None if not known."""
        steps = tree.nodes[1:]
        lengths = [path_length(tree, node.id) for node in tree.finished()]
        elapsed = fsum(self.finished_after)
        return SearchStats(
            rounds=self.rounds,
            nodes=len(steps),
            expanded=sum(bool(node.children) for node in tree.nodes),
            pruned=sum(node.state is NodeState.PRUNED for node in steps),
            finished=len(lengths),
            depth=max((node.depth for node in steps), default=0),
            generated_tokens=tree.generated_tokens,
            reply_tokens=0 if chosen is None else path_length(tree, chosen),
            prompt_tokens=len(tree.prompt),
            kv_tokens_total=self.kv_tokens_total,
            kv_tokens_peak=self.kv_tokens_peak,
            policy_seconds=self.policy_seconds,
            solver_fallbacks=self.solver_fallbacks,
            embedder_fallbacks=self.embedder_fallbacks,
            embedder_fault=self.embedder_fault,
            seconds=seconds,
            precise_goodput=sum(lengths) / elapsed if elapsed else 0.0,
            engine=cost or Counters(),
            cost_known=cost is not None,
        )
