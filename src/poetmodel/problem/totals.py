"""User-defined constraints and objectives: linear expressions of the totals of a schedule.

Totals are sums over a schedule, such as bytes written, and counts of recomputations, transfers and
resident homes of one node or tensor. A constraint may also count recomputations and page-ins in
given stages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from io import StringIO
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from poetmodel.errors import InputError, quote

if TYPE_CHECKING:
    from poetmodel.graph import Graph

CONSTANT: Final = "constant"
"""Key of an objective's constant."""


class Count(StrEnum):
    """Counts of one node or tensor; a key such as ``page_ins:conv1`` names the tensor."""

    RECOMPUTATIONS = "recomputations"
    """Number of computations of a node after the first."""
    PAGE_INS = "page_ins"
    """Number of page-ins of a tensor; without a stage, the first read of state counts too."""
    PAGE_OUTS = "page_outs"
    """Number of page-outs of a tensor."""
    RESIDENT = "resident"
    """Whether the home of a state tensor is RAM, 0 or 1."""


class Total(StrEnum):
    """Sums over all nodes and tensors."""

    BYTES_WRITTEN = "bytes_written"
    """Bytes that page-outs and, on average per step, commits write [B]; a page-out that is a write
    of a commit counts only in the commits."""
    BYTES_READ = "bytes_read"
    """Bytes paged in, including first reads of state on storage [B]."""
    ENERGY = "energy_j"
    """Energy of a training step: single pass with commits and idle power, plus overhead [J]."""
    COMPUTE = "compute_s"
    """Compute time: single pass and recomputations [s]."""
    TRANSFER = "transfer_s"
    """Transfer time, including commits [s]."""


STAGE_COUNTS: Final = (Count.RECOMPUTATIONS, Count.PAGE_INS)
"""Counts that may be restricted to a stage; ``page_ins@12:conv1`` is 1 for a page-in in
stage 12."""
KEYS: Final = (
    *Total,
    *(f"{count}:NAME" for count in Count),
    *(f"{count}@STAGE:NAME" for count in STAGE_COUNTS),
)
"""Forms of the keys of totals, for messages: ``page_ins:NAME``, ``page_ins@STAGE:NAME``."""
UNITS: Final[Mapping[str, str]] = {
    Total.BYTES_WRITTEN: "bytes",
    Total.BYTES_READ: "bytes",
    Total.ENERGY: "J",
    Total.COMPUTE: "s",
    Total.TRANSFER: "s",
}
"""Unit of each total; counts have none."""

_MAX_STAGE_DIGITS: Final = 18
"""Maximum number of digits of a stage in a key."""

Terms = tuple[tuple[str, float], ...]
"""A linear expression: pairs (key, coefficient) with keys such as ``page_ins:conv1``."""


class Key(NamedTuple):
    """A parsed key: a total, or a count of a node or tensor, optionally in one stage."""

    kind: str
    """A member of `Total` or `Count`, unless the key is `CONSTANT` or invalid."""
    stage: int | None
    """The stage; None for the sum over all stages, -1 if the text after @ is no number, or
    has more than `_MAX_STAGE_DIGITS` digits."""
    name: str
    """The node or tensor; empty for a total."""

    @classmethod
    def parse(cls, key: str) -> Self:
        """Parse a key without a check that its parts exist; an invalid stage is -1.

        Examples
        --------
        >>> Key.parse("page_ins@12:conv1")
        Key(kind='page_ins', stage=12, name='conv1')
        """
        kind, _, name = key.partition(":")
        kind, at_sign, stage = kind.partition("@")
        number = int(stage) if stage.isdecimal() and len(stage) <= _MAX_STAGE_DIGITS else -1
        return cls(kind, number if at_sign else None, name)


def unit_of_terms(terms: Iterable[tuple[str, float]]) -> str:
    """Return the unit of a sum; "" for counts, for sums of different units and without terms."""
    units = {UNITS.get(key, "") for key, _ in terms if key != CONSTANT}
    return units.pop() if len(units) == 1 else ""


