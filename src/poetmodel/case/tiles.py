"""Tile sizes of a step that are tried: those of ``--tile auto``, or the stated one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from poetmodel.budgets import Budget, TileChoice
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.case.case import Case
    from poetmodel.device import Device
    from poetmodel.lowered.step import LoweredStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiles:
    """A step in the tile sizes to try."""

    case: Case
    """The case with its stated tile size."""
    candidates: Sequence[tuple[int | None, LoweredStep]]
    """(tile size [B], step in tiles), from one to four, in the order of `candidate_tiles`.

    For ``auto``, only the step without tiles, with size None, if it fits; otherwise the largest
    sizes that fit, largest first, or only the first of these if a profile or constraints name
    nodes. If none fits, only the pair with the smallest minimum RAM."""
    ram_bytes: int
    """RAM budget of tensors [B]."""
    device: Device
    paging: bool
    """Whether tensors may be paged."""

    @classmethod
    def find(cls, case: Case) -> StepTiles | None:
        """Return the sizes to try of a step file with ``auto``, or of a step in memory.

        None for other cases, and without a device. The budget is that of the case or the device's
        RAM; a percentage is of the keep-all peak without tiles.
        """
        device = case.load_device() if case.tries_tiles else None
        step = None if device is None else case.load_whole_step()
        if device is None or step is None:
            return None
        from poetmodel.tiling.choice import candidate_tiles

        ram = Budget.parse(device.ram_bytes if case.limits.ram is None else case.limits.ram)
        ram_bytes = ram.resolve(checkpoint_all_peak_bytes(step.graph))
        paging = case.limits.paging and device.storage is not None
        candidates = candidate_tiles(
            step,
            TileChoice.parse(case.tile),
            device,
            ram_bytes=ram_bytes,
            paging=paging,
            names_nodes=case.names_nodes,
        )
        return cls(
            case=case, candidates=candidates, ram_bytes=ram_bytes, device=device, paging=paging
        )

    def choose(self, tile_bytes: int | None, step: LoweredStep) -> tuple[Case, str]:
        """Return the case with a tile size (None: without tiles), and a hint with the choice."""
        from poetmodel.tiling.choice import needed_bytes

        tile = str(TileChoice(size_bytes=tile_bytes))
        hint = f"auto chooses --tile {tile} for {format_bytes(self.ram_bytes)} of tensors"
        needed_ram_bytes = needed_bytes(step, self.device, paging=self.paging)
        if needed_ram_bytes > self.ram_bytes:
            hint += "; no tile size fits, and this one needs the least RAM: " + format_bytes(
                needed_ram_bytes
            )
        return self.case.with_tile(tile), hint


def resolve_sizes(case: Case) -> tuple[Case, list[str]]:
    """Return the case with sizes for ``--tile auto`` and a percentage of RAM, and hints.

    ``auto`` is replaced for a step file and a device; a percentage only with tiles, since it refers
    to the keep-all peak without tiles.
    """
    tiles, hints = StepTiles.find(case), []
    if tiles is not None:
        case, hint = tiles.choose(*tiles.candidates[0])
        hints.append(hint)
    return replace(case, limits=case.absolute_limits()), hints
