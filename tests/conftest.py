"""The order of all tests, and the examples that Hypothesis draws.

Every run draws new examples, here and in CI. Its seed is printed at its start and shared by all
of its processes: with ``--hypothesis-seed`` the same files draw the same examples. No example fails
for taking long.
"""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from runtime.embedded import pipe

LONGEST = (
    "tests/test_same_tree.py",
    "tests/test_soak.py",
    "tests/loadtest/test_scenarios.py",
    "tests/server/test_many.py",
    "tests/clients/test_clients.py",
    "tests/runtime/sglang/test_servers.py",
    "tests/runtime/sglang/test_shared_servers.py",
)
"""Started last, one of these would keep a worker busy long after the others are done."""

settings.register_profile(
    "fresh",
    settings.get_profile("default"),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("fresh"), max_examples=25)
settings.register_profile(
    "mutants",  # with the seed in pyproject.toml, and without shrinking failures
    settings.get_profile("fresh"),
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("fresh")


SEED = "hypothesis_seed"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Set Hypothesis's seed before it is read: the given one, the run's, or a new one."""
    if config.option.hypothesis_seed is None:
        of_the_run = getattr(config, "workerinput", {}).get(SEED)
        config.option.hypothesis_seed = of_the_run or str(secrets.randbelow(2**32))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the run's seed to one of its workers."""
    node.workerinput[SEED] = node.config.option.hypothesis_seed


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print the seed even in a quiet run; workers have no terminal to print it to."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"--hypothesis-seed={session.config.option.hypothesis_seed}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, the others in their usual order."""
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.fixture(scope="session", autouse=True)
def engines_are_forked() -> Iterator[None]:
    """Fork the engine processes that tests start from one that has loaded torch, which takes two
    seconds. Servers that run in other processes spawn their engines as usual."""
    multiprocessing.set_forkserver_preload(["tests.loaded_engine"])
    pipe.START_METHOD, spawn = "forkserver", pipe.START_METHOD
    yield
    pipe.START_METHOD = spawn
