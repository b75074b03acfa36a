"""Workers for the runs of a sweep: processes of this machine."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from poetmodel.process import WorkerJob, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable


class LocalProcesses(Executor):
    """Does runs in processes of this machine; those that die are replaced.

    What still runs when it is left is ended.
    """

    def __init__(self) -> None:
        self._processes: list[WorkerProcess] = []

    def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        """Call a function in a process."""
        self._processes = [process for process in self._processes if process.is_alive]
        idle = next((process for process in self._processes if not process.is_busy), None)
        if idle is None:
            idle = WorkerProcess()
            self._processes.append(idle)
        return idle.call(_called, function, *arguments)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - as its base class has it
        """End all processes at once."""
        for process in self._processes:
            process.end()
        for process in self._processes:
            process.close()


def _called(_: WorkerJob, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
