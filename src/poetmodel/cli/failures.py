"""Exit statuses, and failures as plain sentences on stderr."""

from __future__ import annotations

import os
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Final, TextIO

from poetmodel.cli.entry import INTERRUPTED
from poetmodel.cli.output import print_note, printable
from poetmodel.errors import (
    BackendUnavailableError,
    InputError,
    MethodNotApplicableError,
    PoetModelError,
    VerificationError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.device.room import DeviceRoom

MAX_FAULTS: Final = 8
"""Most faults of one input that are printed."""


class Status(IntEnum):
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


def report(error: PoetModelError | OSError) -> Status:
    """Print an error on stderr and return its exit status."""
    if isinstance(error, InputError):
        print_faults(error.faults)
        return Status.BAD_INPUT
    if isinstance(error, BackendUnavailableError):
        print_faults([str(error)])
        return Status.NO_BACKEND
    if isinstance(error, MethodNotApplicableError):
        print_faults([str(error)])
        return Status.NO_SCHEDULE
    if isinstance(error, VerificationError):
        print_faults(
            [
                "the solver's schedule breaks a rule and was dropped; please report this bug",
                *error.violations,
            ]
        )
        return Status.FAILURE
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        print_faults([f"{place}{error.strerror or error}"])
        return Status.BAD_INPUT
    print_faults([str(error)])
    return Status.FAILURE


def print_faults(faults: Iterable[str]) -> None:
    """Print the first few faults on stderr, one a line, and how many more there are."""
    found = list(faults)
    for fault in found[:MAX_FAULTS]:
        print(f"error: {printable(' '.join(fault.split()))}", file=sys.stderr)
    if len(found) > MAX_FAULTS:
        print(f"and {len(found) - MAX_FAULTS:,} more", file=sys.stderr)


def print_warnings(warnings: Iterable[str]) -> None:
    """Print the first few warnings on stderr, one a line, and how many more; none if quiet."""
    _print_notes("warning", warnings)


def print_hints(hints: Iterable[str]) -> None:
    """Print the first few hints on what to do about an error, as warnings are printed."""
    _print_notes("hint", hints)


def _print_notes(kind: str, sentences: Iterable[str]) -> None:
    found = list(sentences)
    for sentence in found[:MAX_FAULTS]:
        print_note(f"{kind}: {printable(' '.join(sentence.split()))}")
    if len(found) > MAX_FAULTS:
        print_note(f"and {len(found) - MAX_FAULTS:,} more")


def print_room_warning(room: DeviceRoom | None) -> None:
    """Warn on stderr if a step does not fit its device."""
    warning = None if room is None else room.warning()
    if warning is not None:
        print_warnings([warning])


def mute(stream: TextIO) -> None:
    """Discard what is left in a stream, so that the interpreter ends without an error."""
    try:
        target = stream.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, target)
    os.close(nowhere)
