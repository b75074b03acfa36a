"""A device: what it computes, remembers and stores, at which power, and whether that is likely."""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.device.cores import CycleModel, find_core
from poetmodel.device.io import read_device
from poetmodel.errors import DeviceError, raised_as, shown
from poetmodel.files import unknown_key
from poetmodel.units import MAX_BYTES, brief, format_bytes, parse_frequency

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path


_CLOCK: Final = re.compile(r"\d+(?:\.\d+)? ?[kMG]Hz")
_GRAPHICS: Final = re.compile(r"multiprocessors?\b|compute units?\b|\bGPU\b", re.IGNORECASE)
"""Words for the cores of graphics cards."""


class DeviceFigure(NamedTuple):
    """What is known of a figure of a device; all that reads, checks or shows it reads this."""

    name: str
    """Its name for people, after that of its part."""
    unit: str
    usual: tuple[float, float] | None
    """The range that it usually lies in: outside it was probably given in another unit."""
    is_positive: bool
    """Whether it must be above 0, and not only not below."""
    may_lack: bool
    """Whether a device need not have it."""


_BYTES: Final = (1e3, 2.0**50)
_RATE: Final = (1e3, 1e13)
_POWER: Final = (1e-6, 1e3)
UNITS_MEANT: Final = {
    "B": "bytes",
    "B/s": "bytes per second",
    "FLOP/J": "FLOP per joule",
    "FLOP/s": "FLOP per second",
    "W": "watts",
    "s": "seconds",
    "times": "multiples of 1, not percent",
}
"""What a figure of a unit should be given in."""


def figure(
    name: str,
    unit: str,
    *,
    default: Any = MISSING,
    usual: tuple[float, float] | None = None,
    is_positive: bool = True,
) -> Any:
    """Return the field of a part of a device that is a `DeviceFigure`; those in bytes are whole."""
    known = DeviceFigure(name, unit, usual, is_positive, may_lack=default is None)
    return field(default=default, metadata={"figure": known})


