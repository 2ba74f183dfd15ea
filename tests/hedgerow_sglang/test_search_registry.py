"""What the plug-in's registry learns of searches from their notes; SGLang is not needed."""

from __future__ import annotations

from array import array

import pytest

from hedgerow_sglang.plugin_protocol import Note
from hedgerow_sglang.search_registry import SILENT_TURNS, CacheNamespace, SearchRegistry
from tests.kvpolicy.pressure import kept_tokens

PROMPT = 2
HERE = CacheNamespace()


def ids(*tokens: int) -> array:
    """Token ids."""
    return array("q", tokens)


def ash_registry() -> SearchRegistry:
    """A search "ash" with prompt 9 9, and below it steps 1: 1 1 (value 0.2) and 2: 2 2 (0.8)."""
    searches = SearchRegistry()
    first = Note("ash", PROMPT, 1, 0, turn=1, active=(0,))
    second = Note("ash", PROMPT, 2, 0, turn=1, active=(0,))
    for note in (first, second):
        assert searches.take_note(note) == []
    assert searches.complete_step(first, ids(9, 9, 1, 1), HERE) == [("ash", 0), ("ash", 1)]
    assert searches.complete_step(second, ids(9, 9, 2, 2), HERE) == [("ash", 2)]
    searches.take_note(Note("ash", PROMPT, 3, 2, turn=2, values={1: 0.2, 2: 0.8}, active=(2,)))
    return searches


def order(searches: SearchRegistry, *waiting: Note) -> list[int]:
    """Ash's blocks in eviction order."""
    readers = searches.readers(waiting)
    ranked = sorted(searches.blocks("ash"), key=lambda block: searches.rank(block, readers))
    return [node for _, node in ranked]


def tokens_within(searches: SearchRegistry, budget: int) -> dict[str, list[int]]:
    """Tokens that kvpolicy keeps of every block under a budget, by tree."""
    plan = kept_tokens(searches.block_table, budget)
    return {tree: tokens.tolist() for tree, tokens in plan.items()}


@pytest.mark.promise(
    "The SGLang plug-in evicts in the order of `kvpolicy`: first what is off the active path, then "
    "the higher id."
)
def test_the_order_is_kvpolicys() -> None:
    """Block 1 is off the path and goes first; of those on it, the higher id goes first."""
    assert order(ash_registry()) == [1, 2, 0]
    assert tokens_within(ash_registry(), 5) == {"ash": [2, 1, 2]}


def test_a_step_without_a_reward_has_its_parents_value() -> None:
    """The unscored step 3 below 2 is worth 2's 0.8; it goes first once the search turns to 1."""
    searches = ash_registry()
    searches.complete_step(Note("ash", PROMPT, 3, 2, turn=2), ids(9, 9, 2, 2, 5), HERE)
    searches.take_note(Note("ash", PROMPT, 4, 1, turn=3, active=(1,)))
    assert order(searches) == [3, 2, 1, 0]
    searches.take_note(Note("ash", PROMPT, 4, 0, turn=4, active=(0,)))
    assert order(searches) == [1, 3, 2, 0]


def test_where_the_search_would_turn_next_goes_before_rewards() -> None:
    """Block 2 is worth 0.8 and block 1 0.2, but the search would turn to 1 before 2."""
    searches = ash_registry()
    searches.take_note(Note("ash", PROMPT, 4, 0, turn=3, active=(0,), outlook=(1, 2, 7)))
    assert order(searches) == [2, 1, 0]


def test_a_turn_is_taken_once_and_never_an_earlier_one() -> None:
    """Every request of a round carries its hint; requests may arrive late or out of order."""
    searches = ash_registry()
    searches.take_note(Note("ash", PROMPT, 4, 2, turn=2, values={1: 0.9}, active=(1,)))
    searches.take_note(Note("ash", PROMPT, 5, 2, turn=1, values={1: 0.9}, active=(1,)))
    assert order(searches) == [1, 2, 0]


def test_what_died_is_freed_once_and_does_not_come_back() -> None:
    searches = ash_registry()
    (dead,) = searches.take_note(Note("ash", PROMPT, 4, 2, turn=3, dead=(1,)))
    assert dead == (("ash", 1), HERE, ids(9, 9, 1, 1), PROMPT, False)
    assert searches.take_note(Note("ash", PROMPT, 5, 2, turn=4, dead=(1,))) == []
    late = Note("ash", PROMPT, 1, 0, turn=4)
    assert searches.complete_step(late, ids(9, 9, 1, 1), HERE) == []
    assert 1 not in order(searches)


def test_a_search_that_is_over_is_freed_whole() -> None:
    """Any search's note may end it, and a late step of the ended search adds no block."""
    searches = ash_registry()
    paths = [dead.tokens for dead in searches.take_note(Note("oak", 3, over=("ash", "elm")))]
    assert paths == [ids(9, 9), ids(9, 9, 1, 1), ids(9, 9, 2, 2)]
    searches.complete_step(Note("ash", PROMPT, 3, 2, turn=2), ids(9, 9, 2, 2, 5), HERE)
    assert len(searches) == 1
    assert searches.take_note(Note("oak", 3, over=("oak",))) == []
    assert len(searches) == 0


