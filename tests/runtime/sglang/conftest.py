"""One yard of servers for the whole run: they take long to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.sglang.yard import Yard


@pytest.fixture(scope="session")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    made = Yard(tmp_path_factory.mktemp("sglang"))
    yield made
    made.close()
