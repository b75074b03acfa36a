"""Drawings of the explorer: when a worker draws, and when the stored drawing is returned."""

import asyncio
from types import SimpleNamespace

import pytest

from poetmodel.explore.coordination import Coordinator
from poetmodel.explore.points import OpenProblem, Point
from poetmodel.explore.store import PointStore
from poetmodel.solver.request import SearchOptions


class CountingWorkers:
    """A pool of workers that numbers its drawings."""

    def __init__(self):
        self.drawing_count = 0

    async def acquire(self):
        """Return None: no process is needed."""

    async def run_job_on(self, _worker, _job, _schedule):
        """Return a drawing with its number."""
        self.drawing_count += 1
        return SimpleNamespace(body=b"drawing %d" % self.drawing_count)


@pytest.fixture
def store(tmp_path):
    """Return an empty store."""
    created_store = PointStore(tmp_path / "store.sqlite")
    yield created_store
    created_store.close()


def load_drawings(store, point, *, count):
    """Request the drawing of a point `count` times in succession; return all drawings."""
    coordinator = Coordinator(
        store,
        solve_workers=CountingWorkers(),
        quick_workers=CountingWorkers(),
        search=SearchOptions(),
        drawing_version="now",
    )
    coordinator.open_problems["problem"] = OpenProblem(
        "problem", {"settings": {}}, {point.id: point}
    )

    async def load_all():
        return [await coordinator.load_drawing(point.id, None) for _ in range(count)]

    return asyncio.run(load_all())


def provisional_point():
    """Return a point with the schedule of a lender."""
    return Point(
        id="point",
        problem="problem",
        ram_bytes=100,
        deadline_s=None,
        value=2.0,
        provisional=True,
        lender=("lender", "lender digest"),
        revision=1,
        digest="digest",
    )


def test_provisional_point_is_drawn_once_for_a_revision(store):
    """Without a drawing of the lender, later requests get the stored drawing of the point."""
    assert load_drawings(store, provisional_point(), count=3) == [b"drawing 1"] * 3


def test_provisional_point_has_the_drawing_of_its_lender(store):
    """No worker draws; a stored drawing of the point itself is preferred."""
    store.call_and_wait(store.save_drawing, "lender", "lender digest", "now", b"of the lender")
    assert load_drawings(store, provisional_point(), count=2) == [b"of the lender"] * 2
    store.call_and_wait(store.save_drawing, "point", "digest", "now", b"of the point")
    assert load_drawings(store, provisional_point(), count=1) == [b"of the point"]
