"""Choose the tile size for the RAM of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.budgets import TileChoice
from poetmodel.errors import BudgetError
from poetmodel.graph import floor
from poetmodel.plan.alignment import align_sizes, device_alignment
from poetmodel.tiling.tiles import (
    BLOCK,
    MIN_TILE_BYTES,
    make_distinct_tilings,
    min_tiled_bytes,
    tile_step,
)

if TYPE_CHECKING:
    from poetmodel.device import Device
    from poetmodel.lowered.step import LoweredStep

MAX_NODES: Final = 5000
"""Maximum number of nodes of the steps in tiles that ``auto`` considers."""
MAX_CANDIDATES: Final = 4
"""Maximum number of pairs that `candidate_tiles` returns."""


def parse_tile(tile: str | int | TileChoice | None) -> TileChoice:
    """Parse a tile size [B] or ``auto`` or ``none`` (also None) for a captured step.

    Raises `InputError`, or `BudgetError` for a size below `MIN_TILE_BYTES`.
    """
    choice = TileChoice.parse(tile)
    if choice.size_bytes is not None and choice.size_bytes < MIN_TILE_BYTES:
        raise BudgetError(
            f"tile: expected at least {MIN_TILE_BYTES} B, because tiles are slices of {BLOCK} "
            f"channels or more, got {choice.size_bytes:,} B; give a size such as 32KiB"
        )
    return choice


def divide_step(step: LoweredStep, tile: str | int | TileChoice | None) -> LoweredStep:
    """Divide a step into tiles of a stated size; return `step` itself if no tensor is divided."""
    tile_bytes = parse_tile(tile).require_size()
    return step if tile_bytes is None else tile_step(step, tile_bytes)


def choose_tiles(
    step: LoweredStep, choice: TileChoice, device: Device, *, ram_bytes: int, paging: bool
) -> tuple[int | None, LoweredStep]:
    """Choose the tile size; return (size [B], step in tiles), or (None, `step`) for no tiles.

    ``auto`` chooses the largest of 1, 1.5, 2, 3, 4, 6 … KiB that needs at most `ram_bytes`, or the
    size that needs the least RAM. The search descends, and ends before the first size whose step
    has more than `MAX_NODES` nodes. An undivided step that fits stays undivided.
    """
    if not choice.is_auto:
        return choice.size_bytes, divide_step(step, choice)
    best_tiling: tuple[int | None, LoweredStep] = (None, step)
    min_needed_bytes = needed_bytes(step, device, paging=paging)
    if min_needed_bytes <= ram_bytes:
        return best_tiling
    lower_bound = min_tiled_bytes(
        step,
        alignment=device_alignment(device),
        reads_in_place=paging and device.is_memory_mapped,
        is_resident=not paging,
    )
    for size, tiled_step in make_distinct_tilings(
        step, _list_candidate_sizes(max(step.graph.tensor_bytes) - 1)
    ):
        if len(tiled_step.graph.nodes) > MAX_NODES:
            break
        tiled_needed_bytes = needed_bytes(tiled_step, device, paging=paging)
        if tiled_needed_bytes < min_needed_bytes:
            best_tiling, min_needed_bytes = (size, tiled_step), tiled_needed_bytes
        if min_needed_bytes <= max(ram_bytes, lower_bound):
            break
    return best_tiling


def candidate_tiles(
    step: LoweredStep,
    choice: TileChoice,
    device: Device,
    *,
    ram_bytes: int,
    paging: bool,
    names_nodes: bool = False,
) -> list[tuple[int | None, LoweredStep]]:
    """Return at most `MAX_CANDIDATES` tile sizes [B] to try, each with the step in tiles.

    After the size of `choose_tiles`, smaller ones that fit follow: finer tiles permit more
    schedules, coarser tiles have fewer nodes. None follow if the problem `names_nodes` (measured
    costs, user-defined constraints), because each size has other node names.
    """
    first_tiling = choose_tiles(step, choice, device, ram_bytes=ram_bytes, paging=paging)
    first_size, tiled_step = first_tiling
    if not choice.is_auto or first_size is None or names_nodes:
        return [first_tiling]
    if needed_bytes(tiled_step, device, paging=paging) > ram_bytes:
        return [first_tiling]
    tilings = [first_tiling]
    for size, finer_step in make_distinct_tilings(step, _list_candidate_sizes(first_size)):
        if len(finer_step.graph.nodes) > MAX_NODES or len(tilings) == MAX_CANDIDATES:
            break
        is_small_enough = needed_bytes(finer_step, device, paging=paging) <= ram_bytes
        if size < first_size and is_small_enough:
            tilings.append((size, finer_step))
    return tilings


def _list_candidate_sizes(max_bytes: int) -> list[int]:
    """Return the sizes 1, 1.5, 2, 3 … KiB up to `max_bytes`, largest first [B]."""
    all_sizes = (size for k in range(10, 41) for size in (2**k, 3 * 2 ** (k - 1)))
    return sorted((size for size in all_sizes if size <= max_bytes), reverse=True)


def needed_bytes(step: LoweredStep, device: Device, *, paging: bool) -> int:
    """Return the minimum RAM of a step with the alignment of a device [B].

    Without `paging`, all state stays in RAM. With it, memory-mapped state needs no RAM.
    """
    aligned = align_sizes(step.graph, device_alignment(device))
    return floor(
        aligned, memory_mapped=paging and device.is_memory_mapped, resident=not paging
    ).bytes
