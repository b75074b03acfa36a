"""Files of devices, ``*.toml``, and of measured costs, ``*.csv``.

`poetmodel.device.hardware` checks the range of each figure of a device; this module checks what
only a file can get wrong: syntax, unknown keys, values in place of tables.

A profile holds measured costs, one row per node or tensor. The columns are ``name``, the two of one
computation (``compute_time_s``, ``compute_energy_j``) and the four of paging (``page_in_time_s`` to
``page_out_energy_j``), in any order. A row gives the compute cells, the page cells, or both; the
other cells are empty.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.costs import Cost, Costs, PageCost
from poetmodel.device.hardware import (
    Compute,
    Device,
    Flash,
    Storage,
    StorageMode,
    Transfer,
    keys_of,
)
from poetmodel.errors import CostError, DeviceError, did_you_mean, raised_as, shown
from poetmodel.files import parse_toml, read_text, shipped, unknown_key, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_TABLES: Final = ("compute", "storage", "flash")
_FLASH_NEEDED: Final = tuple(field.name for field in fields(Flash) if field.default is MISSING)
_SUFFIX: Final = ".toml"

COMPUTE_COLUMNS: Final = ("compute_time_s", "compute_energy_j")
PAGE_COLUMNS: Final = (
    "page_in_time_s",
    "page_in_energy_j",
    "page_out_time_s",
    "page_out_energy_j",
)
COLUMNS: Final = ("name", *COMPUTE_COLUMNS, *PAGE_COLUMNS)

_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NEEDS_QUOTES: Final = re.compile(r'[",\r\n]')


def device_names() -> tuple[str, ...]:
    """Return the names of the shipped devices, sorted."""
    return tuple(sorted(path.stem for path in shipped("devices").glob(f"*{_SUFFIX}")))


def load_device(name_or_path: str | Path) -> Device:
    """Do what `Device.load` does; the device's `key` is the name or path as given."""
    key = str(name_or_path)
    names = device_names()
    if key in names:
        path = shipped("devices") / f"{key}{_SUFFIX}"
    elif _is_path(key):
        path = Path(key)
    else:
        hint = did_you_mean(key.lower(), names, most=3)
        aside = f" ({hint})" if hint else ""
        raise DeviceError(
            f"device {shown(key)}: there is no such device{aside}; shipped are {', '.join(names)}; "
            f"else give the path of a {_SUFFIX} file"
        )
    with raised_as(DeviceError):
        text = read_text(path)
    with raised_as(DeviceError, key):
        return _device(parse_toml(text, expected="device file"), key=key)


def _is_path(key: str) -> bool:
    if key.endswith(_SUFFIX) or os.sep in key or (os.altsep and os.altsep in key):
        return True
    try:
        return Path(key).is_file()
    except OSError:
        return False


