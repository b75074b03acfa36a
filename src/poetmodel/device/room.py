"""Whether a training step fits into the RAM of a device, whatever budget it was planned for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from poetmodel.device.hardware import Device
    from poetmodel.graph import Graph

ROOM: Final = ("resident_bytes", "device_ram_bytes", "fits_device")
"""Keys of files and JSON about the RAM of a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """What a step takes of a device's RAM: its peak and the resident bytes."""

    device: str
    """Short name of the device."""
    ram_bytes: int
    """RAM of the device [B]."""
    peak_bytes: int
    """Most that tensors and workspaces take at once [B]."""
    resident_bytes: int
    """Parameters, gradients and optimizer state, which stay in RAM beside them [B]."""

    @classmethod
    def of(cls, device: Device | None, graph: Graph, peak_bytes: int) -> DeviceRoom | None:
        """Compare a peak of a graph's training step with a device; None where there is none."""
        if device is None:
            return None
        return cls(
            device=device.key or device.name,
            ram_bytes=device.ram_bytes,
            peak_bytes=peak_bytes,
            resident_bytes=graph.total_resident_bytes,
        )

    @property
    def needed_bytes(self) -> int:
        """Peak and resident bytes together [B]."""
        return self.peak_bytes + self.resident_bytes

    @property
    def fits(self) -> bool:
        """Whether the device has that much RAM."""
        return self.needed_bytes <= self.ram_bytes

    def remark(self) -> str:
        """Return in words whether the step fits, what it needs, and which part is too much."""
        return f"{'fits' if self.fits else 'does not fit'}; {self._needs()}"

    def warning(self) -> str | None:
        """Return a sentence where the step does not fit, else None."""
        if self.fits:
            return None
        ram = format_bytes(self.ram_bytes)
        return (
            f"the step does not fit device {self.device}, which has {ram} of RAM: {self._needs()}"
        )

    def _needs(self) -> str:
        peak, resident = format_bytes(self.peak_bytes), format_bytes(self.resident_bytes)
        needs = f"it needs {peak} at the peak"
        if self.resident_bytes:
            needs += f" and {resident} of resident bytes, {format_bytes(self.needed_bytes)} in all"
        if self.fits:
            return needs
        if self.peak_bytes > self.ram_bytes:
            both = self.resident_bytes > self.ram_bytes
            return f"{needs}; {'each' if both else 'the peak'} alone is too much"
        if self.resident_bytes > self.ram_bytes:
            return f"{needs}; the resident bytes alone are too much"
        return f"{needs}; together they are too much"


def room_figures(room: DeviceRoom | None) -> dict[str, int | bool | None]:
    """Return the figures that files and JSON state, None without a device."""
    if room is None:
        return dict.fromkeys(ROOM)
    return dict(zip(ROOM, (room.resident_bytes, room.ram_bytes, room.fits), strict=True))
