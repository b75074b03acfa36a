"""Costs measured on an emulated board: instructions of the very code that is exported.

An emulator counts instructions, not cycles. Time is a model: instructions over those of one cycle,
over the clock, times a factor for waits for memory; energy is that time times a power. Transfers
are estimated from the device.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.budgets import TileChoice
from poetmodel.device import Costs, Device
from poetmodel.device.cores import CycleModel, core_for_target, find_core
from poetmodel.device.cost import Cost
from poetmodel.errors import InputError
from poetmodel.export.board import MACHINES, Target, build, run
from poetmodel.export.deployment import STACK_BYTES, reserved_bytes
from poetmodel.export.exporting import export_step
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.lowered.calls import DataType
from poetmodel.plan import Op

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.export.deployment import Deployment
    from poetmodel.lowered.step import LoweredStep

MACHINE_RAM_BYTES: Final = 4 * 2**20
"""RAM of the emulated boards [B]."""


@dataclass(frozen=True, kw_only=True)
class EmulatedProfile:
    """The costs of a step on an emulated board, and how they were found."""

    costs: Costs
    """Times and energies of every node and every tensor of the step's graph."""
    instructions: Mapping[str, int]
    """Of one computation of each node."""
    notes: tuple[str, ...]
    """How the figures came about, one sentence each."""


def emulated_profile(
    step: LoweredStep,
    *,
    device: str | Device,
    instructions_per_cycle: float | None = None,
    core: str | None = None,
    time_limit_s: float = 600.0,
) -> EmulatedProfile:
    """Count the instructions of each node on a board that QEMU emulates.

    Parameters
    ----------
    step : LoweredStep
        What is computed, in tiles if it is to be exported in tiles.
    device : str or Device
        Its storage gives the costs of transfers, and its core clock and power.
    instructions_per_cycle : float, optional
        Average instructions per cycle; by default that of the core, 1 if it has no figure. The
        memory factor of the device applies to both.
    core : {'m4', 'm3', 'm7'}, optional
        Which Cortex the code is built for; by default that of the device, else m4.
    time_limit_s : float
        How long building and running may each take [s].

    Raises
    ------
    InputError
        If the device says no clock or no power.
    MissingExtraError
        If a compiler or the emulator is missing.
    ToolchainError
        If the code does not fit into the emulated board, or fails there.
    """
    board, target, model, power_w = emulated_board(
        device, instructions_per_cycle=instructions_per_cycle, core=core
    )
    instructions = _instructions(step, board, target, time_limit_s)
    per_s = model.instructions_per_s
    compute = {
        name: Cost(count / per_s, count / per_s * power_w) for name, count in instructions.items()
    }
    estimated = Costs.estimate(step.graph, board)
    return EmulatedProfile(
        costs=replace(estimated, compute=compute, source="", cycles=model),
        instructions=instructions,
        notes=(
            f"compute times: instructions of the exported code for a Cortex-{target.upper()}, "
            f"counted by QEMU, {model.instructions_per_cycle:g} a cycle at "
            f"{model.clock_hz / 1e6:g} MHz ({model.origin}); {model.label}",
            f"compute energies: these times, {power_w:g} W",
            f"page costs: estimated for device {board.short_name}",
        ),
    )


def emulated_board(
    device: str | Device, *, instructions_per_cycle: float | None, core: str | None
) -> tuple[Device, Target, CycleModel, float]:
    """Return a device, its emulated core, its cycles and its power [W].

    Raises as `emulated_profile` does for options. Call this before a capture: it needs no step.
    """
    board = Device.load(device) if isinstance(device, str) else device
    hertz, power_w = board.clock_hz, board.compute.power_w
    if hertz is None:
        raise InputError(f"device {board.name}: expected the clock in its core, such as 64 MHz")
    if power_w is None:
        raise InputError(f"device {board.name}: expected [compute] power_w")
    if instructions_per_cycle is not None and not 0 < instructions_per_cycle < math.inf:
        raise InputError(
            f"instructions per cycle: expected a number above 0, got {instructions_per_cycle}"
        )
    if core is not None and core not in tuple(map(str, MACHINES)):
        raise InputError(f"core: expected one of {', '.join(MACHINES)}, got {core!r}")
    known = find_core(board.core)
    target = Target(core or (Target.M4 if known is None else known.emulated_as))
    if core is not None and (known is None or known.emulated_as != core):
        known = core_for_target(core)
    model = CycleModel(known, hertz, board.compute.memory_factor, instructions_per_cycle)
    return board, target, model, power_w


def _instructions(
    step: LoweredStep, device: Device, core: Target, time_limit_s: float
) -> dict[str, int]:
    """Return the instructions of one computation of each node that computes."""
    with tempfile.TemporaryDirectory(prefix="poetmodel-profile-") as name:
        folder = Path(name)
        deployment = _deployed(step, device, folder)
        program = build(folder, core, settings=("PROFILE=1",), time_limit_s=time_limit_s)
        done = run(
            program,
            core,
            folder,
            inputs=_batch(step),
            steps=1,
            learning_rate=step.learning_rate or 0.0,
            time_limit_s=time_limit_s,
        ).require_success()
    times = Counter(index for op, index in deployment.plan.program if op == Op.COMPUTE)
    return {
        node.name: round(done.node_instructions[k] / times[k])
        for k, node in enumerate(step.graph.nodes)
        if not node.is_state
    }


def _deployed(step: LoweredStep, device: Device, folder: Path) -> Deployment:
    """Export a step with all the RAM that the emulated board has, so that little is done twice."""
    whole = checkpoint_all_peak_bytes(step.graph) * 5 // 4 + reserved_bytes(step, STACK_BYTES)
    ram = min(MACHINE_RAM_BYTES, whole)
    command = "poetmodel profile"
    return export_step(step, folder, ram=ram, device=device, tile=TileChoice.WHOLE, command=command)


def _batch(step: LoweredStep) -> bytes:
    """Return one batch: normal numbers, and 0 for integers, which is a class of any number."""
    random = np.random.default_rng(0)
    parts = []
    for value in step.inputs:
        size = math.prod(value.shape)
        reals = value.type is DataType.REAL
        array = random.normal(size=size) if reals else np.zeros(size)
        parts.append(array.astype(value.type.stored).tobytes())
    return b"".join(parts)
