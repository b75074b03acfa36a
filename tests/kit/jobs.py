"""Jobs for processes of their own, which import this module."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from poetmodel.errors import InputError, VerificationError
from poetmodel.solver.lazy.primal_worker import search_schedules

if TYPE_CHECKING:
    from poetmodel.process import WorkerJob


def number(_: WorkerJob) -> int:
    """Return the number of the process."""
    return os.getpid()


def echo(job: WorkerJob, *arguments: Any) -> tuple[Any, ...]:
    """Tell each argument, and return all."""
    for argument in arguments:
        job.tell(argument)
    return arguments


def noisy(_: WorkerJob) -> str:
    """Print where only pickles may come from, and read what is not for it."""
    os.write(1, b"noise")
    for stream in (sys.stdout, sys.stderr):
        stream.write("noise")
        stream.flush()
    return "done"


def noisy_search(job: WorkerJob, *arguments: Any) -> None:
    """Search for schedules as the primal worker does, after printing."""
    noisy(job)
    search_schedules(job, *arguments)


def answering(job: WorkerJob) -> None:
    """Tell what each message says, until that is "end"."""
    while True:
        for message in job.messages():
            if message == "end":
                return
            job.tell(message)
        time.sleep(0.01)


def endless(*_: Any) -> NoReturn:
    """Do nothing, and look at nothing."""
    while True:
        time.sleep(0.01)


def attentive(job: WorkerJob) -> str:
    """Wait until nobody wants it any more."""
    job.tell("begun")
    while not job.cancelled:
        time.sleep(0.001)
    return "noticed"


def failing(*_: Any) -> NoReturn:
    """Fail."""
    msg = "of its own"
    raise LookupError(msg)


def refusing(_: WorkerJob) -> NoReturn:
    """Raise an error with several faults."""
    raise InputError(["one", "two"])


def rejecting(_: WorkerJob) -> NoReturn:
    """Raise an error that another process cannot make again."""
    raise VerificationError(["one", "two"])


def ending(_: WorkerJob, *arguments: Any) -> NoReturn:
    """End the process in the middle of the job."""
    del arguments
    os.kill(os.getpid(), 9)
    raise AssertionError


def leaving(_: WorkerJob) -> NoReturn:
    """Leave Python."""
    sys.exit("left")


class Unreadable:
    """Something that can be written and not read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, ("no number",))


def unreadable(_: WorkerJob) -> Unreadable:
    """Return what cannot be read."""
    return Unreadable()
