"""Check a step before a solve: size of the weights, RAM of one node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from poetmodel.errors import BudgetError, FlashError
from poetmodel.problem.infeasibility import missing_unit_hint
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.device import Device
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