def test_a_search_that_comes_from_another_server_hangs_below_its_prompt() -> None:
    """A step with an unknown parent, or with tokens that leave the parent's path, goes below it."""
    searches = ash_registry()
    searches.complete_step(Note("ash", PROMPT, 12, 7, turn=2), ids(9, 9, 2, 2, 6), HERE)
    searches.complete_step(Note("ash", PROMPT, 13, 2, turn=2), ids(9, 9, 3, 3, 6), HERE)
    assert searches.chain(("ash", 12)) == [("ash", 12), ("ash", 0)]
    assert searches.chain(("ash", 13)) == [("ash", 13), ("ash", 0)]
    assert searches.path(("ash", 13)) == (HERE, ids(9, 9, 3, 3, 6), PROMPT)
    assert tokens_within(searches, 100) == {"ash": [2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 3]}


def test_what_was_read_before() -> None:
    """Tokens known to have been read: none in the first round, later the parent's path but for its
    last token. A request without a step counts the longest path of any block."""
    searches = ash_registry()
    good = ids(9, 9, 2, 2)
    assert searches.read_before(Note("ash", PROMPT, 2, 0, turn=1), ids(9, 9)) == 0
    assert searches.read_before(Note("ash", PROMPT, 3, 2, turn=2), good) == 3
    assert searches.read_before(Note("ash", PROMPT, 3, 0, turn=2), ids(9, 9)) == 1
    assert searches.read_before(Note("ash", PROMPT, 3, 1, turn=2), good) == 0
    assert searches.read_before(Note("ash", PROMPT, 3, 7, turn=2), good) == 0
    assert searches.read_before(Note("elm", PROMPT, 3, 2, turn=2), good) == 0
    assert searches.read_before(Note("ash", PROMPT, turn=2), good) == 3
    assert searches.read_before(Note("ash", PROMPT, turn=2), ids(9, 9, 2)) == 1
    assert searches.read_before(Note("ash", PROMPT, turn=1), good) == 0
    searches.clear()
    assert searches.read_before(Note("ash", PROMPT, 3, 2, turn=2), good) == 0


def test_a_search_that_went_without_a_word_holds_nothing_for_ever() -> None:
    """A dead client's search is dropped after ``SILENT_TURNS`` turns of others, on all ranks."""
    searches = ash_registry()
    for turn in range(1, SILENT_TURNS):
        assert searches.take_note(Note("oak", 3, turn=turn, active=(0,))) == []
    assert len(searches) == 2
    gone = [
        dead
        for turn in range(SILENT_TURNS, SILENT_TURNS + 2)
        for dead in searches.take_note(Note("oak", 3, turn=turn, active=(0,)))
    ]
    assert len(searches) == 1
    assert {dead.block: dead.silent for dead in gone} == {("ash", node): True for node in range(3)}


def test_what_waits_decides_what_a_round_gives_up_first() -> None:
    """Blocks 1 and 2 are both read by the round: the one whose reader is first in the queue stays
    longer, one without a waiting reader goes earlier, and the prompt goes last."""
    searches = ash_registry()
    searches.take_note(Note("ash", PROMPT, turn=3, active=(1, 2)))
    ask = {node: Note("ash", PROMPT, 5 + node, node, turn=3) for node in (1, 2)}
    assert order(searches, ask[1], ask[2]) == [2, 1, 0]
    assert order(searches, ask[2], ask[1]) == [1, 2, 0]
    assert order(searches, ask[1]) == [2, 1, 0]
    assert order(searches, ask[2]) == [1, 2, 0]


def test_a_step_that_is_not_scored_yet_stays() -> None:
    """Step 3 of the current round goes after block 1, which the round does not read; from the next
    hint on its reward counts."""
    searches = ash_registry()
    searches.complete_step(Note("ash", PROMPT, 3, 2, turn=2), ids(9, 9, 2, 2, 5), HERE)
    assert order(searches) == [1, 3, 2, 0]
    searches.take_note(Note("ash", PROMPT, turn=3, values={3: 0.1}, active=(2,)))
    assert order(searches) == [3, 1, 2, 0]


def test_a_step_may_be_drawn_in_several_requests() -> None:
    """A block grows with each request; repeated, shorter or diverging tokens change nothing."""
    searches = ash_registry()
    note = Note("ash", PROMPT, 3, 2, turn=2)
    prefix, whole = ids(9, 9, 2, 2, 5), ids(9, 9, 2, 2, 5, 6)
    assert searches.complete_step(note, prefix, HERE) == [("ash", 3)]
    assert searches.complete_step(note, whole, HERE) == [("ash", 3)]
    assert searches.path(("ash", 3)).tokens == whole
    for tokens in (whole, prefix, ids(9, 9, 2, 2, 7, 7, 7)):
        assert searches.complete_step(note, tokens, HERE) == []
    assert searches.path(("ash", 3)).tokens == whole
