"""What the page of results and the README say of own constraints: with them and without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from constraints import MODEL, TOTALS, WITHOUT
from result_pages.records import ONE_PERCENT, SolveRecord
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST: Final = 3
"""How many times as long as without a constraint the median solve may take."""


@dataclass(frozen=True, slots=True)
class OwnPair:
    """What was solved with a constraint, and right before without it."""

    own: SolveRecord
    without: SolveRecord

    @property
    def ratio(self) -> float:
        """Its time over that without the constraint."""
        return self.own.seconds / self.without.seconds

    @property
    def feasible(self) -> bool:
        """Whether it was not proved infeasible."""
        return self.own.status != "infeasible"

    @property
    def answered(self) -> bool:
        """Whether it was proved to 1 %, or proved infeasible."""
        return self.own.status == "infeasible" or self.own.within(ONE_PERCENT)


def pairs(records: Sequence[dict[str, Any]], form: str = TOTALS) -> list[OwnPair]:
    """Return the solves with a constraint that is stated in one form, in the run's order."""
    forms: dict[str, list[SolveRecord]] = {}
    for record in records:
        forms.setdefault(record["cell"]["form"], []).append(SolveRecord(record))
    without = {_place(run): run for run in forms.get(WITHOUT, ())}
    return [
        OwnPair(own=run, without=without[_place(run)])
        for run in forms.get(form, ())
        if _place(run) in without
    ]


def _place(run: SolveRecord) -> tuple[str, str]:
    return run.label, run.cell["own"]


# -- words -----------------------------------------------------------------------------------------


def sentence(records: Sequence[dict[str, Any]]) -> str:
    """Return how solves with own constraints fared, in one sentence and a space; "" without."""
    able = [pair for pair in pairs(records) if pair.feasible]
    if not able:
        return ""
    words = render("constraints-sentence", records=records, able=able, limit_s=_limit_s(records))
    return f"{words} "


def section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return what the page of results says of own constraints."""
    over_totals = pairs(records)
    able = [pair for pair in over_totals if pair.feasible]
    built = pairs(records, MODEL)
    over = {_place(pair.own): pair.own for pair in over_totals}
    both = [(pair.own, over[key]) for pair in built if (key := _place(pair.own)) in over]
    return render(
        "constraints",
        records=records,
        source=source,
        limit_s=_limit_s(records),
        most=MOST,
        pairs=over_totals,
        able=able,
        missed=sorted(
            (pair for pair in able if not pair.answered), key=lambda pair: -(pair.own.gap or 1.0)
        ),
        slow=[pair for pair in able if pair.answered and pair.ratio > MOST],
        built=built,
        both=both,
        longer=[own.seconds / other.seconds for own, other in both],
    )


def _limit_s(records: Sequence[dict[str, Any]]) -> float:
    return max(float(record["cell"]["limit_s"]) for record in records)
