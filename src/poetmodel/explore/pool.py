"""Worker processes: started warm, given one job at a time, replaced when they die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import PoetModelError
from poetmodel.explore.frames import Frame, receive_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    Told = Callable[[Frame], None]

_LOG = logging.getLogger(__name__)

CANCEL_S: Final = 1.0
"""How long a worker may take to end a job that nobody wants, before it is replaced [s]."""
START_S: Final = 60.0
"""How long a worker may take to start [s]."""
STARTS: Final = 5
"""How often a worker that does not start is started."""


class WorkerError(Exception):
    """A job that a worker did not finish: it died, or met an error of its own."""


class DiedError(WorkerError):
    """A job whose worker's process ended under it."""


class RefusedError(PoetModelError):
    """A job that cannot be done, for a reason that people can do something about."""


@dataclass(slots=True)
class Worker:
    """One process, and the job that it does."""

    niceness: int
    catalogue: str
    process: asyncio.subprocess.Process | None = None
    reader: asyncio.Task[None] | None = None
    reply: asyncio.Future[Frame] | None = None
    told: Told | None = None
    number: int = 0

    async def start(self) -> None:
        """Start the process and wait until it has imported all that it needs."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "poetmodel.explore.worker", str(self.niceness), self.catalogue),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C in a terminal is for the server. (A session of its own would be scheduled as a
            # group, in which niceness compares with nobody.)
            process_group=0,
        )
        stream = self.process.stdout
        if stream is None:
            msg = "a process without pipes"
            raise WorkerError(msg)
        try:
            await asyncio.wait_for(receive_frame(stream), START_S)
        except (asyncio.IncompleteReadError, TimeoutError):
            await self.stop()
            msg = "a worker process did not start; the reason is printed in the terminal"
            raise WorkerError(msg) from None
        self.reader = asyncio.create_task(self._listen(self.process, stream))

    async def _listen(
        self, process: asyncio.subprocess.Process, stream: asyncio.StreamReader
    ) -> None:
        try:
            while True:
                self._take(await receive_frame(stream))
        except asyncio.IncompleteReadError:
            status = await process.wait()
            if self.reply is not None and not self.reply.done():
                self.reply.set_exception(
                    DiedError(f"the worker process ended unexpectedly (status {status})")
                )

    def _take(self, frame: Frame) -> None:
        values = frame.values
        if values.get("job") != self.number or self.reply is None or self.reply.done():
            return
        if "told" in values:
            if self.told is not None:
                self.told(Frame(values=values["told"], body=frame.body))
        elif "reply" in values:
            self.reply.set_result(Frame(values=values["reply"], body=frame.body))
        elif "refused" in values:
            self.reply.set_exception(RefusedError(values["refused"]))
        else:
            self.reply.set_exception(WorkerError(values["failed"]))

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.returncode is None

    def give(self, job: dict[str, Any], body: bytes, told: Told | None) -> asyncio.Future[Frame]:
        """Give it a job; the future has the reply, or why there is none."""
        self.number += 1
        self.told = told
        self.reply = asyncio.get_running_loop().create_future()
        self._send(Frame(values={**job, "job": self.number}, body=body))
        return self.reply

    def cancel(self) -> None:
        """Tell it that nobody wants the job any more, nor hears of it."""
        self.told = None
        self._send(Frame(values={"cancel": self.number}))

    def _send(self, frame: Frame) -> None:
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(ConnectionError):
                self.process.stdin.write(frame.encode())

    async def stop(self) -> None:
        """End the process at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
            if self.process.stdin is not None:
                self.process.stdin.close()
        if self.reader is not None:
            self.reader.cancel()


@dataclass(slots=True)
class WorkerPool:
    """Workers that share a queue."""

    size: int
    niceness: int
    catalogue: str
    newest_first: bool = False
    """Whether who asks last gets a worker first: of solves, which take long."""
    free: list[Worker] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    waiting: list[asyncio.Future[Worker]] = field(default_factory=list)
    mending: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        """Start all workers."""
        self.workers = [Worker(self.niceness, self.catalogue) for _ in range(self.size)]
        await asyncio.gather(*(worker.start() for worker in self.workers))
        for worker in self.workers:
            self.give_back(worker)

    async def stop(self) -> None:
        """End all workers."""
        for task in self.mending:
            task.cancel()
        for future in self.waiting:
            future.cancel()
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def do(self, job: dict[str, Any], body: bytes = b"", told: Told | None = None) -> Frame:
        """Return the reply to a job; `told` gets what is said before it.

        Raises `WorkerError` or `RefusedError`. Cancelled, it leaves the worker to end the job.
        Where the worker had died, perhaps before it got the job, another one does it.
        """
        with contextlib.suppress(DiedError):
            return await self.let(await self.take(), job, body, told)
        return await self.let(await self.take(), job, body, told)

    async def let(
        self, worker: Worker, job: dict[str, Any], body: bytes = b"", told: Told | None = None
    ) -> Frame:
        """Let a worker that was taken do a job, as `do`; then it is free."""
        try:
            return await worker.give(job, body, told)
        finally:
            reply = worker.reply
            if worker.alive and reply is not None and reply.done() and not reply.cancelled():
                self.give_back(worker)
            else:
                self._mend(worker)

    async def take(self) -> Worker:
        """Return a free worker as soon as there is one."""
        while self.free:
            worker = self.free.pop()
            if worker.alive:
                return worker
            self._mend(worker)
        future: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future in self.waiting:
                self.waiting.remove(future)
            elif future.done() and not future.cancelled():
                self.give_back(future.result())
            raise

    def give_back(self, worker: Worker) -> None:
        """Let others have a worker."""
        while self.waiting:
            future = self.waiting.pop(-1 if self.newest_first else 0)
            if not future.done():
                future.set_result(worker)
                return
        self.free.append(worker)

    def _mend(self, worker: Worker) -> None:
        task = asyncio.create_task(self._recover(worker))
        self.mending.add(task)
        task.add_done_callback(self.mending.discard)

    async def _recover(self, worker: Worker) -> None:
        """Wait for a cancelled job to end, or replace the worker."""
        ended = worker.reply = asyncio.get_running_loop().create_future()
        if worker.alive:
            worker.cancel()
            with contextlib.suppress(TimeoutError, WorkerError, RefusedError):
                await asyncio.wait_for(ended, CANCEL_S)
        if worker.alive and not ended.cancelled():
            self.give_back(worker)
            return
        await worker.stop()
        for _ in range(STARTS):
            try:
                await worker.start()
            except WorkerError as error:
                _LOG.warning("%s", error)
                await asyncio.sleep(1)
            else:
                self.give_back(worker)
                return
