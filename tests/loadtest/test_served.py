"""A server that ends with its benchmark; reading its metrics; quantiles."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from loadtest.served import exit_on_sigterm, quantile, values

SERVER_SCRIPT = """
import signal
from loadtest.served import Served

with Served(on_line=lambda line: print(line, end="", flush=True)):
    print("waits", flush=True)
    signal.pause()
"""

TEXT = "\n".join(
    f'hedgerow_kv_tokens{{model="{model}",served="sprig",state="{state}"}} {value}'
    for model, state, value in (
        ("policy", "active", 12.0),
        ("policy", "cached", 13.0),
        ("reward", "active", 14.0),
    )
)


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("hedgerow_kv_tokens", {"model": "policy", "state": "active"}, [12.0]),
        ("hedgerow_kv_tokens", {"state": "active"}, [12.0, 14.0]),
        ("hedgerow_kv_tokens", {"model": "draft"}, []),
        ("hedgerow_kv", {}, []),
    ],
)
def test_values_have_the_name_and_the_labels(
    name: str, labels: dict[str, str], expected: list[float]
) -> None:
    """A sample matches whatever its other labels are."""
    assert values(TEXT, name, **labels) == expected


def test_a_quantile_is_one_of_the_numbers() -> None:
    """Of 0 to 99 the median is 50 and the 0.99-quantile 99; of no numbers it is 0."""
    ordered = [float(number) for number in range(100)]
    assert [quantile(ordered, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 99.0]
    assert quantile([], 0.5) == 0.0


def test_a_handler_is_set_by_the_main_thread_alone_and_never_replaced() -> None:
    """A thread leaves SIGTERM as it is; the main thread sets a handler where there is none."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(exit_on_sigterm).result()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        exit_on_sigterm()
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        exit_on_sigterm()
        assert signal.getsignal(signal.SIGTERM) is handler
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["", "waits"])
def test_the_server_ends_with_a_benchmark_that_is_terminated(moment: str) -> None:
    """By SIGTERM, from the server's first line on and once it is ready."""
    benchmark = subprocess.Popen(
        [sys.executable, "-c", SERVER_SCRIPT], stdout=subprocess.PIPE, text=True
    )
    assert benchmark.stdout is not None
    next(line for line in benchmark.stdout if moment in line)
    benchmark.send_signal(signal.SIGTERM)
    benchmark.communicate(timeout=60)  # until the server, too, has closed its output
    assert benchmark.returncode == 128 + signal.SIGTERM
