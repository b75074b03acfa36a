"""Export: a step is solved for a device, planned, placed, and written as a folder of C."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypedDict

from poetmodel.device import Costs, StorageMode
from poetmodel.device.generation import LEAST_UNIT_BYTES, GenerationLayout
from poetmodel.device.io import load_device, load_profile
from poetmodel.errors import BudgetError, InputError, VerificationError
from poetmodel.export.deployment import (
    Deployment,
    Inference,
    WeightsFormat,
    alignment_on,
    reserved_bytes,
    stack_bytes,
)
from poetmodel.export.flash import check_flash, program_sizes, smallest
from poetmodel.export.folder import check_folder, check_prefix, check_shared, write_folder
from poetmodel.export.source import StepSource
from poetmodel.export.step import Weights, reading_state
from poetmodel.export.tables import with_byte_inputs
from poetmodel.export.tiles import tiled
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.plan import check_plan
from poetmodel.plan.arena import check_arena
from poetmodel.problem import Problem
from poetmodel.problem.infeasibility import unit_remark
from poetmodel.solver.fitting import aligned_graph, fit_arena
from poetmodel.solver.request import Request
from poetmodel.units import format_bytes, parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.device import Device
    from poetmodel.export.step import LoweredStep
    from poetmodel.plan import Plan
    from poetmodel.plan.arena import Arena
    from poetmodel.result import SolveResult
    from poetmodel.solver.request import OnProgress

DEVICE = "nrf52840"
"""The device whose costs count unless another is named: a Cortex-M4 with 256 KiB."""
NO_TILES: Final = "none"
AUTO: Final = "auto"
MOST_NODES: Final = 5000
"""A step of more nodes is not looked at where the size of tiles is chosen."""
STEP_RATIO: Final = 0.9
"""Share of the time limit for the step; the rest is for checks, and for an inference."""


class ExportKeywords(TypedDict, total=False):
    """Keywords of `export_step` that `poetmodel.torch.export` passes on."""

    ram: str | int | None
    device: str | Device
    profile: str | Path | Costs | None
    stack: str | int | None
    tile: str | int | None
    paging: bool
    recompute: bool
    minimize: str
    deadline: str | float | None
    time_limit: float
    gap: float
    commit: bool
    commit_every: int
    checksum: bool
    byte_inputs: Mapping[str, str]
    prefix: str
    weights: WeightsFormat | str
    shared_kernels: str | Path | None
    command: str
    on_progress: OnProgress | None


def export_step(  # noqa: PLR0913 - one way in, and all but two of its parameters have defaults
    step: LoweredStep,
    folder: Path,
    *,
    ram: str | int | None = None,
    device: str | Device = DEVICE,
    profile: str | Path | Costs | None = None,
    stack: str | int | None = None,
    tile: str | int | None = None,
    paging: bool = True,
    recompute: bool = True,
    minimize: str = "energy",
    deadline: str | float | None = None,
    time_limit: float = 60.0,
    gap: float = 0.01,
    commit: bool = False,
    commit_every: int = 1,
    checksum: bool = True,
    infer: bool = False,
    byte_inputs: Mapping[str, str] = MappingProxyType({}),
    prefix: str = "pm",
    weights: WeightsFormat | str = WeightsFormat.C,
    shared_kernels: str | Path | None = None,
    command: str = "",
    on_progress: OnProgress | None = None,
) -> Deployment:
    """Write a folder of C that trains a step within all of a device's RAM.

    Parameters
    ----------
    step : LoweredStep
        What is computed.
    folder : Path
        Where to write; made if it is not there.
    ram : str or int, optional
        All of the RAM that a step takes: state, tensors, inputs, stack, runtime. Bytes, a size such
        as ``256KiB``, or a percentage of what it takes when everything is kept. Default: the
        device's.
    device : str or Device
        Whose costs, storage and RAM count.
    profile : str, Path or Costs, optional
        Measured costs in place of the device's estimates.
    stack : str or int, optional
        What to reserve for the stack. Default: 1536 bytes, 2048 with `commit`.
    tile : str or int, optional
        Largest tensor, such as ``32KiB``: parameters and activations that are larger are in slices
        of channels, as far as kernels take these. ``none`` for whole ones, ``auto`` for the largest
        size with which the minimum RAM fits, none if that does without. Default: ``auto``.
    paging, recompute : bool
        Whether tensors may be paged, and computed again.
    minimize : {'energy', 'time', 'ram', 'writes'}
        What the schedule is best in.
    deadline : str or float, optional
        Time limit of a step: seconds, ``20ms``, or ``150%`` of one computation of every node.
    time_limit : float
        Wall time for everything but the writing of the files: all solves, plans and addresses,
        those of an inference included [s]. What was found by then is written.
    gap : float
        Gap of the overhead at which the solver stops.
    commit : bool
        Whether storage keeps generations of all state, so that one is whole at any moment.
    commit_every : int
        In each how many steps state goes there; above 1 it implies `commit`, and all state that is
        replaced must have its home in RAM.
    checksum : bool
        Whether committed state has checksums, which are compared when it is read.
    infer : bool
        Whether ``pm_infer`` is wanted too: the forward pass in evaluation mode. Its step must have
        been captured with it.
    byte_inputs : mapping
        Inputs of real numbers, by name, that the step is to take as bytes, and what these mean:
        ``uint8:0.0039`` are integers times a scale, ``uint8:0.01,0.02,0.01:-1.5`` with a scale for
        each channel, and an offset that is added. Inputs that are bytes already need none.
    prefix : str
        What all names of C begin with: two steps of other prefixes link into one program.
    weights : {'c', 'binary'}
        Whether the first values of state are an array of C, or a file that the assembler includes.
    shared_kernels : str or Path, optional
        A folder for the kernels, which several steps share: each adds those that it needs.
    command : str
        What made the folder, for its readers.
    on_progress : callable, optional
        As for `poetmodel.solve`: called with the progress of each solve.

    Returns
    -------
    Deployment
        What was written, with the result of the solve.

    Raises
    ------
    BudgetError
        If the RAM leaves no room for any schedule.
    FlashError
        If program and storage do not fit the flash of the device.
    NoScheduleError
        If no schedule keeps the limits, or none was found in time.
    """
    clock = Request(time_limit_s=time_limit, gap=gap, on_progress=on_progress)
    check_folder(folder)
    check_prefix(prefix)
    if shared_kernels is not None:
        check_shared(Path(shared_kernels), folder)
    if weights not in list(WeightsFormat):
        raise InputError(f"weights: expected c or binary, got {weights!r}")
    board = load_device(device) if isinstance(device, str) else device
    step = step if infer else replace(step, inference=None)
    if infer and step.inference is None:
        raise InputError(
            f"infer: {step.graph.name} was captured without its forward pass in evaluation mode; "
            "capture it again, with infer"
        )
    step = with_byte_inputs(step, byte_inputs)
    if type(commit_every) is not int or commit_every < 1:
        raise InputError(f"commit_every: expected a number of steps from 1, got {commit_every!r}")
    commit = commit or commit_every > 1
    if commit and board.storage is None:
        raise InputError(f"commit: device {board.name} has no storage for two generations of state")
    if commit and board.is_volatile and (board.flash is None or not board.flash.storage_bytes):
        raise InputError(
            f"commit: the storage of {board.name} forgets without power, and no [flash] of it may "
            "take state; state its storage_bytes, or choose a device whose storage keeps state"
        )
    in_place = commit and not board.is_volatile
    unit_bytes = GenerationLayout.on(board).write_unit_bytes if in_place else 1
    if board.is_memory_mapped and unit_bytes > LEAST_UNIT_BYTES:
        raise InputError(
            f"commit: the storage of {board.name} is written {unit_bytes} B at a time, and updates "
            "of state that is read in place write a few numbers at a time; choose a device whose "
            "write_unit_bytes is at most 4, or storage that is not memory-mapped"
        )
    stack = stack_bytes(stack, commit=commit)
    reserved = reserved_bytes(step, stack)
    ram_bytes = _ram_bytes(step, board, ram, reserved)
    pages = paging and _costs(step, board, profile).pages is not None
    room = ram_bytes - reserved
    tile_bytes, step = chosen_tiles(step, tile, board, room_bytes=room, paging=pages)
    costs = _costs(step, board, profile)
    problem = Problem(
        step.graph,
        costs,
        ram=_arena_bytes(ram_bytes, reserved, needed_bytes(step, board, paging=pages), tile_bytes),
        deadline=deadline,
        recompute=recompute,
        paging=pages,
        minimize=minimize,
        commit=commit_every if commit else None,
    )
    if problem.table.commit is not None:
        _check_storage(2 * problem.table.commit.generation_bytes, board, commit=True)
    least_plan, no_addresses = smallest(step)
    deployment = Deployment(
        step=step,
        tile_bytes=tile_bytes,
        plan=least_plan,
        arena=no_addresses,
        ram_bytes=ram_bytes,
        stack_bytes=stack,
        device=board,
        commit=commit and bool(step.graph.replacement_of),
        commit_every=commit_every,
        checksum=checksum,
        prefix=prefix,
        weights=WeightsFormat(weights),
        shared_kernels=None
        if shared_kernels is None
        else Path(os.path.relpath(shared_kernels, folder)).as_posix(),
    )
    first = Weights.of(step)
    check_flash(_with_sizes(deployment, first), at_least=True)
    result, plan, arena = _fitted(problem, board, clock, STEP_RATIO)
    deployment = replace(deployment, plan=plan, arena=arena, result=result)
    if step.inference is not None:
        inference = _inference(deployment, step.inference, problem, board, clock)
        deployment = replace(deployment, inference=inference)
    _check_storage(deployment.least_stored_bytes, board, commit=bool(deployment.rotating))
    deployment = _with_sizes(deployment, first)
    check_flash(deployment)
    write_folder(deployment, folder, command=command)
    return deployment


def _with_sizes(deployment: Deployment, weights: Weights) -> Deployment:
    """Return a deployment that knows what its program takes of flash."""
    source = StepSource(deployment, weights)
    return replace(deployment, program=program_sizes(deployment, source))


def _fitted(
    problem: Problem, device: Device, clock: Request, ratio: float = 1.0
) -> tuple[SolveResult, Plan, Arena]:
    """Return a schedule with its plan and addresses, all checked; raise where there is none.

    It may take a share of the time that is left.
    """
    mode = StorageMode.BLOCKING if device.storage is None else device.storage.mode
    limit_s = max(ratio * clock.remaining_s(), 1e-3)
    result, plan, arena = fit_arena(
        problem,
        mode=mode,
        alignment=alignment_on(device),
        time_limit=limit_s,
        gap=clock.gap,
        on_progress=clock.on_progress,
    )
    result.require_schedule()
    if plan is None or arena is None:
        raise VerificationError(result.violations)
    checks = (
        check_plan(problem.graph, problem.costs, plan).violations,
        check_arena(problem.graph, plan, arena).violations,
    )
    if any(checks):
        raise VerificationError([fault for check in checks for fault in check])
    return result, plan, arena


def _inference(
    deployment: Deployment, captured: LoweredStep, problem: Problem, device: Device, clock: Request
) -> Inference:
    """Plan an inference beside a step: in the RAM above the state that lives there."""
    resident = deployment.resident_bytes
    mapped = deployment.plan.memory_mapped
    tensors, homes = deployment.step.graph, deployment.plan.resident or ()
    stored = {tensors.tensors[i].name for i in tensors.state_tensors if i not in homes}
    step = reading_state(captured, () if mapped else stored)
    least = floor(aligned_graph(step.graph, alignment_on(device))).bytes
    room = problem.usable_ram_bytes - resident
    if room < least:
        raise BudgetError(
            f"ram: state in RAM leaves {max(0, room):,} B for an inference, and one node of it "
            f"needs {least:,} B; give {least - room:,} B more, or leave infer out"
        )
    aux = problem.aux_limit_bytes
    wanted = replace(
        problem,
        graph=step.graph,
        costs=Costs.estimate(step.graph, device),
        ram=room,
        deadline=None,
        aux_bytes=None if aux is None else max(0, aux - deployment.least_stored_bytes),
    )
    _, plan, arena = _fitted(wanted, device, clock)
    return Inference(step=step, plan=plan, arena=arena)


def _check_storage(stored_bytes: int, device: Device, *, commit: bool) -> None:
    """Raise if the storage of the device has no room for what a step keeps there [B].

    Generations of state are in its flash where its storage forgets.
    """
    flash = device.flash if commit and device.is_volatile else None
    room = device.aux_bytes if flash is None else flash.storage_bytes
    if room is None or stored_bytes <= room:
        return
    what, advice, blocks = "what is kept there takes", "give more ram", ""
    if commit:
        what = "both generations of all state there take"
        advice = "train fewer parameters, or leave commit out"
    if commit or not device.is_volatile:
        blocks = f" in blocks of {GenerationLayout.on(device).erase_block_bytes:,} B"
    raise BudgetError(
        f"{'storage' if flash is None else 'flash'}: {what} {stored_bytes:,} B{blocks}, and device "
        f"{device.name} has {room:,} B; {advice}"
    )


def in_tiles(step: LoweredStep, tile: str | int | None) -> LoweredStep:
    """Return a step in tiles of a size, where one is given."""
    if tile in (None, NO_TILES):
        return step
    if tile == AUTO:
        raise InputError(
            "tile: auto is chosen for the RAM of a device; give the size that 'poetmodel export' "
            "prints, such as 32KiB"
        )
    tile_bytes = parse_size(tile, field="tile")
    if tile_bytes == 0:
        raise InputError("tile: expected a size above 0 bytes, such as 32KiB")
    return tiled(step, tile_bytes)


def chosen_tiles(
    step: LoweredStep, tile: str | int | None, device: Device, *, room_bytes: int, paging: bool
) -> tuple[int | None, LoweredStep]:
    """Return the size of tiles and the step in them; None and the whole step where it needs none.

    With ``auto`` the size is the largest of 1, 1.5, 2, 3, 4, 6 … KiB with which no node needs more
    than there is room for. Where there is none the step is whole, as nothing makes it fit.
    """
    if tile not in (None, AUTO):
        size = None if tile == NO_TILES else parse_size(tile or 0, field="tile")
        return size, in_tiles(step, tile)
    best, least = (None, step), needed_bytes(step, device, paging=paging)
    largest = max(step.graph.tensor_bytes)
    sizes = (size for k in range(10, largest.bit_length()) for size in (2**k, 3 * 2 ** (k - 1)))
    for size in sorted((size for size in sizes if size < largest), reverse=True):
        if least <= room_bytes:
            break
        found = tiled(step, size)
        if len(found.graph.nodes) > MOST_NODES:
            break
        needed = needed_bytes(found, device, paging=paging)
        if needed < least:
            best, least = (size, found), needed
    return best


def needed_bytes(step: LoweredStep, device: Device, *, paging: bool) -> int:
    """Return what the node needs that needs the most, with addresses as a device has them [B]."""
    mapped = device.storage is not None and device.storage.memory_mapped
    aligned = aligned_graph(step.graph, alignment_on(device))
    return floor(aligned, memory_mapped=paging and mapped, resident=not paging).bytes


def _costs(step: LoweredStep, device: Device, profile: str | Path | Costs | None) -> Costs:
    if profile is None:
        return Costs.estimate(step.graph, device)
    if isinstance(profile, Costs):
        return replace(profile, device=device)
    return load_profile(profile, device=device)


def _ram_bytes(step: LoweredStep, device: Device, ram: str | int | None, reserved: int) -> int:
    if ram is None:
        return device.ram_bytes
    whole = checkpoint_all_peak_bytes(aligned_graph(step.graph, alignment_on(device)))
    return parse_size(ram, field="ram", whole_bytes=whole + reserved)


def _arena_bytes(ram_bytes: int, reserved: int, least: int, tile_bytes: int | None) -> int:
    """Return what is left for the arena; raise `BudgetError` where no step fits into that."""
    if ram_bytes - reserved < least:
        tiles = "whole" if tile_bytes is None else f"in tiles of {format_bytes(tile_bytes)}"
        raise BudgetError(
            f"ram: {format_bytes(ram_bytes)} less {format_bytes(reserved)} for inputs, stack and "
            f"runtime leave {max(0, ram_bytes - reserved):,} B for tensors, and one node alone of "
            f"the step, {tiles}, needs {least:,} B; give at least {least + reserved:,} B"
            f"{unit_remark(ram_bytes, least + reserved)}"
        )
    return ram_bytes - reserved
