"""The compilers and the emulator that exported folders need: found, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from poetmodel.errors import MissingExtraError, PoetModelError

if TYPE_CHECKING:
    from collections.abc import Sequence
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
    return tuple(each for each in programs(target, emulate=emulate) if shutil.which(each) is None)


def require(target: Target, *, emulate: bool = True) -> None:
    """Make sure that all programs are there.

    Raises
    ------
    MissingExtraError
        One is not; the message says how Debian calls it.
    """
    missing = missing_programs(target, emulate=emulate)
    if missing:
        names = " ".join(PACKAGES[each] for each in missing).replace(" and ", " ")
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
