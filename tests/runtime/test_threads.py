"""The engine's threads: as many as have lately made passes fastest, and no more."""

import pytest

from runtime.embedded.model.threads import LATEST, ThreadTuner, thread_counts


class Passes:
    """Passes by a tuner's choice that take what ``seconds`` says of threads and rows."""

    def __init__(self, counts, seconds) -> None:
        self.now, self.seconds = 0.0, seconds
        self.tuner = ThreadTuner(counts, clock=lambda: self.now)

    def run(self, rows: int, passes: int = 300) -> list[int]:
        """The threads of each pass."""
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
    """Powers of two, and all."""
    assert thread_counts(most) == counts


def test_a_first_trial_by_hand():
    """Both numbers in turns, four passes each, twice; then what was faster, which is two."""
    passes = Passes((1, 2), lambda threads, rows: rows / threads)
    assert passes.run(64, 20) == [1] * 4 + [2] * 4 + [1] * 4 + [2] * 8


def test_threads_that_make_passes_slower_are_not_used():
    """What each thread adds outweighs what it takes over."""
    passes = Passes((1, 2), lambda threads, rows: 1e-5 * (rows / threads + 70 * threads))
    passes.run(64)
    assert passes.tuner.at(64) == 1


def test_threads_that_make_passes_faster_are():
    """Half the time with twice the threads; with eight there is nothing more to gain."""
    passes = Passes((1, 2, 4, 8), lambda threads, rows: 1e-3 * rows / min(threads, 4))
    passes.run(64)
    assert passes.tuner.at(64) == 4


def test_large_passes_have_more_threads_than_small_ones():
    """Two threads take 1.5 of the time at 1 row, .97 at 16, which is not worth a core, .5 at 64."""
    factor = {1: 1.5, 16: 0.97, 64: 0.5}
    passes = Passes((1, 2), lambda threads, rows: 1e-3 * rows * (factor[rows] ** (threads - 1)))
    for rows in factor:
        passes.run(rows)
    assert [passes.tuner.at(rows) for rows in (1, 16, 31, 64, 127)] == [1, 1, 1, 2, 2]


def test_the_choice_follows_the_load():
    """When others take the second core the second thread goes, and it comes back with the core."""
    passes = Passes((1, 2), lambda threads, rows: rows / threads)
    passes.run(64, 5000)
    passes.seconds = lambda threads, rows: rows * threads
    assert set(passes.run(64, 2 * LATEST)[-20:]) == {1}
    passes.seconds = lambda threads, rows: rows / threads
    assert set(passes.run(64, 2 * LATEST)[-20:]) == {2}


def test_a_pass_that_is_held_up_gives_the_core_away():
    """Somebody takes the second core: a pass shows it. Later a trial finds it free again."""
    passes = Passes((1, 2), lambda threads, rows: rows / threads)
    passes.run(64, 100)
    free, passes.seconds = passes.seconds, lambda threads, rows: rows * (9 if threads > 1 else 1)
    assert passes.run(64, 20) == [2] + [1] * 12 + [2] + [1] * 6
    passes.seconds = free
    assert set(passes.run(64, 2 * LATEST)[-20:]) == {2}


def test_a_trial_ends_where_it_is_held_up():
    """Who tries a second thread while somebody else has the core does so for one pass, and waits
    for twice as many passes each time: 8, 16."""
    passes = Passes((1, 2), lambda threads, rows: rows * (9 if threads > 1 else 1))
    assert passes.run(64, 36) == [1] * 4 + [2] + [1] * (8 + 4) + [2] + [1] * 18


def test_one_slow_pass_is_soon_forgiven():
    """However steady the choice was: eight passes with one thread, and a trial, half of it so."""
    passes = Passes((1, 2), lambda threads, rows: rows / threads)
    passes.run(64, 5000)
    steady, passes.seconds = passes.seconds, lambda threads, rows: 9 * rows
    passes.run(64, 1)
    passes.seconds = steady
    assert passes.run(64, 60).count(1) == 8 + 8


def test_longer_passes_keep_their_threads():
    """Contexts grow: what one thread took once is no longer known, and a few passes show it."""
    passes = Passes((1, 2), lambda threads, rows: rows / threads)
    passes.run(64, 100)
    passes.seconds = lambda threads, rows: 3 * rows / threads
    assert passes.run(64, 60).count(1) < 10


def test_a_steady_choice_is_seldom_tried():
    """Fewer than one pass in fifty has another number of threads than the chosen one."""
    passes = Passes((1, 2), lambda threads, rows: rows / threads)
    assert passes.run(64, 20_000).count(1) < 20_000 / 50


def test_one_number_is_no_choice():
    """Nothing is timed."""
    passes = Passes((3,), lambda threads, rows: 1.0)
    assert set(passes.run(7)) == {3}
    assert passes.tuner.at(7) == 3
