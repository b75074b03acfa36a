"""A device: what it computes, remembers and stores, and at which power."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from poetmodel.errors import DeviceError, shown
from poetmodel.units import MAX_BYTES, brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class StorageMode(StrEnum):
    """Whether a transfer occupies the core."""

    BLOCKING = "blocking"
    """The core moves the bytes itself (an SD card on SPI)."""
    DMA = "dma"
    """One DMA channel moves them while the core computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The core of a device."""

    flops_per_s: float
    """Sustained rate [FLOP/s]."""
    power_w: float | None = None
    """Power while computing [W]."""
    flops_per_j: float | None = None
    """Energy efficiency [FLOP/J]; goes before `power_w`."""
    bytes_per_s: float | None = None
    """RAM bandwidth [B/s]; where given, an operation takes at least its traffic over this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One direction of the auxiliary storage."""

    latency_s: float
    """Time before the first byte [s], 0 or more."""
    bytes_per_s: float
    """Rate after that [B/s]."""
    power_w: float
    """Power while transferring [W]; where transfers block the core, the core's is part of it."""

    def time_s(self, size_bytes: int) -> float:
        """Return the time to move a tensor [s]."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Auxiliary storage: flash or an SD card."""

    mode: StorageMode
    """Whether transfers block the core."""
    page_in: Transfer
    """Storage to RAM."""
    page_out: Transfer
    """RAM to storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A board that trains.

    Raises
    ------
    DeviceError
        With every figure that is out of range.
    """

    name: str
    """What people call it."""
    ram_bytes: int
    """RAM for tensors [B]."""
    compute: Compute
    """The core."""
    storage: Storage | None = None
    """Auxiliary storage; None means that nothing can be paged."""
    aux_bytes: int | None = None
    """Size of the auxiliary storage [B]; None means unlimited."""
    core: str = ""
    """Processor and clock, for people."""
    idle_power_w: float = 0.0
    """Power drawn over the whole step beside everything else [W]."""
    source: str = ""
    """Where each figure comes from."""
    key: str = ""
    """The name that `load` was given: a shipped device's short name, or a path."""

    def __repr__(self) -> str:
        storage = "no storage" if self.storage is None else f"{self.storage.mode} storage"
        return brief(self, shown(self.name), f"{format_bytes(self.ram_bytes)} RAM", storage)

    def __post_init__(self) -> None:
        faults = list(_faults(self))
        if faults:
            raise DeviceError(faults)

    @property
    def has_dma(self) -> bool:
        """Whether transfers run beside the core."""
        return self.storage is not None and self.storage.mode == StorageMode.DMA

    @classmethod
    def load(cls, name_or_path: str | Path) -> Device:
        """Read a shipped device, by its short name, or a ``*.toml`` file.

        Raises
        ------
        DeviceError
            If there is no such device or file; with every fault found in the file.
        """
        from poetmodel.device.io import load_device

        return load_device(name_or_path)


def _faults(device: Device) -> Iterator[str]:
    for key in ("name", "core", "source", "key"):
        value = getattr(device, key)
        if not isinstance(value, str) or (key == "name" and not value):
            wanted = "a non-empty string" if key == "name" else "a string"
            yield f"{key}: expected {wanted}, got {shown(value)}"
    yield from _bytes_fault("ram_bytes", device.ram_bytes, least=1)
    if device.aux_bytes is not None:
        yield from _bytes_fault("aux_bytes", device.aux_bytes, least=0)
    yield from _number_fault("idle_power_w", device.idle_power_w)
    yield from _compute_faults(device.compute)
    if device.storage is not None:
        yield from _storage_faults(device.storage)


def _compute_faults(compute: Compute) -> Iterator[str]:
    yield from _number_fault("[compute] flops_per_s", compute.flops_per_s, positive=True)
    if compute.power_w is None and compute.flops_per_j is None:
        yield "[compute]: expected power_w or flops_per_j, got neither"
    for key in ("power_w", "flops_per_j", "bytes_per_s"):
        value = getattr(compute, key)
        if value is not None:
            yield from _number_fault(f"[compute] {key}", value, positive=key != "power_w")


def _storage_faults(storage: Storage) -> Iterator[str]:
    if storage.mode not in tuple(StorageMode):
        yield f"[storage] mode: expected {' or '.join(StorageMode)}, got {shown(storage.mode)}"
    for key in ("page_in", "page_out"):
        transfer = getattr(storage, key)
        where = f"[storage.{key}]"
        yield from _number_fault(f"{where} latency_s", transfer.latency_s)
        yield from _number_fault(f"{where} bytes_per_s", transfer.bytes_per_s, positive=True)
        yield from _number_fault(f"{where} power_w", transfer.power_w)


def _bytes_fault(where: str, value: object, *, least: int) -> Iterator[str]:
    good = isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_BYTES
    if not good:
        yield f"{where}: expected a whole number of bytes from {least} to 2^53, got {shown(value)}"


def _number_fault(where: str, value: object, *, positive: bool = False) -> Iterator[str]:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared, not asked for isfinite, which no integer beyond the floats survives.
    if not good or not 0 <= value <= sys.float_info.max or (positive and value == 0):  # type: ignore[operator]
        bound = "> 0" if positive else ">= 0"
        yield f"{where}: expected a finite number {bound}, got {shown(value)}"
