"""One clock for everything that runs within a limit, and garbage collections that are rarer."""

import gc

import pytest

from poetmodel import clock as home
from poetmodel.clock import ALLOCATIONS, check_time_limit, rare_collections, time_limit, watched
from poetmodel.errors import TimeLimitError


class Clock:
    """A clock that is set by hand."""

    now_s = 0.0

    def monotonic(self):
        """Return the time."""
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    """Put a clock that is set by hand in place of the machine's."""
    found = Clock()
    monkeypatch.setattr(home, "time", found)
    return found


def test_limit_ends_what_runs_in_it_and_nothing_after(clock):
    """It holds inside of the block, once its seconds have passed; without one nothing happens."""
    with time_limit(5):
        clock.now_s = 5.0
        check_time_limit()
        clock.now_s = 5.1
        with pytest.raises(TimeLimitError):
            check_time_limit()
    clock.now_s = 1e9
    check_time_limit()
    assert list(watched(range(3))) == [0, 1, 2]


def test_inner_limit_cannot_be_later_than_the_outer_one(clock):
    """A limit within a limit only shortens it, and leaves it as it was."""
    with time_limit(5):
        with time_limit(60):
            clock.now_s = 6.0
            with pytest.raises(TimeLimitError):
                check_time_limit()
        clock.now_s = 4.0
        with time_limit(0.5):
            clock.now_s = 4.6
            with pytest.raises(TimeLimitError):
                check_time_limit()
        check_time_limit()


def test_many_items_are_watched_while_they_are_read(clock, monkeypatch):
    """A walk over items is stopped between two chunks, not only before the first."""
    monkeypatch.setattr(home, "CHUNK", 10)
    seen = []

    def walk():
        for item in watched(range(100)):
            seen.append(item)
            clock.now_s = item / 20

    with time_limit(1), pytest.raises(TimeLimitError):
        walk()
    assert seen == list(range(30))


@pytest.fixture(autouse=True)
def _thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_rare_collections_end_with_the_outermost_solve():
    """Two solves at once: the thresholds return when the last one ends, with an error, say."""
    gc.set_threshold(700, 11, 12)
    with rare_collections():
        with pytest.raises(KeyboardInterrupt), rare_collections():
            raise KeyboardInterrupt
        assert gc.get_threshold() == (ALLOCATIONS, 11, 12)
    assert gc.get_threshold() == (700, 11, 12)
    with pytest.raises(KeyboardInterrupt), rare_collections():
        raise KeyboardInterrupt
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("first", [0, 2 * ALLOCATIONS])
def test_rare_collections_leave_rarer_ones_alone(first):
    """Where collections are off or rarer still, nothing is changed."""
    gc.set_threshold(first, 11, 12)
    with rare_collections():
        assert gc.get_threshold() == (first, 11, 12)
    assert gc.get_threshold() == (first, 11, 12)