class StorageMode(StrEnum):
    """Whether a transfer occupies the core."""

    BLOCKING = "blocking"
    """The core moves the bytes itself (an SD card on SPI)."""
    DMA = "dma"
    """One DMA channel moves them while the core computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The core of a device."""

    flops_per_s: float = figure("compute rate", "FLOP/s", usual=(1e3, 1e16))
    """Sustained rate [FLOP/s]."""
    power_w: float | None = figure(
        "compute power", "W", default=None, usual=_POWER, is_positive=False
    )
    """Power while computing [W]."""
    flops_per_j: float | None = figure("efficiency", "FLOP/J", default=None, usual=(1e3, 1e15))
    """Energy efficiency [FLOP/J]; goes before `power_w`."""
    bytes_per_s: float | None = figure("RAM bandwidth", "B/s", default=None, usual=_RATE)
    """RAM bandwidth [B/s]; where given, an operation takes at least its traffic over this."""
    cache_line_bytes: int | None = figure("cache lines", "B", default=None)
    """Lines of the data cache between core and RAM, a power of two [B]; None: there is none."""
    memory_factor: float = figure("memory factor", "times", default=1.0, usual=(0.1, 20.0))
    """Cycles of exported C on the board over those of the core alone: waits for flash, caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One direction of the auxiliary storage."""

    latency_s: float = figure("latency", "s", usual=(0.0, 1.0), is_positive=False)
    """Time before the first byte [s], 0 or more."""
    bytes_per_s: float = figure("rate", "B/s", usual=_RATE)
    """Rate after that [B/s]."""
    power_w: float = figure("power", "W", usual=_POWER, is_positive=False)
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
    memory_mapped: bool = False
    """Whether the core reads it like RAM (NOR flash, FRAM, MRAM): state there needs no page-in."""
    endurance_cycles: float | None = figure("endurance", "writes", default=None)
    """How often each erase block can be written, where known."""
    erase_block_bytes: int | None = figure("erase block", "B", default=None)
    """Erase block, in multiples of which a write erases [B]; None means single bytes."""
    volatile: bool = False
    """Whether it loses its content without power (PSRAM, SDRAM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flash:
    """Flash of the program, in which storage may lie too."""

    size_bytes: int = figure("size", "B", usual=_BYTES)
    """All of it [B]."""
    write_unit_bytes: int = figure("write unit", "B")
    """Write unit; every write begins at a multiple of it [B]."""
    erase_block_bytes: int = figure("erase block", "B")
    """Erase block [B]."""
    erase_s: float = figure("erase", "s", usual=(0.0, 10.0), is_positive=False)
    """Time to erase a block [s]."""
    write_bytes_per_s: float = figure("write rate", "B/s", usual=_RATE)
    """Rate of programming what was erased [B/s]."""
    power_w: float = figure("power", "W", usual=_POWER, is_positive=False)
    """Power while it erases and programs; that of a core which waits is part of it [W]."""
    endurance_cycles: float | None = figure("endurance", "writes", default=None)
    """How often each block can be erased, where known."""
    storage_bytes: int = figure("for storage", "B", default=0, is_positive=False)
    """Limit of pages and generations of state in it [B]; 0: storage lies elsewhere."""

    def write_s(self, size_bytes: int, blocks: int) -> float:
        """Return the time to program bytes, and to erase blocks before [s]."""
        return blocks * self.erase_s + size_bytes / self.write_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A board that trains.

    Raises
    ------
    DeviceError
        With every figure that is out of range.
    """

    name: str
    """Name for users."""
    ram_bytes: int = figure("RAM", "B", usual=_BYTES)
    """RAM for tensors [B]."""
    compute: Compute
    """The core."""
    storage: Storage | None = None
    """Auxiliary storage; None means that nothing can be paged."""
    flash: Flash | None = None
    """Flash of the program; None means that its size is not checked."""
    aux_bytes: int | None = figure("storage", "B", default=None, usual=_BYTES, is_positive=False)
    """Size of the auxiliary storage [B]; None means unlimited."""
    core: str = ""
    """Processor and clock, for people."""
    idle_power_w: float = figure("idle power", "W", default=0.0, usual=_POWER, is_positive=False)
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
    def short_name(self) -> str:
        """Name or path that it was loaded by, else its name."""
        return self.key or self.name

    @property
    def clock_hz(self) -> float | None:
        """The clock that it names with its core [Hz]; None where it names none."""
        clock = _CLOCK.search(self.core)
        return None if clock is None else parse_frequency(clock.group(), field="clock")

    @property
    def cycle_model(self) -> CycleModel | None:
        """How instructions of exported C become time; None without a clock or a core with FPU."""
        core = find_core(self.core)
        if self.clock_hz is None or core is None or not core.has_fpu:
            return None
        return CycleModel(core, self.clock_hz, self.compute.memory_factor)

    @property
    def is_graphics_card(self) -> bool:
        """Whether its core is that of a graphics card, by the words that name it."""
        return _GRAPHICS.search(self.core) is not None

    @property
    def has_dma(self) -> bool:
        """Whether transfers run beside the core."""
        return self.storage is not None and self.storage.mode == StorageMode.DMA

    @property
    def is_memory_mapped(self) -> bool:
        """Whether the core reads the storage like RAM."""
        return self.storage is not None and self.storage.memory_mapped

    @property
    def is_volatile(self) -> bool:
        """Whether the storage loses its content without power."""
        return self.storage is not None and self.storage.volatile

    @property
    def stores_in_flash(self) -> bool:
        """Whether storage lies in the flash of the program."""
        in_flash = self.flash is not None and self.flash.storage_bytes > 0
        return in_flash and self.storage is not None and not self.storage.volatile

    @property
    def commits_to_flash(self) -> bool:
        """Whether generations of state lie in the program's flash: storage does, or forgets."""
        return self.stores_in_flash or (self.is_volatile and self.flash is not None)

    @property
    def dma_line_bytes(self) -> int:
        """Alignment of a DMA buffer, at both ends, so that no neighbour shares a cache line [B]."""
        return (self.compute.cache_line_bytes or 1) if self.has_dma else 1

    def steps_until_worn(
        self, writes: Iterable[tuple[int, int]], *, committed_blocks: float = 0
    ) -> float | None:
        """Return the number of training steps that the storage endures, with ideal wear levelling.

        Parameters
        ----------
        writes : iterable of (int, int)
            Sizes [B] that a step writes, each with how often.
        committed_blocks : float
            Blocks that commits erase in a step beside these.

        Returns
        -------
        float or None
            Size of the storage times its endurance over the bytes of all erase blocks that a step
            writes; None where the device states no endurance or no size, or nothing is written.
        """
        storage, flash = self.storage, self.flash
        if storage is None:
            return None
        worn = flash if flash is not None and self.stores_in_flash else storage
        block = worn.erase_block_bytes or 1
        written = sum(-(-size // block) * block * times for size, times in writes)
        apart = flash is not None and self.is_volatile
        beside = 0.0 if apart else committed_blocks * block
        parts = [(self.aux_bytes, worn.endurance_cycles, written + beside)]
        if flash is not None and apart:
            committed = committed_blocks * flash.erase_block_bytes
            parts.append((flash.storage_bytes, flash.endurance_cycles, committed))
        lives = [
            size * cycles / erased
            for size, cycles, erased in parts
            if size is not None and cycles is not None and erased
        ]
        return min(lives, default=None)

    @classmethod
    def load(cls, name_or_path: str | Path) -> Device:
        """Read a shipped device, by its short name, or a ``*.toml`` file.

        Raises
        ------
        DeviceError
            If there is no such device or file; with every fault found in the file.
        """
        key = str(name_or_path)
        document = read_device(key)
        with raised_as(DeviceError, key):
            return _parse_device(document, key=key)


_PARTS: Final[Mapping[str, tuple[type, str]]] = {
    "": (Device, ""),
    "compute": (Compute, ""),
    "storage": (Storage, "storage "),
    "storage.page_in": (Transfer, "page-in "),
    "storage.page_out": (Transfer, "page-out "),
    "flash": (Flash, "flash "),
}
"""The parts of a device by their tables in files: class, and what names of figures begin with."""


def device_figures() -> Iterator[tuple[str, DeviceFigure]]:
    """Yield the path of each figure of a device, such as ``storage.page_in.latency_s``, and it."""
    for part, (kind, prefix) in _PARTS.items():
        for entry in fields(kind):
            if "figure" in entry.metadata:
                known: DeviceFigure = entry.metadata["figure"]
                path = f"{part}.{entry.name}" if part else entry.name
                yield path, known._replace(name=prefix + known.name)


def _keys_of(kind: type) -> tuple[str, ...]:
    """Return the keys that a part of a device has in files, without tables in it."""
    return tuple(
        entry.name
        for entry in fields(kind)
        if entry.name not in {part.rpartition(".")[2] for part in _PARTS} | {"key"}
    )


# -- files -----------------------------------------------------------------------------------------
_TABLES: Final = ("compute", "storage", "flash")
_FLASH_NEEDED: Final = tuple(entry.name for entry in fields(Flash) if entry.default is MISSING)


def _parse_device(document: dict[str, Any], *, key: str) -> Device:
    faults: list[str] = _unknown_keys(document, (*_keys_of(Device), *_TABLES), "")
    compute = _table(document, "compute", "compute", _keys_of(Compute), faults)
    figures = {name: document[name] for name in _keys_of(Device) if name in document}
    figures |= {name: document.get(name) for name in ("name", "ram_bytes")}
    flash = _parse_flash(document, faults) if "flash" in document else None
    storage = _parse_storage(document, flash, faults) if "storage" in document else None
    if flash is not None and flash.storage_bytes and not (storage and storage.volatile):
        figures.setdefault("aux_bytes", flash.storage_bytes)
    try:
        device = Device(
            compute=_parse_compute(compute),
            storage=storage,
            flash=flash,
            key=key,
            **figures,
        )
    except DeviceError as error:
        raise DeviceError([*faults, *error.faults]) from None
    if faults:
        raise DeviceError(faults)
    return device


def _parse_compute(table: Mapping[str, Any]) -> Compute:
    given = {name: table[name] for name in _keys_of(Compute) if name in table}
    return Compute(**{"flops_per_s": None} | given)


def _parse_flash(document: dict[str, Any], faults: list[str]) -> Flash:
    table = _table(document, "flash", "flash", _keys_of(Flash), faults)
    needed = {key: table.get(key) for key in _FLASH_NEEDED}
    return Flash(**needed | {key: table[key] for key in _keys_of(Flash) if key in table})  # type: ignore[arg-type]


def _parse_storage(document: dict[str, Any], flash: Flash | None, faults: list[str]) -> Storage:
    """Return the storage; where it lies in the flash, that has its block and endurance."""
    keys, ways = _keys_of(Storage), {}
    storage = _table(document, "storage", "storage", (*keys, "page_in", "page_out"), faults)
    for name in ("page_in", "page_out"):
        way = _table(storage, name, f"storage.{name}", _keys_of(Transfer), faults)
        ways[name] = Transfer(**{key: way.get(key) for key in _keys_of(Transfer)})  # type: ignore[arg-type]
    mode = storage.get("mode")
    known = {str(member): member for member in StorageMode}
    figures = {key: storage[key] for key in keys if key in storage and key != "mode"}
    if flash is not None and flash.storage_bytes and not storage.get("volatile"):
        for key in ("endurance_cycles", "erase_block_bytes"):
            figures.setdefault(key, getattr(flash, key))
    mode = known.get(mode, mode) if isinstance(mode, str) else mode
    return Storage(mode=mode, **ways, **figures)  # type: ignore[arg-type]


def _table(
    owner: Mapping[str, Any], key: str, where: str, known: tuple[str, ...], faults: list[str]
) -> dict[str, Any]:
    """Return a table of the file; one that is missing is empty, and its keys are then missed."""
    table = owner.get(key, {})
    if not isinstance(table, dict):
        faults.append(f"[{where}]: expected a table, got {shown(table)}")
        return {}
    faults += _unknown_keys(table, known, f"[{where}] ")
    return table


def _unknown_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> list[str]:
    return [f"{where}{key}: {unknown_key(key, known)}" for key in table if key not in known]


# -- checks ----------------------------------------------------------------------------------------
def figures_of(device: Device) -> Iterator[tuple[str, DeviceFigure, Any]]:
    """Yield the key that files have for each figure of a device, the figure, and its value."""
    for path, known in device_figures():
        table, _, key = path.rpartition(".")
        part: Any = device
        for name in table.split(".") if table else ():
            part = None if part is None else getattr(part, name)
        if part is not None:
            yield f"[{table}] {key}" if table else key, known, getattr(part, key)


def _faults(device: Device) -> Iterator[str]:
    for key in ("name", "core", "source", "key"):
        value = getattr(device, key)
        if not isinstance(value, str) or (key == "name" and not value):
            wanted = "a non-empty string" if key == "name" else "a string"
            yield f"{key}: expected {wanted}, got {shown(value)}"
    for key, known, value in figures_of(device):
        if value is not None or not known.may_lack:
            yield from _figure_fault(key, known, value)
    compute, line = device.compute, device.compute.cache_line_bytes
    if isinstance(line, int) and line & (line - 1):
        yield f"[compute] cache_line_bytes: expected a power of two, got {shown(line)}"
    if compute.power_w is None and compute.flops_per_j is None:
        yield "[compute]: expected power_w or flops_per_j, got neither"
    if device.storage is not None:
        yield from _storage_faults(device.storage)
    if device.flash is not None:
        yield from _flash_faults(device, device.flash)


def _storage_faults(storage: Storage) -> Iterator[str]:
    if storage.mode not in tuple(StorageMode):
        yield f"[storage] mode: expected {' or '.join(StorageMode)}, got {shown(storage.mode)}"
    for key in ("memory_mapped", "volatile"):
        value = getattr(storage, key)
        if not isinstance(value, bool):
            yield f"[storage] {key}: expected true or false, got {shown(value)}"


def _flash_faults(device: Device, flash: Flash) -> Iterator[str]:
    """Yield which figures of the flash contradict others; only where each is in its own range."""
    sizes = (flash.size_bytes, flash.erase_block_bytes, flash.write_unit_bytes, flash.storage_bytes)
    if not all(isinstance(size, int) for size in sizes) or flash.write_unit_bytes < 1:
        return
    if flash.erase_block_bytes % flash.write_unit_bytes:
        yield (
            "[flash] erase_block_bytes: expected a multiple of write_unit_bytes, got "
            f"{flash.erase_block_bytes} and {flash.write_unit_bytes}"
        )
    if flash.storage_bytes > flash.size_bytes:
        yield (
            f"[flash] storage_bytes: expected at most size_bytes, got {flash.storage_bytes} of "
            f"{flash.size_bytes}"
        )
    most = device.aux_bytes
    if device.stores_in_flash and not (isinstance(most, int) and most <= flash.storage_bytes):
        yield (
            f"aux_bytes: expected at most storage_bytes of [flash], where the storage lies, got "
            f"{shown(most)} and {flash.storage_bytes}"
        )


def _figure_fault(key: str, known: DeviceFigure, value: Any) -> Iterator[str]:
    """Yield what is wrong with a figure."""
    if known.unit == "B":
        least = int(known.is_positive)
        wanted = f"a whole number of bytes from {least} to 2^53"
        good = isinstance(value, int) and least <= value <= MAX_BYTES
    else:
        wanted = f"a finite number {'>' if known.is_positive else '>='} 0"
        # Compared, not asked for isfinite, which no integer beyond the floats survives.
        good = isinstance(value, int | float) and 0 <= value <= sys.float_info.max
        good = good and (value > 0 or not known.is_positive)
    if not good or isinstance(value, bool):
        yield f"{key}: expected {wanted}, got {shown(value)}"
