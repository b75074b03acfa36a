"""Cuts: inequalities that hold for every schedule that matters, one family a module.

Each family is a `Separator` of one relaxation. A cut outlives its relaxation: it is noted in terms
of the graph, and the finer relaxation's separator of the same family states it again. A new family
is a module with a function `separator`, like those of the others, and its name in `CUT_FAMILIES` of
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
    """A valid row ``sum of value * column >= lower`` of a form; its name is that of its family."""

    origin: Any = None
    """Its stages, nodes and tensors, for its family's `restate`."""
    in_bytes: bool = True
    """Whether it sums bytes rather than decisions."""

    def violation(self, x: NDArray[Any]) -> float:
        """Return by how much a point violates it; negative where there is slack."""
        return self.lower - float(self.value(x.__getitem__))

    def loosened(self) -> float:
        """Return the right-hand side for a solver: of rows in bytes, with room for its tolerance.

        Rows of decisions need none: what violates them does so by one.
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
        """Return this relaxation's form of a coarser one's cut; nothing if it goes."""
