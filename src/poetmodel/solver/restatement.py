"""What was added to a Pyomo model, as `Problem.subject_to` and `minimizing` state it.

The default formulation solves such a problem by a few enforced rows, and over all schedules; a
model is solved as a whole, and over the schedules that it offers.
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

MOST_TERMS: Final = 4
"""Terms of a sum that are written out."""
MOST_RULES: Final = 4
"""Constraints that are written out."""


class _Counted(NamedTuple):
    """What a variable counts."""

    kind: Count
    item: int
    stage: int | None
    """Its stage; None for what is counted over all of them."""


class _Sum(NamedTuple):
    """A linear expression over what variables count."""

    terms: dict[_Counted, float]
    constant: float


def restatement(model: pyo.ConcreteModel) -> str | None:
    """Return a call that states what was added to a model from `build`, in Python.

    None if nothing was added, if a part of that is no sum over totals, or if variables or rows of
    the model itself were changed.
    """
    objective = next(model.component_data_objects(pyo.Objective, active=True), None)
    added = _added_rows(model)
    if added is None or objective is None or not model.exact or _is_narrowed(model):
        return None
    words = _TotalsWriter(model, _counted_variables(model))
    calls: list[str | None] = []
    if added:
        calls.append(words.rules(added))
    if objective.expr is not getattr(model, "stated_objective", None):
        calls.append(words.objective(objective))
    return f"problem.{'.'.join(map(str, calls))}" if calls and all(calls) else None


def _added_rows(model: pyo.ConcreteModel) -> dict[str, list[Any]] | None:
    """Return the rows that were added, by constraint; None if rows of the model were changed."""
    added: dict[str, list[Any]] = {}
    active = 0
    for row in model.component_data_objects(pyo.Constraint, active=True):
        name = row.parent_component().name
        if name not in model.stated_rows:
            added.setdefault(name, []).append(row)
        elif row.expr is not model.stated_rows[name].get(row.index()):
            return None
        else:
            active += 1
    return added if active == sum(map(len, model.stated_rows.values())) else None


def _is_narrowed(model: pyo.ConcreteModel) -> bool:
    """Return whether variables of the model were fixed, or have other bounds than `build` gave."""
    arrays = model.arrays
    for column, variable in enumerate(model.variables):
        if variable.fixed != (column in arrays.fixed):
            return True
        if variable.bounds != (arrays.lower[column], arrays.upper[column]):
            return True
    return False


def _counted_variables(model: pyo.ConcreteModel) -> dict[int, _Counted]:
    """Return what the variables of decisions count, by the `id` of the variable."""
    decisions = model.decisions
    counted = {
        id(variable): _Counted(count, item, None)
        for count, pairs in (
            (Count.PAGE_OUTS, decisions.page_outs),
            (Count.RECOMPUTATIONS, decisions.recomputations),
            (Count.PAGE_INS, decisions.page_ins),
        )
        for item, variable in pairs
    }
    labels = model.arrays.column_labels()
    for column, variable in enumerate(model.variables):
        known, label = counted.get(id(variable)), labels[column]
        if known is not None and isinstance(label.key, tuple):
            counted[id(variable)] = known._replace(stage=label.key[0])
        elif label.family == Count.RESIDENT:
            counted[id(variable)] = _Counted(Count.RESIDENT, label.key, None)
    return counted


class _TotalsWriter:
    """Sums over the variables of a model, in the words of `subject_to`."""

    def __init__(self, model: pyo.ConcreteModel, counted: Mapping[int, _Counted]) -> None:
        self.model = model
        self.graph = model.problem.graph
        self.counted = counted
        self.storage_homes = {id(home): item for item, home in model.decisions.storage_homes}
        self.offered: dict[Count, dict[int, int]] = {count: defaultdict(int) for count in Count}
        """How many variables count each item, those without a choice aside."""
        for variable in model.variables:
            what = counted.get(id(variable))
            if what is not None and not variable.fixed:
                self.offered[what.kind][what.item] += 1

    def rules(self, added: Mapping[str, list[Any]]) -> str | None:
        """Return a call of `subject_to` that states constraints; None where totals do not."""
        rules = []
        for name, rows in added.items():
            relations = [self.relation(row) for row in rows]
            if not all(relations):
                return None
            several = f"[{relations[0]}, ...]" if len(rows) > 1 else relations[0]
            keyword = re.sub(r"\W", "_", name)
            rules.append(f"{keyword}=lambda v: {several}")
        more = len(rules) - MOST_RULES
        shown = rules[:MOST_RULES] + [f"... {more} more"] * (more > 0)
        return f"subject_to({', '.join(shown)})"

    def relation(self, row: Any) -> str | None:
        """Return a constraint in words; None where a total does not say it."""
        found = self._sum(row.body)
        if found is None or not found.terms:
            return None
        sides = [None if side is None else pyo.value(side) for side in (row.lower, row.upper)]
        lower, upper = (None if side is None else side - found.constant for side in sides)
        text = self._totals(found.terms)
        if text is None:
            one_sided = upper is not None and (lower or 0) <= 0
            if not one_sided or min(found.terms.values()) < 0:
                return None
            text, lower = self._by_stage(found.terms), None
        if text is None:
            return None
        if lower == upper:
            return f"{text} == {upper:.10g}"
        if lower is not None and upper is not None:
            return f"({lower:.10g}, {text}, {upper:.10g})"
        return f"{text} <= {upper:.10g}" if upper is not None else f"{text} >= {lower:.10g}"

    def objective(self, objective: Any) -> str | None:
        """Return a call of `minimizing` that states an objective; None where totals do not."""
        found = self._sum(objective.expr)
        if found is None or not found.terms:
            return None
        sign = 1 if objective.sense == pyo.minimize else -1
        text = self._totals({what: sign * value for what, value in found.terms.items()})
        return None if text is None else f"minimizing(lambda v: {text})"

    def _sum(self, expression: Any) -> _Sum | None:
        """Return an expression as a sum of what is counted; None if anything else is in it."""
        linear = generate_standard_repn(expression)
        if not linear.is_linear():
            return None
        terms: defaultdict[_Counted, float] = defaultdict(float)
        constant = float(linear.constant)
        for value, variable in zip(linear.linear_coefs, linear.linear_vars, strict=True):
            what = self.counted.get(id(variable))
            if what is not None:
                terms[what] += value
            elif id(variable) in self.storage_homes:  # it is 1 - resident
                terms[_Counted(Count.RESIDENT, self.storage_homes[id(variable)], None)] -= value
                constant += value
            else:
                return None
        return _Sum({what: value for what, value in terms.items() if value}, constant)

    def _totals(self, terms: Mapping[_Counted, float]) -> str | None:
        """Return a sum in words if it has the same coefficient for all stages of an item."""
        items: dict[Count, dict[int, list[float]]] = {}
        for what, value in terms.items():
            items.setdefault(what.kind, {}).setdefault(what.item, []).append(value)
        parts: list[tuple[float, str]] = []
        for count, values in items.items():
            offered = self.offered[count]
            if any(len(of) != offered[i] or len(set(of)) > 1 for i, of in values.items()):
                return None
            parts += self._parts(count, {i: of[0] for i, of in values.items()})
        return _joined(parts)

    def _parts(self, count: Count, values: Mapping[int, float]) -> Iterator[tuple[float, str]]:
        """Yield the terms of one count: all items at once where they have one coefficient."""
        offered, sizes = self.offered[count].keys(), self.graph.tensor_bytes
        same = set(values.values())
        if len(values) > 1 and values.keys() == offered and len(same) == 1:
            yield same.pop(), f"sum(v.{count}.values())"
            return
        moved = {Count.PAGE_OUTS: Total.BYTES_WRITTEN, Count.PAGE_INS: Total.BYTES_READ}
        if count in moved and not self.graph.state_tensors:
            prices = {value / sizes[i] for i, value in values.items() if sizes[i]}
            if len(prices) == 1 and values.keys() == {i for i in offered if sizes[i]}:
                yield prices.pop(), f"v.{moved[count]}"
                return
        for item, value in values.items():
            yield value, f"v.{count}[{self._name(count, item)}]"

    def _by_stage(self, terms: Mapping[_Counted, float]) -> str | None:
        """Return a sum in words, stage by stage; None where something is not counted so."""
        if any(what.kind not in STAGE_COUNTS for what in terms):
            return None
        return _joined(
            (value, f"v.{what.kind}[{what.stage}, {self._name(what.kind, what.item)}]")
            for what, value in terms.items()
        )

    def _name(self, count: Count, item: int) -> str:
        nodes = count == Count.RECOMPUTATIONS
        name = self.graph.nodes[item].name if nodes else self.graph.tensors[item].name
        return f'"{name}"'


def _joined(parts: Iterable[tuple[float, str]]) -> str:
    """Return terms as a sum in Python; of many terms the first ones."""
    text, number = "", 0
    for number, (value, name) in enumerate(parts, start=1):
        if number > MOST_TERMS:
            return f"{text} + ..."
        factor = "" if abs(value) == 1 else f"{abs(value):.10g} * "
        sign = "-" if value < 0 else "+"
        text += f" {sign} {factor}{name}" if text else f"{sign.strip('+')}{factor}{name}"
    return text
