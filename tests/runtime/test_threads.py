"""The engine uses the number of threads that lately made passes fastest."""

import pytest

from runtime.embedded.model.threads import LATEST, ThreadTuner, thread_counts


class Passes:
    """Simulated passes with a tuner's thread counts; ``seconds`` gives time by threads and rows."""

    def __init__(self, counts, seconds) -> None:
        self.now, self.seconds = 0.0, seconds
        self.tuner = ThreadTuner(counts, clock=lambda: self.now)

    def run(self, rows: int, passes: int = 300) -> list[int]:
        """Run passes and return the number of threads of each."""
        used = []
        for _ in range(passes):
            with self.tuner.timed(rows) as count:
                used.append(count)
                self.now += self.seconds(count, rows)
        return used


@pytest.mark.parametrize(
    ("most", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_counts_to_choose_from(most, counts):
    """Counts are the powers of two up to ``most``, and ``most``."""
    assert thread_counts(most) == counts


def test_a_first_trial_by_hand():
    """Both counts run in turn, four passes each, twice; then the faster one, two, is used."""
    passes = Passes((1, 2), lambda threads, rows: rows / threads)
    assert passes.run(64, 20) == [1] * 4 + [2] * 4 + [1] * 4 + [2] * 8


def test_threads_that_make_passes_slower_are_not_used():
    """Two threads are not used if their overhead exceeds the gain."""
    passes = Passes((1, 2), lambda threads, rows: 1e-5 * (rows / threads + 70 * threads))
    passes.run(64)
    assert passes.tuner.at(64) == 1


def test_threads_that_make_passes_faster_are():
    """With passes that scale up to four threads, four are used rather than eight."""
    passes = Passes((1, 2, 4, 8), lambda threads, rows: 1e-3 * rows / min(threads, 4))
    passes.run(64)
    assert passes.tuner.at(64) == 4


def test_large_passes_have_more_threads_than_small_ones():
    """Two threads take 1.5 times as long at 1 row, .97 at 16 (not worth a core), .5 at 64."""
    factor = {1: 1.5, 16: 0.97, 64: 0.5}
    passes = Passes((1, 2), lambda threads, rows: 1e-3 * rows * (factor[rows] ** (threads - 1)))
    for rows in factor:
        passes.run(rows)
    assert [passes.tuner.at(rows) for rows in (1, 16, 31, 64, 127)] == [1, 1, 1, 2, 2]


def test_the_choice_follows_the_load():
    """The second thread is dropped while another process has the second core."""
    passes = Passes((1, 2), lambda threads, rows: rows / threads)
    passes.run(64, 5000)
    passes.seconds = lambda threads, rows: rows * threads
    assert set(passes.run(64, 2 * LATEST)[-20:]) == {1}
    passes.seconds = lambda threads, rows: rows / threads
    assert set(passes.run(64, 2 * LATEST)[-20:]) == {2}


def test_a_pass_that_is_held_up_gives_the_core_away():
    """One slow pass shows that the second core is taken; a later trial finds it free again."""
    passes = Passes((1, 2), lambda threads, rows: rows / threads)
    passes.run(64, 100)
    free, passes.seconds = passes.seconds, lambda threads, rows: rows * (9 if threads > 1 else 1)
    assert passes.run(64, 20) == [2] + [1] * 12 + [2] + [1] * 6
    passes.seconds = free
    assert set(passes.run(64, 2 * LATEST)[-20:]) == {2}


def test_a_trial_ends_where_it_is_held_up():
    """A trial of a second thread on a taken core lasts one pass, and the wait for the next trial
    doubles: 8, 16."""
    passes = Passes((1, 2), lambda threads, rows: rows * (9 if threads > 1 else 1))
    assert passes.run(64, 36) == [1] * 4 + [2] + [1] * (8 + 4) + [2] + [1] * 18


def test_one_slow_pass_is_soon_forgiven():
    """One slow pass costs eight passes with one thread and eight more in a trial."""
    passes = Passes((1, 2), lambda threads, rows: rows / threads)
    passes.run(64, 5000)
    steady, passes.seconds = passes.seconds, lambda threads, rows: 9 * rows
    passes.run(64, 1)
    passes.seconds = steady
    assert passes.run(64, 60).count(1) == 8 + 8


def test_longer_passes_keep_their_threads():
    """As contexts grow, old times with one thread are outdated; a few passes show that."""
    passes = Passes((1, 2), lambda threads, rows: rows / threads)
    passes.run(64, 100)
    passes.seconds = lambda threads, rows: 3 * rows / threads
    assert passes.run(64, 60).count(1) < 10


def test_a_steady_choice_is_seldom_tried():
    """Fewer than one pass in fifty tries another number of threads."""
    passes = Passes((1, 2), lambda threads, rows: rows / threads)
    assert passes.run(64, 20_000).count(1) < 20_000 / 50


def test_one_number_is_no_choice():
    """With a single count there is nothing to choose."""
    passes = Passes((3,), lambda threads, rows: 1.0)
    assert set(passes.run(7)) == {3}
    assert passes.tuner.at(7) == 3
