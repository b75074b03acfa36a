"""Devices: compute, RAM, storage and flash with rates and powers; parsing and validation."""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.device.cores import CycleModel, find_core
from poetmodel.device.io import read_device
from poetmodel.errors import DeviceError, convert_errors, quote
from poetmodel.files import unknown_key_message
from poetmodel.units import MAX_BYTES, brief, format_bytes, parse_frequency

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path


_CLOCK_PATTERN: Final = re.compile(r"\d+(?:\.\d+)? ?[kMG]Hz")
_GPU_WORDS: Final = re.compile(r"multiprocessors?\b|compute units?\b|\bGPU\b", re.IGNORECASE)
"""Words for the cores of graphics cards."""


class DeviceQuantity(NamedTuple):
    """Description of a numeric quantity of a device, for parsing, validation and display."""

    name: str
    """Display name; only `device_quantities` adds the prefix of the table."""
    unit: str
    """Unit, such as ``B`` or ``W``."""
    typical_range: tuple[float, float] | None
    """Usual range of values; a value outside is probably in a wrong unit. None for any value."""
    is_positive: bool
    """Whether the value must be above 0; otherwise 0 is valid too."""
    is_optional: bool
    """Whether the value may be None."""


_BYTES_RANGE: Final = (1e3, 2.0**50)
_RATE_RANGE: Final = (1e3, 1e13)
_POWER_RANGE: Final = (1e-6, 1e3)
UNIT_NAMES: Final = {
    "B": "bytes",
    "B/s": "bytes per second",
    "FLOP/J": "FLOP per joule",
    "FLOP/s": "FLOP per second",
    "W": "watts",
    "s": "seconds",
    "times": "multiples of 1, not percent",
}
"""Names of units, for warnings about values that are probably in another unit."""


def quantity_field(
    name: str,
    unit: str,
    *,
    default: Any = MISSING,
    typical_range: tuple[float, float] | None = None,
    is_positive: bool = True,
) -> Any:
    """Return a dataclass field with a `DeviceQuantity` as metadata.

    Quantities in bytes are integers; with the default None, None is valid.
    """
    quantity = DeviceQuantity(name, unit, typical_range, is_positive, is_optional=default is None)
    return field(default=default, metadata={"quantity": quantity})


