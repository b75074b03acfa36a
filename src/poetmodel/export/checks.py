"""Check an export before a solve: options, size of the weights, RAM of one node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from poetmodel.budgets import Budget, TileChoice
from poetmodel.device import Costs, Device
from poetmodel.device.generation import MIN_WRITE_UNIT_BYTES, GenerationLayout
from poetmodel.errors import BudgetError, FlashError, InputError
from poetmodel.export.deployment import RUNTIME_BYTES, WeightsFormat, parse_stack
from poetmodel.export.folder import check_folder, check_prefix, check_shared_folder
from poetmodel.export.replay import check_samples
from poetmodel.lowered.tables import parse_byte_inputs
from poetmodel.problem import Limits, Quantity
from poetmodel.problem.infeasibility import missing_unit_hint
from poetmodel.solver.request import Request
from poetmodel.tiling.choice import parse_tile
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from poetmodel.lowered.step import LoweredStep


def check_options(  # noqa: PLR0913 - each option of an export that needs no step
    folder: Path,
    *,
    ram: str | int | Budget | None,
    device: str | Device,
    profile: str | Path | Costs | None,
    stack: str | int | None,
    tile: str | int | TileChoice | None,
    minimize: str,
    deadline: str | float | None,
    time_limit: float,
    gap: float,
    commit: bool,
    commit_every: int,
    byte_inputs: Mapping[str, str],
    prefix: str,
    weights: WeightsFormat | str,
    shared_kernels: str | Path | None,
    replay: int,
) -> Device:
    """Check the options of `poetmodel.export.exporting.export_step`, and return the device.

    Checks only conditions that do not depend on the step; `check_ram`, which compares `ram` with
    the stack, is a separate check. Raises `InputError` or one of its subclasses for the first
    invalid option. Leaves no file.
    """
    Request(time_limit_s=time_limit, gap=gap)
    check_folder(folder)
    check_prefix(prefix)
    if shared_kernels is not None:
        check_shared_folder(Path(shared_kernels), folder)
    if weights not in list(WeightsFormat):
        raise InputError(f"weights: expected c or binary, got {weights!r}")
    if minimize not in list(Quantity):
        raise InputError(f"minimize: expected one of {', '.join(Quantity)}, got {minimize!r}")
    board = Device.load(device) if isinstance(device, str) else device
    if board.is_graphics_card:
        raise InputError(
            f"device: {board.short_name} is a graphics card ({board.core}), and exported C runs on "
            "CPUs and microcontrollers; choose one of these ('poetmodel devices' lists them)"
        )
    if isinstance(profile, str | Path):
        Costs.load(profile, device=board)
    parse_byte_inputs(byte_inputs)
    if type(commit_every) is not int or commit_every < 1:
        raise InputError(f"commit_every: expected a number of steps from 1, got {commit_every!r}")
    commit = commit or commit_every > 1
    if commit:
        _check_commit(board)
    check_samples(replay)
    if replay and board.storage is None:
        raise InputError(f"replay: device {board.name} has no storage for samples")
    parse_tile(tile)
    Limits(ram=ram, deadline=deadline).check()
    parse_stack(stack, commit=commit)
    return board


def check_ram(ram: str | int | Budget | None, stack: str | int | None, board: Device) -> None:
    """Raise `BudgetError` if stack and runtime use all of a RAM budget given in bytes.

    Budgets in percent and the default, None, are not checked. The default stack is that of a step
    without commits. An invalid `ram` also raises `BudgetError`, as does an invalid `stack` beside a
    budget in bytes. `board` is for the message only.
    """
    budget = None if ram is None else Budget.parse(ram)
    if budget is None or budget.size_bytes is None:
        return
    ram_bytes = budget.size_bytes
    reserved_bytes = parse_stack(stack, commit=False) + RUNTIME_BYTES
    if ram_bytes <= reserved_bytes:
        has_unit = not str(budget.stated_value).isdigit() or not ram_bytes
        remark = "" if has_unit else missing_unit_hint(ram_bytes, board.ram_bytes)
        raise BudgetError(
            f"ram: {format_bytes(ram_bytes)} less {format_bytes(reserved_bytes)} for stack and "
            "runtime leave 0 B for inputs and tensors; give more, up to the "
            f"{format_bytes(board.ram_bytes)} of device {board.short_name}{remark}"
        )


def _check_commit(board: Device) -> None:
    """Raise `InputError` if a device can store no generations of state.

    These are devices without storage, with volatile storage but no flash for state, or with
    memory-mapped storage whose write unit exceeds `MIN_WRITE_UNIT_BYTES`.
    """
    if board.storage is None:
        raise InputError(f"commit: device {board.name} has no storage for two generations of state")
    if board.is_volatile:
        if board.flash is None or not board.flash.storage_bytes:
            raise InputError(
                f"commit: the storage of {board.name} is volatile, and no [flash] of it may take "
                "state; state its storage_bytes, or choose a device whose storage retains state"
            )
        return
    unit_bytes = GenerationLayout.for_device(board).write_unit_bytes
    if board.is_memory_mapped and unit_bytes > MIN_WRITE_UNIT_BYTES:
        raise InputError(
            f"commit: the storage of {board.name} is written {unit_bytes} B at a time, and updates "
            "of state that is read in place write a few numbers at a time; choose a device whose "
            "write_unit_bytes is at most 4, or storage that is not memory-mapped"
        )


def min_weight_bytes(step: LoweredStep) -> int:
    """Return a lower bound on the weights in flash, for any tiles: all nonzero elements [B].

    Counts state before the first step and constants, those of forward passes included; values that
    passes share count once (`LoweredStep.values`). Elements that are 0 do not count, because
    weights in flash omit slices of state that contain only zeros.
    """
    steps = (step, *step.forward_passes)
    return sum(
        each_step.buffers[name].type.itemsize * int(np.count_nonzero(values))
        for each_step in steps
        for name, values in each_step.values.items()
    )


def check_weight_bytes(weight_bytes: int, device: Device) -> None:
    """Raise `FlashError` if the initial weights alone exceed the flash of a device.

    `weight_bytes` is their size, or a lower bound on it [B]. A device without stated flash is not
    checked.
    """
    if device.flash is not None and weight_bytes > device.flash.size_bytes:
        raise FlashError(
            f"flash: first weights alone are {weight_bytes:,} B at least, and device "
            f"{device.name} has {device.flash.size_bytes:,} B; take a smaller network, or a device "
            "with more flash"
        )


def make_ram_error(
    step: LoweredStep,
    device: Device,
    *,
    ram_bytes: int,
    reserved_bytes: int,
    needed_bytes: int,
    tile_bytes: int | None,
    paging: bool,
    hints: Iterable[str],
) -> BudgetError:
    """Return the error for a step with a node that needs more RAM than tensors may use.

    `needed_bytes` is the working set of the node [B], `ram_bytes` the RAM limit of the step [B],
    and `reserved_bytes` the RAM outside of the arena [B]. `tile_bytes` is the tile size [B], None
    without tiles; `paging` is whether tensors may be paged.

    The message lists `hints` for options that reduce the working set. If the device has enough RAM,
    it advises a higher limit first. If not, it advises updates by an optimizer for a step that
    returns gradients. Without any other advice, it advises a smaller network or batch, or a device
    with more RAM.
    """
    total_bytes, available_bytes = needed_bytes + reserved_bytes, device.ram_bytes
    tiling = "whole" if tile_bytes is None else f"in tiles of {format_bytes(tile_bytes)}"
    advice = list(hints)
    if total_bytes <= available_bytes:
        condition = "" if paging else "without paging "
        advice.insert(0, f"{condition}give at least {total_bytes:,} B")
        remark = missing_unit_hint(ram_bytes, total_bytes)
        limit = ""
    else:
        remark = ""
        limit = (
            f", {total_bytes:,} B in all, and device {device.short_name} has {available_bytes:,} B"
        )
        if step.gradients:
            advice.append("update the parameters by an optimizer: gradients are then in tiles too")
        advice = advice or ["take a smaller network or batch, or a device with more RAM"]
    return BudgetError(
        f"ram: {format_bytes(ram_bytes)} less {format_bytes(reserved_bytes)} for inputs, stack and "
        f"runtime leave {max(0, ram_bytes - reserved_bytes):,} B for tensors, and one node alone "
        f"of the step, {tiling}, needs {needed_bytes:,} B{limit}; {', or '.join(advice)}{remark}"
    )
