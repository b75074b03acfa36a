"""Linear expressions and rows, scaled so that solvers see numbers near one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pyomo.core.expr.numeric_expr import LinearExpression, MonomialTermExpression

from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Term = tuple[float, Any]
"""A coefficient and a Pyomo variable."""


def linear(terms: Iterable[Term], constant: float = 0.0) -> Any:
    """Return ``sum of coefficient * variable + constant`` as a Pyomo expression.

    Built from monomials directly: a third of the time that summing takes. Models have thousands of
    these, so that it looks at the time limit.
    """
    check_time_limit()
    parts: list[Any] = [MonomialTermExpression(term) for term in terms]
    if constant or not parts:
        parts.append(constant)
    return LinearExpression(parts)


def merged(terms: Iterable[Term]) -> list[Term]:
    """Return the terms with coefficients of the same variable added and zeros dropped."""
    total: dict[int, list[Any]] = {}
    for coefficient, variable in terms:
        if coefficient:
            entry = total.setdefault(id(variable), [0.0, variable])
            entry[0] += coefficient
    return [(coefficient, variable) for coefficient, variable in total.values() if coefficient]


def byte_row(terms: Sequence[Term], limit_bytes: int) -> tuple[list[Term], float] | None:
    """Return a scaled row for ``sum of bytes * variable <= limit_bytes``, None if it cannot bind.

    Parameters
    ----------
    terms : sequence of (int, variable)
        Whole bytes, not negative, on variables within [0, 1].
    limit_bytes : int
        Right-hand side [B].

    Notes
    -----
    The right-hand side is rounded down to a multiple of the greatest common divisor `g` of the
    bytes, which loses no 0/1 point, and then raised by ``g / 2``, which admits none: what is left
    is room for a solver's tolerance, so that rounding its answer seldom exceeds the limit.
    """
    row = merged(terms)
    if sum(coefficient for coefficient, _ in row) <= limit_bytes:
        return None
    divisor = math.gcd(*(int(coefficient) for coefficient, _ in row))
    right = (limit_bytes // divisor) * divisor + divisor / 2
    scale = max(coefficient for coefficient, _ in row)
    return [(coefficient / scale, variable) for coefficient, variable in row], right / scale


def real_row(terms: Sequence[Term], limit: float) -> tuple[list[Term], float] | None:
    """Return a scaled row for ``sum of value * variable <= limit``, or None if it cannot bind.

    Parameters
    ----------
    terms : sequence of (float, variable)
        Times or energies, not negative, on variables within [0, 1].
    limit : float
        Right-hand side, in the same unit, not negative.

    Notes
    -----
    A value above the limit rules its variable out, however large it is. It counts as twice the
    limit, so that small ones beside it are not lost to the solver.
    """
    row = merged(terms)
    if sum(coefficient for coefficient, _ in row) <= limit:
        return None
    row = [(min(value, 2 * limit) if limit else 1.0, variable) for value, variable in row]
    scale = max((coefficient for coefficient, _ in row), default=1.0)
    return [(coefficient / scale, variable) for coefficient, variable in row], limit / scale


def entry(variables: Any, index: Any, default: Any = None) -> Any:
    """Return one variable of an indexed Pyomo component, or `default` where it has none."""
    return variables[index] if index in variables else default  # noqa: SIM401  # has no `get`
