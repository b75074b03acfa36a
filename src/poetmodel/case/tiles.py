"""Tile sizes of a step file for ``--tile auto``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from poetmodel.budgets import Budget, TileChoice
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.case.case import Case
    from poetmodel.device import Device
    from poetmodel.graph.catalogue import Variant
    from poetmodel.lowered.step import LoweredStep


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoTiles:
    """Tile sizes of a step file to try for ``--tile auto``."""

    case: Case
    """The case without a tile size."""
    candidates: Sequence[tuple[int | None, LoweredStep]]
    """(tile size [B], step in tiles), from one to four, in the order of `candidate_tiles`.

    Only the step without tiles, with size None, if it fits; otherwise the largest sizes that fit,
    largest first, or only the first of these if a profile or constraints name nodes. If none fits,
    only the pair with the smallest minimum RAM."""
    ram_bytes: int
    """RAM budget of tensors [B]."""
    device: Device
    paging: bool
    """Whether tensors may be paged."""

    @classmethod
    def find(cls, case: Case) -> AutoTiles | None:
        """Return the sizes to try, largest first; None without ``auto``, step file or device.

        The budget is that of the case or the device's RAM; a percentage is of the keep-all peak
        without tiles.
        """
        if case.source is None or not case.is_step_file:
            return None
        if not TileChoice.parse(case.tile).is_auto:
            return None
        device = case.load_device()
        if device is None:
            return None
        from poetmodel.lowered.io import load_step
        from poetmodel.tiling.choice import candidate_tiles

        step = load_step(case.source)
        ram = Budget.parse(device.ram_bytes if case.limits.ram is None else case.limits.ram)
        ram_bytes = ram.resolve(checkpoint_all_peak_bytes(step.graph))
        paging = case.limits.paging and device.storage is not None
        candidates = candidate_tiles(
            step,
            TileChoice.AUTO,
            device,
            ram_bytes=ram_bytes,
            paging=paging,
            names_nodes=case.profile is not None or bool(case.constraint_files),
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
        shape = replace(cast("Variant", self.case.shape), tile=tile)
        return replace(self.case, shape=shape), hint


def resolve_sizes(case: Case) -> tuple[Case, list[str]]:
    """Return the case with sizes for ``--tile auto`` and a percentage of RAM, and hints.

    ``auto`` is replaced for a step file and a device; a percentage only with tiles, since it refers
    to the keep-all peak without tiles.
    """
    tiles, hints = AutoTiles.find(case), []
    if tiles is not None:
        case, hint = tiles.choose(*tiles.candidates[0])
        hints.append(hint)
    return replace(case, limits=case.absolute_limits()), hints
