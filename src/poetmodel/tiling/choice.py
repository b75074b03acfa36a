"""The choice of the size of tiles for the RAM of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.budgets import TileChoice
from poetmodel.errors import BudgetError
from poetmodel.graph import floor
from poetmodel.plan.alignment import align_sizes, device_alignment
from poetmodel.tiling.tiles import BLOCK, MIN_TILE_BYTES, different_tiles, tiled, tiled_floor_bytes

if TYPE_CHECKING:
    from poetmodel.device import Device
    from poetmodel.lowered.step import LoweredStep

MAX_NODES: Final = 5000
"""Steps in tiles with more nodes are no candidates for ``auto``."""
MAX_CANDIDATES: Final = 4
"""Most sizes that are tried, from the largest that fits on."""


def parse_tile(tile: str | int | TileChoice | None) -> TileChoice:
    """Return the choice of the tiles of a captured step that a text or a size [B] states.

    Raises
    ------
    InputError
        If `tile` is no choice.
    BudgetError
        If its size is smaller than any slice.
    """
    choice = TileChoice.parse(tile)
    if choice.size_bytes is not None and choice.size_bytes < MIN_TILE_BYTES:
        raise BudgetError(
            f"tile: expected at least {MIN_TILE_BYTES} B, since tiles are slices of {BLOCK} "
            f"channels or more, got {choice.size_bytes:,} B; give a size such as 32KiB"
        )
    return choice


def in_tiles(step: LoweredStep, tile: str | int | TileChoice | None) -> LoweredStep:
    """Return a step in tiles of a stated size, whole for ``none``; refuse ``auto``."""
    tile_bytes = parse_tile(tile).require_size()
    return step if tile_bytes is None else tiled(step, tile_bytes)


def chosen_tiles(
    step: LoweredStep, choice: TileChoice, device: Device, *, room_bytes: int, paging: bool
) -> tuple[int | None, LoweredStep]:
    """Return the size of tiles [B] and the step in them; None and the step where it stays whole.

    With ``auto`` the size is the largest of 1, 1.5, 2, 3, 4, 6 … KiB with which no node needs more
    than `room_bytes`. It stays whole if it fits so, or if no tiles need less. If none fit, those
    that need the least are chosen.
    """
    if not choice.is_auto:
        return choice.size_bytes, in_tiles(step, choice)
    best: tuple[int | None, LoweredStep] = (None, step)
    least = needed_bytes(step, device, paging=paging)
    if least <= room_bytes:
        return best
    bound = tiled_floor_bytes(
        step,
        alignment=device_alignment(device),
        in_place=paging and device.is_memory_mapped,
        resident=not paging,
    )
    for size, found in different_tiles(step, _sizes(max(step.graph.tensor_bytes) - 1)):
        if len(found.graph.nodes) > MAX_NODES:
            break
        needed = needed_bytes(found, device, paging=paging)
        if needed < least:
            best, least = (size, found), needed
        if least <= max(room_bytes, bound):
            break
    return best


def fitting_tiles(
    step: LoweredStep,
    choice: TileChoice,
    device: Device,
    *,
    room_bytes: int,
    paging: bool,
    names_nodes: bool = False,
) -> list[tuple[int | None, LoweredStep]]:
    """Return the sizes of tiles [B] to try, each with the step in them: first `chosen_tiles`.

    With ``auto`` smaller sizes follow with which no node needs more than `room_bytes` either, if
    that one fits: finer tiles leave schedules more choice, and coarser ones fewer nodes to compute.
    None follow if the problem `names_nodes`, as measured costs and own constraints do: each size
    has nodes of other names.
    """
    first = chosen_tiles(step, choice, device, room_bytes=room_bytes, paging=paging)
    largest, found = first
    if not choice.is_auto or largest is None or names_nodes:
        return [first]
    if needed_bytes(found, device, paging=paging) > room_bytes:
        return [first]
    fitting = [first]
    for size, smaller in different_tiles(step, _sizes(largest)):
        if len(smaller.graph.nodes) > MAX_NODES or len(fitting) == MAX_CANDIDATES:
            break
        fits = needed_bytes(smaller, device, paging=paging) <= room_bytes
        if size < largest and fits:
            fitting.append((size, smaller))
    return fitting


def _sizes(most: int) -> list[int]:
    """Return the sizes from 1 KiB to `most` that are tried, the largest first [B]."""
    each = (size for k in range(10, 41) for size in (2**k, 3 * 2 ** (k - 1)))
    return sorted((size for size in each if size <= most), reverse=True)


def needed_bytes(step: LoweredStep, device: Device, *, paging: bool) -> int:
    """Return what the node needs that needs the most, with addresses as a device has them [B]."""
    mapped = device.storage is not None and device.storage.memory_mapped
    aligned = align_sizes(step.graph, device_alignment(device))
    return floor(aligned, memory_mapped=paging and mapped, resident=not paging).bytes