def _device(document: dict[str, Any], *, key: str) -> Device:
    faults: list[str] = _unknown_keys(document, (*keys_of(Device), *_TABLES), "")
    compute = _table(document, "compute", "compute", keys_of(Compute), faults)
    figures = {name: document[name] for name in keys_of(Device) if name in document}
    figures |= {name: document.get(name) for name in ("name", "ram_bytes")}
    flash = _flash(document, faults) if "flash" in document else None
    storage = _storage(document, flash, faults) if "storage" in document else None
    if flash is not None and flash.storage_bytes and not (storage and storage.volatile):
        figures.setdefault("aux_bytes", flash.storage_bytes)
    try:
        device = Device(
            compute=_compute(compute),
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


def _compute(table: Mapping[str, Any]) -> Compute:
    given = {name: table[name] for name in keys_of(Compute) if name in table}
    return Compute(**{"flops_per_s": None} | given)


def _flash(document: dict[str, Any], faults: list[str]) -> Flash:
    table = _table(document, "flash", "flash", keys_of(Flash), faults)
    needed = {key: table.get(key) for key in _FLASH_NEEDED}
    return Flash(**needed | {key: table[key] for key in keys_of(Flash) if key in table})  # type: ignore[arg-type]


def _storage(document: dict[str, Any], flash: Flash | None, faults: list[str]) -> Storage:
    """Return the storage; where it lies in the flash, that has its block and endurance."""
    keys, ways = keys_of(Storage), {}
    storage = _table(document, "storage", "storage", (*keys, "page_in", "page_out"), faults)
    for name in ("page_in", "page_out"):
        way = _table(storage, name, f"storage.{name}", keys_of(Transfer), faults)
        ways[name] = Transfer(**{key: way.get(key) for key in keys_of(Transfer)})  # type: ignore[arg-type]
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


def load_profile(path: str | Path, *, device: Device | None = None) -> Costs:
    """Do what `Costs.load` does; whether the costs fit a graph shows when used with one."""
    with raised_as(CostError):
        text = read_text(path)
    reader = _ProfileReader(text)
    if reader.faults:
        raise CostError(f"{path}: {fault}" for fault in reader.faults)
    pages = None if device is not None and device.storage is None else reader.pages
    return Costs(compute=reader.compute, pages=pages, device=device, source=str(path))


def save_profile(costs: Costs, path: str | Path) -> None:
    """Write a profile; `load_profile` gives the same costs back."""
    pages = costs.pages or {}
    lines = [",".join(COLUMNS)]
    for name in dict.fromkeys((*costs.compute, *pages)):
        cost, page = costs.compute.get(name), pages.get(name)
        cells = [_quoted(name)]
        cells += _cells(cost) if cost else [""] * len(COMPUTE_COLUMNS)
        cells += _cells(page.page_in, page.page_out) if page else [""] * len(PAGE_COLUMNS)
        lines.append(",".join(cells))
    write_text(path, "\n".join(lines) + "\n")


def _cells(*costs: Cost) -> list[str]:
    return [repr(float(value)) for cost in costs for value in (cost.time_s, cost.energy_j)]


def _quoted(name: str) -> str:
    if not _NEEDS_QUOTES.search(name):
        return name
    return '"' + name.replace('"', '""') + '"'


class _ProfileReader:
    """Takes a profile apart: `compute` and `pages` by name, and every fault with its line."""

    def __init__(self, text: str) -> None:
        self.compute: dict[str, Cost] = {}
        self.pages: dict[str, PageCost] = {}
        self.faults: list[str] = []
        self._line_of: dict[str, int] = {}
        rows = self._rows(text)
        header = next(rows, None)
        if header is None:
            if not self.faults:
                self.faults.append(f"expected the columns {', '.join(COLUMNS)}, got an empty file")
            return
        columns = [cell.strip() for cell in header[1]]
        self.faults += _header_faults(columns, header[0])
        if self.faults:
            return
        for line, cells in rows:
            self._row(line, cells, columns)
        if not self._line_of and not self.faults:
            self.faults.append("expected a row for every node, got no rows")

    def _rows(self, text: str) -> Iterator[tuple[int, list[str]]]:
        """Yield each row that is not blank with the line it begins on."""
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        line = 1
        try:
            for cells in reader:
                if cells:
                    yield line, cells
                line = reader.line_num + 1
        except csv.Error as error:
            self.faults.append(f"line {line}: not valid CSV ({error})")

    def _row(self, line: int, cells: list[str], columns: list[str]) -> None:
        if len(cells) != len(columns):
            self.faults.append(f"line {line}: expected {len(columns)} cells, got {len(cells)}")
            return
        row = dict(zip(columns, cells, strict=True))
        name = row["name"]
        where = f"line {line} ({shown(name)})"
        if not name:
            self.faults.append(f"line {line}: name: expected a non-empty string, got an empty cell")
        elif name in self._line_of:
            self.faults.append(
                f"{where}: the name already has a row, in line {self._line_of[name]}"
            )
        else:
            self._line_of[name] = line
        computing = self._values(row, COMPUTE_COLUMNS, where)
        paging = self._values(row, PAGE_COLUMNS, where)
        if name and not any(row[column].strip() for column in columns if column != "name"):
            self.faults.append(
                f"{where}: expected {COMPUTE_COLUMNS[0]} and {COMPUTE_COLUMNS[1]}, or the four "
                "page columns, or all; got only a name"
            )
        if computing:
            self.compute[name] = Cost(*computing)
        if paging:
            self.pages[name] = PageCost(Cost(*paging[:2]), Cost(*paging[2:]))

    def _values(self, row: dict[str, str], columns: tuple[str, ...], where: str) -> list[float]:
        """Return the figures of cells that belong together; none where all of them are empty."""
        given = [column for column in columns if row[column].strip()]
        empty = [column for column in columns if column not in given]
        if given and empty:
            self.faults.append(f"{where}: {given[0]} is given, but not {', '.join(empty)}")
        faults = [
            f"{where}: {column}: expected a finite number >= 0, got {shown(cell)}"
            for column in given
            if _NUMBER.fullmatch(cell := row[column].strip()) is None
            or not 0 <= float(cell) < math.inf
        ]
        self.faults += faults
        return [] if faults or empty else [float(row[column]) for column in columns]


def _header_faults(columns: list[str], line: int) -> Iterator[str]:
    for column in dict.fromkeys(columns):
        if column not in COLUMNS:
            yield f"line {line}: unknown column {shown(column)}; expected are {', '.join(COLUMNS)}"
        elif columns.count(column) > 1:
            yield f"line {line}: the column {column} comes {columns.count(column)} times"
    missing = [column for column in COLUMNS if column not in columns]
    if missing:
        yield f"line {line}: missing {', '.join(missing)}; expected are {', '.join(COLUMNS)}"
