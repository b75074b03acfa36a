"""The processes of the explorer: started warm, given one job at a time, replaced when they die."""

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

    Tell = Callable[[Frame], None]

_LOG = logging.getLogger(__name__)

CANCEL_S: Final = 1.0
"""How long a process may take to end a job that nobody wants, before it is replaced [s]."""
START_S: Final = 60.0
"""How long a process may take to start [s]."""
STARTS: Final = 5
"""How often a process that does not start is started."""


class WorkerError(Exception):
    """A job that a process did not finish: it died, or met an error of its own."""


class RefusedError(PoetModelError):
    """A job that cannot be done, for a reason that people can do something about."""


@dataclass(slots=True)
class WorkerPool:
    """Processes that share a queue."""

    size: int
    niceness: int
    catalogue: str
    newest_first: bool = False
    """Whether who asks last gets a process first: of solves, which take long."""
    free: list[WorkerProcess] = field(default_factory=list)
    workers: set[WorkerProcess] = field(default_factory=set)
    waiting: list[asyncio.Future[WorkerProcess]] = field(default_factory=list)
    mending: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        """Start all processes."""
        await asyncio.gather(*(self._hire() for _ in range(self.size)))

    async def stop(self) -> None:
        """End all processes."""
        for task in self.mending:
            task.cancel()
        for future in self.waiting:
            future.cancel()
        await asyncio.gather(*(asyncio.to_thread(worker.close) for worker in self.workers))

    async def do(self, job: dict[str, Any], body: bytes = b"", tell: Tell | None = None) -> Frame:
        """Return the reply to a job; `tell` gets what is said before it.

        Raises `WorkerError` or `RefusedError`. Cancelled, it leaves the process to end the job.
        Where the process had died, perhaps before it got the job, another one does it.
        """
        with contextlib.suppress(ProcessEndedError):
            return await self._let(await self.take(), job, body, tell)
        return await self.let(await self.take(), job, body, tell)

    async def let(
        self, worker: WorkerProcess, job: dict[str, Any], body: bytes, tell: Tell | None = None
    ) -> Frame:
        """Let a process that was taken do a job, as `do`; then it is free."""
        try:
            return await self._let(worker, job, body, tell)
        except ProcessEndedError as error:
            msg = f"a worker: {error}"
            raise WorkerError(msg) from error

    async def _let(
        self, worker: WorkerProcess, job: dict[str, Any], body: bytes, tell: Tell | None
    ) -> Frame:
        loop = asyncio.get_running_loop()

        def hear(news: Frame) -> None:
            if tell is not None:
                loop.call_soon_threadsafe(tell, news)

        reply = worker.call(perform, self.catalogue, job, body, on_progress=hear)
        try:
            return await asyncio.wrap_future(reply)
        except PoetModelError as error:
            raise RefusedError("; ".join(str(error).splitlines())) from error
        except MemoryError as error:
            msg = "there is not enough memory for it"
            raise WorkerError(msg) from error
        except ProcessEndedError:
            raise
        except Exception as error:
            _LOG.warning("%s", "\n".join(getattr(error, "__notes__", [str(error)])))
            msg = f"an error of poetmodel: {type(error).__name__}: {error}"
            raise WorkerError(msg) from error
        finally:
            if reply.done() and worker.is_alive:
                self.give_back(worker)
            else:
                self._mend(worker, reply)

    async def take(self) -> WorkerProcess:
        """Return a free process as soon as there is one."""
        while self.free:
            worker = self.free.pop()
            if worker.is_alive:
                return worker
            self._mend(worker)
        future: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future in self.waiting:
                self.waiting.remove(future)
            elif future.done() and not future.cancelled():
                self.give_back(future.result())
            raise

    def give_back(self, worker: WorkerProcess) -> None:
        """Let others have a process."""
        while self.waiting:
            future = self.waiting.pop(-1 if self.newest_first else 0)
            if not future.done():
                future.set_result(worker)
                return
        self.free.append(worker)

    async def _hire(self) -> None:
        """Start a process, and wait until it has imported all that it needs."""
        try:
            worker = WorkerProcess()
        except OSError as error:
            msg = f"a worker process could not be started ({error})"
            raise WorkerError(msg) from error
        self.workers.add(worker)
        try:
            await asyncio.wait_for(asyncio.wrap_future(worker.call(load, self.niceness)), START_S)
        except Exception as error:
            self.workers.discard(worker)
            worker.end()
            msg = f"a worker process did not start: {type(error).__name__}: {error}"
            raise WorkerError(msg) from error
        self.give_back(worker)

    def _mend(self, worker: WorkerProcess, reply: Future[Frame] | None = None) -> None:
        task = asyncio.create_task(self._recover(worker, reply))
        self.mending.add(task)
        task.add_done_callback(self.mending.discard)

    async def _recover(self, worker: WorkerProcess, reply: Future[Frame] | None) -> None:
        """Wait for a cancelled job to end, or replace the process."""
        if reply is not None and worker.is_alive:
            worker.cancel()
            await asyncio.to_thread(wait, [reply], CANCEL_S)
            if reply.done() and worker.is_alive:
                self.give_back(worker)
                return
        self.workers.discard(worker)
        worker.end()
        for _ in range(STARTS):
            try:
                await self._hire()
            except WorkerError as error:
                _LOG.warning("%s", error)
                await asyncio.sleep(1)
            else:
                return


# -- in the processes ------------------------------------------------------------------------------


def load(_: WorkerJob, niceness: int) -> None:
    """Import all that jobs need, once and before the first one, and give way to others then."""
    import poetmodel.explore.exports
    import poetmodel.solver.lazy
    import poetmodel.solver.monolithic  # noqa: F401

    os.nice(niceness)


def perform(job: WorkerJob, catalogue: str, values: dict[str, Any], body: bytes) -> Frame:
    """Do what a job names, and return the reply."""
    from poetmodel.explore import answers, exports, tasks
    from poetmodel.explore.choice import Catalogue

    tasks_of = {
        "prepare": tasks.prepare,
        "begin": tasks.begin,
        "solve": tasks.solve,
        "draw": answers.draw,
        "why": answers.why,
        "export": exports.export,
    }
    talk = tasks.Talk(
        catalogue=Catalogue.from_json(catalogue),
        tell=job.tell,
        cancelled=lambda: job.cancelled,
        body=body,
    )
    return tasks_of[values["task"]](values, talk)
