"""Profiles: ``*.csv`` files of measured costs, one row per name of a node or tensor.

The columns are ``name``, two for a computation (``compute_time_s``, ``compute_energy_j``) and four
for paging (``page_in_time_s`` to ``page_out_energy_j``), in any order. A row has the compute cells,
the page cells, or both; the other cells are empty.
"""

from __future__ import annotations

import csv
import io
import math
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.device.cost import Cost, PageCost
from poetmodel.errors import CostError, convert_errors, quote
from poetmodel.files import read_text, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

COMPUTE_COLUMNS: Final = ("compute_time_s", "compute_energy_j")
"""Columns of the costs of a computation, in the order of `Cost`."""
PAGE_COLUMNS: Final = (
    "page_in_time_s",
    "page_in_energy_j",
    "page_out_time_s",
    "page_out_energy_j",
)
"""Columns of the costs of paging, in the order of `PageCost`."""
COLUMNS: Final = ("name", *COMPUTE_COLUMNS, *PAGE_COLUMNS)
"""All columns, in the order in which they are written."""

_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NEEDS_QUOTES: Final = re.compile(r'[",\r\n]')


class ProfileContent(NamedTuple):
    """The costs in a profile, by name."""

    compute: dict[str, Cost]
    """Cost of one computation of each node."""
    pages: dict[str, PageCost]
    """Cost of transfers of each tensor."""


def read_profile(path: str | Path) -> ProfileContent:
    """Read the costs in a profile by name; raise `CostError` with all errors."""
    with convert_errors(CostError):
        text = read_text(path)
    parser = _ProfileParser(text)
    if parser.faults:
        raise CostError(f"{path}: {fault}" for fault in parser.faults)
    return ProfileContent(parser.compute, parser.pages)


def write_profile(
    path: str | Path, compute: Mapping[str, Cost], pages: Mapping[str, PageCost]
) -> None:
    """Write a profile: the file from which `read_profile` returns `compute` and `pages`.

    A profile without costs or with an empty name is written, although `read_profile` refuses it.
    """
    lines = [",".join(COLUMNS)]
    for name in dict.fromkeys((*compute, *pages)):
        cost, page = compute.get(name), pages.get(name)
        cells = [_quote(name)]
        cells += _format_cells(cost) if cost else [""] * len(COMPUTE_COLUMNS)
        cells += _format_cells(page.page_in, page.page_out) if page else [""] * len(PAGE_COLUMNS)
        lines.append(",".join(cells))
    write_text(path, "\n".join(lines) + "\n")


def _format_cells(*costs: Cost) -> list[str]:
    return [repr(float(value)) for cost in costs for value in (cost.time_s, cost.energy_j)]


def _quote(name: str) -> str:
    """Quote a name for CSV if needed; `csv.writer` would leave a carriage return unquoted."""
    if not _NEEDS_QUOTES.search(name):
        return name
    return '"' + name.replace('"', '""') + '"'


class _ProfileParser:
    """Parses a profile to costs by name (`compute`, `pages`), and collects `faults`."""

    def __init__(self, text: str) -> None:
        self.compute: dict[str, Cost] = {}
        """Cost of one computation of each node."""
        self.pages: dict[str, PageCost] = {}
        """Cost of transfers of each tensor."""
        self.faults: list[str] = []
        """Errors in the profile, with their lines unless it is empty or has no rows."""
        self._line_of: dict[str, int] = {}
        rows = self._read_rows(text)
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
            self._parse_row(line, cells, columns)
        if not self._line_of and not self.faults:
            self.faults.append("expected a row for every node, got no rows")

    def _read_rows(self, text: str) -> Iterator[tuple[int, list[str]]]:
        """Yield (number of first line, cells) of each nonempty row; add invalid CSV to `faults`."""
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        line = 1
        try:
            for cells in reader:
                if cells:
                    yield line, cells
                line = reader.line_num + 1
        except csv.Error as error:
            self.faults.append(f"line {line}: not valid CSV ({error})")

    def _parse_row(self, line: int, cells: list[str], columns: list[str]) -> None:
        """Parse one row: add its costs to `compute` and `pages`, and its errors to `faults`."""
        if len(cells) != len(columns):
            self.faults.append(f"line {line}: expected {len(columns)} cells, got {len(cells)}")
            return
        row = dict(zip(columns, cells, strict=True))
        name = row["name"]
        label = f"line {line} ({quote(name)})"
        if not name:
            self.faults.append(f"line {line}: name: expected a non-empty string, got an empty cell")
        elif name in self._line_of:
            self.faults.append(
                f"{label}: the name already has a row, in line {self._line_of[name]}"
            )
        else:
            self._line_of[name] = line
        compute_values = self._parse_cells(row, COMPUTE_COLUMNS, label)
        page_values = self._parse_cells(row, PAGE_COLUMNS, label)
        if name and not any(row[column].strip() for column in columns if column != "name"):
            self.faults.append(
                f"{label}: expected {COMPUTE_COLUMNS[0]} and {COMPUTE_COLUMNS[1]}, or the four "
                "page columns, or all; got only a name"
            )
        if compute_values:
            self.compute[name] = Cost(*compute_values)
        if page_values:
            self.pages[name] = PageCost(Cost(*page_values[:2]), Cost(*page_values[2:]))

    def _parse_cells(
        self, row: dict[str, str], columns: tuple[str, ...], label: str
    ) -> list[float]:
        """Return the numbers in `columns`, else []; add to `faults` unless all cells are empty."""
        filled_columns = [column for column in columns if row[column].strip()]
        empty_columns = [column for column in columns if column not in filled_columns]
        if filled_columns and empty_columns:
            self.faults.append(
                f"{label}: {filled_columns[0]} is given, but not {', '.join(empty_columns)}"
            )
        faults = [
            f"{label}: {column}: expected a finite number >= 0, got {quote(cell)}"
            for column in filled_columns
            if _NUMBER.fullmatch(cell := row[column].strip()) is None
            or not 0 <= float(cell) < math.inf
        ]
        self.faults += faults
        return [] if faults or empty_columns else [float(row[column]) for column in columns]


def _header_faults(columns: list[str], line: int) -> Iterator[str]:
    """Yield a fault per unknown or duplicate column name, and one for all missing `COLUMNS`."""
    for column in dict.fromkeys(columns):
        if column not in COLUMNS:
            yield f"line {line}: unknown column {quote(column)}; expected {', '.join(COLUMNS)}"
        elif columns.count(column) > 1:
            yield f"line {line}: the column {column} comes {columns.count(column)} times"
    missing_columns = [column for column in COLUMNS if column not in columns]
    if missing_columns:
        names = ", ".join(missing_columns)
        yield f"line {line}: missing {names}; expected {', '.join(COLUMNS)}"
