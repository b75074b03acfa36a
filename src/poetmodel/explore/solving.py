"""Solves of points: started from neighbours, streamed to pages, saved in the store."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from poetmodel.explore.points import FIGURES, Opened, Point, known_bound, neighbour
from poetmodel.explore.pool import RefusedError, WorkerError, WorkerPool
from poetmodel.problem import DeadlineCounts
from poetmodel.result import relative_gap

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from poetmodel.explore.store import PointStore
    from poetmodel.explore.tasks import Frame

SAVE_EVERY_S: Final = 1.0
"""Interval at which bounds without a new schedule are written to the store [s]."""
NO_PROOF: Final = {"termination": "interrupted", "build_s": 0.0, "solve_s": 0.0, "versions": {}}


class Tell(Protocol):
    """Says that there is news of a point, perhaps a new schedule."""

    def __call__(self, opened: Opened, point: Point, *, front: bool = False) -> None:
        """Say it."""


class Solves:
    """The solves of a server."""

    def __init__(
        self,
        store: PointStore,
        *,
        solvers: WorkerPool,
        drawers: WorkerPool,
        search: dict[str, Any],
        tell: Tell,
    ) -> None:
        self.store = store
        self.solvers = solvers
        self.drawers = drawers
        self.search = search
        self.tell = tell
        self.running: dict[str, asyncio.Task[None]] = {}
        self._schedules: dict[str, bytes] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """End all solves; the store keeps their schedules and bounds."""
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

    async def lend(self, opened: Opened, point: Point) -> None:
        """Let a point begin with the best schedule and bound of its neighbours."""
        others = [other for other in opened.points.values() if other is not point]
        point.bound = max(point.bound, known_bound(point, others))
        overlaps = opened.facts["deadline"]["counts"] == DeadlineCounts.OVERLAP
        near = neighbour(point, others, overlaps=overlaps)
        if near is None or (point.value is not None and point.value <= (near.value or 0.0)):
            return
        schedule = await self.schedule(near)
        if not schedule or near.value is None:
            return
        if point.value is not None and point.value <= near.value:
            return  # its own solve found a schedule during the wait
        figures = {name: getattr(near, name) for name in FIGURES}
        point.provisional, point.neighbour_bytes = True, near.ram_bytes
        point.lender = near.lender if near.provisional else (near.id, near.digest)
        point.bound = min(point.bound, near.value)
        point.proof = {**NO_PROOF, **near.proof, "termination": "interrupted"}
        if relative_gap(near.value, point.bound) <= self.search["gap"]:  # what is known proves it
            point.state, point.status, point.provisional = "done", "optimal", False
            point.proof["termination"] = "proved"
        point.take(figures, schedule)
        if not point.provisional:
            await self._save(point, schedule)

    async def schedule(self, point: Point) -> bytes:
        """Return the packed schedule of a point; of a provisional one, that of its neighbour."""
        name = point.lender[0] if point.provisional and point.lender else point.id
        schedule = self._schedules.get(name)
        return await self.store.call(self.store.schedule, name) if schedule is None else schedule

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
            await self._save(point, self._schedules.get(point.id))
            if point.id not in self.running:
                self._schedules.pop(point.id, None)

    async def _show(self, opened: Opened, point: Point) -> None:
        """Show something before the solve has anything."""
        with contextlib.suppress(WorkerError, RefusedError):  # the solve meets them, too
            reply = await self.drawers.do(self.job("begin", opened, point))
            if point.value is None and "found" in reply.values:
                self._take(opened, point, reply.values["found"], reply.body)

    async def _run(self, opened: Opened, point: Point) -> None:
        mine, before_s, saved_s = asyncio.current_task(), point.seconds, time.monotonic()
        start = await self.schedule(point)

        def on_frame(frame: Frame) -> None:
            nonlocal saved_s
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
                if time.monotonic() - saved_s > SAVE_EVERY_S:
                    saved_s = time.monotonic()
                    self._go(self._save(point, None))

        job = {**self.job("solve", opened, point), "search": self.search, "bound": point.bound}
        reply = await self.solvers.let(await self.solvers.take(), job, start, on_frame)
        figures, schedule = reply.values.get("found"), reply.body
        if figures is None or (point.value is not None and point.value < figures["value"]):
            schedule = await self.schedule(point)
        ended = replace(point, proof=dict(point.proof))
        ended.end(reply.values, schedule, before_s=before_s)
        await self._save(ended, schedule or None)  # before pages are told
        point.end(reply.values, schedule, before_s=before_s)
        if schedule:
            self._schedules[point.id] = schedule
        self.tell(opened, point, front=True)

    def _take(self, opened: Opened, point: Point, figures: dict[str, Any], schedule: bytes) -> None:
        """Take over a schedule that a worker found, if it is better than what is known."""
        better = point.value is None or figures["value"] < point.value
        if better:
            point.provisional = False
            point.take(figures, schedule)
            point.proof = point.proof or dict(NO_PROOF)
            self._schedules[point.id] = schedule
            self._go(self._save(point, schedule))
        elif point.provisional and figures["value"] == point.value:
            self._adopt(point, schedule)
        self.tell(opened, point, front=better)

    def _adopt(self, point: Point, schedule: bytes) -> None:
        """Make a neighbour's schedule, verified for this point, its own."""
        point.provisional = False
        point.revise(schedule)
        self._schedules[point.id] = schedule
        self._go(self._save(point, schedule))

    def _fail(self, opened: Opened, point: Point, reason: str) -> None:
        point.state, point.reason = "failed", reason
        self.tell(opened, point)

    async def _save(self, point: Point, schedule: bytes | None) -> None:
        """Write a point, unless it is open and has no schedule of its own."""
        if point.is_over or (point.value is not None and not point.provisional):
            copy = replace(point, proof=dict(point.proof))
            await self.store.call(self.store.save, copy, schedule)

    def _go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside everything else."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
