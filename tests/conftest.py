"""For every test: its place in the run, and what Hypothesis draws.

Every run draws examples of its own, here and in CI. Its seed is said at its start and shared by all
of its processes: the same files draw the same examples under ``--hypothesis-seed``. How long an
example takes fails none.
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
"""Begun last, one of these would keep one worker busy long after the others are done."""

settings.register_profile(
    "fresh",
    settings.get_profile("default"),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("fresh"), max_examples=25)
settings.register_profile(
    "mutants",  # by the one seed that pyproject.toml gives, and a failure is enough
    settings.get_profile("fresh"),
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("fresh")


SEED = "hypothesis_seed"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before Hypothesis looks for its seed: the one asked for, the run's, or a new one."""
    if config.option.hypothesis_seed is None:
        of_the_run = getattr(config, "workerinput", {}).get(SEED)
        config.option.hypothesis_seed = of_the_run or str(secrets.randbelow(2**32))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the run's seed to one of its workers."""
    node.workerinput[SEED] = node.config.option.hypothesis_seed


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say the seed, however quiet the run is to be; workers have nobody to say it to."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"--hypothesis-seed={session.config.option.hypothesis_seed}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others as they were."""
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.fixture(scope="session", autouse=True)
def engines_are_forked() -> Iterator[None]:
    """Engine processes that tests start are forks of one that has loaded torch, which takes two
    seconds. Those of servers in processes of their own are spawned, as everywhere else."""
    multiprocessing.set_forkserver_preload(["tests.loaded_engine"])
    pipe.START_METHOD, spawn = "forkserver", pipe.START_METHOD
    yield
    pipe.START_METHOD = spawn
