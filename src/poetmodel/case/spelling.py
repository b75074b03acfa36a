"""Spelling of limits and options of a search on a command line: one row for each option."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.problem import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.solver.request import SearchOptions


class OptionRow(NamedTuple):
    """The spelling of a field on a command line."""

    field: str
    spelling: str
    """The option with its value: ``--ram SIZE``."""
    text: str
    """Its help."""
    states: bool | int | None = None
    """The value that a flag states; None for an option with a value."""
    unit: str = ""
    """Suffix of a number."""
    is_always_stated: bool = False
    """Whether a command states it even if it has the default of `poetmodel solve`."""

    @property
    def option(self) -> str:
        """The option without its value: ``--ram``."""
        return self.spelling.partition(" ")[0]

    @property
    def parameter(self) -> str:
        """The name of the option as a parameter: ``no_paging``."""
        return self.option.removeprefix("--").replace("-", "_")


LIMIT_ROWS: Final = (
    OptionRow(
        "commit",
        "--commit",
        "Write all state that a step replaces to storage in every step, so that no state is lost "
        "in a power cut.",
        states=1,
    ),
    OptionRow(
        "commit",
        "--commit-every N",
        "Write the state in every N-th step, at 1/N of the cost; with N above 1 the state stays "
        "in RAM.",
    ),
    OptionRow(
        "ram",
        "--ram SIZE",
        "RAM budget: 256KiB, 1.5MB, or 50% of the keep-all peak. Default: the device's.",
    ),
    OptionRow(
        "aux_bytes",
        "--aux SIZE",
        "Storage for paged tensors. Default: the device's, else unlimited.",
    ),
    OptionRow(
        "deadline",
        "--deadline TIME",
        "Time limit of a step: 1.5s, 20ms, or 110% of a single pass over all nodes.",
        unit="s",
    ),
    OptionRow(
        "deadline_counts",
        "--deadline-counts",
        "Time that the deadline limits. Default: by the device's storage mode, else serial.",
    ),
    OptionRow(
        "minimize",
        "--minimize",
        "What to minimize. Default: energy, or the objective of --constraints.",
    ),
    OptionRow(
        "energy_budget",
        "--energy-budget ENERGY",
        "Energy limit of a step: 2.5J, 1.2Wh, or 105% of the baseline.",
        unit="J",
    ),
    OptionRow("paging", "--no-paging", "Do not page; only recompute.", states=False),
    OptionRow("recompute", "--no-recompute", "Do not recompute; only page.", states=False),
    OptionRow(
        "count_parameters",
        "--count-parameters",
        "Count parameters, gradients and optimizer state in the RAM budget.",
        states=True,
    ),
)
"""All fields of `Limits` but `constraints`, which files state."""

EXPORTED_LIMITS: Final = (
    *("commit", "aux_bytes", "deadline", "deadline_counts", "paging", "recompute"),
)
"""The limits that ``poetmodel export`` states as other commands do; its RAM includes the stack."""

SWEPT_LIMITS: Final = ("commit", "deadline_counts")
"""The limits that ``poetmodel sweep`` states as other commands do."""
UNEXPLORED_LIMITS: Final = ("energy_budget",)
"""The limits that ``poetmodel explore`` does not have."""

SEARCH_ROWS: Final = (
    OptionRow(
        "method",
        "--method NAME",
        "Method: optimal; an earlier method for comparison, such as checkpoint-all, chen-sqrt, "
        "rotor or dtr; or FILE.py:FUNCTION, a user-defined method.",
    ),
    OptionRow("formulation", "--formulation", "The formulation to solve. Default: lazy."),
    OptionRow("backend", "--backend", "The solver.", is_always_stated=True),
    OptionRow(
        "time_limit_s",
        "--time-limit TIME",
        "Wall-clock limit for building and solving: seconds, or a time such as 5min.",
        is_always_stated=True,
    ),
    OptionRow(
        "gap",
        "--gap FRACTION",
        "Gap tolerance, as a fraction of the overhead in the minimized quantity: stop when the gap "
        "is at most this.",
        is_always_stated=True,
    ),
    OptionRow(
        "threads",
        "--threads N",
        "Threads. With 2 or more, `lazy` runs a primal worker in parallel with the proof.",
    ),
    OptionRow(
        "solver_options",
        "--solver-option NAME=VALUE",
        "An option of the solver by its own name, such as mip_heuristic_effort=0.2 of HiGHS; may "
        "be repeated.",
    ),
)
"""All fields of `SearchOptions` but the seed."""


def stated_options(stated: Limits | SearchOptions) -> Iterator[tuple[OptionRow, tuple[str, ...]]]:
    """Yield row and arguments of each option that differs from its default or is always stated."""
    rows = LIMIT_ROWS if isinstance(stated, Limits) else SEARCH_ROWS
    rows_with_values = {row.field for row in rows if row.states is None}
    defaults = {entry.name: entry.default for entry in fields(stated)}
    for row in rows:
        value = getattr(stated, row.field)
        if value is None or value in ("", {}):
            continue
        if value == defaults[row.field] and not row.is_always_stated:
            continue
        if row.states is None:
            yield row, tuple(_arguments(row, value))
        elif row.field not in rows_with_values:
            yield row, (row.option,)


def _arguments(row: OptionRow, value: Any) -> Iterator[str]:
    """Yield option and value, all digits of a number; once for each entry of a mapping."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from (row.option, f"{name}={entry}")
    elif isinstance(value, float):
        yield from (row.option, f"{value!r}{row.unit}")
    else:
        yield from (row.option, f"{value}")
