"""Exported programs, run: on this machine, or on a board that QEMU emulates."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from poetmodel.export.toolchain import MACHINES, Target, ToolchainError, execute, require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
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
    the steps before, where it went on."""
    node_instructions: Mapping[int, int]
    """Instructions of one step by node, where they were counted (``PROFILE=1``)."""
    messages: str
    """All that it said on standard error."""

    @property
    def error(self) -> int:
        """The error number of the step that failed, or 0."""
        return max(0, self.status - STEP_STATUS)

    def require_success(self) -> Run:
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
) -> Run:
    """Run a program that was built from an exported folder.

    Parameters
    ----------
    program : Path
        What `poetmodel.export.toolchain.build` returned.
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
        ``resume``, and faults such as ``cut:7``.
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
    return Run(
        status=done.returncode,
        losses={int(step): float(loss) for step, loss in _LOSS.findall(done.stdout)},
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
