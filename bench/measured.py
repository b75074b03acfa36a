"""Records of ``bench/results/`` as data frames, and formats of their values in tables."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

from poetmodel.baselines import method_names
from poetmodel.sweeps.store import RecordFile
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from poetmodel.sweeps.measurement import Record

RESULTS: Final = Path(__file__).resolve().parent / "results"
CASES: Final = "cases"
"""Kind of the records of ``pytest bench``, whose file names consist of the date."""
_DAY: Final = "-".join("[0-9]" * digits for digits in (4, 2, 2))
"""Pattern of the date with which each file of records begins."""
ONE_PERCENT: Final = 0.01

# -- records ---------------------------------------------------------------------------------------


def records(kind: str) -> list[Record]:
    """Return the last record of each name in the newest file ``DATE-KIND.jsonl``."""
    name = _DAY if kind == CASES else f"{_DAY}-{kind}"
    files = sorted(RESULTS.glob(f"{name}.jsonl"))
    return list(_read_records(files[-1])) if files else []


@cache
def _read_records(path: Path) -> tuple[Record, ...]:
    return tuple(RecordFile(path, lambda record: (record["kind"], record["name"])).records())


def load(kind: str) -> pd.DataFrame:
    """Return the records of a kind as a frame, with the fields of their runs as columns.

    A measured field overrides the run's field of the same name, except for `kind`.
    """
    found = []
    for record in records(kind):
        cell = record.get("cell", {})
        facts = {"gap": record.get("gap"), "kind": cell.get("kind", record["kind"])}
        found.append({**cell, **record, **facts})
    return pd.DataFrame(found)


def figure_records(name: str) -> list[Record]:
    """Return the records of a figure of the paper, by problem, method and budget."""
    path = RESULTS / "figures" / f"{name}.jsonl"
    found = RecordFile(path, lambda record: str(record["key"])).records()
    groups = list(dict.fromkeys(map(_figure_group, found)))
    methods = method_names()

    def place(record: Record) -> tuple[int, int, float]:
        cell = record["cell"]
        share = float(cell["ram"].rstrip("%"))
        return groups.index(_figure_group(record)), methods.index(cell["method"]), share

    return sorted(found, key=place)


def _figure_group(record: Record) -> tuple[Any, ...]:
    return tuple(record["cell"][name] for name in ("model", "device", "deadline"))


# -- formats ---------------------------------------------------------------------------------------


def missing(value: object) -> bool:
    """Return whether a value is None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def seconds_text(value: float | None) -> str:
    """Format a time with three significant digits; a dash if it is missing."""
    if value is None or missing(value):
        return "-"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def percent_text(ratio: float | None, digits: int = 3) -> str:
    """Format a fraction as a percentage; a dash if it is missing."""
    return "-" if ratio is None or missing(ratio) else f"{100 * ratio:.{digits}g} %"


def bytes_text(value: float | None) -> str:
    """Format a size with its unit; a dash if it is missing."""
    return "-" if value is None or missing(value) else format_bytes(round(value))


def share_text(part: int, whole: int) -> str:
    """Format a count and its total, as in ``3 of 5``."""
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "-"


def times_text(low: float, high: float) -> str:
    """Format a factor between `low` and `high`: one number if both are equal, else a range."""
    if missing(low):
        return "-"
    if math.isinf(high) and not math.isinf(low):
        return f"at least {_factor(low)}"
    least, most = _factor(low), _factor(high)
    return least if least == most else f"{least} to {most}"


def _factor(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:.2f}" if value < 10 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def code(name: str) -> str:
    """Format a name as inline code."""
    return f"`{name}`"


def whole(value: float) -> str:
    """Format a number, rounded to an integer, with thousands separators."""
    return f"{round(value):,}"


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least this fraction of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def markdown(frame: pd.DataFrame, formats: Mapping[str, Callable[[Any], str]]) -> str:
    """Return a Markdown table of the columns with a format; texts are left-aligned."""
    rules = ["---" if form in (str, code) else "---:" for form in formats.values()]
    lines = [list(formats), rules]
    lines += [
        [form(row[name]) for name, form in formats.items()] for row in frame.to_dict("records")
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figures(rows: Sequence[Sequence[str]], heads: Sequence[str], *, words: int = 1) -> str:
    """Return a Markdown table of texts; columns after the first `words` are right-aligned."""
    rules = ["---" if place < words else "---:" for place in range(len(heads))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, rules, *rows))