class StorageMode(StrEnum):
    """Whether a transfer occupies the core."""

    BLOCKING = "blocking"
    """The core moves the bytes itself (an SD card on SPI)."""
    DMA = "dma"
    """One DMA channel moves the bytes while the core computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The core of a device."""

    flops_per_s: float = quantity_field("compute rate", "FLOP/s", typical_range=(1e3, 1e16))
    """Sustained rate [FLOP/s]."""
    power_w: float | None = quantity_field(
        "compute power", "W", default=None, typical_range=_POWER_RANGE, is_positive=False
    )
    """Power while computing [W]; None if only `flops_per_j` is known."""
    flops_per_j: float | None = quantity_field(
        "efficiency", "FLOP/J", default=None, typical_range=(1e3, 1e15)
    )
    """Energy efficiency [FLOP/J]; takes precedence over `power_w`. None if only `power_w` is
    known."""
    bytes_per_s: float | None = quantity_field(
        "RAM bandwidth", "B/s", default=None, typical_range=_RATE_RANGE
    )
    """RAM bandwidth [B/s]; if stated, memory traffic bounds the time of a node from below."""
    cache_line_bytes: int | None = quantity_field("cache lines", "B", default=None)
    """Size of data cache lines, a power of two [B]; None without a cache."""
    memory_factor: float = quantity_field(
        "memory factor", "times", default=1.0, typical_range=(0.1, 20.0)
    )
    """Ratio of cycles of exported C on the board to cycles of the core alone (flash waits,
    caches)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One direction of transfers to and from auxiliary storage."""

    latency_s: float = quantity_field("latency", "s", typical_range=(0.0, 1.0), is_positive=False)
    """Time before the first byte [s], 0 or more."""
    bytes_per_s: float = quantity_field("rate", "B/s", typical_range=_RATE_RANGE)
    """Rate after the first byte [B/s]."""
    power_w: float = quantity_field("power", "W", typical_range=_POWER_RANGE, is_positive=False)
    """Power while transferring [W]; includes the core's if transfers block the core."""

    def time_s(self, size_bytes: int) -> float:
        """Return the time to transfer `size_bytes`, latency included [s]."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Auxiliary storage, such as flash, an SD card or PSRAM."""

    mode: StorageMode
    """Whether transfers block the core."""
    page_in: Transfer
    """Storage to RAM."""
    page_out: Transfer
    """RAM to storage."""
    memory_mapped: bool = False
    """Whether the core reads the storage like RAM (NOR flash, FRAM, MRAM): state on it needs no
    page-in."""
    endurance_cycles: float | None = quantity_field("endurance", "writes", default=None)
    """Number of times each erase block can be written; None if unknown."""
    erase_block_bytes: int | None = quantity_field("erase block", "B", default=None)
    """Erase block; writes erase whole blocks [B]. If None, wear is counted in single bytes."""
    volatile: bool = False
    """Whether the storage loses its content without power (PSRAM, SDRAM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flash:
    """The flash that contains the program; it can also contain the storage."""

    size_bytes: int = quantity_field("size", "B", typical_range=_BYTES_RANGE)
    """Total size [B]."""
    write_unit_bytes: int = quantity_field("write unit", "B")
    """Write unit; every write begins at a multiple of it [B]."""
    erase_block_bytes: int = quantity_field("erase block", "B")
    """Erase block [B]."""
    erase_s: float = quantity_field("erase", "s", typical_range=(0.0, 10.0), is_positive=False)
    """Time to erase a block [s]."""
    write_bytes_per_s: float = quantity_field("write rate", "B/s", typical_range=_RATE_RANGE)
    """Rate of programming erased flash [B/s]."""
    power_w: float = quantity_field("power", "W", typical_range=_POWER_RANGE, is_positive=False)
    """Power while the flash erases and programs, including that of the waiting core [W]."""
    endurance_cycles: float | None = quantity_field("endurance", "writes", default=None)
    """Number of times each block can be erased; None if unknown."""
    storage_bytes: int = quantity_field("for storage", "B", default=0, is_positive=False)
    """Maximum size of pages, samples and generations of state in the flash [B]; 0 if it contains
    none of them. With volatile storage, the flash contains no pages."""

    def write_s(self, size_bytes: int, blocks: int) -> float:
        """Return the time to erase `blocks` blocks and to program `size_bytes` [s]."""
        return blocks * self.erase_s + size_bytes / self.write_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A board that trains.

    Raises
    ------
    DeviceError
        If a value is invalid; lists every error.
    """

    name: str
    """Display name."""
    ram_bytes: int = quantity_field("RAM", "B", typical_range=_BYTES_RANGE)
    """RAM that a step may use [B]; exported C also has its stack, inputs and runtime in it."""
    compute: Compute
    """The core."""
    storage: Storage | None = None
    """Auxiliary storage; None if no tensor can be paged."""
    flash: Flash | None = None
    """Flash that contains the program; None if its size is not checked."""
    aux_bytes: int | None = quantity_field(
        "storage", "B", default=None, typical_range=_BYTES_RANGE, is_positive=False
    )
    """Size of the auxiliary storage [B]; None for unlimited."""
    core: str = ""
    """Processor and clock as text; `clock_hz`, `cycle_model` and `is_graphics_card` parse it."""
    idle_power_w: float = quantity_field(
        "idle power", "W", default=0.0, typical_range=_POWER_RANGE, is_positive=False
    )
    """Power drawn over the counted time of a step, in addition to all other powers [W]."""
    source: str = ""
    """Sources of the values."""
    key: str = ""
    """Argument of `load`: short name of a shipped device, or a path; empty for other devices."""

    def __repr__(self) -> str:
        storage = "no storage" if self.storage is None else f"{self.storage.mode} storage"
        return brief(self, quote(self.name), f"{format_bytes(self.ram_bytes)} RAM", storage)

    def __post_init__(self) -> None:
        faults = list(_faults(self))
        if faults:
            raise DeviceError(faults)

    @property
    def short_name(self) -> str:
        """Name or path that the device was loaded by, else its name."""
        return self.key or self.name

    @property
    def clock_hz(self) -> float | None:
        """The clock stated in `core` [Hz]; None if it states none."""
        clock = _CLOCK_PATTERN.search(self.core)
        return None if clock is None else parse_frequency(clock.group(), field="clock")

    @property
    def cycle_model(self) -> CycleModel | None:
        """Model that converts instructions of exported C to time.

        None unless `core` states a clock and a known core with an FPU.
        """
        core = find_core(self.core)
        if self.clock_hz is None or core is None or not core.has_fpu:
            return None
        return CycleModel(core, self.clock_hz, self.compute.memory_factor)

    @property
    def is_graphics_card(self) -> bool:
        """Whether `core` names a graphics card."""
        return _GPU_WORDS.search(self.core) is not None

    @property
    def has_dma(self) -> bool:
        """Whether transfers proceed in parallel with computations."""
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
        """Whether the storage is in the flash that contains the program."""
        in_flash = self.flash is not None and self.flash.storage_bytes > 0
        return in_flash and self.storage is not None and not self.storage.volatile

    @property
    def commits_to_flash(self) -> bool:
        """Whether generations of state are in the flash that contains the program.

        True if the storage is in that flash, or if the device has such flash and its storage is
        volatile.
        """
        return self.stores_in_flash or (self.is_volatile and self.flash is not None)

    @property
    def dma_line_bytes(self) -> int:
        """Alignment of both ends of DMA's buffers [B]: a cache line; 1 without DMA or cache."""
        return (self.compute.cache_line_bytes or 1) if self.has_dma else 1

    def steps_until_worn(
        self, writes: Iterable[tuple[int, int]], *, committed_blocks: float = 0
    ) -> float | None:
        """Return the number of training steps until storage wears out, with ideal wear levelling.

        Parameters
        ----------
        writes : iterable of (int, int)
            Sizes of writes [B], each with its number of writes per step.
        committed_blocks : float
            Blocks that commits erase per step, in addition to `writes`.

        Returns
        -------
        float or None
            Size of the storage (`aux_bytes`) times its endurance, divided by the bytes written per
            step; each write is rounded up to whole erase blocks, if stated. For storage in flash,
            endurance and blocks are those of the flash. If the storage is volatile and there is
            flash, commits are written to the `storage_bytes` of the flash instead, and the smaller
            known number of steps is returned. None if the device has no storage or states no
            endurance or size, or if no bytes are written.
        """
        storage, flash = self.storage, self.flash
        if storage is None:
            return None
        page_storage = flash if flash is not None and self.stores_in_flash else storage
        block_bytes = page_storage.erase_block_bytes or 1
        page_out_bytes = sum(
            -(-size // block_bytes) * block_bytes * count for size, count in writes
        )
        has_separate_commits = flash is not None and self.is_volatile
        commit_bytes = 0.0 if has_separate_commits else committed_blocks * block_bytes
        storages = [(self.aux_bytes, page_storage.endurance_cycles, page_out_bytes + commit_bytes)]
        if flash is not None and has_separate_commits:
            committed_bytes = committed_blocks * flash.erase_block_bytes
            storages.append((flash.storage_bytes, flash.endurance_cycles, committed_bytes))
        steps_of_storage = [
            size * cycles / erased_bytes
            for size, cycles, erased_bytes in storages
            if size is not None and cycles is not None and erased_bytes
        ]
        return min(steps_of_storage, default=None)

    @classmethod
    def load(cls, name_or_path: str | Path) -> Device:
        """Read a shipped device, by its short name, or a TOML file, by its path.

        A short name takes precedence over a file of that name.

        Raises
        ------
        DeviceError
            If there is no such device or file, or the file has errors; lists every error.
        """
        key = str(name_or_path)
        document = read_device(key)
        with convert_errors(DeviceError, key):
            return _parse_device(document, key=key)


_TABLES_BY_PATH: Final[Mapping[str, tuple[type, str]]] = {
    "": (Device, ""),
    "compute": (Compute, ""),
    "storage": (Storage, "storage "),
    "storage.page_in": (Transfer, "page-in "),
    "storage.page_out": (Transfer, "page-out "),
    "flash": (Flash, "flash "),
}
"""Tables of device files by path: class, and prefix of the names of quantities."""


def device_quantities() -> Iterator[tuple[str, DeviceQuantity]]:
    """Yield (path, quantity) for each quantity of device files: ``storage.page_in.latency_s``."""
    for table_path, (table_class, prefix) in _TABLES_BY_PATH.items():
        for entry in fields(table_class):
            if "quantity" in entry.metadata:
                quantity: DeviceQuantity = entry.metadata["quantity"]
                path = f"{table_path}.{entry.name}" if table_path else entry.name
                yield path, quantity._replace(name=prefix + quantity.name)


# -- files -----------------------------------------------------------------------------------------
def _parse_device(document: dict[str, Any], *, key: str) -> Device:
    """Parse the content of device file `key` (name, path); raise `DeviceError` with all errors."""
    faults: list[str] = []
    try:
        device: Device = _parse_table(_with_flash_defaults(document), "", faults, key=key)
    except DeviceError as error:
        raise DeviceError([*faults, *error.faults]) from None
    if faults:
        raise DeviceError(faults)
    return device


def _with_flash_defaults(document: dict[str, Any]) -> dict[str, Any]:
    """Return a device file with `aux_bytes` and defaults of storage from flash that contains it."""
    flash, storage = document.get("flash"), document.get("storage")
    is_volatile = isinstance(storage, dict) and storage.get("volatile")
    if not isinstance(flash, dict) or not flash.get("storage_bytes") or is_volatile:
        return document
    if isinstance(storage, dict):
        shared_keys = ("endurance_cycles", "erase_block_bytes")
        storage = {key: flash[key] for key in shared_keys if key in flash} | storage
        document = {**document, "storage": storage}
    return {"aux_bytes": flash["storage_bytes"], **document}


def _parse_table(table: Any, path: str, faults: list[str], **values: Any) -> Any:
    """Return the object of the table at `path`, such as ``storage.page_in``, of a device file.

    `values` are fields that the file does not state. Missing values have their default, None
    without one. Adds unknown keys, and values that are no tables, to `faults`.
    """
    table_class, _ = _TABLES_BY_PATH[path]
    if not isinstance(table, dict):
        faults.append(f"[{path}]: expected a table, got {quote(table)}")
        table = {}
    children = {
        child.rpartition(".")[2]: child
        for child in _TABLES_BY_PATH
        if child and child.rpartition(".")[0] == path
    }
    entries = {entry.name: entry for entry in fields(table_class) if entry.name != "key"}
    prefix = f"[{path}] " if path else ""
    known_keys = (*(name for name in entries if name not in children), *children)
    faults += (
        f"{prefix}{key}: {unknown_key_message(key, known_keys)}"
        for key in table
        if key not in entries
    )
    for name, entry in entries.items():
        if name in table or entry.default is MISSING:
            values[name] = table.get(name)
    for name, child in children.items():
        if name in values:
            values[name] = _parse_table(table.get(name, {}), child, faults)
    if values.get("mode") in tuple(StorageMode):
        values["mode"] = StorageMode(values["mode"])
    return table_class(**values)


# -- checks ----------------------------------------------------------------------------------------
def quantity_values(device: Device) -> Iterator[tuple[str, DeviceQuantity, Any]]:
    """Yield (label, quantity, value or None) for each quantity of a device; skips absent tables.

    A label is a key, such as ``ram_bytes``, or a table and a key: ``[compute] power_w``.
    """
    for path, quantity in device_quantities():
        table_path, _, key = path.rpartition(".")
        values: Any = device
        for name in table_path.split(".") if table_path else ():
            values = None if values is None else getattr(values, name)
        if values is not None:
            yield f"[{table_path}] {key}" if table_path else key, quantity, getattr(values, key)


def _faults(device: Device) -> Iterator[str]:
    """Yield an error for each invalid, missing or contradictory value of a device."""
    for key in ("name", "core", "source", "key"):
        value = getattr(device, key)
        if not isinstance(value, str) or (key == "name" and not value):
            expected = "a non-empty string" if key == "name" else "a string"
            yield f"{key}: expected {expected}, got {quote(value)}"
    for key, quantity, value in quantity_values(device):
        if value is not None or not quantity.is_optional:
            yield from _quantity_fault(key, quantity, value)
    compute, line_bytes = device.compute, device.compute.cache_line_bytes
    if isinstance(line_bytes, int) and line_bytes & (line_bytes - 1):
        yield f"[compute] cache_line_bytes: expected a power of two, got {quote(line_bytes)}"
    if compute.power_w is None and compute.flops_per_j is None:
        yield "[compute]: expected power_w or flops_per_j, got neither"
    if device.storage is not None:
        yield from _storage_faults(device.storage)
    if device.flash is not None:
        yield from _flash_faults(device, device.flash)


def _storage_faults(storage: Storage) -> Iterator[str]:
    """Yield an error for each invalid value of `mode`, `memory_mapped` and `volatile`."""
    if storage.mode not in tuple(StorageMode):
        yield f"[storage] mode: expected {' or '.join(StorageMode)}, got {quote(storage.mode)}"
    for key in ("memory_mapped", "volatile"):
        value = getattr(storage, key)
        if not isinstance(value, bool):
            yield f"[storage] {key}: expected true or false, got {quote(value)}"


def _flash_faults(device: Device, flash: Flash) -> Iterator[str]:
    """Yield an error for each contradiction between sizes of the flash and of storage in it."""
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
    limit_bytes = device.aux_bytes
    if device.stores_in_flash and not (
        isinstance(limit_bytes, int) and limit_bytes <= flash.storage_bytes
    ):
        yield (
            f"aux_bytes: expected at most storage_bytes of [flash], which holds the storage, got "
            f"{quote(limit_bytes)} and {flash.storage_bytes}"
        )


def _quantity_fault(key: str, quantity: DeviceQuantity, value: Any) -> Iterator[str]:
    """Yield an error unless a value has its quantity's type and valid (not typical) range."""
    if quantity.unit == "B":
        minimum = int(quantity.is_positive)
        expected = f"a whole number of bytes from {minimum} to 2^53"
        is_valid = isinstance(value, int) and minimum <= value <= MAX_BYTES
    else:
        expected = f"a finite number {'>' if quantity.is_positive else '>='} 0"
        # math.isfinite overflows for integers beyond the range of floats.
        is_valid = isinstance(value, int | float) and 0 <= value <= sys.float_info.max
        is_valid = is_valid and (value > 0 or not quantity.is_positive)
    if not is_valid or isinstance(value, bool):
        yield f"{key}: expected {expected}, got {quote(value)}"
