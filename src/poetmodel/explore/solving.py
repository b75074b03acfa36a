"""Solves of points: begun with what neighbours know, told while they go on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, Protocol

from poetmodel.explore.points import FIGURES, Opened, Point, known_bound, neighbour
from poetmodel.explore.pool import RefusedError, WorkerError, WorkerPool
from poetmodel.problem import DeadlineCounts
from poetmodel.result import relative_gap

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from poetmodel.explore.tasks import Frame

NO_PROOF: Final = {"termination": "interrupted", "build_s": 0.0, "solve_s": 0.0, "versions": {}}


class Tell(Protocol):
    """Says that there is news of a point, perhaps a new schedule."""

    def __call__(self, opened: Opened, point: Point, *, front: bool = False) -> None:
        """Say it."""


class Solves:
    """The solves of a server."""

    def __init__(
        self,
        *,
        solvers: WorkerPool,
        drawers: WorkerPool,
        search: dict[str, Any],
        tell: Tell,
    ) -> None:
        self.solvers = solvers
        self.drawers = drawers
        self.search = search
        self.tell = tell
        self.running: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """End all solves."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin(self, opened: Opened, point: Point) -> None:
        """Begin to solve a point."""
        point.state = "waiting"
        self.running[point.id] = self._go(self._solve(opened, point))

    def cancel(self, name: str) -> None:
        """End the solve of a point, if there is one."""
        task = self.running.pop(name, None)
        if task is not None:
            task.cancel()

    def lend(self, opened: Opened, point: Point) -> None:
        """Let a point begin with the best schedule and bound of its neighbours."""
        others = [other for other in opened.points.values() if other is not point]
        point.bound = max(point.bound, known_bound(point, others))
        overlaps = opened.facts["deadline"]["counts"] == DeadlineCounts.OVERLAP
        near = neighbour(point, others, overlaps=overlaps)
        if near is None or near.value is None:
            return
        if point.value is not None and point.value <= near.value:
            return
        figures = {name: getattr(near, name) for name in FIGURES}
        point.provisional, point.neighbour_bytes = True, near.ram_bytes
        point.lender = near.lender if near.provisional else near.digest
        point.bound = min(point.bound, near.value)
        point.proof = {**NO_PROOF, **near.proof, "termination": "interrupted"}
        if relative_gap(near.value, point.bound) <= self.search["gap"]:  # what is known proves it
            point.state, point.status, point.provisional = "done", "optimal", False
            point.proof["termination"] = "proved"
        point.take(figures, near.schedule)

    def job(self, task: str, opened: Opened, point: Point) -> dict[str, Any]:
        """Return a job of a worker about a point."""
        return {
            "task": task,
            "choice": opened.facts["choice"],
            "ram_bytes": point.ram_bytes,
            "deadline_s": point.deadline_s,
        }

    def proved(self, opened: Opened, point: Point) -> dict[str, Any]:
        """Return a job about the schedule of a point with its certificate."""
        proof = {
            **NO_PROOF,
            **point.proof,
            "status": point.status or "feasible",
            "bound": point.bound,
            "final": point.is_over,
        }
        return {**self.job("", opened, point), "proof": proof, "search": self.search}

    async def _solve(self, opened: Opened, point: Point) -> None:
        first: asyncio.Task[None] | None = None
        if point.value is None:
            first = asyncio.create_task(self._show(opened, point))
        try:
            await self._run(opened, point)
        except RefusedError as error:
            self._fail(opened, point, str(error))
        except WorkerError as error:
            self._fail(opened, point, f"{error}; move the slider to try again")
        finally:
            if first is not None:
                first.cancel()
            if self.running.get(point.id) is asyncio.current_task():
                del self.running[point.id]

    async def _show(self, opened: Opened, point: Point) -> None:
        """Show something before the solve has anything."""
        with contextlib.suppress(WorkerError, RefusedError):  # the solve meets them, too
            reply = await self.drawers.do(self.job("begin", opened, point))
            if point.value is None and "found" in reply.values:
                self._take(opened, point, reply.values["found"], reply.body)

    async def _run(self, opened: Opened, point: Point) -> None:
        mine, before_s, start = asyncio.current_task(), point.seconds, point.schedule

        def on_frame(frame: Frame) -> None:
            if self.running.get(point.id) is not mine:  # nobody wants it any more
                return
            values = frame.values
            point.state = "solving"
            point.seconds = before_s + values["seconds"]
            point.bound = max(point.bound, values["bound"])
            if "found" in values:
                self._take(opened, point, values["found"], frame.body)
            else:
                self.tell(opened, point)

        job = {**self.job("solve", opened, point), "search": self.search, "bound": point.bound}
        reply = await self.solvers.let(await self.solvers.take(), job, start, on_frame)
        figures, schedule = reply.values.get("found"), reply.body
        if figures is None or (point.value is not None and point.value < figures["value"]):
            schedule = point.schedule
        point.end(reply.values, schedule, before_s=before_s)
        self.tell(opened, point, front=True)

    def _take(self, opened: Opened, point: Point, figures: dict[str, Any], schedule: bytes) -> None:
        """Take over a schedule that a worker found, if it is better than what is known."""
        better = point.value is None or figures["value"] < point.value
        if better:
            point.provisional = False
            point.take(figures, schedule)
            point.proof = point.proof or dict(NO_PROOF)
        elif point.provisional and figures["value"] == point.value:
            point.provisional, point.schedule = False, schedule
            point.revise()
        self.tell(opened, point, front=better)

    def _fail(self, opened: Opened, point: Point, reason: str) -> None:
        point.state, point.reason = "failed", reason
        self.tell(opened, point)

    def _go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside everything else."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
