"""What the page of results and the README say of own constraints: with them and without."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from blocks import folded, table
from constraints import MODEL, TOTALS, WITHOUT
from result_pages.records import (
    ONE_PERCENT,
    SolveRecord,
    circumstances,
    made_text,
    percent_text,
    seconds_text,
    share_text,
)

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


def _feasible(found: Sequence[OwnPair]) -> list[OwnPair]:
    return [pair for pair in found if pair.own.status != "infeasible"]


# -- words -----------------------------------------------------------------------------------------


def sentence(records: Sequence[dict[str, Any]]) -> str:
    """Return how solves with own constraints fared, in one sentence and a space; "" without."""
    able = _feasible(pairs(records))
    if not able:
        return ""
    proved = share_text(sum(pair.answered for pair in able), len(able))
    return (
        f"With constraints of one's own, {proved} feasible problems were proved to 1 % within "
        f"{_limit_s(records):g} s; the median took {_times(able)} as long as without "
        f"({made_text(records)}). "
    )


def section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return what the page of results says of own constraints."""
    found, built = pairs(records), pairs(records, MODEL)
    parts = [
        "## Own constraints",
        f"From `bench/results/{source}`, one process a solve. "
        f"{circumstances(records, where='one solve at a time with one thread each')}. Each "
        "constraint or objective is [stated over totals](formats.md#constraints-toml) and solved "
        "by default; right before, the same problem was solved without it. A constraint allows "
        "at most half of what the best schedule without it has, unless it says otherwise. Building "
        "is the part of the time in which models are built and compiled.",
        f"Wanted: every feasible problem within 1 % after at most {_limit_s(records):g} s, and a "
        f"median time of at most {MOST} times that without.",
        summary(found),
        folded("Constraints", own_table(found)),
    ]
    if built:
        parts += [built_sentence(built, found), folded("Models", built_table(built, found))]
    return "\n\n".join(parts)


def summary(found: Sequence[OwnPair]) -> str:
    """Return how many were proved, how long that took, and what takes longest."""
    able = _feasible(found)
    refuted = len(found) - len(able)
    said = [f"{refuted} of {len(found)} problems are proved infeasible."] if refuted else []
    if able:
        with_s, without_s = (
            seconds_text(statistics.median(times))
            for times in (
                [pair.own.seconds for pair in able],
                [pair.without.seconds for pair in able],
            )
        )
        proved = share_text(sum(pair.answered for pair in able), len(able))
        said.append(
            f"{proved} feasible problems were proved to 1 %. The median time is {with_s} with the "
            f"constraint and {without_s} without it; the median of the ratios of each pair is "
            f"{_times(able)}."
        )
    missed = sorted(
        (pair for pair in able if not pair.answered), key=lambda pair: -(pair.own.gap or 1.0)
    )
    if missed:
        names = "; ".join(_named(pair) for pair in missed)
        said.append(f"Not proved to 1 %: {names}.")
    slow = [pair for pair in able if pair.answered and pair.ratio > MOST]
    if slow:
        slowest = max(slow, key=lambda pair: pair.ratio)
        said.append(
            f"{len(slow)} of those that were proved took more than {MOST} times as long, at most "
            f"{slowest.ratio:.3g} times: {_named(slowest)}."
        )
    return " ".join(said)


def _named(pair: OwnPair) -> str:
    gap = "" if pair.answered else f" (gap {percent_text(pair.own.gap)})"
    return f"{pair.own.label}, {pair.own.cell['own']}{gap}"


def own_table(found: Sequence[OwnPair]) -> str:
    """Return a line for each constraint."""
    rows = [
        (
            pair.own.label,
            pair.own.cell["own"],
            pair.own.status,
            pair.own.time_text,
            pair.without.time_text,
            f"{pair.ratio:.2g}",
            percent_text(pair.own.gap),
            percent_text(pair.own.overhead_ratio),
            percent_text(pair.without.overhead_ratio),
            *_sizes(pair.own),
        )
        for pair in found
    ]
    first = ("instance", "constraint", "status", "time", "time without", "ratio", "gap")
    heads = (*first, "overhead", "overhead without", "columns", "building")
    return table(heads, rows, right=3)


def built_sentence(built: Sequence[OwnPair], found: Sequence[OwnPair]) -> str:
    """Return how models of `pm.build` fared against the same constraints over totals."""
    over = {_place(pair.own): pair.own.seconds for pair in found}
    ratios = [
        pair.own.seconds / over[place] for pair in built if (place := _place(pair.own)) in over
    ]
    able = _feasible(built)
    proved = share_text(sum(pair.answered for pair in able), len(able))
    longer = f"; the median took {statistics.median(ratios):.2g} times as long" if ratios else ""
    left_out = len(built) - len(able)
    said = (
        f" Of {len(built)} models, {left_out} came out infeasible: a model [leaves out "
        "choices](how-to/constraint.md#when-a-choice-is-missing) that its problem needs only with "
        "the constraint."
        if left_out
        else ""
    )
    return (
        "The first constraint of each instance was also added to [a model that `pm.build` "
        "made](how-to/constraint.md#constraints-that-name-stages), as a sum over all stages."
        f"{said} {proved} others were proved to 1 %{longer} as over totals:"
    )


def built_table(built: Sequence[OwnPair], found: Sequence[OwnPair]) -> str:
    """Return a line for each constraint that was added to a model."""
    over = {_place(pair.own): pair.own for pair in found}
    rows = [
        (
            pair.own.label,
            pair.own.cell["own"],
            pair.own.status,
            pair.own.time_text,
            over[_place(pair.own)].time_text,
            percent_text(pair.own.gap),
            percent_text(pair.own.overhead_ratio),
            *_sizes(pair.own),
        )
        for pair in built
        if _place(pair.own) in over
    ]
    first = ("instance", "constraint", "status", "time", "over totals", "gap", "overhead")
    return table((*first, "columns", "building"), rows, right=3)


def _sizes(run: SolveRecord) -> tuple[str, str]:
    """Return columns of the largest model, and the time of building models."""
    building_s = (run.record.get("stated_s") or 0.0) + (run.record.get("build_s") or 0.0)
    return f"{run.size('columns'):,}", seconds_text(building_s)


def _times(found: Sequence[OwnPair]) -> str:
    return f"{statistics.median(pair.ratio for pair in found):.2g} times"


def _limit_s(records: Sequence[dict[str, Any]]) -> float:
    return max(float(record["cell"]["limit_s"]) for record in records)
