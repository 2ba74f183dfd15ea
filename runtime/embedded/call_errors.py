"""What fails at one search's own work ends that search alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallError:
    """What failed for a tree, None for no tree that could be told; ``call``: at taking on or
    answering this one."""

    tree: str | None
    call: int | None
    error: Exception


class CallErrors:
    """The faults that nobody has looked at yet: one of each call, and one of each tree."""

    def __init__(self) -> None:
        self._found: list[CallError] = []

    def at(self, tree: str | None, call: int | None = None) -> _At:
        """What is raised within has to do with this tree alone: it is noted and goes no further."""
        return _At(self, tree, call)

    def note(self, fault: CallError) -> None:
        """Keep a fault until somebody looks."""
        if fault.call is not None or fault.tree not in self:
            self._found.append(fault)

    def __contains__(self, tree: str | None) -> bool:
        return any(fault.tree == tree for fault in self._found)

    def take(self) -> Iterator[CallError]:
        """Those since the last look."""
        found, self._found = self._found, []
        return iter(found)


class _At:
    """See ``CallErrors.at``."""

    __slots__ = ("_call", "_faults", "_tree")

    def __init__(self, faults: CallErrors, tree: str | None, call: int | None) -> None:
        self._faults, self._tree, self._call = faults, tree, call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._faults.note(CallError(self._tree, self._call, error))
        return True
