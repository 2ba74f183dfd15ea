"""The engine's threads: as many as make its passes fastest, and no more."""

import pytest

from runtime.embedded.model.thread_timing import fastest_threads
from runtime.embedded.model.threads import Threads, thread_counts


class Timed:
    """A forward whose passes take what ``seconds`` says of threads and rows."""

    def __init__(self, seconds) -> None:
        self.threads = Threads.same(1)
        self.now = 0.0
        self._seconds = seconds

    def new_store(self, slots: int) -> None:
        """None is needed."""

    def run(self, spans, store) -> None:
        """Time goes by."""
        self.now += self._seconds(self.threads.at(len(spans)), len(spans))


def choose(counts, seconds) -> Threads:
    model = Timed(seconds)
    chosen = fastest_threads(model, counts, clock=lambda: model.now)
    assert model.threads is chosen
    return chosen


@pytest.mark.parametrize(
    ("most", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_counts_to_choose_from(most, counts):
    """Powers of two, and all."""
    assert thread_counts(most) == counts


def test_threads_by_rows():
    """Each number of rows has the threads of the last step that it reaches."""
    threads = Threads.rising([(1, 1), (16, 1), (64, 4)])
    assert threads.steps == ((1, 1), (64, 4))
    assert Threads.rising([(1, 1), (16, 4), (64, 2)]).steps == ((1, 1), (16, 4))
    assert [threads.at(rows) for rows in (0, 1, 63, 64, 900)] == [1, 1, 1, 4, 4]
    assert (threads.counts, threads.most) == ((1, 4), 4)
    assert str(threads) == "1, 4 from 64 rows on"
    assert Threads.same(3).at(7) == 3
    with pytest.raises(ValueError, match="threads: 0; at least 1"):
        Threads.same(0)


def test_threads_that_make_passes_slower_are_not_used():
    """What each thread adds outweighs what it takes over."""
    slower = choose((1, 2), lambda threads, rows: 1e-5 * (rows / threads + 70 * threads))
    assert slower == Threads.same(1)


def test_threads_that_make_passes_faster_are():
    """Half the time with twice the threads; with eight there is nothing more to gain."""
    faster = choose((1, 2, 4, 8), lambda threads, rows: 1e-3 * rows / min(threads, 4))
    assert faster == Threads.same(4)


def test_large_passes_have_more_threads_than_small_ones():
    """Two threads take 1.5 of the time at 1 row, .97 at 16, which is not worth a core, .5 at 64."""
    factor = {1: 1.5, 16: 0.97, 64: 0.5}
    chosen = choose((1, 2), lambda threads, rows: 1e-3 * rows * (factor[rows] ** (threads - 1)))
    assert chosen.steps == ((1, 1), (64, 2))


def test_of_a_large_model_little_is_timed():
    """A pass of one row shows that every thread is needed."""
    model = Timed(lambda threads, rows: float(rows))
    chosen = fastest_threads(model, (1, 2, 64), clock=lambda: model.now)
    assert chosen == Threads.same(64)
    assert model.now == 2
