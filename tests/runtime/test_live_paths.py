"""A path lives as long as one node that may be come back to ends at it."""

from __future__ import annotations

from runtime.accounting import LivePaths


def test_a_path_dies_with_its_last_node() -> None:
    """By hand: 1 and 2 end at "ab", 3 at "c"; a node that is unknown or dead already is none."""
    paths = LivePaths[str]()
    assert [paths.add(1, "ab"), paths.add(2, "ab"), paths.add(3, "c")] == [True, False, True]
    assert paths.mark_dead([1, 7]) == []
    assert "ab" in paths
    assert paths.mark_dead([2, 1, 3]) == ["ab", "c"]
    assert list(paths) == []
    assert paths.add(4, "ab")
