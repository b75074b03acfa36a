"""Reading files of own constraints and an own objective, ``*.toml``, for the graph of a problem.

A name in a sum may be a pattern, as the shell has them: it stands for all nodes or tensors that it
matches. A name that the graph has is that name, whatever characters are in it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import InputError, did_you_mean, raised_as, shown
from poetmodel.files import parse_toml, place, read_text, unknown_key
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.problem.objective import OWN
from poetmodel.problem.totals import (
    BY_STAGE,
    CONSTANT,
    KEYS,
    Constraint,
    Count,
    Key,
    Terms,
    Total,
    is_number,
    unit_of,
    whole,
)
from poetmodel.units import parse_energy, parse_size, parse_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from poetmodel.problem.problem import Problem

_TABLES: Final = ("constraint", "objective")
_SIDES: Final[Mapping[str, tuple[str, ...]]] = {
    "at_most": ("upper",),
    "at_least": ("lower",),
    "equals": ("lower", "upper"),
}
"""The limits that each key gives."""
_KEYS: Final = ("name", "sum", "each", *_SIDES)
_EXAMPLE: Final = '{"bytes_written" = 1}'
_EACH: Final = "a pattern such as 'recomputations:conv*'"


def load_constraints(path: str | Path, problem: Problem) -> Problem:
    """Return a problem with the constraints, and the objective if there is one, of a file.

    Raises
    ------
    InputError
        With every fault of the file.
    """
    return parse_constraints(read_text(path), problem, source=str(path))


def parse_constraints(text: str, problem: Problem, *, source: str) -> Problem:
    """Do what `load_constraints` does with the text of a file; `source` names it in errors."""
    with raised_as(InputError, source):
        reader = _Reader(problem)
        reader.read(parse_toml(text, expected="file of constraints"))
        if reader.faults:
            raise InputError(reader.faults)
        if reader.objective is not None:
            problem = replace(problem, minimize=OWN, own_objective=reader.objective)
        return replace(problem, constraints=(*problem.constraints, *reader.rows))


_NAMED: Final = {
    Count.RECOMPUTATIONS: "node",
    Count.PAGE_INS: "tensor",
    Count.PAGE_OUTS: "tensor",
    Count.RESIDENT: "state tensor",
}
"""Counted part of the schedule, by count."""


class _Reader:
    """Takes a file apart: its rows, its objective, and every fault with its place."""

    def __init__(self, problem: Problem) -> None:
        self.rows: list[Constraint] = []
        self.objective: Terms | None = None
        self.faults: list[str] = []
        self._graph = problem.graph
        nodes, tensors = list(self._graph.node_index), list(self._graph.tensor_index)
        self._names = {
            Count.RECOMPUTATIONS: nodes,
            Count.PAGE_INS: tensors,
            Count.PAGE_OUTS: tensors,
            Count.RESIDENT: [self._graph.tensors[i].name for i in self._graph.state_tensors],
        }
        self._parsers: dict[str, tuple[Callable[..., float], dict[str, float]]] = {
            "bytes": (parse_size, {"whole_bytes": checkpoint_all_peak_bytes(self._graph)}),
            "s": (parse_time, {"whole_s": problem.pass_time_s}),
            "J": (parse_energy, {"whole_j": problem.baseline_energy_j}),
        }
        self._taken = {row.name: "the problem" for row in problem.constraints}
        """Owners of each name of a row."""

    def read(self, document: dict[str, Any]) -> None:
        """Read a whole file."""
        self._unknown(document, _TABLES, "")
        tables = document.get("constraint", [])
        if not isinstance(tables, list):
            got = "[constraint]" if isinstance(tables, dict) else shown(tables)
            self.faults.append(f"constraint: expected a list of tables, [[constraint]], got {got}")
            tables = []
        for index, table in enumerate(tables):
            where, default = place(("constraint", index), document), f"constraint {index + 1}"
            if not isinstance(table, dict):
                self.faults.append(f"{where}: expected a table, got {shown(table)}")
            elif "name" in table:
                self._constraint(table, default, where)
            else:
                self._constraint(table, default, f"{where} ({shown(default)})")
        if "objective" in document:
            self._objective(document["objective"])
        elif not tables and not self.faults:
            self.faults.append("expected [[constraint]] or [objective], got neither")

    def _objective(self, table: object) -> None:
        if not isinstance(table, dict):
            self.faults.append(f"objective: expected a table, [objective], got {shown(table)}")
            return
        self._unknown(table, ("sum",), "objective.")
        terms = self._sum(table.get("sum"), "objective.sum", constant=True)
        self.objective = terms or ((CONSTANT, 0),)  # what cancels out is any schedule

    def _constraint(self, table: dict[str, Any], default: str, where: str) -> None:
        before = len(self.faults)
        self._unknown(table, _KEYS, f"{where}.")
        name = table.get("name", default)
        if not isinstance(name, str) or not name:
            self.faults.append(
                f"{where}.name: expected a text that is not empty, got {shown(name)}"
            )
            name = default
        sums: dict[str, dict[str, float]] = {}
        if ("sum" in table) == ("each" in table):
            got = "both" if "sum" in table else "neither"
            self.faults.append(
                f"{where}: expected sum = {_EXAMPLE} or each = 'recomputations:conv*', got {got}"
            )
        elif "sum" in table:
            sums = {name: dict(self._sum(table["sum"], f"{where}.sum"))}
        else:
            sums = {
                f"{name}[{key.partition(':')[2]}]": {key: 1}
                for key in self._each(table["each"], f"{where}.each")
            }
        unit = unit_of(next(iter(sums.values()), {}).items())
        limits = self._limits(table, unit, where, known=len(self.faults) == before)
        for row in sums:
            if row in self._taken:
                self.faults.append(
                    f"{where}.name: {self._taken[row]} already has the name {shown(row)}"
                )
            self._taken[row] = where
        if len(self.faults) == before:
            try:
                self.rows += [Constraint(name=n, terms=t, **limits) for n, t in sums.items()]
            except InputError as error:
                self.faults += error.faults

    def _sum(self, value: object, where: str, *, constant: bool = False) -> Terms:
        """Return the terms of a sum, those of patterns written out."""
        if not isinstance(value, dict) or not value:
            got = "an empty table" if value == {} else shown(value)
            self.faults.append(f"{where}: expected a table such as {_EXAMPLE}, got {got}")
            return ()
        total: defaultdict[str, float] = defaultdict(int)
        for key, weight in value.items():
            if not is_number(weight) or weight == 0:
                self.faults.append(
                    f"{where}: {shown(key)}: expected a finite number other than 0, got "
                    f"{shown(weight)}"
                )
                continue
            for term in (CONSTANT,) if constant and key == CONSTANT else self._matches(key, where):
                total[term] += weight
        return tuple((key, whole(weight)) for key, weight in total.items() if weight)

    def _each(self, value: object, where: str) -> list[str]:
        if not isinstance(value, str):
            self.faults.append(f"{where}: expected {_EACH}, got {shown(value)}")
            return []
        if value in tuple(Total):
            self.faults.append(
                f"{where}: expected {_EACH}; {shown(value)} is one total: write "
                f"sum = {{{value} = 1}}"
            )
            return []
        return list(self._matches(value, where))

    def _matches(self, key: str, where: str) -> Iterator[str]:
        """Yield the totals that a key names, in the order of the graph."""
        if key in tuple(Total):
            yield key
            return
        kind, stage, pattern = Key.parse(key)
        known = kind in self._names if stage is None else kind in BY_STAGE
        if not known or not pattern:
            hint = did_you_mean(key, KEYS) or f"expected one of {', '.join(KEYS)}"
            self.faults.append(f"{where}: {shown(key)}: {hint}")
            return
        names, what = self._names[Count(kind)], _NAMED[Count(kind)]
        last = len(self._graph.nodes) - 1
        if stage is not None and not 0 <= stage <= last:
            self.faults.append(
                f"{where}: {shown(key)}: expected a stage after @, a number from 0 to {last}"
            )
            return
        matches = [pattern] if pattern in names else [n for n in names if fnmatchcase(n, pattern)]
        if not matches:
            close = get_close_matches(pattern, names, n=1)
            hint = f"; did you mean {shown(close[0])}?" if close else ""
            self.faults.append(
                f"{where}: {shown(key)}: no {what} of graph {shown(self._graph.name)} has "
                f"this name{hint}"
            )
        yield from (f"{key.partition(':')[0]}:{name}" for name in matches)

    def _limits(
        self, table: dict[str, Any], unit: str, where: str, *, known: bool
    ) -> dict[str, float]:
        """Return the limits of a constraint; the unit of its sum is not `known` after a fault."""
        given = [key for key in _SIDES if key in table]
        if not given or ("equals" in given and len(given) > 1):
            got = " and ".join(given) or "none"
            self.faults.append(
                f"{where}: expected at_most, at_least or both, or equals alone; got {got}"
            )
        limits: dict[str, float] = {}
        for key in given:
            amount = self._amount(table[key], unit, f"{where}.{key}", known=known)
            limits |= dict.fromkeys(_SIDES[key], amount)
        return limits

    def _amount(self, value: object, unit: str, where: str, *, known: bool) -> float:
        if isinstance(value, str) and not known:
            return 0.0  # a size for all that is known
        if isinstance(value, str) and unit:
            parse, of = self._parsers[unit]
            try:
                return parse(value, field=where, **of)
            except InputError as error:
                self.faults += error.faults
                return 0.0
        if isinstance(value, str):
            self.faults.append(
                f"{where}: expected a number, got {shown(value)}: only a sum of bytes, of times "
                "or of energies alone has a unit"
            )
        elif not is_number(value):
            self.faults.append(f"{where}: expected a finite number, got {shown(value)}")
        else:
            return value  # type: ignore[return-value]
        return 0.0

    def _unknown(self, table: dict[str, Any], known: tuple[str, ...], where: str) -> None:
        self.faults += [
            f"{where}{key}: {unknown_key(key, known)}" for key in table if key not in known
        ]
