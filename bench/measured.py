"""Readers of the records in ``bench/results/``, and formats of values and tables on pages."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.baselines import method_names
from poetmodel.sweeps.store import RecordFile
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pandas as pd

    from poetmodel.sweeps.measurement import Record

RESULTS: Final = Path(__file__).resolve().parent / "results"
CASES: Final = "cases"
"""Kind of the records of ``pytest bench``, whose file names consist of the date."""
_DATE_PATTERN: Final = "-".join("[0-9]" * digits for digits in (4, 2, 2))
"""Pattern of the date with which each file of records begins."""
ONE_PERCENT: Final = 0.01

# -- records ---------------------------------------------------------------------------------------


def read_records(kind: str) -> list[Record]:
    """Read the last record of each run in the newest file ``DATE-KIND.jsonl``, if there is one."""
    name = _DATE_PATTERN if kind == CASES else f"{_DATE_PATTERN}-{kind}"
    files = sorted(RESULTS.glob(f"{name}.jsonl"))
    return list(_read_file(files[-1])) if files else []


@cache
def _read_file(path: Path) -> tuple[Record, ...]:
    return tuple(RecordFile(path, lambda record: (record["kind"], record["name"])).records())


def load_frame(kind: str) -> pd.DataFrame:
    """Return the records of a kind as a frame, with the fields of their runs as further columns.

    A measured field overrides the run's field of the same name, except for `kind`.
    """
    import pandas as pd

    rows = []
    for record in read_records(kind):
        cell = record.get("cell", {})
        derived = {"gap": record.get("gap"), "kind": cell.get("kind", record["kind"])}
        rows.append({**cell, **record, **derived})
    return pd.DataFrame(rows)


def read_figure_records(name: str) -> list[Record]:
    """Read the records of a figure of the paper, in the order of problem, method and budget."""
    path = RESULTS / "figures" / f"{name}.jsonl"
    records = RecordFile(path, lambda record: str(record["key"])).records()
    problems = list(dict.fromkeys(map(_figure_problem, records)))
    methods = method_names()

    def sort_key(record: Record) -> tuple[int, int, float]:
        cell = record["cell"]
        percentage = float(cell["ram"].rstrip("%"))
        return problems.index(_figure_problem(record)), methods.index(cell["method"]), percentage

    return sorted(records, key=sort_key)


def _figure_problem(record: Record) -> tuple[Any, ...]:
    return tuple(record["cell"][name] for name in ("model", "device", "deadline"))


# -- formats ---------------------------------------------------------------------------------------


def is_missing(value: object) -> bool:
    """Return whether a value is None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def format_seconds(value: float | None) -> str:
    """Format a time with three significant digits; a dash if it is missing."""
    if value is None or is_missing(value):
        return "-"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def format_percent(ratio: float | None, digits: int = 3) -> str:
    """Format a fraction as a percentage; a dash if it is missing."""
    return "-" if ratio is None or is_missing(ratio) else f"{100 * ratio:.{digits}g} %"


def format_size(value: float | None) -> str:
    """Format a size with its unit; a dash if it is missing."""
    return "-" if value is None or is_missing(value) else format_bytes(round(value))


def format_count(count: int, total: int) -> str:
    """Format a count and its total, as in ``3 of 5 (60.0 %)``; a dash for a total of 0."""
    return f"{count} of {total} ({100 * count / total:.1f} %)" if total else "-"


def format_factors(low: float, high: float) -> str:
    """Format a factor between `low` and `high` as a number or a range; a dash for NaN."""
    if is_missing(low):
        return "-"
    if math.isinf(high) and not math.isinf(low):
        return f"at least {_format_factor(low)}"
    low_text, high_text = _format_factor(low), _format_factor(high)
    return low_text if low_text == high_text else f"{low_text} to {high_text}"


def _format_factor(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:.2f}" if value < 10 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def format_code(name: str) -> str:
    """Format a name as inline code."""
    return f"`{name}`"


def format_integer(value: float) -> str:
    """Format a number, rounded to an integer, with thousands separators."""
    return f"{round(value):,}"


def compute_percentile(values: Iterable[float], fraction: float) -> float:
    """Return the smallest value that at least a fraction of all values does not exceed.

    NaN without values.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else math.nan


def format_frame(frame: pd.DataFrame, formats: Mapping[str, Callable[[Any], str]]) -> str:
    """Format columns of a frame as a Markdown table, by the function for each column.

    Columns with the function `str` or `format_code` are left-aligned.
    """
    alignments = [
        "---" if format_value in (str, format_code) else "---:" for format_value in formats.values()
    ]
    lines = [list(formats), alignments]
    lines += [
        [format_value(row[name]) for name, format_value in formats.items()]
        for row in frame.to_dict("records")
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def format_table(rows: Sequence[Sequence[str]], headings: Sequence[str], *, words: int = 1) -> str:
    """Format texts as a Markdown table; columns after the first `words` are right-aligned."""
    alignments = ["---" if column < words else "---:" for column in range(len(headings))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, alignments, *rows))
