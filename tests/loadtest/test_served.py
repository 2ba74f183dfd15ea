"""What a server says of itself, and arrivals by chance."""

from __future__ import annotations

import asyncio
import time

import pytest

from loadtest.served import closed_loop, open_loop, poisson, quantile, samples, values

TEXT = "\n".join(
    f'hedgerow_kv_tokens{{model="{model}",served="sprig",state="{state}"}} {value}'
    for model, state, value in (
        ("policy", "active", 12.0),
        ("policy", "cached", 13.0),
        ("reward", "active", 14.0),
    )
)


@pytest.mark.parametrize(
    ("name", "labels", "found"),
    [
        ("hedgerow_kv_tokens", {"model": "policy", "state": "active"}, [12.0]),
        ("hedgerow_kv_tokens", {"state": "active"}, [12.0, 14.0]),
        ("hedgerow_kv_tokens", {"model": "draft"}, []),
        ("hedgerow_kv", {}, []),
    ],
)
def test_values_have_the_name_and_the_labels(
    name: str, labels: dict[str, str], found: list[float]
) -> None:
    """Labels that are not asked for may say anything."""
    assert values(TEXT, name, **labels) == found


def test_every_sample_is_read() -> None:
    """In the order in which they are said."""
    assert [sample.value for sample in samples(TEXT)] == [12.0, 13.0, 14.0]


def test_arrivals_are_the_same_each_time() -> None:
    """In order, in time, and about as many as asked for; another seed, other times."""
    times = poisson(2.0, 1000)
    assert times == poisson(2.0, 1000) != poisson(2.0, 1000, seed=1)
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 1000
    assert len(times) == pytest.approx(2000, rel=0.1)


async def test_none_comes_before_its_time() -> None:
    """All of them, whoever waits: the first is answered after the last has come."""
    began, came = time.perf_counter(), []

    async def ask() -> int:
        came.append(time.perf_counter() - began)
        await asyncio.sleep(0.2)
        return len(came)

    times = poisson(200, 0.1)
    answers, took = await open_loop(ask, 200, 0.1)
    assert answers == [len(times)] * len(times)
    assert all(when >= at for at, when in zip(times, came, strict=True))
    assert took >= times[-1] + 0.2


async def test_clients_ask_one_thing_after_the_other() -> None:
    """As long as there is time, then nothing more."""
    under_way = most = 0

    async def ask() -> float:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return time.perf_counter()

    answers, took = await closed_loop(ask, 3, 0.1)
    assert most == 3
    assert len(answers) >= 3
    assert took >= 0.1


def test_a_quantile_is_one_of_the_numbers() -> None:
    """Of a hundred the fiftieth and the last but one; of none 0."""
    ordered = [float(number) for number in range(100)]
    assert [quantile(ordered, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 99.0]
    assert quantile([], 0.5) == 0.0
