"""Read files of user-defined constraints and objectives, ``*.toml``, for the graph of a problem.

A name in ``sum`` or ``each`` may be a shell pattern, which stands for every node, tensor or, after
``resident:``, state tensor that it matches. A text that equals a name stands only for this name,
even if it contains wildcards.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import InputError, convert_errors, quote, suggest_names
from poetmodel.files import format_location, parse_toml, read_text, unknown_key_message
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.problem.problem import Problem
from poetmodel.problem.quantities import USER_OBJECTIVE
from poetmodel.problem.totals import (
    CONSTANT,
    KEYS,
    STAGE_COUNTS,
    Constraint,
    Count,
    Key,
    Terms,
    Total,
    is_finite_number,
    to_int_if_whole,
    unit_of_terms,
)
from poetmodel.units import parse_energy, parse_size, parse_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from poetmodel.device import Costs
    from poetmodel.graph import Graph
    from poetmodel.problem.limits import Limits

_TABLES: Final = ("constraint", "objective")
"""Keys at the top of a file."""
_BOUNDS_OF_KEY: Final[Mapping[str, tuple[str, ...]]] = {
    "at_most": ("upper",),
    "at_least": ("lower",),
    "equals": ("lower", "upper"),
}
"""The fields of `Constraint` that each key of a bound sets."""
_CONSTRAINT_KEYS: Final = ("name", "sum", "each", *_BOUNDS_OF_KEY)
"""Keys of a constraint."""
_SUM_EXAMPLE: Final = '{"bytes_written" = 1}'
"""Example of ``sum``, for messages."""
_EACH_EXAMPLE: Final = "a pattern such as 'recomputations:conv*'"
"""Example of ``each``, for messages."""


def load_constraints(path: str | Path, problem: Problem) -> Problem:
    """Return a problem with the constraints of a file, and with its objective if it has one."""
    return parse_constraints(read_text(path), problem, source=str(path))


def state_problem(
    graph: Graph, costs: Costs, limits: Limits, constraint_files: Sequence[str] = ()
) -> Problem:
    """Return the problem with user constraints of files; `InputError` for a second objective."""
    problem = Problem.from_limits(graph, costs, limits)
    objective_source = None if limits.minimize is None else f"--minimize {limits.minimize}"
    for file in constraint_files:
        constrained_problem = load_constraints(file, problem)
        if constrained_problem.user_objective != problem.user_objective:
            if objective_source is not None:
                raise InputError(
                    f"{objective_source}: {file} states an objective, too; leave out one"
                )
            objective_source = file
        problem = constrained_problem
    return problem


def parse_constraints(text: str, problem: Problem, *, source: str) -> Problem:
    """Return `problem` with constraints and objective of a TOML text; errors name its `source`."""
    with convert_errors(InputError, source):
        reader = _ConstraintReader(problem)
        reader.read(parse_toml(text))
        if reader.faults:
            raise InputError(reader.faults)
        if reader.objective is not None:
            problem = replace(problem, minimize=USER_OBJECTIVE, user_objective=reader.objective)
        return replace(problem, constraints=(*problem.constraints, *reader.rows))


_SUBJECT_OF_COUNT: Final = {
    Count.RECOMPUTATIONS: "node",
    Count.PAGE_INS: "tensor",
    Count.PAGE_OUTS: "tensor",
    Count.RESIDENT: "state tensor",
}
"""Noun for the graph's items that each count counts, for messages."""


