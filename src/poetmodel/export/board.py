"""A board: building an exported folder for it or this machine, and running what was built."""

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
    """What the Makefile of an exported folder builds for."""

    HOST = "host"
    HOST_DOUBLE = "host-double"
    """This machine in double precision, with sanitizers for addresses and undefined behaviour."""
    M3 = "m3"
    M4 = "m4"
    M7 = "m7"

    @property
    def is_board(self) -> bool:
        """Whether it is emulated."""
        return self in MACHINES


MACHINES: Final = {
    Target.M3: "mps2-an385",
    Target.M4: "mps2-an386",
    Target.M7: "mps2-an500",
}
"""The machines of QEMU that stand for boards."""

PACKAGES: Final = {
    "make": "make",
    "cc": "gcc",
    "arm-none-eabi-gcc": "gcc-arm-none-eabi and libnewlib-arm-none-eabi",
    "qemu-system-arm": "qemu-system-arm",
}
"""What Debian calls the packages of the programs."""


class ToolchainError(PoetModelError, RuntimeError):
    """A compiler, a linker or the emulator refused its work."""


def programs(target: Target, *, emulate: bool = True) -> tuple[str, ...]:
    """Return the programs that a target needs: to be built and, with `emulate`, to be run."""
    if not target.is_board:
        return ("make", "cc")
    return ("make", "arm-none-eabi-gcc", *(("qemu-system-arm",) if emulate else ()))


def missing_programs(target: Target, *, emulate: bool = True) -> tuple[str, ...]:
    """Return those programs that this machine lacks."""
    return tuple(
        program for program in programs(target, emulate=emulate) if shutil.which(program) is None
    )


def require(target: Target, *, emulate: bool = True) -> None:
    """Make sure that all programs are there.

    Raises
    ------
    MissingExtraError
        One is not; the message says how Debian calls it.
    """
    missing = missing_programs(target, emulate=emulate)
    if missing:
        names = " ".join(PACKAGES[program] for program in missing).replace(" and ", " ")
        raise MissingExtraError(
            f"target {target}: needs {' and '.join(missing)}, which this machine lacks; "
            f"on Debian: apt-get install {names}"
        )


def build(
    folder: Path, target: Target, *, settings: Sequence[str] = (), time_limit_s: float = 600.0
) -> Path:
    """Build the program of an exported folder, and return its path.

    Parameters
    ----------
    folder : Path
        What was exported.
    target : Target
        For which processor.
    settings : sequence of str
        What else ``make`` is told: ``DRIVER=ram``, ``CHECKSUM=1``, ``RAM_SIZE=65536``.
    time_limit_s : float
        How long it may take [s].

    Raises
    ------
    MissingExtraError
        A program is missing.
    ToolchainError
        The compiler or the linker refused; the message has their first errors.
    """
    require(target, emulate=False)
    # What a make around this one hands on would change what is built.
    handed_on = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CFLAGS")
    environment = {key: value for key, value in os.environ.items() if key not in handed_on}
    command = ["make", "--silent", target.value, *settings]
    done = execute(command, folder, time_limit_s=time_limit_s, environment=environment)
    if done.returncode:
        raise ToolchainError(f"{folder}: make {target} failed: {_first_errors(done.stderr)}")
    return folder / "build" / target / "pm_run"


