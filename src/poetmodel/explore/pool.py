"""Worker processes of the explorer, one job each; replaced if they die or ignore a cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import PoetModelError
from poetmodel.process import ProcessEndedError, WorkerJob, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.explore.tasks import Frame

    OnFrame = Callable[[Frame], None]

_LOG = logging.getLogger(__name__)

CANCEL_S: Final = 1.0
"""Maximum time for a process to end a cancelled job before it is replaced [s]."""
START_S: Final = 60.0
"""Maximum time for a process to start [s]."""
MAX_STARTS: Final = 5
"""Maximum number of attempts to replace a process."""


class WorkerError(Exception):
    """A process died or did not start, or a job failed unexpectedly or for lack of memory."""


class RefusedError(PoetModelError):
    """Error for a job that poetmodel refuses, with a message for the user."""


@dataclass(slots=True)
class WorkerPool:
    """Processes with a common queue of jobs."""

    size: int
    """Number of processes."""
    niceness: int
    """Increment of the niceness of the processes, as for `os.nice`."""
    catalogue: str
    """The catalogue as JSON."""
    newest_first: bool = False
    """Whether the latest request gets the next free process; used for solves, which take long."""
    free_workers: list[WorkerProcess] = field(default_factory=list)
    workers: set[WorkerProcess] = field(default_factory=set)
    """All processes, free or not."""
    waiting_requests: list[asyncio.Future[WorkerProcess]] = field(default_factory=list)
    """Requests for a process, oldest first."""
    recovery_tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that end cancelled jobs and replace processes."""

    async def start(self) -> None:
        """Start all processes and wait for them; raise `WorkerError` if one does not start."""
        await asyncio.gather(*(self._start_process() for _ in range(self.size)))

    async def stop(self) -> None:
        """Cancel waiting requests and recoveries, kill all processes and wait for their end."""
        for task in self.recovery_tasks:
            task.cancel()
        for future in self.waiting_requests:
            future.cancel()
        await asyncio.gather(*(asyncio.to_thread(worker.close) for worker in self.workers))

    async def run_job(
        self, job: dict[str, Any], body: bytes = b"", on_frame: OnFrame | None = None
    ) -> Frame:
        """Wait for a free process, run a job on it and return its reply.

        `on_frame` gets frames before the reply, in the event loop. Cancelling this call cancels the
        job in the background. If the process dies, another one runs the job once more.
        """
        with contextlib.suppress(ProcessEndedError):
            return await self._run_job_on(await self.acquire(), job, body, on_frame)
        return await self.run_job_on(await self.acquire(), job, body, on_frame)

    async def run_job_on(
        self,
        worker: WorkerProcess,
        job: dict[str, Any],
        body: bytes,
        on_frame: OnFrame | None = None,
    ) -> Frame:
        """Run a job on an acquired process, which is then released or replaced; return its reply.

        As `run_job`, but the job is not repeated if the process dies.
        """
        try:
            return await self._run_job_on(worker, job, body, on_frame)
        except ProcessEndedError as error:
            msg = f"a worker: {error}"
            raise WorkerError(msg) from error

    async def _run_job_on(
        self, worker: WorkerProcess, job: dict[str, Any], body: bytes, on_frame: OnFrame | None
    ) -> Frame:
        """Run a job on a process and return the reply; release the process, or recover it later."""
        loop = asyncio.get_running_loop()

        def forward(frame: Frame) -> None:
            if on_frame is not None:
                loop.call_soon_threadsafe(on_frame, frame)

        reply = worker.call(run_task, self.catalogue, job, body, on_progress=forward)
        try:
            return await asyncio.wrap_future(reply)
        except PoetModelError as error:
            raise RefusedError("; ".join(str(error).splitlines())) from error
        except MemoryError as error:
            msg = "there is not enough memory for this job"
            raise WorkerError(msg) from error
        except ProcessEndedError:
            raise
        except Exception as error:
            _LOG.warning("%s", "\n".join(getattr(error, "__notes__", [str(error)])))
            msg = f"an error of poetmodel: {type(error).__name__}: {error}"
            raise WorkerError(msg) from error
        finally:
            if reply.done() and worker.is_alive:
                self.release(worker)
            else:
                self._recover_in_background(worker, reply)

    async def acquire(self) -> WorkerProcess:
        """Return the free process that was released last; wait for one if none is free."""
        while self.free_workers:
            worker = self.free_workers.pop()
            if worker.is_alive:
                return worker
            self._recover_in_background(worker)
        if not self.workers and not self._n_recoveries:
            await self._start_process()
            return await self.acquire()
        future: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self.waiting_requests.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future in self.waiting_requests:
                self.waiting_requests.remove(future)
            elif future.done() and not (future.cancelled() or future.exception()):
                self.release(future.result())
            raise

    def release(self, worker: WorkerProcess) -> None:
        """Pass a process to the next waiting request, or mark it as free."""
        while self.waiting_requests:
            future = self.waiting_requests.pop(-1 if self.newest_first else 0)
            if not future.done():
                future.set_result(worker)
                return
        self.free_workers.append(worker)

    @property
    def _n_recoveries(self) -> int:
        """Number of processes being replaced; ended tasks may still be in `recovery_tasks`."""
        return sum(not task.done() for task in self.recovery_tasks)

    async def _start_process(self) -> None:
        """Start and prepare a process, and release it to the pool; `WorkerError` if that fails."""
        try:
            worker = WorkerProcess()
        except OSError as error:
            msg = f"a worker process could not be started ({error})"
            raise WorkerError(msg) from error
        self.workers.add(worker)
        try:
            await asyncio.wait_for(
                asyncio.wrap_future(worker.call(prepare_process, self.niceness)), START_S
            )
        except Exception as error:
            self.workers.discard(worker)
            worker.end()
            msg = f"a worker process did not start: {type(error).__name__}: {error}"
            raise WorkerError(msg) from error
        self.release(worker)

    def _recover_in_background(
        self, worker: WorkerProcess, reply: Future[Frame] | None = None
    ) -> None:
        task = asyncio.create_task(self._recover(worker, reply))
        self.recovery_tasks.add(task)
        task.add_done_callback(self.recovery_tasks.discard)

    async def _recover(self, worker: WorkerProcess, reply: Future[Frame] | None) -> None:
        """Release a process after cancelling its job, or replace it if it is dead or does not stop.

        A failed start is logged and repeated after 1 s, up to `MAX_STARTS` times; then the pool has
        one process less. Waiting requests fail if none is left.
        """
        if reply is not None and worker.is_alive:
            worker.cancel()
            await asyncio.to_thread(wait, [reply], CANCEL_S)
            if reply.done() and worker.is_alive:
                self.release(worker)
                return
        self.workers.discard(worker)
        worker.end()
        for _ in range(MAX_STARTS):
            try:
                await self._start_process()
            except WorkerError as error:
                _LOG.warning("%s", error)
                await asyncio.sleep(1)
            else:
                return
        if not self.workers and self._n_recoveries <= 1:
            for future in self.waiting_requests:
                if not future.done():
                    future.set_exception(WorkerError("no worker process could be started"))
            self.waiting_requests.clear()


# -- code in the worker processes ------------------------------------------------------------------


def prepare_process(_: WorkerJob, niceness: int) -> None:
    """Import the modules of all jobs, and lower the priority of the process by `niceness`."""
    import poetmodel.explore.drawing
    import poetmodel.solver.facade
    import poetmodel.solver.lazy
    import poetmodel.solver.monolithic  # noqa: F401

    os.nice(niceness)


def run_task(job: WorkerJob, catalogue: str, values: dict[str, Any], body: bytes) -> Frame:
    """Run the task ``values["task"]`` with the `values` of the job, and return its reply."""
    from poetmodel.explore import drawing, tasks
    from poetmodel.explore.settings import parse_catalogue

    functions = {
        "prepare_problem": tasks.prepare_problem,
        "find_first_schedule": tasks.find_first_schedule,
        "solve_point": tasks.solve_point,
        "draw_point": drawing.draw_point,
        "explain_infeasibility": drawing.explain_infeasibility,
        "export_point": drawing.export_point,
    }
    context = tasks.JobContext(
        catalogue=parse_catalogue(catalogue),
        send=job.report_progress,
        is_cancelled=lambda: job.cancelled,
        body=body,
    )
    return functions[values["task"]](values, context)
