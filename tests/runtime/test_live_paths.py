"""A path lives as long as a live node ends at it."""

from __future__ import annotations

from runtime.accounting import LivePaths


def test_a_path_dies_with_its_last_node() -> None:
    """1 and 2 end at "ab", 3 at "c"; unknown and dead nodes are ignored."""
    paths = LivePaths[str]()
    assert [paths.add(1, "ab"), paths.add(2, "ab"), paths.add(3, "c")] == [True, False, True]
    assert paths.mark_dead([1, 7]) == []
    assert "ab" in paths
    assert paths.mark_dead([2, 1, 3]) == ["ab", "c"]
    assert list(paths) == []
    assert paths.add(4, "ab")
