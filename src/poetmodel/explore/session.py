"""Shared state of all pages: problems, points, requests, and running solves.

Each page requests one point at a time. Unfinished ones are solved, the newest request first;
unrequested solves are cancelled. All code runs in the server's event loop and must not block.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.explore.answer import Answer, Found, OpenProblem, Point, Proof, make_point_id
from poetmodel.explore.pool import RefusedError, WorkerError, WorkerPool

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from poetmodel.explore.settings import ExplorerSettings
    from poetmodel.explore.store import PointStore
    from poetmodel.explore.tasks import Frame
    from poetmodel.solver.request import SearchOptions

MAX_CACHED_PROBLEMS: Final = 64
"""Number of problems in memory, those of pages included, above which unused problems are
discarded."""
MAX_CACHED_PAGES: Final = 500
"""Number of pages in memory, open ones included, above which closed pages are discarded."""
REQUEST_LIFETIME_S: Final = 10.0
"""Time for which the request of a page without listeners stays valid, for a reload [s]."""
SAVE_EVERY_S: Final = 1.0
"""Minimum interval between writes of bounds without a new schedule [s]."""


class Listener:
    """The unsent events of a stream to a browser: pairs (kind, id of a point), each queued once.

    ``point``: the requested point changed; ``front``: any solve found a new schedule or ended.
    """

    def __init__(self) -> None:
        self._pending_events: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._signal = asyncio.Event()
        self.is_closed = False

    def notify(self, kind: str, point_id: str) -> None:
        """Queue an event about a point, unless it is queued already."""
        self._pending_events[kind, point_id] = None
        self._signal.set()

    def close(self) -> None:
        """End the stream, because the server stops."""
        self.is_closed = True
        self._signal.set()

    async def wait_for_events(self, max_s: float) -> list[tuple[str, str]]:
        """Remove and return queued events; wait at most `max_s` [s] for one, or for the end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._signal.wait(), max_s)
        self._signal.clear()
        events, self._pending_events = list(self._pending_events), OrderedDict()
        return events


@dataclass(slots=True)
class Page:
    """A page in a browser, and the point that it requests."""

    id: str
    """Id of the session."""
    requested_point: str | None = None
    """Id of the requested point; None before the first request, and after it has expired."""
    problem: str | None = None
    """Id of the problem of the last requested point."""
    listeners: list[Listener] = field(default_factory=list)
    last_seen_s: float = field(default_factory=time.monotonic)
    """Time of the last contact, if there is no listener, on the monotonic clock [s]."""


class GoneError(Exception):
    """Error for a request about an unknown or discarded problem or point, or an old revision."""


