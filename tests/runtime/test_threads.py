"""The engine's threads: as many as make its passes fastest, and no more."""

import pytest

from runtime.embedded.model.threads import fastest_threads, thread_counts


class Timed:
    """A forward whose passes take what ``seconds`` says of threads and rows."""

    def __init__(self, seconds) -> None:
        self.threads = 0
        self.now = 0.0
        self._seconds = seconds

    def new_store(self, slots: int) -> None:
        """None is needed."""

    def run(self, spans, store) -> None:
        """Time goes by."""
        self.now += self._seconds(self.threads, len(spans))


def choose(counts, seconds) -> int:
    model = Timed(seconds)
    chosen = fastest_threads(model, counts, clock=lambda: model.now)
    assert model.threads == chosen
    return chosen


@pytest.mark.parametrize(
    ("most", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_counts_to_choose_from(most, counts):
    """Powers of two, and all."""
    assert thread_counts(most) == counts


def test_threads_that_make_passes_slower_are_not_used():
    """What each thread adds outweighs what it takes over."""
    assert choose((1, 2), lambda threads, rows: 1e-5 * (rows / threads + 70 * threads)) == 1


def test_threads_that_make_passes_faster_are():
    """Half the time with twice the threads; with eight there is nothing more to gain."""
    assert choose((1, 2, 4, 8), lambda threads, rows: 1e-3 * rows / min(threads, 4)) == 4


def test_every_number_of_rows_counts_alike():
    """Two threads take 0.5 of the time at 64 rows and 1.5 each at 1 and 16: slower in the mean."""
    factor = {1: 1.5, 16: 1.5, 64: 0.5}
    assert choose((1, 2), lambda threads, rows: 1e-3 * rows * (factor[rows] ** (threads - 1))) == 1


def test_of_a_large_model_little_is_timed():
    """A pass of one row shows that every thread is needed."""
    model = Timed(lambda threads, rows: float(rows))
    assert fastest_threads(model, (1, 2, 64), clock=lambda: model.now) == 64
    assert model.now == 2
