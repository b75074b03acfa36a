"""Drawings of the explorer: when a worker draws, and who shares the drawing."""

import asyncio
from types import SimpleNamespace

import pytest

from poetmodel.explore.answer import Answer, Found, OpenProblem, Point
from poetmodel.explore.session import ExplorerSession
from poetmodel.explore.settings import ExplorerSettings
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


def session_of(store, point):
    """Return a session with one open point."""
    session = ExplorerSession(
        store,
        solve_workers=CountingWorkers(),
        quick_workers=CountingWorkers(),
        search=SearchOptions(),
    )
    session.open_problems["problem"] = OpenProblem(
        "problem", ExplorerSettings(model="mlp", device="mkr1000"), {}, {point.id: point}
    )
    return session


def provisional_point():
    """Return a point with the schedule of a lender."""
    borrowed = Found(
        metrics={"value": 2.0}, is_own=False, lender=("lender", "digest"), packed=b"packed"
    )
    return Point(
        id="point",
        problem="problem",
        ram_bytes=100,
        deadline_s=None,
        answer=Answer(found=borrowed),
        revision=1,
        digest="digest",
    )


def test_concurrent_requests_of_a_revision_share_one_drawing(store):
    """A later request is drawn again: drawings are not stored."""
    point = provisional_point()
    session = session_of(store, point)

    async def load_all():
        shared = await asyncio.gather(*(session.load_drawing(point.id, 1) for _ in range(3)))
        return [*shared, await session.load_drawing(point.id, None)]

    assert asyncio.run(load_all()) == [b"drawing 1"] * 3 + [b"drawing 2"]
