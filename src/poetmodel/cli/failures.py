"""Exit statuses, and errors and warnings on stderr."""

from __future__ import annotations

import logging
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
    PoetModelError,
    UnknownOptionError,
    UserMethodError,
    VerificationError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.device.ram import DeviceRam
    from poetmodel.result import SolveResult

MAX_FAULTS: Final = 8
"""Maximum number of printed errors or warnings."""


class ExitStatus(IntEnum):
    """Exit statuses of commands."""

    SUCCESS = 0
    """Success; for ``solve`` a schedule was found."""
    FAILURE = 1
    """Failed run of a sweep, or a failure without a status of its own, such as that of a solver."""
    BAD_INPUT = 2
    """Usage error, invalid input, or a file that cannot be read or written."""
    INFEASIBLE = 3
    """Proven infeasible, or larger than the flash; for ``verify``, ``plan`` and ``bench check`` an
    invalid file, plan or solution."""
    NO_SCHEDULE = 4
    """No schedule was found within the limits, also after Ctrl-C in ``solve``; or the method does
    not apply, or its schedule violates a limit."""
    NO_BACKEND = 5
    """The back end, PyTorch or ExecuTorch is missing or its release is not supported, or a licence
    is missing or refuses the model."""
    REJECTED = 6
    """The verifier rejected the schedule of ``paper`` or of a user-defined method."""
    INTERRUPTED = INTERRUPTED
    """Ctrl-C, unless the command then returns its result so far, as ``solve`` does."""
    CLOSED_PIPE = 141
    """The reader of the output closed the pipe."""


_EXIT_STATUSES: Final = {
    "optimal": ExitStatus.SUCCESS,
    "feasible": ExitStatus.SUCCESS,
    "infeasible": ExitStatus.INFEASIBLE,
    "unknown": ExitStatus.NO_SCHEDULE,
}
"""Exit status of a result, by its status."""


def result_exit_status(result: SolveResult) -> ExitStatus:
    """Return the exit status of a result: REJECTED with violations, else that of its status."""
    return ExitStatus.REJECTED if result.violations else _EXIT_STATUSES[result.status]


def report_error(error: PoetModelError | OSError) -> ExitStatus:
    """Print the message of an error, or its faults, on stderr; return its `ExitStatus`."""
    if isinstance(error, InputError):
        print_errors(error.faults)
        is_flash_full = isinstance(error, FlashError)
        return ExitStatus.INFEASIBLE if is_flash_full else ExitStatus.BAD_INPUT
    if isinstance(error, VerificationError):
        message = "a result of poetmodel violates a rule and was dropped; please report this bug"
        print_errors([message, *error.violations])
        return ExitStatus.FAILURE
    if isinstance(error, OSError):
        prefix = f"{error.filename}: " if error.filename else ""
        print_errors([f"{prefix}{error.strerror or error}"])
        return ExitStatus.BAD_INPUT
    print_errors([str(error)])
    if isinstance(error, UnknownOptionError):
        return ExitStatus.BAD_INPUT
    if isinstance(error, BackendUnavailableError):
        return ExitStatus.NO_BACKEND
    if isinstance(error, NoScheduleError):
        return result_exit_status(error.result)
    if isinstance(error, MethodNotApplicableError):
        return ExitStatus.NO_SCHEDULE
    if isinstance(error, UserMethodError) and error.refused:
        return ExitStatus.REJECTED
    return ExitStatus.FAILURE


def print_errors(faults: Iterable[str]) -> None:
    """Print up to `MAX_FAULTS` errors on stderr, one per line, and the number of further errors."""
    for line in _prefixed_lines("error", faults):
        print(line, file=sys.stderr)


def print_warnings(warnings: Iterable[str], *, kind: str = "warning") -> None:
    """Print warnings on stderr like `print_errors`, unless quiet; `kind` replaces ``error``."""
    for line in _prefixed_lines(kind, warnings):
        print_note(line)


class WarningHandler(logging.Handler):
    """Handler that prints log messages of poetmodel as warnings of a command."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of a record on stderr, unless quiet."""
        print_warnings([record.getMessage()])


def _prefixed_lines(prefix: str, sentences: Iterable[str]) -> list[str]:
    """Return up to `MAX_FAULTS` sentences with a prefix, then ``and 3 more`` for 3 further ones."""
    messages = list(sentences)
    lines = [
        f"{prefix}: {printable(' '.join(message.split()))}" for message in messages[:MAX_FAULTS]
    ]
    n_omitted = len(messages) - MAX_FAULTS
    return [*lines, f"and {n_omitted:,} more"] if n_omitted > 0 else lines


def print_device_ram_warnings(*device_rams: DeviceRam | None) -> None:
    """Print a warning on stderr for each step that does not fit its device, unless quiet."""
    from poetmodel.report.device_ram import format_warning

    warnings = (format_warning(device_ram) for device_ram in device_rams if device_ram is not None)
    print_warnings(dict.fromkeys(text for text in warnings if text is not None))


def discard_output(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that the interpreter exits without an error.

    Its buffered output is discarded. Streams without a file descriptor are unchanged.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return
    null_descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_descriptor, descriptor)
    os.close(null_descriptor)
