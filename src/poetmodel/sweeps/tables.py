"""Tables of a sweep: bounds along the RAM axis, the Pareto front, CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import DEVICE_RAM_KEYS
from poetmodel.files import write_text
from poetmodel.result import Status, relative_gap
from poetmodel.schedule.metrics import Display, Group, metrics_at
from poetmodel.sweeps.measurement import NOT_INSTALLED, REFUSED, Record
from poetmodel.sweeps.runs import Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


Row = dict[str, Any]
"""Row of a table: values by column."""

_COUNT_KEYS: Final = ("recomputed", "paged_out", "paged_in")
"""Columns from the field ``counts`` of a record."""
_STATE_KEYS: Final = ("resident_bytes", "on_storage_bytes", "read_bytes", "written_back_bytes")
"""Columns from the field ``state`` of a record, with the prefix ``state_``."""
_SIZE_KEYS: Final = ("columns", "rows", "nodes", "root_bound")
"""Columns from the field ``statistics`` of a record: model size, branch-and-bound nodes, root
bound."""
_MODEL_KEYS: Final = ("model_value", "model_bound")
"""Columns from the field ``statistics`` of a record: value and bound of the solved model."""


def rows(records: Iterable[Record]) -> list[Row]:
    """Return one flat row per record, with the largest bound proven for its or a larger budget.

    ``axis_bound_j`` is the largest bound among this run and equal runs with a larger budget: a
    bound with more RAM is also valid with less. ``axis_gap`` is the gap of the overhead to it.
    """
    records = list(records)
    table = [_make_row(record) for record in records]
    rows_by_axis: dict[Run, list[Row]] = {}
    for row, record in zip(table, records, strict=True):
        rows_by_axis.setdefault(Run.from_dict(record["cell"]).chain, []).append(row)
    for axis_rows in rows_by_axis.values():
        bound_j = 0.0
        for row in sorted(axis_rows, key=lambda row: -(row["ram_budget_bytes"] or 0)):
            bound_j = max(bound_j, row["overhead_bound_j"] or 0.0)
            if row["overhead_j"] is not None:
                row["axis_bound_j"] = min(bound_j, row["overhead_j"])
                row["axis_gap"] = relative_gap(row["overhead_j"], bound_j)
    return table


def _make_row(record: Record) -> Row:
    """Return the flat row of a record, with None as ``axis_bound_j`` and ``axis_gap``."""
    run_fields, result = record["cell"], record["result"] or {}
    row: Row = {
        name: run_fields.get(name)
        for name in ("model", "device", "ram", "deadline", "method", "backend", "formulation")
    }
    row["model"] = Run.from_dict(run_fields).network
    row |= {name: run_fields["settings"][name] for name in ("seed", "time_limit_s")}
    row["status"] = _status(record)
    row["ram_budget_bytes"] = result.get("problem", {}).get("ram_budget_bytes")
    row["termination"] = record.get("termination")
    row["violations"] = len(result.get("violations", ()))
    row |= {name: result.get(name) for name in _metric_columns()}
    row |= {"axis_bound_j": None, "axis_gap": None}
    row |= {name: (record.get("counts") or {}).get(name) for name in _COUNT_KEYS}
    state = record.get("state") or {}
    row |= {f"state_{name}": state.get(name) for name in _STATE_KEYS}
    statistics = record.get("statistics") or {}
    row |= {name: statistics.get(name) for name in (*_SIZE_KEYS, *_MODEL_KEYS)}
    row["model_gap"] = model_gap(statistics)
    row |= {name: record.get(name) for name in ("seconds", "cpu_s", "warm_start", "reason", "key")}
    return row


def _metric_columns() -> tuple[str, ...]:
    """Return the columns of metrics: energy, proof and memory, device RAM, then further ones."""
    first_groups = (Group.ENERGY, Group.PROOF, Group.MEMORY)
    other_groups = [group for group in Group if group not in first_groups]
    first_keys, other_keys = (
        [metric.key for metric in metrics_at(Display.SWEEP, *groups)]
        for groups in (first_groups, other_groups)
    )
    return (*first_keys, *DEVICE_RAM_KEYS, *other_keys)


def _status(record: Record) -> str:
    """Return the status of a record; in older ones, ``unavailable`` is decided by the reason."""
    if record["status"] == "unavailable":
        return REFUSED if "licence" in record["reason"] else NOT_INSTALLED
    return str(record["status"])


def model_gap(statistics: Mapping[str, Any]) -> float | None:
    """Return the gap of the model that was solved; None if its value or bound is unknown.

    For a restriction of the problem, and for ``paper``, it is not the gap of the problem.
    """
    value, bound = (statistics.get(name) for name in _MODEL_KEYS)
    return None if value is None or bound is None else relative_gap(value, bound)


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Return the Pareto-optimal rows in energy, RAM and time of each model and device, by RAM.

    Copies with ``proven``: whether no schedule within the row's limits takes less energy, up to the
    gap tolerance. Rows without a schedule or rejected by the verifier are left out.
    """
    solved_rows = [row for row in rows if row["energy_j"] is not None and not row["violations"]]
    front: list[Row] = []
    for index, row in enumerate(solved_rows):
        is_dominated = any(
            _model_and_device(other) == _model_and_device(row)
            and _dominates(other, row, is_earlier=position < index)
            for position, other in enumerate(solved_rows)
        )
        if not is_dominated:
            front.append({**row, "proven": row["status"] == Status.OPTIMAL})
    return sorted(front, key=lambda row: (*_model_and_device(row), row["peak_ram_bytes"]))


def _model_and_device(row: Row) -> tuple[str, str]:
    return row["model"], row["device"]


def _dominates(row: Row, other_row: Row, *, is_earlier: bool) -> bool:
    """Return whether no value of a row is larger and one is smaller, or, if earlier, all equal."""
    pairs = [(row[name], other_row[name]) for name in ("energy_j", "peak_ram_bytes", "makespan_s")]
    if any(value > other_value for value, other_value in pairs):
        return False
    return is_earlier or any(value < other_value for value, other_value in pairs)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as a CSV file with a header, the columns of the first row; None becomes empty.

    Without rows, the file has one empty line. Replaces an existing file. Raises `ValueError` for a
    row with further columns, and the errors of `write_text`.
    """
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, buffer.getvalue())