class ExplorerSession:
    """Opens problems, solves requested points, notifies pages; quick workers read and draw."""

    def __init__(
        self,
        store: PointStore,
        *,
        solve_workers: WorkerPool,
        quick_workers: WorkerPool,
        search: SearchOptions,
    ) -> None:
        self.store = store
        self.solve_workers = solve_workers
        self.quick_workers = quick_workers
        self.search = search
        self.open_problems: OrderedDict[str, OpenProblem] = OrderedDict()
        self.pages: OrderedDict[str, Page] = OrderedDict()
        self.running: dict[str, asyncio.Task[None]] = {}
        """Tasks of solves that run or wait for a process, by the id of their point."""
        self._problem_tasks: dict[ExplorerSettings, asyncio.Task[OpenProblem]] = {}
        self._problem_ids: OrderedDict[ExplorerSettings, str] = OrderedDict()
        self._drawing_tasks: dict[str, asyncio.Task[bytes | None]] = {}
        self._unrequested_digests: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start workers and periodic clean-up; raise `WorkerError` if a worker does not start."""
        await asyncio.gather(self.solve_workers.start(), self.quick_workers.start())
        self._run_in_background(self._clean_up())

    async def stop(self) -> None:
        """Cancel solves, drawings and the clean-up, and stop the workers."""
        tasks = [*self._drawing_tasks.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(self.solve_workers.stop(), self.quick_workers.stop())

    def _run_in_background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task that `stop` cancels; return the task."""
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # -- problems --------------------------------------------------------------------------------

    async def open(self, settings: ExplorerSettings) -> OpenProblem:
        """Return the open problem of some settings; if it is not open, read its graph and points.

        Concurrent calls share one read. The problem becomes the last to be discarded.
        """
        problem_id = self._problem_ids.get(settings)
        open_problem = None if problem_id is None else self.open_problems.get(problem_id)
        if open_problem is None:
            read_task = self._problem_tasks.get(settings)
            if read_task is None:
                read_task = self._problem_tasks[settings] = asyncio.create_task(
                    self._read_problem(settings)
                )
                read_task.add_done_callback(lambda _: self._problem_tasks.pop(settings, None))
            open_problem = await asyncio.shield(read_task)
        self.open_problems.move_to_end(open_problem.id)
        return open_problem

    async def _read_problem(self, settings: ExplorerSettings) -> OpenProblem:
        """Prepare the problem of some settings in a worker, and return it as an open problem."""
        reply = await self.quick_workers.run_job({"task": "prepare_problem", "settings": settings})
        problem_id = reply.values["problem"]
        open_problem = self.open_problems.get(problem_id)
        if open_problem is None:
            points = await self.store.call(self.store.load_points, problem_id)
            open_problem = OpenProblem(problem_id, settings, reply.values)
            open_problem.points = {point.id: point for point in points}
            self.open_problems[problem_id] = open_problem
        self._problem_ids[settings] = problem_id
        return open_problem

    def find_problem(self, problem_id: str) -> OpenProblem:
        """Return an open problem by its id; raise `GoneError` if it is not open."""
        open_problem = self.open_problems.get(problem_id)
        if open_problem is None:
            msg = "this problem is not open here: choose model and device again"
            raise GoneError(msg)
        return open_problem

    def find_point(self, point_id: str) -> tuple[OpenProblem, Point]:
        """Return the problem of a point and the point, by its id; raise `GoneError` if unknown."""
        for open_problem in reversed(self.open_problems.values()):
            if point_id in open_problem.points:
                return open_problem, open_problem.points[point_id]
        msg = "this point is not known here: choose model and device again"
        raise GoneError(msg)

    # -- requests --------------------------------------------------------------------------------

    def find_or_add_page(self, session_id: str) -> Page:
        """Return the page of a session id; create it if it is unknown."""
        page = self.pages.setdefault(session_id, Page(session_id))
        self.pages.move_to_end(session_id)
        return page

    async def request_point(
        self,
        session_id: str,
        problem_id: str,
        ram_bytes: int,
        deadline_s: float | None,
        *,
        solve_again: bool = False,
    ) -> dict[str, Any]:
        """Set the requested point of a page, start its solve if needed, and return its values.

        The solve of the page's previous point is cancelled unless another page requests it. With
        `solve_again`, a point that ended without a proof is solved again.
        """
        open_problem = self.find_problem(problem_id)
        point = await self._load_point(open_problem, ram_bytes, deadline_s)
        page = self.find_or_add_page(session_id)
        previous_id, page.requested_point, page.problem = page.requested_point, point.id, problem_id
        page.last_seen_s = time.monotonic()
        if previous_id is not None and previous_id != point.id:
            self._cancel_unrequested(previous_id)
        must_solve_again = solve_again and not point.answer.is_proved
        if not point.is_finished and point.id not in self.running:
            await self._borrow(open_problem, point)
        is_wanted = page.requested_point == point.id and (must_solve_again or not point.is_finished)
        if is_wanted and point.id not in self.running:
            point.state, point.failure = "waiting", ""
            self.running[point.id] = self._run_in_background(self._solve(open_problem, point))
        return open_problem.describe(point)

    async def _load_point(
        self, open_problem: OpenProblem, ram_bytes: int, deadline_s: float | None
    ) -> Point:
        """Return a point, with what other servers know of it unless it is finished."""
        point_id = make_point_id(open_problem.id, ram_bytes, deadline_s)
        point = open_problem.points.get(point_id)
        if point is not None and point.is_finished:
            return point
        stored = await self.store.call(self.store.load_point, point_id)
        new = Point(
            id=point_id, problem=open_problem.id, ram_bytes=ram_bytes, deadline_s=deadline_s
        )
        point = open_problem.points.setdefault(point_id, stored or new)
        if stored is not None and stored is not point:
            point.take(stored.answer)
            if stored.is_finished and point_id not in self.running:
                point.state = "done"
        return point

    async def _borrow(self, open_problem: OpenProblem, point: Point) -> None:
        """Take schedule and bound of neighbours; save a point that these prove optimal."""
        lent = open_problem.borrow(point)
        found = point.answer.merge(lent).found
        if found is not None and found == lent.found and found.lender and not found.packed:
            packed = await self.store.call(self.store.load_schedule, found.lender[0])
            lent = replace(lent, found=replace(found, packed=packed) if packed else None)
        point.take(point.answer.merge(lent).close(self.search.gap))
        if point.answer.is_proved:
            point.state = "done"
            await self._save(point)

    def _cancel_unrequested(self, point_id: str) -> None:
        """Cancel solve and queued drawing of a point unless a page requests the point."""
        if any(page.requested_point == point_id for page in self.pages.values()):
            return
        task = self.running.pop(point_id, None)
        if task is not None:
            task.cancel()
        for open_problem in self.open_problems.values():
            point = open_problem.points.get(point_id)
            if point is None:
                continue
            if not point.is_finished:
                point.state = "cancelled"
            if point.digest in self._drawing_tasks:
                self._unrequested_digests.add(point.digest)

    # -- solves ----------------------------------------------------------------------------------

    def _make_job(self, task_name: str, open_problem: OpenProblem, point: Point) -> dict[str, Any]:
        """Return the job of a worker: task, settings of a problem, and what is known of a point."""
        return {
            "task": task_name,
            "settings": open_problem.settings,
            "ram_bytes": point.ram_bytes,
            "deadline_s": point.deadline_s,
            "search": self.search,
            "answer": point.answer,
        }

    async def _solve(self, open_problem: OpenProblem, point: Point) -> None:
        """Solve and save a point, ``failed`` on errors; a quick worker seeks a first schedule."""
        first_schedule_task: asyncio.Task[None] | None = None
        if point.answer.found is None:
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
            await self._save(point)

    async def _find_first_schedule(self, open_problem: OpenProblem, point: Point) -> None:
        """Use a quick worker's schedule if it is the first; the solve itself reports errors."""
        with contextlib.suppress(WorkerError, RefusedError):
            reply = await self.quick_workers.run_job(
                self._make_job("find_first_schedule", open_problem, point)
            )
            if reply.body:
                self._take(open_problem, point, _read_answer(reply))

    async def _run_solver(self, open_problem: OpenProblem, point: Point) -> None:
        """Run the solver from the schedule of a point; save the result, then update the point."""
        this_solve, earlier_s, saved_s = asyncio.current_task(), point.seconds, time.monotonic()

        def on_frame(frame: Frame) -> None:
            """Set the point's state to ``solving``; take time, bound and schedule of a report."""
            nonlocal saved_s
            # The solve was cancelled, because no page requested the point any more.
            if self.running.get(point.id) is not this_solve:
                return
            point.state = "solving"
            point.seconds = earlier_s + frame.values["seconds"]
            has_new_schedule = self._take(open_problem, point, _read_answer(frame))
            if not has_new_schedule and time.monotonic() - saved_s > SAVE_EVERY_S:
                saved_s = time.monotonic()
                self._run_in_background(self._save(point))

        start_schedule = await self.load_schedule(point)
        reply = await self.solve_workers.run_job_on(
            await self.solve_workers.acquire(),
            self._make_job("solve_point", open_problem, point),
            start_schedule,
            on_frame,
        )
        proof: Proof = reply.values["proof"]
        proof = replace(proof, solve_s=earlier_s + proof.solve_s)
        point.seconds = proof.build_s + proof.solve_s
        finished_point = replace(point)
        for changed_point in (finished_point, point):
            changed_point.take(_read_answer(reply))
            changed_point.finish(proof)
            if changed_point is finished_point:
                await self._save(finished_point)  # before pages are notified
        self._notify_listeners(open_problem, point, has_new_schedule=True)

    def _take(self, open_problem: OpenProblem, point: Point, answer: Answer) -> bool:
        """Merge a worker's answer, and notify pages; return whether its schedule is new."""
        has_new_schedule = point.take(answer)
        if has_new_schedule:
            self._run_in_background(self._save(point))
        self._notify_listeners(open_problem, point, has_new_schedule=has_new_schedule)
        return has_new_schedule

    def _fail(self, open_problem: OpenProblem, point: Point, reason: str) -> None:
        point.state, point.failure = "failed", reason
        self._notify_listeners(open_problem, point)

    async def _save(self, point: Point) -> None:
        """Merge a point into the store if it is finished or has a schedule of its own."""
        if point.is_finished or point.answer.is_owned:
            await self.store.call(self.store.save, replace(point))

    async def load_schedule(self, point: Point) -> bytes:
        """Return the packed schedule of a point or of its lender; empty if there is none."""
        found = point.answer.found
        if found is None or found.packed:
            return b"" if found is None else found.packed
        lender_id = found.lender[0] if found.lender and not found.is_own else point.id
        return await self.store.call(self.store.load_schedule, lender_id)

    # -- drawings --------------------------------------------------------------------------------

    async def load_drawing(self, point_id: str, revision: int | None) -> bytes | None:
        """Return the drawing of a point as gzipped JSON; `revision` None stands for the newest.

        None if the point has no schedule, or if no page requests the point any more when a
        worker is free. Calls for one revision share one drawing. Other revisions raise `GoneError`.
        """
        open_problem, point = self.find_point(point_id)
        if point.answer.found is None:
            return None
        if revision is not None and revision != point.revision:
            msg = f"revision {revision} is over: the newest one is {point.revision}"
            raise GoneError(msg)
        digest = point.digest
        self._unrequested_digests.discard(digest)
        task = self._drawing_tasks.get(digest)
        if task is None:
            task = self._drawing_tasks[digest] = asyncio.create_task(
                self._draw(open_problem, point)
            )
            task.add_done_callback(lambda _: self._discard_drawing(digest))
        return await asyncio.shield(task)

    def _discard_drawing(self, digest: str) -> None:
        self._drawing_tasks.pop(digest, None)
        self._unrequested_digests.discard(digest)

    async def _draw(self, open_problem: OpenProblem, point: Point) -> bytes | None:
        """Draw a point in a worker; None if no page requests it when a worker is free."""
        digest, schedule = point.digest, await self.load_schedule(point)
        job = self._make_job("draw_point", open_problem, point)
        worker = await self.quick_workers.acquire()
        if digest in self._unrequested_digests:  # the slider has moved during the wait
            self.quick_workers.release(worker)
            return None
        reply = await self.quick_workers.run_job_on(worker, job, schedule)
        return reply.body

    async def export(self, point_id: str, file_kind: str) -> Frame:
        """Return a file about a point: ``schedule``, ``plan``, ``report`` or ``command``.

        Raises `GoneError` for an unknown point, `RefusedError` for a point without a schedule.
        """
        open_problem, point = self.find_point(point_id)
        if point.answer.found is None:
            msg = "there is no schedule yet to export"
            raise RefusedError(msg)
        job = self._make_job("export_point", open_problem, point)
        job["kind"] = file_kind
        return await self.quick_workers.run_job(job, await self.load_schedule(point))

    async def explain_infeasibility(
        self, problem_id: str, ram_bytes: int, deadline_s: float | None
    ) -> dict[str, Any]:
        """Return the values of `answers.explain_infeasibility` for a RAM budget and a deadline."""
        open_problem = self.find_problem(problem_id)
        point = Point(id="", problem=problem_id, ram_bytes=ram_bytes, deadline_s=deadline_s)
        reply = await self.quick_workers.run_job(
            self._make_job("explain_infeasibility", open_problem, point)
        )
        return reply.values

    # -- events ----------------------------------------------------------------------------------

    def add_listener(self, session_id: str) -> Listener:
        """Add an event stream to a page, which is created if unknown; return its listener."""
        page, listener = self.find_or_add_page(session_id), Listener()
        page.listeners.append(listener)
        if page.requested_point is not None:
            listener.notify("point", page.requested_point)
        return listener

    def close_listeners(self) -> None:
        """End all event streams."""
        for page in self.pages.values():
            for listener in page.listeners:
                listener.close()

    def remove_listener(self, session_id: str, listener: Listener) -> None:
        """Remove an event stream from a page, and store the time as its last contact."""
        page = self.pages.get(session_id)
        if page is not None and listener in page.listeners:
            page.listeners.remove(listener)
            page.last_seen_s = time.monotonic()

    def _notify_listeners(
        self, open_problem: OpenProblem, point: Point, *, has_new_schedule: bool = False
    ) -> None:
        """Queue ``point`` for pages that request it, and a new schedule (``front``) for all."""
        for page in self.pages.values():
            for listener in page.listeners:
                if page.requested_point == point.id:
                    listener.notify("point", point.id)
                if has_new_schedule and page.problem == open_problem.id:
                    listener.notify("front", point.id)

    async def _clean_up(self) -> None:
        """Each second, end expired requests of closed pages, and discard idle points."""
        while True:
            await asyncio.sleep(1)
            now_s = time.monotonic()
            pages = list(self.pages.values())
            for page in pages:
                if page.listeners or now_s - page.last_seen_s < REQUEST_LIFETIME_S:
                    continue
                requested_id, page.requested_point = page.requested_point, None
                if requested_id is not None:
                    self._cancel_unrequested(requested_id)
                if len(self.pages) > MAX_CACHED_PAGES:
                    del self.pages[page.id]
            for open_problem in self.open_problems.values():
                open_problem.discard_idle(
                    self.running.keys() | {page.requested_point for page in pages}
                )
            used_problems = {page.problem for page in self.pages.values()}
            for problem_id in [
                problem_id for problem_id in self.open_problems if problem_id not in used_problems
            ]:
                is_solving = any(
                    point in self.running for point in self.open_problems[problem_id].points
                )
                if len(self.open_problems) > MAX_CACHED_PROBLEMS and not is_solving:
                    del self.open_problems[problem_id]


def _read_answer(frame: Frame) -> Answer:
    """Return the schedule, if any, and the bound that a worker reports."""
    metrics, found = frame.values.get("metrics"), None
    if metrics is not None:
        found = Found(metrics=metrics, packed=frame.body)
    return Answer(found=found, bound=frame.values.get("bound", 0.0))
