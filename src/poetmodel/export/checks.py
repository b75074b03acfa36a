"""Check the RAM and the flash of a step: before a solve, and of its program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from poetmodel.errors import BudgetError, FlashError
from poetmodel.export.storage import NEARLY_FULL
from poetmodel.graph import Phase
from poetmodel.problem.infeasibility import missing_unit_hint
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from poetmodel.device import Device
    from poetmodel.export.deployment import Build
    from poetmodel.lowered.step import LoweredStep


def min_weight_bytes(step: LoweredStep) -> int:
    """Return a lower bound on the weights in flash, for any tiles: all nonzero elements [B].

    Zeros do not count, because weights in flash omit slices of state that contain only zeros.
    Values that passes share count once.
    """
    steps = (step, *step.forward_passes)
    return sum(
        each_step.buffers[name].type.itemsize * int(np.count_nonzero(values))
        for each_step in steps
        for name, values in each_step.values.items()
    )


def check_weight_bytes(weight_bytes: int, device: Device) -> None:
    """Raise `FlashError` if initial weights [B], or their lower bound, exceed the flash."""
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

    `needed_bytes` is the working set of the node, `ram_bytes` the RAM limit of the step,
    `reserved_bytes` the RAM outside of the arena, and `tile_bytes` the tile size (None: no tiles)
    [B]. `hints` are options that reduce the working set; a higher limit comes first if RAM is
    enough.
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


def check_flash(build: Build, *, are_lower_bounds: bool = False) -> None:
    """Raise `FlashError` if a step does not fit the flash of its device.

    With `are_lower_bounds`, the message says "at least"; the comparison is the same.
    """
    sizes, device = build.flash_map(), build.device
    if device.flash is None or sizes["free"] >= 0:
        return
    missing_bytes, flash_bytes = -sizes.pop("free"), device.flash.size_bytes
    uses = [f"{use} {amount:,} B" for use, amount in sizes.items() if amount]
    raise FlashError(
        f"flash: {', '.join(uses[:-1])} and {uses[-1]} are {flash_bytes + missing_bytes:,} B"
        f"{' at least' if are_lower_bounds else ''}, and device {device.name} has "
        f"{flash_bytes:,} B; "
        f"{_flash_advice(build, sizes, missing_bytes)}"
    )


def _flash_advice(build: Build, sizes: Mapping[str, int], missing_bytes: int) -> str:
    """Return advice for `sizes` [B], by use, that exceed the flash by `missing_bytes` in sum."""
    updates = (node for node in build.step.graph.nodes if node.phase == Phase.UPDATE)
    has_moments = any(len(node.outputs) > 1 for node in updates)
    smaller_optimizer = ["take an optimizer with fewer bytes of state"] if has_moments else []
    if sizes["storage"] < missing_bytes:
        return " or ".join([*smaller_optimizer, "take a smaller network"])
    first_options = []
    if build.commit:
        first_options = ["leave out the option commit"]
    elif build.ram_bytes < build.device.ram_bytes:
        first_options = ["increase the option ram"]
    return (
        ", ".join([*first_options, *smaller_optimizer] or ["take a smaller network"])
        + " or take a device whose storage is a card"
    )


def ram_warning(build: Build) -> str | None:
    """Return a warning if the RAM limit of a step exceeds the RAM of the device, otherwise None."""
    device, ram_bytes = build.device, build.ram_bytes
    if ram_bytes <= device.ram_bytes:
        return None
    return (
        f"the step may take {format_bytes(ram_bytes)} of RAM, and device {device.short_name} has "
        f"{format_bytes(device.ram_bytes)}"
    )


def flash_warning(build: Build) -> str | None:
    """Return a warning if program and storage use more than `NEARLY_FULL` of the flash, or None."""
    device = build.device
    if device.flash is None:
        return None
    flash_bytes, free_bytes = device.flash.size_bytes, build.flash_map()["free"]
    if free_bytes >= (1 - NEARLY_FULL) * flash_bytes:
        return None
    return (
        f"the step takes {1 - free_bytes / flash_bytes:.0%} of the flash of device "
        f"{device.short_name}: "
        f"{format_bytes(free_bytes)} of {format_bytes(flash_bytes)} are left to the application"
    )
