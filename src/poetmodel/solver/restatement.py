"""Write the rows and objective added to a Pyomo model as `Problem.subject_to` and `minimizing`.

The call is displayed to users, because the problem that it returns is solved faster: the default
formulation enforces few rows, over all schedules. A model is solved as a whole, over the schedules
that its variables can represent.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyomo.core as pyo
from pyomo.repn import generate_standard_repn

from poetmodel.problem.totals import STAGE_COUNTS, Count, Total

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAX_TERMS: Final = 4
"""Maximum number of terms of a sum in the call; "..." replaces the further terms."""
MAX_RULES: Final = 4
"""Maximum number of constraints in the call; "..." and their number replace the further ones."""


class _CountKey(NamedTuple):
    """The count, item and stage of a variable."""

    kind: Count
    item: int
    """The node or tensor that is counted."""
    stage: int | None
    """The stage; None if the variable belongs to no single stage."""


class _Sum(NamedTuple):
    """A linear expression over counts."""

    terms: dict[_CountKey, float]
    constant: float


def restate_as_call(model: pyo.ConcreteModel) -> str | None:
    """Return the Python call, for display, that states the rows and objective added to a model.

    The first active objective is stated unless `has_problem_objective` is true. Long sums and lists
    are shortened by "...". Return None without additions, or if `subject_to` and `minimizing`
    cannot state them. Also return None if the model is not exact or has no active objective, or if
    variables or rows that `build` made were changed.
    """
    objective = next(model.component_data_objects(pyo.Objective, active=True), None)
    added_rows = _added_rows(model)
    if added_rows is None or objective is None or not model.exact or _has_changed_variables(model):
        return None
    writer = _TotalsWriter(model, _counted_variables(model))
    method_calls: list[str | None] = []
    if added_rows:
        method_calls.append(writer.subject_to_call(added_rows))
    if not has_problem_objective(model):
        method_calls.append(writer.minimizing_call(objective))
    return (
        f"problem.{'.'.join(map(str, method_calls))}"
        if method_calls and all(method_calls)
        else None
    )


def has_problem_objective(model: pyo.ConcreteModel) -> bool:
    """Return whether the objective that `build` made is active, minimized and unchanged.

    Ignores further active objectives.
    """
    objective = model.component("objective")
    return (
        getattr(objective, "active", False)
        and getattr(objective, "sense", None) == pyo.minimize
        and getattr(objective, "expr", None) is getattr(model, "stated_objective", None)
    )


def _added_rows(model: pyo.ConcreteModel) -> dict[str, list[Any]] | None:
    """Return the active added rows by constraint name, without rows that have no finite limit.

    Return None if rows of `build` were changed, deactivated or removed, or if a constraint of
    `build` has further rows.
    """
    rows_by_name: dict[str, list[Any]] = {}
    n_unchanged = 0
    for row in model.component_data_objects(pyo.Constraint, active=True):
        name = row.parent_component().name
        if name not in model.stated_rows:
            if _limits(row) != (None, None):
                rows_by_name.setdefault(name, []).append(row)
        elif row.expr is not model.stated_rows[name].get(row.index()):
            return None
        else:
            n_unchanged += 1
    return rows_by_name if n_unchanged == sum(map(len, model.stated_rows.values())) else None


def _limits(row: Any) -> tuple[float | None, float | None]:
    """Return the lower and upper limit of a row; None for a limit that excludes no value."""
    lower, upper = (None if bound is None else pyo.value(bound) for bound in (row.lower, row.upper))
    return None if lower == -math.inf else lower, None if upper == math.inf else upper


def _has_changed_variables(model: pyo.ConcreteModel) -> bool:
    """Return whether variables or their bounds changed since `build`.

    Changed variables are fixed, unfixed, or fixed at another value.
    """
    arrays = model.arrays
    for column, variable in enumerate(model.variables):
        if (variable.value if variable.fixed else None) != arrays.fixed.get(column):
            return True
        if variable.bounds != (arrays.lower[column], arrays.upper[column]):
            return True
    return False


def _counted_variables(model: pyo.ConcreteModel) -> dict[int, _CountKey]:
    """Return the key of each variable that counts recomputations or transfers, by its ``id``.

    Includes the variables of resident state; omits the variables of ``decisions.storage_homes``.
    """
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
    """Writes linear expressions over the variables of a model as sums of totals or stage counts."""

    def __init__(self, model: pyo.ConcreteModel, count_key_of: Mapping[int, _CountKey]) -> None:
        """Store `count_key_of`, the keys of variables by ``id``, and fill `n_variables`."""
        self.model = model
        self.graph = model.problem.graph
        self.count_key_of = count_key_of
        self.storage_homes = {id(home): item for item, home in model.decisions.storage_homes}
        self.n_variables: dict[Count, dict[int, int]] = {count: defaultdict(int) for count in Count}
        """Number of variables that count each item, fixed ones excluded."""
        for variable in model.variables:
            key = count_key_of.get(id(variable))
            if key is not None and not variable.fixed:
                self.n_variables[key.kind][key.item] += 1

    def subject_to_call(self, added_rows: Mapping[str, list[Any]]) -> str | None:
        """Return a call of `subject_to` with one keyword for each added constraint, for display.

        A keyword is the name of its constraint, with "_" for characters that names of Python do
        not contain. Of several rows of a constraint only the first is written. "..." and their
        number replace constraints after the first `MAX_RULES`. Return None if `write_constraint`
        returns None for any row, including rows that are not written.
        """
        rules = []
        for name, rows in added_rows.items():
            relations = [self.write_constraint(row) for row in rows]
            if not all(relations):
                return None
            relations_text = f"[{relations[0]}, ...]" if len(rows) > 1 else relations[0]
            keyword = re.sub(r"\W", "_", name)
            rules.append(f"{keyword}=lambda v: {relations_text}")
        n_hidden = len(rules) - MAX_RULES
        shown_rules = rules[:MAX_RULES] + [f"... {n_hidden} more"] * (n_hidden > 0)
        return f"subject_to({', '.join(shown_rules)})"

    def write_constraint(self, row: Any) -> str | None:
        """Return a row as a Python relation or, with two limits, as (lower, sum, upper).

        "..." replaces the terms after the first `MAX_TERMS`. If totals cannot state the row, it is
        written with counts in stages. Counts in stages can only state an upper limit on a sum
        without negative coefficients, and omit a lower limit of 0 or less. Return None if the row
        has no counts or an invalid limit, or if neither totals nor counts in stages can state it.
        """
        count_sum = self._parse_sum(row.body)
        if count_sum is None or not count_sum.terms:
            return None
        lower, upper = (
            None if limit is None else limit - count_sum.constant for limit in _limits(row)
        )
        if not all(limit is None or math.isfinite(limit) for limit in (lower, upper)):
            return None
        text = self._write_totals(count_sum.terms)
        if text is None:
            has_upper_only = upper is not None and (lower or 0) <= 0
            if not has_upper_only or min(count_sum.terms.values()) < 0:
                return None
            text, lower = self._write_stage_terms(count_sum.terms), None
        if text is None:
            return None
        if lower == upper:
            return f"{text} == {upper:.10g}"
        if lower is not None and upper is not None:
            return f"({lower:.10g}, {text}, {upper:.10g})"
        return f"{text} <= {upper:.10g}" if upper is not None else f"{text} >= {lower:.10g}"

    def minimizing_call(self, objective: Any) -> str | None:
        """Return a call of `minimizing` with an objective, for display, without its constant.

        A maximized objective is negated, and `MAX_TERMS` limits the terms. Return None if the
        objective is constant or not linear, or has variables or coefficients that totals cannot
        state.
        """
        count_sum = self._parse_sum(objective.expr)
        if count_sum is None or not count_sum.terms:
            return None
        sign = 1 if objective.sense == pyo.minimize else -1
        text = self._write_totals({key: sign * value for key, value in count_sum.terms.items()})
        return None if text is None else f"minimizing(lambda v: {text})"

    def _parse_sum(self, expression: Any) -> _Sum | None:
        """Return an expression as a sum of counts, without counts whose coefficient is 0.

        A variable of a home on storage is counted as 1 minus `Count.RESIDENT`, and fixed variables
        are part of the constant. Return None if the expression is not linear, or has an unfixed
        variable that is neither a count nor a home.
        """
        linear = generate_standard_repn(expression)
        if not linear.is_linear():
            return None
        terms: defaultdict[_CountKey, float] = defaultdict(float)
        constant = float(linear.constant)
        for value, variable in zip(linear.linear_coefs, linear.linear_vars, strict=True):
            key = self.count_key_of.get(id(variable))
            if key is not None:
                terms[key] += value
            elif id(variable) in self.storage_homes:  # the variable is 1 - resident
                terms[_CountKey(Count.RESIDENT, self.storage_homes[id(variable)], None)] -= value
                constant += value
            else:
                return None
        return _Sum({key: value for key, value in terms.items() if value}, constant)

    def _write_totals(self, terms: Mapping[_CountKey, float]) -> str | None:
        """Return a sum in totals, which have no stages, as Python code.

        `terms` has the coefficient of each count in the sum. In the code, "..." replaces the terms
        after the first `MAX_TERMS`. Return None if the coefficients of an item differ between
        stages, or if the sum omits an unfixed variable of an item. Also return None for page-ins of
        state, because totals include first reads, which variables of page-ins do not count.
        """
        items: dict[Count, dict[int, list[float]]] = {}
        for key, value in terms.items():
            items.setdefault(key.kind, {}).setdefault(key.item, []).append(value)
        terms_of_counts: list[tuple[float, str]] = []
        if not items.get(Count.PAGE_INS, {}).keys().isdisjoint(self.graph.state_tensors):
            return None
        for count, values in items.items():
            n_variables = self.n_variables[count]
            if any(
                len(coefficients) != n_variables[i] or len(set(coefficients)) > 1
                for i, coefficients in values.items()
            ):
                return None
            terms_of_counts += self._terms_of_count(
                count, {i: coefficients[0] for i, coefficients in values.items()}
            )
        return _write_sum(terms_of_counts)

    def _terms_of_count(
        self, count: Count, values: Mapping[int, float]
    ) -> Iterator[tuple[float, str]]:
        """Yield the terms of one count in a sum, as (coefficient, Python expression).

        `values` has the coefficient of each item, a node or tensor. Items with an unfixed variable
        are counted. Yields one term, the sum over all items, if all counted items, two or more,
        have one coefficient. Yields one term, bytes written or read, if the coefficients of all
        counted tensors are proportional to their sizes. Otherwise, and for transfers in a graph
        with state, whose sums include first reads and write-backs, yields one term for each item.
        """
        byte_totals = {Count.PAGE_OUTS: Total.BYTES_WRITTEN, Count.PAGE_INS: Total.BYTES_READ}
        has_sum = count not in byte_totals or not self.graph.state_tensors
        counted_items, sizes = self.n_variables[count].keys(), self.graph.tensor_bytes
        distinct_values = set(values.values())
        is_sum = values.keys() == counted_items and len(distinct_values) == 1
        if has_sum and len(values) > 1 and is_sum:
            yield distinct_values.pop(), f"sum(v.{count}.values())"
            return
        if has_sum and count in byte_totals:
            prices = {value / sizes[i] for i, value in values.items() if sizes[i]}
            if len(prices) == 1 and values.keys() == {i for i in counted_items if sizes[i]}:
                yield prices.pop(), f"v.{byte_totals[count]}"
                return
        for item, value in values.items():
            yield value, f"v.{count}[{self._quoted_name(count, item)}]"

    def _write_stage_terms(self, terms: Mapping[_CountKey, float]) -> str | None:
        """Return a sum over counts in single stages as Python code.

        "..." replaces the terms after the first `MAX_TERMS`. Return None if a term has a count that
        is not in `STAGE_COUNTS`.
        """
        if any(key.kind not in STAGE_COUNTS for key in terms):
            return None
        return _write_sum(
            (value, f"v.{key.kind}[{key.stage}, {self._quoted_name(key.kind, key.item)}]")
            for key, value in terms.items()
        )

    def _quoted_name(self, count: Count, item: int) -> str:
        counts_nodes = count == Count.RECOMPUTATIONS
        name = self.graph.nodes[item].name if counts_nodes else self.graph.tensors[item].name
        return f'"{name}"'


def _write_sum(terms: Iterable[tuple[float, str]]) -> str:
    """Return (coefficient, expression) terms as a Python sum for display.

    "..." replaces the terms after the first `MAX_TERMS`. Returns "" without terms.
    """
    text, n_terms = "", 0
    for n_terms, (value, expression) in enumerate(terms, start=1):
        if n_terms > MAX_TERMS:
            return f"{text} + ..."
        factor = "" if abs(value) == 1 else f"{abs(value):.10g} * "
        sign = "-" if value < 0 else "+"
        text += (
            f" {sign} {factor}{expression}" if text else f"{sign.strip('+')}{factor}{expression}"
        )
    return text
