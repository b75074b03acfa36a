"""Rewrite the rows and objective added to a Pyomo model as `Problem.subject_to` and `minimizing`.

The default formulation solves such a problem with few enforced rows, over all schedules. A model is
solved as a whole, over the schedules that its variables can represent.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyomo.core as pyo
from pyomo.repn import generate_standard_repn

from poetmodel.problem.totals import STAGE_COUNTS, Count, Total

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAX_TERMS: Final = 4
"""Maximum number of terms of a sum that the call shows."""
MAX_RULES: Final = 4
"""Maximum number of constraints that the call shows."""


class _CountKey(NamedTuple):
    """The count, item and stage of a variable."""

    kind: Count
    item: int
    stage: int | None
    """The stage; None if the variable counts over all stages."""


class _Sum(NamedTuple):
    """A linear expression over counts."""

    terms: dict[_CountKey, float]
    constant: float


def restate_as_call(model: pyo.ConcreteModel) -> str | None:
    """Return the Python call that states the rows and objective added to a model from `build`.

    Return None if nothing was added, if it cannot be stated by totals, or if variables or rows of
    the model itself were changed.
    """
    objective = next(model.component_data_objects(pyo.Objective, active=True), None)
    added_rows = _added_rows(model)
    if added_rows is None or objective is None or not model.exact or _is_narrowed(model):
        return None
    writer = _TotalsWriter(model, _counted_variables(model))
    calls: list[str | None] = []
    if added_rows:
        calls.append(writer.subject_to_call(added_rows))
    if objective.expr is not getattr(model, "stated_objective", None):
        calls.append(writer.objective(objective))
    return f"problem.{'.'.join(map(str, calls))}" if calls and all(calls) else None


def _added_rows(model: pyo.ConcreteModel) -> dict[str, list[Any]] | None:
    """Return the added rows by constraint name; None if rows of the model itself were changed."""
    rows_by_name: dict[str, list[Any]] = {}
    active = 0
    for row in model.component_data_objects(pyo.Constraint, active=True):
        name = row.parent_component().name
        if name not in model.stated_rows:
            rows_by_name.setdefault(name, []).append(row)
        elif row.expr is not model.stated_rows[name].get(row.index()):
            return None
        else:
            active += 1
    return rows_by_name if active == sum(map(len, model.stated_rows.values())) else None


def _is_narrowed(model: pyo.ConcreteModel) -> bool:
    """Return whether variables of the model were fixed, or have other bounds than `build` set."""
    arrays = model.arrays
    for column, variable in enumerate(model.variables):
        if variable.fixed != (column in arrays.fixed):
            return True
        if variable.bounds != (arrays.lower[column], arrays.upper[column]):
            return True
    return False


def _counted_variables(model: pyo.ConcreteModel) -> dict[int, _CountKey]:
    """Return the count key of each decision variable, by the `id` of the variable."""
    decisions = model.decisions
    key_by_id = {
        id(variable): _CountKey(count, item, None)
        for count, pairs in (
            (Count.PAGE_OUTS, decisions.page_outs),
            (Count.RECOMPUTATIONS, decisions.recomputations),
            (Count.PAGE_INS, decisions.page_ins),
        )
        for item, variable in pairs
    }
    labels = model.arrays.column_labels()
    for column, variable in enumerate(model.variables):
        key, label = key_by_id.get(id(variable)), labels[column]
        if key is not None and isinstance(label.key, tuple):
            key_by_id[id(variable)] = key._replace(stage=label.key[0])
        elif label.family == Count.RESIDENT:
            key_by_id[id(variable)] = _CountKey(Count.RESIDENT, label.key, None)
    return key_by_id


class _TotalsWriter:
    """Writes linear expressions over the variables of a model as sums over totals, in Python."""

    def __init__(self, model: pyo.ConcreteModel, counted: Mapping[int, _CountKey]) -> None:
        """Count the variables of each item."""
        self.model = model
        self.graph = model.problem.graph
        self.counted = counted
        self.storage_homes = {id(home): item for item, home in model.decisions.storage_homes}
        self.n_variables: dict[Count, dict[int, int]] = {count: defaultdict(int) for count in Count}
        """Number of variables that count each item, fixed ones excluded."""
        for variable in model.variables:
            key = counted.get(id(variable))
            if key is not None and not variable.fixed:
                self.n_variables[key.kind][key.item] += 1

    def subject_to_call(self, added: Mapping[str, list[Any]]) -> str | None:
        """Return a call of `subject_to` with the added constraints.

        Return None if totals cannot state them.
        """
        subject_to_call = []
        for name, rows in added.items():
            relations = [self.write_constraint(row) for row in rows]
            if not all(relations):
                return None
            several = f"[{relations[0]}, ...]" if len(rows) > 1 else relations[0]
            keyword = re.sub(r"\W", "_", name)
            subject_to_call.append(f"{keyword}=lambda v: {several}")
        more = len(subject_to_call) - MAX_RULES
        shown_rules = subject_to_call[:MAX_RULES] + [f"... {more} more"] * (more > 0)
        return f"subject_to({', '.join(shown_rules)})"

    def write_constraint(self, row: Any) -> str | None:
        """Return a constraint as Python code; None if totals cannot state it."""
        parsed = self._parse_sum(row.body)
        if parsed is None or not parsed.terms:
            return None
        sides = [None if side is None else pyo.value(side) for side in (row.lower, row.upper)]
        lower, upper = (None if side is None else side - parsed.constant for side in sides)
        text = self._write_totals(parsed.terms)
        if text is None:
            one_sided = upper is not None and (lower or 0) <= 0
            if not one_sided or min(parsed.terms.values()) < 0:
                return None
            text, lower = self._write_stage_terms(parsed.terms), None
        if text is None:
            return None
        if lower == upper:
            return f"{text} == {upper:.10g}"
        if lower is not None and upper is not None:
            return f"({lower:.10g}, {text}, {upper:.10g})"
        return f"{text} <= {upper:.10g}" if upper is not None else f"{text} >= {lower:.10g}"

    def objective(self, objective: Any) -> str | None:
        """Return a call of `minimizing` with an objective; None if totals cannot state it."""
        parsed = self._parse_sum(objective.expr)
        if parsed is None or not parsed.terms:
            return None
        sign = 1 if objective.sense == pyo.minimize else -1
        text = self._write_totals({key: sign * value for key, value in parsed.terms.items()})
        return None if text is None else f"minimizing(lambda v: {text})"

    def _parse_sum(self, expression: Any) -> _Sum | None:
        """Return an expression as a sum of counts.

        Return None if it has any other variable or is not linear.
        """
        linear = generate_standard_repn(expression)
        if not linear.is_linear():
            return None
        terms: defaultdict[_CountKey, float] = defaultdict(float)
        constant = float(linear.constant)
        for value, variable in zip(linear.linear_coefs, linear.linear_vars, strict=True):
            key = self.counted.get(id(variable))
            if key is not None:
                terms[key] += value
            elif id(variable) in self.storage_homes:  # the variable is 1 - resident
                terms[_CountKey(Count.RESIDENT, self.storage_homes[id(variable)], None)] -= value
                constant += value
            else:
                return None
        return _Sum({key: value for key, value in terms.items() if value}, constant)

    def _write_totals(self, terms: Mapping[_CountKey, float]) -> str | None:
        """Return a sum over items as code; None if an item's coefficients differ between stages."""
        items: dict[Count, dict[int, list[float]]] = {}
        for key, value in terms.items():
            items.setdefault(key.kind, {}).setdefault(key.item, []).append(value)
        parts: list[tuple[float, str]] = []
        for count, values in items.items():
            n_variables = self.n_variables[count]
            if any(
                len(coefficients) != n_variables[i] or len(set(coefficients)) > 1
                for i, coefficients in values.items()
            ):
                return None
            parts += self._total_terms(
                count, {i: coefficients[0] for i, coefficients in values.items()}
            )
        return _write_sum(parts)

    def _total_terms(
        self, count: Count, values: Mapping[int, float]
    ) -> Iterator[tuple[float, str]]:
        """Yield the (coefficient, name) terms of one count.

        One term if all coefficients are equal.
        """
        n_variables, sizes = self.n_variables[count].keys(), self.graph.tensor_bytes
        same = set(values.values())
        if len(values) > 1 and values.keys() == n_variables and len(same) == 1:
            yield same.pop(), f"sum(v.{count}.values())"
            return
        byte_totals = {Count.PAGE_OUTS: Total.BYTES_WRITTEN, Count.PAGE_INS: Total.BYTES_READ}
        if count in byte_totals and not self.graph.state_tensors:
            prices = {value / sizes[i] for i, value in values.items() if sizes[i]}
            if len(prices) == 1 and values.keys() == {i for i in n_variables if sizes[i]}:
                yield prices.pop(), f"v.{byte_totals[count]}"
                return
        for item, value in values.items():
            yield value, f"v.{count}[{self._quoted_name(count, item)}]"

    def _write_stage_terms(self, terms: Mapping[_CountKey, float]) -> str | None:
        """Return a sum over (stage, item) as code; None if a term has a count without stages."""
        if any(key.kind not in STAGE_COUNTS for key in terms):
            return None
        return _write_sum(
            (value, f"v.{key.kind}[{key.stage}, {self._quoted_name(key.kind, key.item)}]")
            for key, value in terms.items()
        )

    def _quoted_name(self, count: Count, item: int) -> str:
        nodes = count == Count.RECOMPUTATIONS
        name = self.graph.nodes[item].name if nodes else self.graph.tensors[item].name
        return f'"{name}"'


def _write_sum(parts: Iterable[tuple[float, str]]) -> str:
    """Return terms as a sum in Python: the first `MAX_TERMS` of them."""
    text, number = "", 0
    for number, (value, name) in enumerate(parts, start=1):
        if number > MAX_TERMS:
            return f"{text} + ..."
        factor = "" if abs(value) == 1 else f"{abs(value):.10g} * "
        sign = "-" if value < 0 else "+"
        text += f" {sign} {factor}{name}" if text else f"{sign.strip('+')}{factor}{name}"
    return text