def format_terms(terms: Terms, *, max_terms: int = 4) -> str:
    """Format the first `max_terms` terms of a sum; append ``and 2 more`` for 2 further terms.

    Examples
    --------
    >>> terms = (("energy_j", 1), ("bytes_written", 2e-6), ("page_ins:a", -1), ("constant", 3))
    >>> format_terms(terms)
    'energy_j + 2e-06 bytes_written - page_ins:a + 3'
    """
    text = ""
    for key, coefficient in terms[:max_terms]:
        sign = "-" if coefficient < 0 else "+"
        magnitude = abs(coefficient)
        prefix = "" if magnitude == 1 and key != CONSTANT else f"{magnitude:.6g} "
        term = prefix.strip() if key == CONSTANT else f"{prefix}{key}"
        text += f" {sign} {term}" if text else f"{sign.strip('+')}{term}"
    n_omitted = len(terms) - max_terms
    return f"{text} and {n_omitted:,} more" if n_omitted > 0 else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A constraint ``lower <= sum of coefficient * total <= upper`` on the totals of a schedule.

    ``Problem.subject_to`` makes constraints from functions. A per-stage constraint contains only
    counts in stages, and has an upper limit, no lower limit above 0 and no negative coefficients.

    Raises
    ------
    InputError
        If the constraint has no name, no limit or a number that is not finite, if its limits
        contradict each other, or if a per-stage constraint has no upper limit, a lower limit above
        0, a negative coefficient or a term that does not count by stage.

    Examples
    --------
    >>> Constraint(name="wear", terms={"bytes_written": 1}, upper=4096).describe_limits()
    'at most 4,096 B'
    """

    name: str
    """Name of the constraint in reports."""
    terms: dict[str, float] = field(hash=False)
    """Coefficients by total: ``bytes_written``, ``page_ins:conv1``, ``page_ins@12:conv1``."""
    lower: float | None = None
    """Minimum; None for no minimum."""
    upper: float | None = None
    """Maximum; None for no maximum."""

    def __post_init__(self) -> None:
        """Validate name, limits and coefficients; convert numbers to int if whole, else to float.

        Copies `terms`. Raises `InputError` for the first of the errors that the class lists, which
        include those of per-stage constraints. Empty `terms` and unknown keys are accepted; see
        `term_faults`.
        """
        label = f"constraint {quote(self.name)}"
        if not self.name:
            raise InputError(f"{label}: expected a non-empty name")
        limits = [limit for limit in (self.lower, self.upper) if limit is not None]
        if not limits:
            raise InputError(f"{label}: expected a limit: at most, at least or equals")
        for value in (*limits, *dict(self.terms).values()):
            if not is_finite_number(value):
                raise InputError(f"{label}: expected a finite number, got {quote(value)}")
        if len(limits) > 1 and limits[0] > limits[1]:
            raise InputError(
                f"{label}: at least {limits[0]:g} and at most {limits[1]:g} contradict each other"
            )
        terms = {key: to_int_if_whole(value) for key, value in dict(self.terms).items()}
        object.__setattr__(self, "terms", terms)
        for side in ("lower", "upper"):
            limit = getattr(self, side)
            object.__setattr__(self, side, None if limit is None else to_int_if_whole(limit))
        if self.is_per_stage:
            self._check_stages(label)

    @property
    def is_per_stage(self) -> bool:
        """Whether the constraint contains counts in stages."""
        return any(Key.parse(key).stage is not None for key in self.terms)

    def _check_stages(self, label: str) -> None:
        """Check the terms and limits of a per-stage constraint; `label` is the prefix of errors."""
        other_terms = [key for key in self.terms if Key.parse(key).stage is None]
        hint = "a model of pm.build(problem, reductions=False) can state it"
        if other_terms:
            raise InputError(
                f"{label}: {quote(other_terms[0])} does not count by stage, but other terms do; "
                f"{hint}"
            )
        if self.upper is None or (self.lower or 0) > 0 or min(self.terms.values()) < 0:
            raise InputError(
                f"{label}: a per-stage constraint can only have an upper limit, and no negative "
                f"coefficients; {hint}"
            )

    def format_value(self, value: float) -> str:
        """Format a value of the sum, with all digits and its unit."""
        unit = unit_of_terms(self.terms.items()).replace("bytes", "B")
        return f"{to_int_if_whole(value):,} {unit}".rstrip()

    def describe_limits(self, format_value: Callable[[float], str] | None = None) -> str:
        """Return the limits as a phrase: ``at least 2 and at most 3``, or ``exactly 3`` if equal.

        `format_value` formats a limit; by default the method of the same name.
        """
        format_value = self.format_value if format_value is None else format_value
        if self.upper is not None and self.lower == self.upper:
            return f"exactly {format_value(self.upper)}"
        phrases = [
            f"{phrase} {format_value(limit)}"
            for phrase, limit in (("at least", self.lower), ("at most", self.upper))
            if limit is not None
        ]
        return " and ".join(phrases)

    def to_dict(self) -> dict[str, Any]:
        """Return ``name``, ``terms`` (a dict), ``lower`` and ``upper`` (None for no limit)."""
        return {
            "name": self.name,
            "terms": dict(self.terms),
            "lower": self.lower,
            "upper": self.upper,
        }


def term_faults(graph: Graph, terms: Iterable[tuple[str, float]], label: str) -> Iterator[str]:
    """Yield an error for each coefficient that is not finite, and for each invalid key."""
    for key, coefficient in terms:
        if not is_finite_number(coefficient):
            yield f"{label}: {quote(key)}: expected a finite number, got {quote(coefficient)}"
        kind, stage, name = Key.parse(key)
        if key in tuple(Total) or key == CONSTANT:
            continue
        if kind not in tuple(Count if stage is None else STAGE_COUNTS) or not name:
            yield f"{label}: {quote(key)}: expected one of {', '.join(KEYS)}"
        elif stage is not None and not 0 <= stage < len(graph.nodes):
            yield (
                f"{label}: {quote(key)}: expected a stage from 0 to {len(graph.nodes) - 1} after @"
            )
        elif kind == Count.RECOMPUTATIONS and name not in graph.node_index:
            yield f"{label}: {quote(key)}: the graph has no node {quote(name)}"
        elif kind != Count.RECOMPUTATIONS and name not in graph.tensor_index:
            yield f"{label}: {quote(key)}: the graph has no tensor {quote(name)}"
        elif kind == Count.RESIDENT and name not in _state_index(graph):
            yield f"{label}: {quote(key)}: tensor {quote(name)} is no state tensor"


def _state_index(graph: Graph) -> dict[str, int]:
    return {graph.tensors[i].name: i for i in graph.state_tensors}


# -- functions of users over a Pyomo block -------------------------------------------------------


class _CountVariables(Mapping[Any, Any]):
    """The variables of one count, by index or name of a node or tensor.

    For the counts of `STAGE_COUNTS`, the key (stage, index or name) returns the variable of one
    stage, given by its index or the name of its node.
    """

    def __init__(self, variables: Any, index: Mapping[str, int], variable_in_stage: Any) -> None:
        self._variables = variables
        self._index = index
        self._variable_in_stage = variable_in_stage

    def __getitem__(self, key: Any) -> Any:
        """Return the variable of a name, an index or, if counted by stage, a (stage, item) pair."""
        if key in self:
            return self._variables[self._index[key] if isinstance(key, str) else key]
        is_pair = isinstance(key, tuple) and len(key) == 2  # noqa: PLR2004 - (stage, item)
        is_stage_key = self._variable_in_stage is not None and is_pair
        if is_stage_key and key[1] in self:
            stage, item = key
            return self._variable_in_stage(
                stage, self._index[item] if isinstance(item, str) else item
            )
        hint = f"expected a name, or a position from 0 to {len(self) - 1}"
        if self._variables.local_name == Count.RESIDENT:
            hint = "expected the name, or the position, of a state tensor"
        if isinstance(key, tuple) and self._variable_in_stage is None:
            hint = f"only {' and '.join(STAGE_COUNTS)} can be counted by stage"
        if isinstance(key, str) and (similar_names := get_close_matches(key, self._index, n=1)):
            hint = f"did you mean {quote(similar_names[0])}?"
        label = f"{self._variables.local_name}[{quote(key)}]"
        raise InputError(f"{label}: the graph has no such entry; {hint}")

    def __contains__(self, key: Any) -> bool:
        if isinstance(key, str):
            return key in self._index
        return isinstance(key, Hashable) and key in self._variables

    def get(self, key: object, default: Any = None) -> Any:
        """Return the variable of a name or index; `default` for other keys, also (stage, item)."""
        exists = key in self
        return self[key] if exists else default

    def __iter__(self) -> Iterator[int]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)


class TotalsBlock:
    """A Pyomo block with a variable for each total and count; parses users' functions of it."""

    def __init__(self, graph: Graph) -> None:
        import pyomo.environ as pyo

        self.block = pyo.Block(concrete=True)
        self.block.counted = pyo.Block()
        # Key of each total and count, by the id of its variable.
        self._key_of_variable: dict[int, str] = {}
        self._nodes = graph.node_index
        for count, index in (
            (Count.RECOMPUTATIONS, graph.node_index),
            (Count.PAGE_INS, graph.tensor_index),
            (Count.PAGE_OUTS, graph.tensor_index),
            (Count.RESIDENT, _state_index(graph)),
        ):
            variables = pyo.Var(list(index.values()), domain=pyo.NonNegativeIntegers)
            self.block.counted.add_component(str(count), variables)
            variable_in_stage = (
                None if count not in STAGE_COUNTS else self._make_stage_lookup(count, index)
            )
            setattr(self.block, count, _CountVariables(variables, index, variable_in_stage))
            self._key_of_variable |= {
                id(variables[i]): f"{count}:{name}" for name, i in index.items()
            }
        for total in Total:
            self.block.add_component(str(total), pyo.Var(domain=pyo.NonNegativeReals))
            self._key_of_variable[id(self.block.component(total))] = str(total)

    def _make_stage_lookup(
        self, count: Count, index: Mapping[str, int]
    ) -> Callable[[Any, int], Any]:
        """Return a function that returns the variable of a (stage, item), created on first access.

        `index` is the index of each node or tensor by name. Also adds an empty indexed variable for
        the count to the block.
        """
        import pyomo.environ as pyo

        names = list(index)
        variables = pyo.Var(pyo.Any, dense=False, domain=pyo.Binary)
        self.block.counted.add_component(f"{count}_in_stage", variables)

        def variable_in_stage(stage: Any, item: int) -> Any:
            stage_index = self._nodes.get(stage) if isinstance(stage, str) else stage
            if not isinstance(stage_index, int) or not 0 <= stage_index < len(self._nodes):
                raise InputError(
                    f"{count}[{quote(stage)}, {quote(names[item])}]: the graph has no such stage; "
                    f"expected the name of a node, or a position from 0 to {len(self._nodes) - 1}"
                )
            variable = variables[stage_index, item]
            self._key_of_variable[id(variable)] = f"{count}@{stage_index}:{names[item]}"
            return variable

        return variable_in_stage

    def expression(self, function: Any, label: str) -> Terms:
        """Return the linear expression that a function returns, its constant under `CONSTANT`.

        The constant 0 stands for an expression without terms. Exceptions of `function` propagate.
        """
        return self._parse_terms(self._call_function(function, label), label) or ((CONSTANT, 0),)

    def constraints(self, function: Any, name: str) -> list[Constraint]:
        """Return the constraints of a function, except Pyomo's ``Skip`` and ``Feasible``.

        Those of a list are named ``name[0]``, ``name[1]``, ..., where skipped entries count.
        Exceptions of `function` propagate.
        """
        import pyomo.environ as pyo

        result = self._call_function(function, f"constraint {quote(name)}")
        relations = (
            {f"{name}[{number}]": relation for number, relation in enumerate(result)}
            if isinstance(result, list)
            else {name: result}
        )
        return [
            self._parse_relation(key, relation)
            for key, relation in relations.items()
            if relation is not pyo.Constraint.Skip and relation is not pyo.Constraint.Feasible
        ]

    def _parse_relation(self, name: str, relation: Any) -> Constraint:
        """Convert a Pyomo relation to a constraint; its limits are reduced by the constant."""
        import pyomo.environ as pyo
        from pyomo.common.log import LoggingIntercept

        label = f"constraint {quote(name)}"
        try:  # Pyomo also logs the errors that it raises.
            with LoggingIntercept(StringIO(), "pyomo.core"):
                row = pyo.Constraint(expr=relation)
                row.construct()
                body, limits = row.body, (row.lower, row.upper)
        except (ValueError, TypeError, KeyError) as error:
            relation_text = quote(
                str(relation) if hasattr(relation, "is_expression_type") else relation
            )
            reason = "" if relation is None else f" ({str(error).splitlines()[0].strip()})"
            raise InputError(
                f"{label}: expected a linear relation between totals, got {relation_text}{reason}"
            ) from None
        terms = dict(self._parse_terms(body, label))
        constant = terms.pop(CONSTANT, 0)
        lower, upper = (None if limit is None else pyo.value(limit) - constant for limit in limits)
        return Constraint(name=name, terms=terms, lower=lower, upper=upper)

    def _call_function(self, function: Any, label: str) -> Any:
        """Call a user's function of the block; return its result, an iterable as a list."""
        from pyomo.common.errors import PyomoException

        if not callable(function):
            raise InputError(f"{label}: expected a function of the totals, got {quote(function)}")
        try:
            result = function(self.block)
            return _list_relations(result)
        except AttributeError as error:
            name = getattr(error, "name", None)
            if not isinstance(name, str) or getattr(error, "obj", None) is not self.block:
                raise
            totals = ", ".join((*Total, *Count))
            raise InputError(
                f"{label}: v.{name}: there is no such total; expected one of {totals}"
            ) from None
        except PyomoException as error:  # For example, a relation is used as a Boolean.
            raise InputError(
                f"{label}: {str(error).splitlines()[0]} Relations have no 'and', no max(), and no "
                "two comparisons in one: return a list of them; for 'or' add a variable to a model "
                "of pm.build(problem)"
            ) from None

    def _parse_terms(self, expression: Any, label: str) -> Terms:
        """Return the nonzero terms (key, coefficient) of a linear expression, a constant last."""
        from pyomo.repn import generate_standard_repn

        try:
            representation = generate_standard_repn(expression)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            raise InputError(
                f"{label}: expected a linear expression of totals, got {quote(expression)}"
            ) from None
        if not representation.is_linear():
            raise InputError(f"{label}: the expression is not linear in the totals")
        coefficient_of_key: defaultdict[str, float] = defaultdict(int)
        for coefficient, variable in zip(
            representation.linear_coefs, representation.linear_vars, strict=True
        ):
            if id(variable) not in self._key_of_variable:
                raise InputError(f"{label}: {variable.name} is none of the totals of a schedule")
            coefficient_of_key[self._key_of_variable[id(variable)]] += coefficient
        coefficient_of_key[CONSTANT] += representation.constant
        if not all(map(is_finite_number, coefficient_of_key.values())):
            raise InputError(f"{label}: expected finite numbers, got {quote(str(expression))}")
        return tuple(
            (key, to_int_if_whole(value)) for key, value in coefficient_of_key.items() if value
        )


def _list_relations(result: Any) -> Any:
    """Return an iterable of relations as a list, and any other result unchanged."""
    from pyomo.core.base.component import ComponentBase
    from pyomo.core.expr.relational_expr import RelationalExpression

    is_list = isinstance(result, Iterable) and not isinstance(result, ComponentBase | Mapping | str)
    if isinstance(result, tuple):  # May be one relation of Pyomo: (lower, expression, upper).
        is_list = all(isinstance(relation, RelationalExpression) for relation in result)
    return list(result) if is_list else result


def is_finite_number(value: object) -> bool:
    """Return whether a value is a finite int or float, neither a bool nor too large for a float."""
    try:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
    except OverflowError:
        return False


def to_int_if_whole(value: float) -> float:
    """Return a whole number as an int, so that sums of bytes and counts are exact; else a float."""
    return int(value) if float(value).is_integer() else float(value)
