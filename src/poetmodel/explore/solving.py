"""Solves of points: started from neighbours, streamed to pages, saved in the store."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from poetmodel.explore.points import METRICS, OpenProblem, Point, best_neighbour, inherited_bound
from poetmodel.explore.pool import RefusedError, WorkerError, WorkerPool
from poetmodel.problem import DeadlineCounts
from poetmodel.result import relative_gap

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from poetmodel.explore.store import PointStore
    from poetmodel.explore.tasks import Frame

SAVE_EVERY_S: Final = 1.0
"""Minimum interval between writes of bounds without a new schedule [s]."""
NO_PROOF: Final = {"termination": "interrupted", "build_s": 0.0, "solve_s": 0.0, "versions": {}}
"""Value of `Point.proof` before a solve of the point has ended."""


class Notify(Protocol):
    """Callback for a change of a point; `front` is whether the point has a new schedule."""

    def __call__(self, opened: OpenProblem, point: Point, *, front: bool = False) -> None:
        """Notify the listeners."""


class Solves:
    """Starts, cancels and records the solves of all points of a server."""

    def __init__(
        self,
        store: PointStore,
        *,
        solvers: WorkerPool,
        drawers: WorkerPool,
        search: dict[str, Any],
        notify: Notify,
    ) -> None:
        """Store the settings; no solve is running.

        `solvers` are the processes of long solves, `drawers` those of short tasks: drawings and
        first schedules. `search` has the keywords of `poetmodel.solver.facade.solve`.
        """
        self.store = store
        self.solvers = solvers
        self.drawers = drawers
        self.search = search
        self.notify = notify
        self.running: dict[str, asyncio.Task[None]] = {}
        self._schedules: dict[str, bytes] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Cancel all background tasks; the store has their schedules and bounds."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start_solve(self, opened: OpenProblem, point: Point) -> None:
        """Start the solve of a point in the background, and set its state to ``waiting``."""
        point.state = "waiting"
        self.running[point.id] = self._run_in_background(self._solve(opened, point))

    def cancel(self, point_id: str) -> None:
        """Cancel the solve of a point, if it is running."""
        task = self.running.pop(point_id, None)
        if task is not None:
            task.cancel()

    async def use_neighbour(self, opened: OpenProblem, point: Point) -> None:
        """Set a point's schedule and bound provisionally to the best of its neighbours.

        Neighbours are the other points of the problem. If schedule and bound prove the schedule
        optimal within the gap tolerance, the point is finished.
        """
        other_points = [other for other in opened.points.values() if other is not point]
        point.bound = max(point.bound, inherited_bound(point, other_points))
        overlaps = opened.facts["deadline"]["counts"] == DeadlineCounts.OVERLAP
        neighbour = best_neighbour(point, other_points, overlaps=overlaps)
        if neighbour is None or (
            point.value is not None and point.value <= (neighbour.value or 0.0)
        ):
            return
        schedule = await self.schedule(neighbour)
        if not schedule or neighbour.value is None:
            return
        if point.value is not None and point.value <= neighbour.value:
            return  # the point's own solve found a schedule during the wait
        metrics = {name: getattr(neighbour, name) for name in METRICS}
        point.provisional, point.neighbour_bytes = True, neighbour.ram_bytes
        point.lender = (
            neighbour.lender if neighbour.provisional else (neighbour.id, neighbour.digest)
        )
        point.bound = min(point.bound, neighbour.value)
        point.proof = {**NO_PROOF, **neighbour.proof, "termination": "interrupted"}
        if (
            relative_gap(neighbour.value, point.bound) <= self.search["gap"]
        ):  # the bound proves the schedule optimal
            point.state, point.status, point.provisional = "done", "optimal", False
            point.proof["termination"] = "proved"
        point.set_schedule(metrics, schedule)
        if not point.provisional:
            await self._save(point, schedule)

    async def schedule(self, point: Point) -> bytes:
        """Return the packed schedule of a point, or of its neighbour if it is provisional.

        Return empty bytes if there is no schedule.
        """
        point_id = point.lender[0] if point.provisional and point.lender else point.id
        schedule = self._schedules.get(point_id)
        return (
            await self.store.call(self.store.schedule, point_id) if schedule is None else schedule
        )

    def make_job(self, task: str, opened: OpenProblem, point: Point) -> dict[str, Any]:
        """Return a worker's job for a task on the problem of a point; "" is set later."""
        return {
            "task": task,
            "choice": opened.facts["choice"],
            "ram_bytes": point.ram_bytes,
            "deadline_s": point.deadline_s,
        }

    def make_job_with_proof(self, opened: OpenProblem, point: Point) -> dict[str, Any]:
        """Return a worker's job on the schedule of a point, with its proof.

        The caller sets the task.
        """
        proof = {
            **NO_PROOF,
            **point.proof,
            "status": point.status or "feasible",
            "bound": point.bound,
            "final": point.is_over,
        }
        return {**self.make_job("", opened, point), "proof": proof, "search": self.search}

    async def _solve(self, opened: OpenProblem, point: Point) -> None:
        """Solve a point, store the result or the failure, and clean up."""
        first_schedule: asyncio.Task[None] | None = None
        if point.value is None:
            first_schedule = asyncio.create_task(self._find_first_schedule(opened, point))
        try:
            await self._run_solver(opened, point)
        except RefusedError as error:
            self._fail(opened, point, str(error))
        except WorkerError as error:
            self._fail(opened, point, f"{error}; move the slider to try again")
        finally:
            if first_schedule is not None:
                first_schedule.cancel()
            if self.running.get(point.id) is asyncio.current_task():
                del self.running[point.id]
            await self._save(point, self._schedules.get(point.id))
            if point.id not in self.running:
                self._schedules.pop(point.id, None)

    async def _find_first_schedule(self, opened: OpenProblem, point: Point) -> None:
        """Find a schedule quickly, for the page to show until the solve finds one."""
        with contextlib.suppress(WorkerError, RefusedError):  # the solve will raise them, too
            reply = await self.drawers.run_job(self.make_job("begin", opened, point))
            if point.value is None and "found" in reply.values:
                self._use_if_better(opened, point, reply.values["found"], reply.body)

    async def _run_solver(self, opened: OpenProblem, point: Point) -> None:
        """Run the solver from the best known schedule; store each report and the result."""
        current_task, before_s, saved_s = asyncio.current_task(), point.seconds, time.monotonic()
        start = await self.schedule(point)

        def on_frame(frame: Frame) -> None:
            """Store a report of the solver, unless the solve was cancelled."""
            nonlocal saved_s
            if (
                self.running.get(point.id) is not current_task
            ):  # no session requests the point any more
                return
            values = frame.values
            point.state = "solving"
            point.seconds = before_s + values["seconds"]
            point.bound = max(point.bound, values["bound"])
            if "found" in values:
                self._use_if_better(opened, point, values["found"], frame.body)
            else:
                self.notify(opened, point)
                if time.monotonic() - saved_s > SAVE_EVERY_S:
                    saved_s = time.monotonic()
                    self._run_in_background(self._save(point, None))

        job = {
            **self.make_job("solve", opened, point),
            "search": self.search,
            "bound": point.bound,
        }
        reply = await self.solvers.run_job_on(await self.solvers.acquire(), job, start, on_frame)
        metrics, schedule = reply.values.get("found"), reply.body
        if metrics is None or (point.value is not None and point.value < metrics["value"]):
            schedule = await self.schedule(point)
        finished_point = replace(point, proof=dict(point.proof))
        finished_point.finish(reply.values, schedule, before_s=before_s)
        await self._save(finished_point, schedule or None)  # before pages are notified
        point.finish(reply.values, schedule, before_s=before_s)
        if schedule:
            self._schedules[point.id] = schedule
        self.notify(opened, point, front=True)

    def _use_if_better(
        self, opened: OpenProblem, point: Point, metrics: dict[str, Any], schedule: bytes
    ) -> None:
        """Store a worker's schedule if it is better than the point's, and notify the listeners."""
        is_better = point.value is None or metrics["value"] < point.value
        if is_better:
            point.provisional = False
            point.set_schedule(metrics, schedule)
            point.proof = point.proof or dict(NO_PROOF)
            self._schedules[point.id] = schedule
            self._run_in_background(self._save(point, schedule))
        elif point.provisional and metrics["value"] == point.value:
            self._use_as_own(point, schedule)
        self.notify(opened, point, front=is_better)

    def _use_as_own(self, point: Point, schedule: bytes) -> None:
        """Make a neighbour's schedule, verified for this point, the point's own."""
        point.provisional = False
        point.begin_revision(schedule)
        self._schedules[point.id] = schedule
        self._run_in_background(self._save(point, schedule))

    def _fail(self, opened: OpenProblem, point: Point, reason: str) -> None:
        point.state, point.reason = "failed", reason
        self.notify(opened, point)

    async def _save(self, point: Point, schedule: bytes | None) -> None:
        """Write a point to the store, unless its solve is unfinished and it has no own schedule."""
        if point.is_over or (point.value is not None and not point.provisional):
            copy = replace(point, proof=dict(point.proof))
            await self.store.call(self.store.save, copy, schedule)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task in the background."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