def execute(
    command: Sequence[str | Path],
    folder: Path,
    *,
    time_limit_s: float,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, and return what it said.

    Raises
    ------
    ToolchainError
        It was not done in time.
    """
    try:
        return subprocess.run(  # noqa: S603 - make, QEMU, or what was built from the folder
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


def _first_errors(text: str, most: int = 3) -> str:
    """Return the lines that say what is wrong, the first ones of them."""
    marks = ("error", "overflowed", "undefined reference", "heap")
    lines = [line.strip() for line in text.splitlines()]
    telling = [line for line in lines if any(mark in line for mark in marks)] or lines[-most:]
    return "; ".join(telling[:most])


INPUTS: Final = "inputs.bin"
STATE: Final = "state.bin"
FAULT_STATUS: Final = 3
"""Exit status of a board whose core met a fault."""
STOPPED_STATUS: Final = 9
"""Exit status of a program that was told to stop at a moment (``cut:`` or ``stop:``)."""
STEP_STATUS: Final = 10
"""Added to the error number of a step."""

_FIGURE: Final = re.compile(r"^([a-z_]+) (\d+)$", re.MULTILINE)
_NODE: Final = re.compile(r"^node (\d+) (\d+)$", re.MULTILINE)
_LOSS: Final = re.compile(r"^loss (\d+) (\S+)$", re.MULTILINE)
_EVALUATION: Final = re.compile(r"^evaluation (\d+) (\S+) (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRun:
    """What a program printed, wrote, and how it ended."""

    status: int
    losses: Mapping[int, float]
    """By the number of the step, from 1."""
    state: bytes = field(repr=False)
    """All state tensors, or gradients; empty where none were written."""
    figures: Mapping[str, int]
    """Of a board: ``ram_bytes``, ``ram_limit_bytes``, ``stack_bytes``, ``stack_limit_bytes``,
    ``flash_bytes``, ``step_instructions``; ``other_instructions``, those of no node, with
    ``PROFILE=1``; ``storage_reads`` and ``storage_writes`` where faults are built in; ``resumed``,
    the steps before, where it went on; with ``DRIVER=nor`` ``storage_bytes`` written since the
    start, ``storage_erases``, and ``storage_worn``, those of the block that has most."""
    node_instructions: Mapping[int, int]
    """Instructions of one step by node, where they were counted (``PROFILE=1``)."""
    messages: str
    """All that it said on standard error."""
    evaluations: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    """Loss and number of correct samples in evaluation mode, by the number of the batch, from 1."""

    @property
    def error(self) -> int:
        """The error number of the step that failed, or 0."""
        return max(0, self.status - STEP_STATUS)

    def require_success(self) -> ProgramRun:
        """Return the run, or raise where it did not end well.

        Raises
        ------
        ToolchainError
            With what the program said.
        """
        if self.status:
            said = "; ".join(self.messages.strip().splitlines()[:3]) or "nothing was said"
            raise ToolchainError(f"pm_run: ended with status {self.status}: {said}")
        return self


def run(
    program: Path,
    target: Target,
    folder: Path,
    *,
    inputs: bytes,
    steps: int,
    learning_rate: float,
    words: Sequence[str] = (),
    time_limit_s: float = 600.0,
) -> ProgramRun:
    """Run a program that was built from an exported folder.

    Parameters
    ----------
    program : Path
        What `build` returned.
    target : Target
        What it was built for.
    folder : Path
        Where it runs: its inputs, state and storage are files there.
    inputs : bytes
        Batches, each with the array of every input.
    steps : int
        How many to train.
    learning_rate : float
        The same in all steps.
    words : sequence of str
        ``resume``, ``evaluate``, and faults such as ``cut:7``.
    time_limit_s : float
        After how long it is ended [s].

    Raises
    ------
    MissingExtraError
        The emulator is missing.
    ToolchainError
        It took too long, or the emulator itself failed.
    """
    (folder / INPUTS).write_bytes(inputs)
    (folder / STATE).unlink(missing_ok=True)
    arguments = [str(steps), repr(learning_rate), INPUTS, STATE, *words]
    if target.is_board:
        require(target)
        command = _emulated(program.resolve(), target, arguments)
    else:
        command = [str(program.resolve()), *arguments]
    done = execute(command, folder, time_limit_s=time_limit_s)
    if done.returncode < 0 and target.is_board:
        raise ToolchainError(f"QEMU: ended by signal {-done.returncode}: {done.stderr.strip()}")
    state = folder / STATE
    return ProgramRun(
        status=done.returncode,
        losses={int(step): float(loss) for step, loss in _LOSS.findall(done.stdout)},
        evaluations={
            int(batch): (float(loss), int(correct))
            for batch, loss, correct in _EVALUATION.findall(done.stdout)
        },
        state=state.read_bytes() if state.is_file() else b"",
        figures={name: int(value) for name, value in _FIGURE.findall(done.stderr)},
        node_instructions={int(node): int(count) for node, count in _NODE.findall(done.stderr)},
        messages=done.stderr,
    )


def _emulated(program: Path, target: Target, arguments: Sequence[str]) -> list[str]:
    """Return the command line of QEMU: an instruction takes a nanosecond of the board's time."""
    words = "".join(f",arg={word}" for word in ("pm_run", *arguments))
    options = ["-icount", "shift=0", "-nographic", "-monitor", "none", "-serial", "none"]
    hosting = f"enable=on,target=native{words}"
    command = ["qemu-system-arm", "-M", MACHINES[target], *options]
    return [*command, "-semihosting-config", hosting, "-kernel", str(program)]
