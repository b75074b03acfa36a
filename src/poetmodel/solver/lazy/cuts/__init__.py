"""Cuts: inequalities that every valid schedule satisfies, one family in each module.

Each enabled family has a `Separator` for each relaxation. A cut may have an origin in terms of the
graph, from which the separator of the same family restates the cut for a finer relaxation. A new
family is a module with a function `make_separator`, like those of the existing ones, and its name
in `CUT_FAMILIES` of `solver.policy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from poetmodel.model.linear import LOOSENING
from poetmodel.problem import LinearRow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


@dataclass(kw_only=True, unsafe_hash=True)
class Cut(LinearRow):
    """A valid row ``sum of value * column >= lower`` of a form, named after the cut's family."""

    origin: Any = None
    """Stages, nodes and tensors of the cut, for `restate` of its family; None if its cuts are not
    restated."""
    is_in_bytes: bool = True
    """Whether the row sums bytes, maybe scaled, instead of decisions."""

    def violation(self, x: NDArray[Any]) -> float:
        """Return the violation of the row at a point; negative if the row has slack."""
        return self.lower - float(self.value(x.__getitem__))

    def loosened_lower(self) -> float:
        """Return `lower`; if the row sums bytes, minus `LOOSENING` times ``max(1, abs(lower))``.

        A 0/1 point that violates a row of decisions does so by at least 1: no tolerance is needed.
        """
        if not self.is_in_bytes:
            return self.lower
        return self.lower - LOOSENING * max(1.0, abs(self.lower))


class Separator(Protocol):
    """Finds the violated cuts of one family for one relaxation."""

    family: ClassVar[str]

    def separate(self, x: NDArray[Any], min_violation: float) -> list[Cut]:
        """Return cuts that the point `x` violates by more than `min_violation`."""

    def restate(self, cut: Cut) -> Iterable[Cut]:
        """Return a coarser relaxation's cut over the columns of this one; no trivial cuts."""