class _ConstraintReader:
    """Parses the content of a file to constraints and an objective."""

    def __init__(self, problem: Problem) -> None:
        self.rows: list[Constraint] = []
        """Constraints of the file."""
        self.objective: Terms | None = None
        """Objective of the file, the constant 0 if its terms cancel out; None without a table."""
        self.faults: list[str] = []
        """Errors, prefixed by their location in the file or the name of their constraint."""
        self._graph = problem.graph
        nodes, tensors = list(self._graph.node_index), list(self._graph.tensor_index)
        self._names = {
            Count.RECOMPUTATIONS: nodes,
            Count.PAGE_INS: tensors,
            Count.PAGE_OUTS: tensors,
            Count.RESIDENT: [self._graph.tensors[i].name for i in self._graph.state_tensors],
        }
        self._parsers: dict[str, tuple[Callable[..., float], dict[str, float]]] = {
            "bytes": (parse_size, {"base_bytes": checkpoint_all_peak_bytes(self._graph)}),
            "s": (parse_time, {"base_s": problem.pass_time_s}),
            "J": (parse_energy, {"base_j": problem.baseline_energy_j}),
        }
        self._owner_of_name = {row.name: "the problem" for row in problem.constraints}
        """Owner of each constraint's name, for messages: the problem, or a location in the file."""

    def read(self, document: dict[str, Any]) -> None:
        """Parse the content of a TOML file: add to `rows` and `faults`, and set `objective`."""
        self._check_keys(document, _TABLES, "")
        tables = document.get("constraint", [])
        if not isinstance(tables, list):
            actual_text = "[constraint]" if isinstance(tables, dict) else quote(tables)
            self.faults.append(
                f"constraint: expected a list of tables, [[constraint]], got {actual_text}"
            )
            tables = []
        for index, table in enumerate(tables):
            label, default_name = (
                format_location(("constraint", index), document),
                f"constraint {index + 1}",
            )
            if not isinstance(table, dict):
                self.faults.append(f"{label}: expected a table, got {quote(table)}")
            elif "name" in table:
                self._read_constraint(table, default_name, label)
            else:
                self._read_constraint(table, default_name, f"{label} ({quote(default_name)})")
        if "objective" in document:
            self._read_objective(document["objective"])
        elif not tables and not self.faults:
            self.faults.append("expected [[constraint]] or [objective], got neither")

    def _read_objective(self, table: object) -> None:
        """Parse the table of the objective: set `objective`, add errors to `faults`."""
        if not isinstance(table, dict):
            self.faults.append(f"objective: expected a table, [objective], got {quote(table)}")
            return
        self._check_keys(table, ("sum",), "objective.")
        terms = self._parse_sum(table.get("sum"), "objective.sum", allows_constant=True)
        # If all terms cancel out, every schedule is optimal.
        self.objective = terms or ((CONSTANT, 0),)

    def _read_constraint(self, table: dict[str, Any], default_name: str, label: str) -> None:
        """Add the constraint of a table, or one per match of ``each``, to `rows`.

        With ``each``, the names are ``name[match]``. A table with errors adds only these, to
        `faults`. Names are registered in both cases, so that repeated names are found.
        """
        n_faults = len(self.faults)
        self._check_keys(table, _CONSTRAINT_KEYS, f"{label}.")
        name = table.get("name", default_name)
        if not isinstance(name, str) or not name:
            self.faults.append(f"{label}.name: expected a non-empty string, got {quote(name)}")
            name = default_name
        sums: dict[str, dict[str, float]] = {}
        n_faults_before_sum = len(self.faults)
        if ("sum" in table) == ("each" in table):
            actual_text = "both" if "sum" in table else "neither"
            self.faults.append(
                f"{label}: expected sum = {_SUM_EXAMPLE} or each = 'recomputations:conv*', got "
                f"{actual_text}"
            )
        elif "sum" in table:
            sums = {name: dict(self._parse_sum(table["sum"], f"{label}.sum"))}
        else:
            sums = {
                f"{name}[{key.partition(':')[2]}]": {key: 1}
                for key in self._parse_each(table["each"], f"{label}.each")
            }
        unit = unit_of_terms(next(iter(sums.values()), {}).items())
        limits = self._parse_limits(
            table, unit, label, is_unit_known=len(self.faults) == n_faults_before_sum
        )
        for row_name in sums:
            if row_name in self._owner_of_name:
                self.faults.append(
                    f"{label}.name: {self._owner_of_name[row_name]} already has the name "
                    f"{quote(row_name)}"
                )
            self._owner_of_name[row_name] = label
        if len(self.faults) == n_faults:
            try:
                self.rows += [
                    Constraint(name=row_name, terms=terms, **limits)
                    for row_name, terms in sums.items()
                ]
            except InputError as error:
                self.faults += error.faults

    def _parse_sum(self, value: object, label: str, *, allows_constant: bool = False) -> Terms:
        """Return the terms of a sum; a key with a pattern has one term for each matching name.

        Omits invalid terms, with an error in `faults`. Weights of equal keys are added; terms that
        cancel out are omitted.
        """
        if not isinstance(value, dict) or not value:
            actual_text = "an empty table" if value == {} else quote(value)
            self.faults.append(
                f"{label}: expected a table such as {_SUM_EXAMPLE}, got {actual_text}"
            )
            return ()
        weight_of_key: defaultdict[str, float] = defaultdict(int)
        for key, weight in value.items():
            if not is_finite_number(weight) or weight == 0:
                self.faults.append(
                    f"{label}: {quote(key)}: expected a finite number other than 0, got "
                    f"{quote(weight)}"
                )
                continue
            for term in (
                (CONSTANT,)
                if allows_constant and key == CONSTANT
                else self._expand_pattern(key, label)
            ):
                if is_finite_number(weight_of_key[term] + weight):
                    weight_of_key[term] += weight
                else:
                    self.faults.append(f"{label}: {quote(term)}: the sum of its terms is too large")
        return tuple(
            (key, to_int_if_whole(weight)) for key, weight in weight_of_key.items() if weight
        )

    def _parse_each(self, value: object, label: str) -> list[str]:
        """Return the keys that a pattern of ``each`` matches, such as ``recomputations:conv1``."""
        if not isinstance(value, str):
            self.faults.append(f"{label}: expected {_EACH_EXAMPLE}, got {quote(value)}")
            return []
        if value in tuple(Total):
            self.faults.append(
                f"{label}: expected {_EACH_EXAMPLE}; {quote(value)} is one total: write "
                f"sum = {{{value} = 1}}"
            )
            return []
        return list(self._expand_pattern(value, label))

    def _expand_pattern(self, key: str, label: str) -> Iterator[str]:
        """Yield the keys that a key with a pattern matches; add a fault if there are none.

        The stage is preserved, as in ``page_ins@3:conv*``. A pattern that is a name matches only
        itself.
        """
        if key in tuple(Total):
            yield key
            return
        kind, stage, pattern = Key.parse(key)
        is_known = kind in self._names if stage is None else kind in STAGE_COUNTS
        if not is_known or not pattern:
            hint = suggest_names(key, KEYS) or f"expected one of {', '.join(KEYS)}"
            self.faults.append(f"{label}: {quote(key)}: {hint}")
            return
        names, noun = self._names[Count(kind)], _SUBJECT_OF_COUNT[Count(kind)]
        last_stage = len(self._graph.nodes) - 1
        if stage is not None and not 0 <= stage <= last_stage:
            self.faults.append(
                f"{label}: {quote(key)}: expected a stage after @, a number from 0 to {last_stage}"
            )
            return
        matches = (
            [pattern]
            if pattern in names
            else [candidate for candidate in names if fnmatchcase(candidate, pattern)]
        )
        if not matches:
            similar_names = get_close_matches(pattern, names, n=1)
            hint = f"; did you mean {quote(similar_names[0])}?" if similar_names else ""
            self.faults.append(
                f"{label}: {quote(key)}: no {noun} of graph {quote(self._graph.name)} has "
                f"this name{hint}"
            )
        yield from (f"{key.partition(':')[0]}:{name}" for name in matches)

    def _parse_limits(
        self, table: dict[str, Any], unit: str, label: str, *, is_unit_known: bool
    ) -> dict[str, float]:
        """Return the bounds by field of `Constraint`; ``equals`` sets both ``lower`` and ``upper``.

        An invalid bound adds a fault and becomes 0. `is_unit_known` is False if the sum has an
        error.
        """
        keys = [key for key in _BOUNDS_OF_KEY if key in table]
        if not keys or ("equals" in keys and len(keys) > 1):
            actual_text = " and ".join(keys) or "none"
            self.faults.append(
                f"{label}: expected at_most, at_least or both, or equals alone; got {actual_text}"
            )
        limits: dict[str, float] = {}
        for key in keys:
            bound = self._parse_amount(
                table[key], unit, f"{label}.{key}", is_unit_known=is_unit_known
            )
            limits |= dict.fromkeys(_BOUNDS_OF_KEY[key], bound)
        return limits

    def _parse_amount(self, value: object, unit: str, label: str, *, is_unit_known: bool) -> float:
        """Return a bound as a number; add a fault and return 0 if it is invalid.

        A percentage is of the keep-all peak, the pass time or the baseline. If `is_unit_known` is
        False, a text becomes 0 without a fault, because the error of the sum is reported already.
        """
        if isinstance(value, str) and not is_unit_known:
            return 0.0  # A text cannot be parsed without a unit.
        if isinstance(value, str) and unit:
            parse, base = self._parsers[unit]
            try:
                return parse(value, field=label, **base)
            except InputError as error:
                self.faults += error.faults
                return 0.0
        if isinstance(value, str):
            self.faults.append(
                f"{label}: expected a number, got {quote(value)}: a sum has a unit only if all its "
                "terms are bytes, all are times, or all are energies"
            )
        elif not is_finite_number(value):
            self.faults.append(f"{label}: expected a finite number, got {quote(value)}")
        else:
            return value  # type: ignore[return-value]
        return 0.0

    def _check_keys(self, table: dict[str, Any], known_keys: tuple[str, ...], label: str) -> None:
        """Add an error to `faults` for each unknown key of a table; `label` is its prefix."""
        self.faults += [
            f"{label}{key}: {unknown_key_message(key, known_keys)}"
            for key in table
            if key not in known_keys
        ]
