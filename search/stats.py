"""Statistics of a search: counts of its tree, and of the tree's KV, which is also cut into blocks
and reported as events.

Nothing here looks into an engine's cache. Equal token prefixes are stored once, so they are counted
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import fsum

from search.counters import Counters
from search.engine import KvMoved
from search.events import Event, Evicted, KvHeld, Rehydrated
from search.policies.policy import Policy, frontier_of
from search.tree import ROOT, Node, NodeState, Tree


@dataclass(frozen=True, slots=True)
class SearchStats:
    """Counts of the committed tree, and times by the caller's clock.

    ``rounds``: rounds whose results were kept. ``nodes``: steps (without the root). ``expanded``:
    nodes with children. ``pruned``, ``finished``: nodes in that state. ``depth``: the deepest
    step's. ``generated_tokens``: of all steps; ``reply_tokens``: of the chosen trajectory.
    ``kv_tokens_total``: unique tokens, prompt included, on the paths of a round's candidates (the
    nodes that may still grow and the trajectories it finished, before the next plan prunes any;
    equal token prefixes once), summed over rounds; ``kv_tokens_peak``: the largest of these. What
    the engine held is ``engine.kv_tokens_peak``. ``policy_seconds``: planning.
    ``solver_fallbacks``: rounds that the policy planned by a simpler rule because its solver met a
    limit; ``embedder_fallbacks``: because the embedder failed, for the reason ``embedder_fault``.
    ``precise_goodput``: tokens a second, the mean length of the finished trajectories over the mean
    time at which their rounds ended; 0 if nothing finished. ``engine``: the tree's cost, dropped
    work included; all zero if the engine did not report it in time (``cost_known`` is False then).
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
    """Numbers that have to be recorded while the tree grows."""

    kv: LogicalKV
    policy: Policy
    rounds: int = 0
    kv_tokens_total: int = 0
    kv_tokens_peak: int = 0
    policy_seconds: float = 0.0
    solver_fallbacks: int = 0
    embedder_fallbacks: int = 0
    embedder_fault: str | None = None
    finished_after: list[float] = field(default_factory=list)

    def round(self, tree: Tree, children: Iterable[Node], seconds: float) -> None:
        """Record a committed round of ``children``, ``seconds`` after the start."""
        candidates = {node.id for node in frontier_of(self.policy, tree)}
        for child in children:
            self.kv.add(child)
            if child.state is NodeState.FINISHED:
                candidates.add(child.id)
                self.finished_after.append(seconds)
        held_tokens = self.kv.tokens(candidates)
        self.rounds += 1
        self.kv_tokens_total += held_tokens
        self.kv_tokens_peak = max(self.kv_tokens_peak, held_tokens)

    def held_tokens(self, tree: Tree) -> int:
        """Unique tokens, prompt included, on the paths of the nodes that may still grow."""
        return self.kv.tokens(node.id for node in frontier_of(self.policy, tree))

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


def path_length(tree: Tree, node_id: int) -> int:
    """Generated tokens on the path down to a node, the prompt not counted."""
    return sum(len(step.tokens) for step in tree.chain(node_id))


