"""Measure costs on an emulated board: instructions of the exported code.

An emulator counts instructions, not cycles. Times are modelled: instructions / instructions per
cycle / clock x memory factor. Energies are these times x the power of the device. Transfer costs
are estimates from the device.
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
from poetmodel.export.board import MACHINES, Target, build_program, run_program
from poetmodel.export.exporting import export_step
from poetmodel.export.reserves import STACK_BYTES, reserved_bytes
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
    """The costs of a step on an emulated board, and notes on their origin."""

    costs: Costs
    """Measured costs of each node except state, and estimated page costs of each tensor if the
    device has storage."""
    instructions: Mapping[str, int]
    """Mean instructions of one computation, by name of the node; state nodes have none."""
    notes: tuple[str, ...]
    """Origin of compute times, compute energies and page costs, one sentence each."""


def measure_emulated(
    step: LoweredStep,
    *,
    device: str | Device,
    instructions_per_cycle: float | None = None,
    core: str | None = None,
    time_limit_s: float = 600.0,
) -> EmulatedProfile:
    """Measure costs of each node: instructions in QEMU, converted to times and energies.

    `device` is the source of transfer costs, clock and power; `core` (m4, m3 or m7) and the
    instructions per cycle have its values by default (m4 and 1 if unknown). The memory factor of
    the device always applies. `time_limit_s` limits the build, and again the execution [s]. The
    step is already in tiles if it will be exported in tiles.

    Raises
    ------
    InputError
        If the device states no clock or no power, or if it, an option or a value is invalid.
    MissingExtraError
        If a compiler or the emulator is missing.
    ToolchainError
        If the build or the execution fails or exceeds its time limit.
    BudgetError, FlashError, NoScheduleError
        If `export_step` finds no export with the RAM of the emulated board.
    """
    board, target, cycle_model, power_w = parse_emulation(
        device, instructions_per_cycle=instructions_per_cycle, core=core
    )
    instructions = _measure_instructions(step, board, target, time_limit_s)
    instructions_per_s = cycle_model.instructions_per_s
    compute = {
        name: Cost.at_power(count / instructions_per_s, power_w)
        for name, count in instructions.items()
    }
    estimated_costs = Costs.estimate(step.graph, board)
    return EmulatedProfile(
        costs=replace(estimated_costs, compute=compute, source="", cycles=cycle_model),
        instructions=instructions,
        notes=(
            f"compute times: instructions of the exported code for a Cortex-{target.upper()}, "
            f"counted by QEMU, {cycle_model.instructions_per_cycle:g} a cycle at "
            f"{cycle_model.clock_hz / 1e6:g} MHz ({cycle_model.origin}); {cycle_model.label}",
            f"compute energies: these times, {power_w:g} W",
            f"page costs: estimated for device {board.short_name}",
        ),
    )


def parse_emulation(
    device: str | Device, *, instructions_per_cycle: float | None, core: str | None
) -> tuple[Device, Target, CycleModel, float]:
    """Return (device, emulated core, cycle model, power [W]) for the options of `measure_emulated`.

    No step is needed, so that options can be checked before the capture.
    """
    board = Device.load(device) if isinstance(device, str) else device
    clock_hz, power_w = board.clock_hz, board.compute.power_w
    if clock_hz is None:
        raise InputError(f"device {board.name}: expected the clock in its core, such as 64 MHz")
    if power_w is None:
        raise InputError(f"device {board.name}: expected [compute] power_w")
    if instructions_per_cycle is not None and not 0 < instructions_per_cycle < math.inf:
        raise InputError(
            f"instructions per cycle: expected a number above 0, got {instructions_per_cycle}"
        )
    if core is not None and core not in tuple(map(str, MACHINES)):
        raise InputError(f"core: expected one of {', '.join(MACHINES)}, got {core!r}")
    core_data = find_core(board.core)
    target = Target(core or (Target.M4 if core_data is None else core_data.makefile_target))
    if core is not None and (core_data is None or core_data.makefile_target != core):
        core_data = core_for_target(core)
    cycle_model = CycleModel(
        core_data, clock_hz, board.compute.memory_factor, instructions_per_cycle
    )
    return board, target, cycle_model, power_w


def _measure_instructions(
    step: LoweredStep, device: Device, target: Target, time_limit_s: float
) -> dict[str, int]:
    """Export, build and execute a step; return mean instructions by name of a computed node."""
    with tempfile.TemporaryDirectory(prefix="poetmodel-profile-") as folder_name:
        folder = Path(folder_name)
        deployment = _export_for_board(step, device, folder)
        program = build_program(folder, target, settings=("PROFILE=1",), time_limit_s=time_limit_s)
        completed = run_program(
            program,
            target,
            folder,
            inputs=_make_random_batch(step),
            steps=1,
            learning_rate=step.learning_rate or 0.0,
            time_limit_s=time_limit_s,
        ).require_success()
    computation_counts = Counter(index for op, index in deployment.plan.program if op == Op.COMPUTE)
    return {
        node.name: round(completed.node_instructions[k] / computation_counts[k])
        for k, node in enumerate(step.graph.nodes)
        if not node.is_state
    }


def _export_for_board(step: LoweredStep, device: Device, folder: Path) -> Deployment:
    """Export a step with `reserved_bytes` plus 5/4 of the keep-all peak, within a board's RAM."""
    needed_bytes = checkpoint_all_peak_bytes(step.graph) * 5 // 4 + reserved_bytes(
        step, STACK_BYTES
    )
    ram = min(MACHINE_RAM_BYTES, needed_bytes)
    command = "poetmodel profile"
    return export_step(step, folder, ram=ram, device=device, tile=TileChoice.WHOLE, command=command)


def _make_random_batch(step: LoweredStep) -> bytes:
    """Return one batch, the bytes of its inputs in order: seeded random reals; integers are 0."""
    random = np.random.default_rng(0)
    arrays = []
    for tensor in step.inputs:
        size = math.prod(tensor.shape)
        is_real = tensor.type is DataType.REAL
        array = random.normal(size=size) if is_real else np.zeros(size)
        arrays.append(array.astype(tensor.type.file_dtype).tobytes())
    return b"".join(arrays)
