"""Build an exported folder for this machine or an emulated board, and execute the program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from poetmodel.errors import MissingExtraError, PoetModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Target(StrEnum):
    """A target of the Makefile of an exported folder."""

    HOST = "host"
    HOST_DOUBLE = "host-double"
    """This machine in double precision, with sanitizers for addresses and undefined behaviour."""
    M3 = "m3"
    M4 = "m4"
    M7 = "m7"

    @property
    def is_board(self) -> bool:
        """Whether the target is a board, which QEMU emulates."""
        return self in MACHINES


MACHINES: Final = {
    Target.M3: "mps2-an385",
    Target.M4: "mps2-an386",
    Target.M7: "mps2-an500",
}
"""The QEMU machine that emulates each board."""

PACKAGES: Final = {
    "make": "make",
    "cc": "gcc",
    "arm-none-eabi-gcc": "gcc-arm-none-eabi and libnewlib-arm-none-eabi",
    "qemu-system-arm": "qemu-system-arm",
}
"""Debian packages of each program, joined by "and"."""


class ToolchainError(PoetModelError, RuntimeError):
    """A compiler, a linker, the emulator or an executed program failed or took too long."""


def list_required_programs(target: Target, *, emulate: bool = True) -> tuple[str, ...]:
    """Return the programs needed to build for a target and, with `emulate`, to execute in QEMU."""
    if not target.is_board:
        return ("make", "cc")
    return ("make", "arm-none-eabi-gcc", *(("qemu-system-arm",) if emulate else ()))


def list_missing_programs(target: Target, *, emulate: bool = True) -> tuple[str, ...]:
    """Return the programs of `list_required_programs` that are not found on this machine."""
    return tuple(
        program
        for program in list_required_programs(target, emulate=emulate)
        if shutil.which(program) is None
    )


def require_programs(target: Target, *, emulate: bool = True) -> None:
    """Raise `MissingExtraError` if a program to build or, with `emulate`, to execute is missing."""
    missing_names = list_missing_programs(target, emulate=emulate)
    if missing_names:
        names = " ".join(PACKAGES[program] for program in missing_names).replace(" and ", " ")
        raise MissingExtraError(
            f"target {target}: needs {' and '.join(missing_names)}, which this machine lacks; "
            f"on Debian: apt-get install {names}"
        )


def build_program(
    folder: Path, target: Target, *, settings: Sequence[str] = (), time_limit_s: float = 600.0
) -> Path:
    """Build the program of an exported folder with ``make``; return its path, ``folder/build/...``.

    `settings` are variables of ``make``, such as ``DRIVER=ram`` or ``RAM_SIZE=65536``; ``CFLAGS``
    and the flags of an outer ``make`` have no effect. Raises `MissingExtraError` without a
    compiler, `ToolchainError` with the first errors of the output or after the time limit.
    """
    require_programs(target, emulate=False)
    # Variables that an outer make exports would change the build.
    removed_variables = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CFLAGS")
    environment = {key: value for key, value in os.environ.items() if key not in removed_variables}
    command = ["make", "--silent", target.value, *settings]
    completed = execute(command, folder, time_limit_s=time_limit_s, environment=environment)
    if completed.returncode:
        raise ToolchainError(
            f"{folder}: make {target} failed: {_find_first_errors(completed.stderr)}"
        )
    return folder / "build" / target / "pm_run"


def execute(
    command: Sequence[str | Path],
    folder: Path,
    *,
    time_limit_s: float,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Execute a command in a folder with an empty stdin; return its output and exit status.

    `environment` replaces that of this process. `ToolchainError` after the time limit.
    """
    try:
        return subprocess.run(  # noqa: S603 - make, QEMU, or a program built from the folder
            list(command),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=time_limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ToolchainError(
            f"{command[0]}: expected to end within {time_limit_s:g} s, and did not; "
            "allow more time or fewer steps"
        ) from None


def _find_first_errors(text: str, max_lines: int = 3) -> str:
    """Return the first error lines of a compiler's output, or else its last lines."""
    error_marks = ("error", "overflowed", "undefined reference", "heap")
    lines = [line.strip() for line in text.splitlines()]
    error_lines = [
        line for line in lines if any(error_mark in line for error_mark in error_marks)
    ] or lines[-max_lines:]
    return "; ".join(error_lines[:max_lines])


INPUTS_FILE: Final = "inputs.bin"
"""File of the batches, in the working folder of a program."""
STATE_FILE: Final = "state.bin"
"""File of the final state, in the working folder of a program."""
FAULT_STATUS: Final = 3
"""Exit status of a board after a processor fault."""
STOPPED_STATUS: Final = 9
"""Exit status of a program that ends at an injected stop (``cut:`` or ``stop:``)."""
STEP_STATUS: Final = 10
"""Exit status of a program whose step or other call of the exported C failed, minus the error
number."""

_METRIC_LINE: Final = re.compile(r"^([a-z_]+) (\d+)$", re.MULTILINE)
_NODE_LINE: Final = re.compile(r"^node (\d+) (\d+)$", re.MULTILINE)
_LOSS_LINE: Final = re.compile(r"^loss (\d+) (\S+)$", re.MULTILINE)
_EVALUATION_LINE: Final = re.compile(r"^evaluation (\d+) (\S+) (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """The outputs, final state and exit status of an executed program."""

    status: int
    """Exit status; -1 times the signal for a program of this machine that a signal ended."""
    losses: Mapping[int, float]
    """Loss by number of the step, from 1; after ``resume``, earlier steps are numbered, too."""
    state: bytes = field(repr=False)
    """Content of the state file: all state tensors, or gradients; empty if none was written."""
    metrics: Mapping[str, int]
    """Metrics by name. Of a board: ``ram_bytes``, ``ram_limit_bytes``, ``stack_bytes``,
    ``stack_limit_bytes``, ``flash_bytes``, ``step_instructions``. With ``PROFILE=1``:
    ``other_instructions``, executed outside of nodes in one step. With ``FAULTS=1``:
    ``storage_reads``, ``storage_writes``. After ``resume``: ``resumed``, the number of earlier
    steps. With ``DRIVER=nor`` or ``FLASH=nor``: ``storage_bytes`` written since the start,
    ``storage_erases``, and ``storage_worn``, the erases of the most erased block."""
    node_instructions: Mapping[int, int]
    """Mean instructions of a step in each node, by its index; empty without ``PROFILE=1``."""
    messages: str
    """The standard error of the program."""
    evaluations: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    """Loss and number of correct samples in evaluation mode, by number of the batch, from 1."""

    @property
    def error_number(self) -> int:
        """The error number of a failed step or other failed call of the exported C, else 0."""
        return max(0, self.status - STEP_STATUS)

    def require_success(self) -> ProgramResult:
        """Return this object; raise `ToolchainError` with lines of stderr after a failure."""
        if self.status:
            output = "; ".join(self.messages.strip().splitlines()[:3]) or "no message"
            raise ToolchainError(f"pm_run: ended with status {self.status}: {output}")
        return self


def run_program(
    program: Path,
    target: Target,
    folder: Path,
    *,
    inputs: bytes,
    steps: int,
    learning_rate: float,
    words: Sequence[str] = (),
    time_limit_s: float = 600.0,
) -> ProgramResult:
    """Execute a program that was built from an exported folder, in QEMU if it is for a board.

    `folder` has the inputs, the final state (an old one is deleted), and the storage, from which
    the word ``resume`` continues; ``cut:7`` injects a fault. `inputs` are the batches, each with
    the arrays of all inputs. A failed step raises no error: the result has the exit status.
    """
    (folder / INPUTS_FILE).write_bytes(inputs)
    (folder / STATE_FILE).unlink(missing_ok=True)
    arguments = [str(steps), repr(learning_rate), INPUTS_FILE, STATE_FILE, *words]
    if target.is_board:
        require_programs(target)
        command = _make_qemu_command(program.resolve(), target, arguments)
    else:
        command = [str(program.resolve()), *arguments]
    completed = execute(command, folder, time_limit_s=time_limit_s)
    if completed.returncode < 0 and target.is_board:
        raise ToolchainError(
            f"QEMU: ended by signal {-completed.returncode}: {completed.stderr.strip()}"
        )
    state = folder / STATE_FILE
    return ProgramResult(
        status=completed.returncode,
        losses={int(step): float(loss) for step, loss in _LOSS_LINE.findall(completed.stdout)},
        evaluations={
            int(batch): (float(loss), int(correct))
            for batch, loss, correct in _EVALUATION_LINE.findall(completed.stdout)
        },
        state=state.read_bytes() if state.is_file() else b"",
        metrics={name: int(value) for name, value in _METRIC_LINE.findall(completed.stderr)},
        node_instructions={
            int(node): int(count) for node, count in _NODE_LINE.findall(completed.stderr)
        },
        messages=completed.stderr,
    )


def _make_qemu_command(program: Path, target: Target, arguments: Sequence[str]) -> list[str]:
    """Return the command line of QEMU, in which each instruction takes 1 ns of emulated time."""
    words = "".join(f",arg={word}" for word in ("pm_run", *arguments))
    options = ["-icount", "shift=0", "-nographic", "-monitor", "none", "-serial", "none"]
    semihosting = f"enable=on,target=native{words}"
    command = ["qemu-system-arm", "-M", MACHINES[target], *options]
    return [*command, "-semihosting-config", semihosting, "-kernel", str(program)]