class LogicalKV:
    """A radix tree over the token paths of a search tree, used only for counting.

    Its tokens do not depend on how paths are cut into steps: two siblings that begin alike share
    their common beginning, two that are equal share everything.
    """

    def __init__(self, prompt_tokens: int) -> None:
        """``prompt_tokens``: the prompt's length; it is on every path."""
        self._prompt = prompt_tokens
        self._edge: list[tuple[int, ...]] = [()]
        self._above: list[int] = [-1]
        self._below: dict[tuple[int, int], int] = {}
        self._end: dict[int, int] = {ROOT: 0}

    def add(self, node: Node) -> None:
        """Add a node whose parent was added before."""
        edge, rest = self._end[node.parent], node.tokens
        while rest:
            child = self._below.get((edge, rest[0]))
            if child is None:
                edge, rest = self._hang(edge, rest), ()
                continue
            shared = _common(self._edge[child], rest)
            edge = child if shared == len(self._edge[child]) else self._split(child, shared)
            rest = rest[shared:]
        self._end[node.id] = edge

    def tokens(self, nodes: Iterable[int]) -> int:
        """Unique tokens, prompt included, on the paths down to ``nodes``."""
        edges: set[int] = set()
        for node in nodes:
            edge = self._end[node]
            while edge and edge not in edges:
                edges.add(edge)
                edge = self._above[edge]
        return self._prompt + sum(len(self._edge[edge]) for edge in edges)

    def edges(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The radix tree so far: each edge's parent (-1: none) and its tokens, the prompt first.

        Where an edge was split, its upper part has a higher number than its lower one.
        """
        lengths = map(len, self._edge[1:])
        return tuple(self._above), (self._prompt, *lengths)

    def end(self, node: int) -> int:
        """The number, as in ``edges``, of the edge whose last token ends the path of ``node``."""
        return self._end[node]

    def _hang(self, above: int, edge: tuple[int, ...]) -> int:
        self._edge.append(edge)
        self._above.append(above)
        self._below[above, edge[0]] = len(self._edge) - 1
        return len(self._edge) - 1

    def _split(self, child: int, offset: int) -> int:
        """Split the edge of ``child`` after ``offset`` tokens; return the new upper part."""
        edge = self._edge[child]
        middle = self._hang(self._above[child], edge[:offset])
        self._edge[child], self._above[child] = edge[offset:], middle
        self._below[middle, edge[offset]] = child
        return middle


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


@dataclass(frozen=True, slots=True)
class LeafKvBlocks:
    """A tree of blocks in any order: a parent's number may be higher than its child's.

    ``above``: each block's parent, -1 for the first, which holds the prompt. ``costs``: whole
    numbers. ``ends``: the block in which each leaf ends, by rising leaf id; leaves with the same
    token path share it.
    """

    above: tuple[int, ...]
    costs: tuple[int, ...]
    ends: tuple[int, ...]


def step_blocks(tree: Tree, leaves: Sequence[Node]) -> LeafKvBlocks:
    """One block of cost 1 for each distinct step, as in the ETS paper, and one for the prompt."""
    parent: dict[int, int] = {}
    for leaf in leaves:
        first = leaf.first
        while first != ROOT and first not in parent:
            parent[first] = tree[tree[first].parent].first
            first = parent[first]
    place = {first: block for block, first in enumerate(sorted((ROOT, *parent)))}
    above = (-1, *(place[parent[first]] for first in sorted(parent)))
    return LeafKvBlocks(above, (1,) * len(above), tuple(place[leaf.first] for leaf in leaves))


def token_blocks(tree: Tree, leaves: Sequence[Node]) -> LeafKvBlocks:
    """One block for each edge of the radix tree, the prompt included, costing its token count."""
    kv = LogicalKV(len(tree.prompt))
    for node_id in sorted(tree.above(leaves)):
        kv.add(tree[node_id])
    return LeafKvBlocks(*kv.edges(), tuple(kv.end(leaf.id) for leaf in leaves))


class KvEvents:
    """Turns an engine's reports on paths into events of steps. A new step counts as wholly kept."""

    def __init__(self, tree: Tree, emit: Callable[[Event], None]) -> None:
        self._tree = tree
        self._emit = emit
        self._kept_tokens: dict[int, int] = {}
        self._unborn: dict[int, int] = {}
        self._reported = False

    def dead(self, number: int, nodes: Iterable[int]) -> None:
        """Emit ``evicted`` for nodes that the engine was told are dead in round ``number``.

        Nothing is emitted before the engine's first report on its KV.
        """
        for node in nodes if self._reported else ():
            if self._kept_tokens.get(node) != 0:
                self._kept_tokens[node] = 0
                self._emit(Evicted(number, node, 0, "dead"))

    def round(self, number: int, changes: KvMoved, active: int) -> None:
        """Emit the events of a committed round. ``active``: unique tokens of the paths it grew."""
        self._reported = True
        cached = {**self._unborn, **changes.cached}
        self._unborn = {node: at for node, at in cached.items() if node >= len(self._tree)}
        for node in sorted(cached.keys() - self._unborn.keys() - {ROOT}):
            self._emit_change(number, node, cached[node])
        active = min(active, changes.held)
        self._emit(KvHeld(number, active, changes.held - active, changes.capacity))

    def _emit_change(self, number: int, id_: int, cached: int) -> None:
        """Emit what changed for a node, of whose whole path ``cached`` tokens are cached."""
        node, tree = self._tree[id_], self._tree
        above = len(tree.prompt) + path_length(tree, node.parent)
        kept_tokens = min(max(cached - above, 0), len(node.tokens))
        previous = self._kept_tokens.get(id_, len(node.tokens))
        self._kept_tokens[id_] = kept_tokens
        if kept_tokens < previous:
            self._emit(Evicted(number, id_, kept_tokens, "room"))
        elif kept_tokens > previous:
            self._emit(Rehydrated(number, id_, kept_tokens))
