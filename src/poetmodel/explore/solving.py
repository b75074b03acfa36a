"""Solves of points: started from neighbours, streamed to pages, saved in the store."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from poetmodel.explore.points import OpenProblem, Point, best_neighbour, inherited_bound
from poetmodel.explore.pool import RefusedError, WorkerError, WorkerPool
from poetmodel.problem import DeadlineCounts
from poetmodel.result import relative_gap

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from poetmodel.explore.store import PointStore
    from poetmodel.explore.tasks import Frame
    from poetmodel.solver.request import SearchOptions

SAVE_EVERY_S: Final = 1.0
"""Minimum interval between writes of bounds without a new schedule [s]."""
NO_PROOF: Final = {"termination": "interrupted", "build_s": 0.0, "solve_s": 0.0, "versions": {}}
"""Value of `Point.proof` of a schedule before a solve of the point has ended."""


class Notify(Protocol):
    """Callback for a change of a point; `has_new_schedule` is whether its schedule is new."""

    def __call__(
        self, open_problem: OpenProblem, point: Point, *, has_new_schedule: bool = False
    ) -> None:
        """Notify the listeners."""


class SolveManager:
    """Starts, cancels and records solves of points; quick workers find first schedules."""

    def __init__(
        self,
        store: PointStore,
        *,
        solve_workers: WorkerPool,
        quick_workers: WorkerPool,
        search: SearchOptions,
        notify: Notify,
    ) -> None:
        self.store = store
        self.solve_workers = solve_workers
        self.quick_workers = quick_workers
        self.search = search
        self.notify = notify
        self.running: dict[str, asyncio.Task[None]] = {}
        """Tasks of solves that run or wait for a process, by the id of their point."""
        self._schedules: dict[str, bytes] = {}
        """Packed schedules of points whose solves run, by the id of the point."""
        self._background: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Cancel all background tasks; wait until solves have saved their points."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start_solve(self, open_problem: OpenProblem, point: Point) -> None:
        """Start the solve of a point, now ``waiting``, in the background."""
        point.state = "waiting"
        self.running[point.id] = self._run_in_background(self._solve(open_problem, point))

    def cancel(self, point_id: str) -> None:
        """Cancel the solve of a point, if it runs or waits, and remove it from `running`."""
        task = self.running.pop(point_id, None)
        if task is not None:
            task.cancel()

    async def use_neighbour(self, open_problem: OpenProblem, point: Point) -> None:
        """Raise a point's bound to `inherited_bound`; use a better schedule of `best_neighbour`.

        It is provisional, unless the bound proves it optimal: then the point is finished and saved.
        """
        other_points = [other for other in open_problem.points.values() if other is not point]
        point.bound = max(point.bound, inherited_bound(point, other_points))
        plans_overlap = open_problem.facts["deadline"]["counts"] == DeadlineCounts.OVERLAP
        neighbour = best_neighbour(point, other_points, overlaps=plans_overlap)
        if neighbour is None or (
            point.value is not None and point.value <= (neighbour.value or 0.0)
        ):
            return
        schedule = await self.load_schedule(neighbour)
        if not schedule or neighbour.value is None:
            return
        if point.value is not None and point.value <= neighbour.value:
            return  # the point got a schedule that is as good during the wait
        point.provisional, point.neighbour_bytes = True, neighbour.ram_bytes
        point.lender = (
            neighbour.lender if neighbour.provisional else (neighbour.id, neighbour.digest)
        )
        point.bound = min(point.bound, neighbour.value)
        point.proof = {**NO_PROOF, **neighbour.proof, "termination": "interrupted"}
        # The bound proves the schedule optimal, so no solve is needed.
        if relative_gap(neighbour.value, point.bound) <= self.search.gap:
            point.state, point.status, point.provisional = "done", "optimal", False
            point.proof["termination"] = "proved"
        point.set_schedule(neighbour.schedule_metrics, schedule)
        if not point.provisional:
            await self._save(point, schedule)

    async def load_schedule(self, point: Point) -> bytes:
        """Return the packed schedule of a point or of its lender; empty if there is none."""
        point_id = point.lender[0] if point.provisional and point.lender else point.id
        schedule = self._schedules.get(point_id)
        return (
            await self.store.call(self.store.load_schedule, point_id)
            if schedule is None
            else schedule
        )

    def make_job(self, task_name: str, open_problem: OpenProblem, point: Point) -> dict[str, Any]:
        """Return the job of a worker: task, settings of a problem, RAM and deadline of a point."""
        return {
            "task": task_name,
            "settings": open_problem.settings,
            "ram_bytes": point.ram_bytes,
            "deadline_s": point.deadline_s,
        }

    def make_job_with_proof(
        self, task_name: str, open_problem: OpenProblem, point: Point
    ) -> dict[str, Any]:
        """Return the job of `make_job` with the proof of a point and the options of a search."""
        proof = {
            **NO_PROOF,
            **point.proof,
            "status": point.status or "feasible",
            "bound": point.bound,
            "final": point.is_finished,
        }
        job = self.make_job(task_name, open_problem, point)
        return {**job, "proof": proof, "search": self.search}

    async def _solve(self, open_problem: OpenProblem, point: Point) -> None:
        """Solve a point and save it; the point becomes ``failed`` if problem or worker do.

        A quick worker searches for a first schedule of a point without one at the same time.
        """
        first_schedule_task: asyncio.Task[None] | None = None
        if point.value is None:
            first_schedule_task = asyncio.create_task(
                self._find_first_schedule(open_problem, point)
            )
        try:
            await self._run_solver(open_problem, point)
        except RefusedError as error:
            self._fail(open_problem, point, str(error))
        except WorkerError as error:
            self._fail(open_problem, point, f"{error}; move the slider to try again")
        finally:
            if first_schedule_task is not None:
                first_schedule_task.cancel()
            if self.running.get(point.id) is asyncio.current_task():
                del self.running[point.id]
            await self._save(point, self._schedules.get(point.id))
            if point.id not in self.running:
                self._schedules.pop(point.id, None)

    async def _find_first_schedule(self, open_problem: OpenProblem, point: Point) -> None:
        """Use a quick worker's schedule if the point still has none; the solve reports errors."""
        with contextlib.suppress(WorkerError, RefusedError):
            reply = await self.quick_workers.run_job(
                self.make_job("find_first_schedule", open_problem, point)
            )
            if point.value is None and "metrics" in reply.values:
                self._use_if_better(open_problem, point, reply.values["metrics"], reply.body)

    async def _run_solver(self, open_problem: OpenProblem, point: Point) -> None:
        """Run the solver from the schedule of a point; save the result, then update the point."""
        this_solve, earlier_s, saved_s = asyncio.current_task(), point.seconds, time.monotonic()
        start_schedule = await self.load_schedule(point)

        def on_frame(frame: Frame) -> None:
            """Set the point's state to ``solving``; update time, bound and schedule by a report."""
            nonlocal saved_s
            # The solve was cancelled, because no session requested the point any more.
            if self.running.get(point.id) is not this_solve:
                return
            values = frame.values
            point.state = "solving"
            point.seconds = earlier_s + values["seconds"]
            point.bound = max(point.bound, values["bound"])
            if "metrics" in values:
                self._use_if_better(open_problem, point, values["metrics"], frame.body)
            else:
                self.notify(open_problem, point)
                if time.monotonic() - saved_s > SAVE_EVERY_S:
                    saved_s = time.monotonic()
                    self._run_in_background(self._save(point, None))

        job = {
            **self.make_job("solve_point", open_problem, point),
            "search": self.search,
            "bound": point.bound,
        }
        reply = await self.solve_workers.run_job_on(
            await self.solve_workers.acquire(), job, start_schedule, on_frame
        )
        metrics, schedule = reply.values.get("metrics"), reply.body
        if metrics is None or (point.value is not None and point.value < metrics["value"]):
            schedule = await self.load_schedule(point)
        finished_point = replace(point, proof=dict(point.proof))
        finished_point.finish(reply.values, schedule, earlier_s=earlier_s)
        await self._save(finished_point, schedule or None)  # before pages are notified
        point.finish(reply.values, schedule, earlier_s=earlier_s)
        if schedule:
            self._schedules[point.id] = schedule
        self.notify(open_problem, point, has_new_schedule=True)

    def _use_if_better(
        self, open_problem: OpenProblem, point: Point, metrics: dict[str, Any], schedule: bytes
    ) -> None:
        """Use and save a worker's schedule if it is the point's first one or has a lower value.

        At equal value, it replaces a provisional schedule. Notifies the listeners in any case.
        """
        is_better = point.value is None or metrics["value"] < point.value
        if is_better:
            point.provisional = False
            point.set_schedule(metrics, schedule)
            point.proof = point.proof or dict(NO_PROOF)
            self._schedules[point.id] = schedule
            self._run_in_background(self._save(point, schedule))
        elif point.provisional and metrics["value"] == point.value:
            self._use_as_own(point, metrics, schedule)
        self.notify(open_problem, point, has_new_schedule=is_better)

    def _use_as_own(self, point: Point, metrics: dict[str, Any], schedule: bytes) -> None:
        """Use and save a worker's schedule in place of a provisional one of equal value."""
        point.provisional = False
        point.set_metrics(metrics)
        point.begin_revision(schedule)
        self._schedules[point.id] = schedule
        self._run_in_background(self._save(point, schedule))

    def _fail(self, open_problem: OpenProblem, point: Point, reason: str) -> None:
        point.state, point.reason = "failed", reason
        self.notify(open_problem, point)

    async def _save(self, point: Point, schedule: bytes | None) -> None:
        """Merge a point into the store if it is finished or has a schedule that is not provisional.

        If `schedule` is None, the store retains its schedule of the point.
        """
        if point.is_finished or (point.value is not None and not point.provisional):
            point_copy = replace(point, proof=dict(point.proof))
            await self.store.call(self.store.save, point_copy, schedule)

    def _run_in_background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task that `stop` cancels; return the task."""
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
