"""Cuts: inequalities that every relevant schedule satisfies, one family in each module.

Each family is a `Separator` of one relaxation. A cut has an origin in terms of the graph, by which
the separator of the same family restates it for a finer relaxation. A new family is a module with a
function `separator`, like the existing ones, and its name in `CUT_FAMILIES` of
`solver.lazy.params`.
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
    """A valid row ``sum of value * column >= lower`` of a form.

    The row has the name of the cut's family.
    """

    origin: Any = None
    """Stages, nodes and tensors of the cut, for `restate` of its family."""
    in_bytes: bool = True
    """Whether the row sums bytes instead of decisions."""

    def violation(self, x: NDArray[Any]) -> float:
        """Return the violation of the row at a point; negative if the row has slack."""
        return self.lower - float(self.value(x.__getitem__))

    def loosened(self) -> float:
        """Return the right-hand side for a solver; for rows in bytes, less the solver's tolerance.

        Rows of decisions are not reduced: a point that violates such a row does so by at least one.
        """
        if not self.in_bytes:
            return self.lower
        return self.lower - LOOSENING * max(1.0, abs(self.lower))


class Separator(Protocol):
    """Separator of one family's cuts for one relaxation."""

    family: ClassVar[str]

    def separate(self, x: NDArray[Any], least: float) -> list[Cut]:
        """Return cuts that a point violates by more than `least`, the most violated first."""

    def restate(self, cut: Cut) -> Iterable[Cut]:
        """Return the cut of a coarser relaxation in the columns of this relaxation.

        Return no cut if it is not valid here.
        """
