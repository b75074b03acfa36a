"""Exit statuses, and failures as plain sentences on stderr."""

from __future__ import annotations

import os
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Final, TextIO

from poetmodel.cli.output import print_note, printable
from poetmodel.errors import (
    INTERRUPTED,
    BackendUnavailableError,
    FlashError,
    InputError,
    MethodNotApplicableError,
    NoScheduleError,
    OwnMethodError,
    PoetModelError,
    UnknownOptionError,
    VerificationError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.device.ram import DeviceRam
    from poetmodel.result import SolveResult

MAX_FAULTS: Final = 8


class ExitStatus(IntEnum):
    """The exit statuses of commands."""

    SUCCESS = 0
    """Done; for ``solve`` a schedule was found."""
    FAILURE = 1
    """Something inside went wrong."""
    BAD_INPUT = 2
    """Bad usage or bad input."""
    INFEASIBLE = 3
    """Proven infeasible; for ``verify`` the schedule is not valid."""
    NO_SCHEDULE = 4
    """No schedule within the limit."""
    NO_BACKEND = 5
    """The back end is missing, or its licence refuses the model."""
    REJECTED = 6
    """The verifier rejects the schedule that was found."""
    INTERRUPTED = INTERRUPTED
    """Ctrl-C before there is a result."""
    CLOSED_PIPE = 141
    """The reader of the output closed the pipe."""


_OF_STATUS: Final = {
    "optimal": ExitStatus.SUCCESS,
    "feasible": ExitStatus.SUCCESS,
    "infeasible": ExitStatus.INFEASIBLE,
    "unknown": ExitStatus.NO_SCHEDULE,
}


def status_of(result: SolveResult) -> ExitStatus:
    """Return the exit status of a result: by its claim, whyever the solve stopped."""
    return ExitStatus.REJECTED if result.violations else _OF_STATUS[result.status]


def report_error(error: PoetModelError | OSError) -> ExitStatus:
    """Print an error on stderr and return its exit status."""
    if isinstance(error, InputError):
        print_faults(error.faults)
        full = isinstance(error, FlashError)
        return ExitStatus.INFEASIBLE if full else ExitStatus.BAD_INPUT
    if isinstance(error, VerificationError):
        message = "the solver's schedule breaks a rule and was dropped; please report this bug"
        print_faults([message, *error.violations])
        return ExitStatus.FAILURE
    if isinstance(error, OSError):
        prefix = f"{error.filename}: " if error.filename else ""
        print_faults([f"{prefix}{error.strerror or error}"])
        return ExitStatus.BAD_INPUT
    print_faults([str(error)])
    if isinstance(error, UnknownOptionError):
        return ExitStatus.BAD_INPUT
    if isinstance(error, BackendUnavailableError):
        return ExitStatus.NO_BACKEND
    if isinstance(error, NoScheduleError):
        return status_of(error.result)
    if isinstance(error, MethodNotApplicableError):
        return ExitStatus.NO_SCHEDULE
    if isinstance(error, OwnMethodError) and error.refused:
        return ExitStatus.REJECTED
    return ExitStatus.FAILURE


def print_faults(faults: Iterable[str]) -> None:
    """Print the first few faults on stderr, one a line, and how many more there are."""
    for line in _lines("error", faults):
        print(line, file=sys.stderr)


def print_warnings(warnings: Iterable[str], *, kind: str = "warning") -> None:
    """Print warnings as `print_faults`, unless quiet; `kind` is ``hint`` for what to do."""
    for line in _lines(kind, warnings):
        print_note(line)


def _lines(kind: str, sentences: Iterable[str]) -> list[str]:
    messages = list(sentences)
    lines = [f"{kind}: {printable(' '.join(fault.split()))}" for fault in messages[:MAX_FAULTS]]
    more = len(messages) - MAX_FAULTS
    return [*lines, f"and {more:,} more"] if more > 0 else lines


def print_room_warnings(*rooms: DeviceRam | None) -> None:
    """Warn on stderr if steps do not fit their devices."""
    warnings = (room.warning() for room in rooms if room is not None)
    print_warnings(dict.fromkeys(text for text in warnings if text is not None))


def mute(stream: TextIO) -> None:
    """Discard what is left in a stream, so that the interpreter ends without an error."""
    try:
        target = stream.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, target)
    os.close(nowhere)
