"""What the page of results says of the default beside other formulations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from grid import METHODS
from result_pages.records import SolveRecord, of_goal
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from result_pages.records import Key

_WANTED_RATIO: Final = 500.0
"""How many times as long as the default ``paper`` should take wherever it finishes."""


def section(records: Sequence[dict[str, Any]]) -> str:
    """Return all that is said of the comparison, without its heading."""
    instances = list(compared(records).values())
    methods = [name for name in METHODS if any(name in runs for runs in instances)]
    return render(
        "comparison",
        finished=finished_sentence(records),
        instances=instances,
        methods=methods,
        ratio=time_ratio,
    )


def time_ratio(other: SolveRecord | None, default: SolveRecord | None) -> str:
    """Return how much longer a method took to the gap asked for than the default.

    Where the other method ran into its limit first the ratio is a lower bound and says so; where
    the default did there is none.
    """
    if other is None or default is None or other.gap is None or not default.done:
        return "-"
    return f"{'' if other.done else '> '}{other.seconds / default.seconds:.0f}x"


def finished_sentence(records: Sequence[dict[str, Any]]) -> str:
    """Return on how many of the instances that `paper` finishes the default is quick enough.

    Names how long `paper` takes on the others, and what that leaves to the default.
    """
    pairs = [
        (runs["paper"], runs["default"])
        for runs in compared(records).values()
        if {"paper", "default"} <= runs.keys() and runs["paper"].done
    ]
    slow = [
        paper.seconds
        for paper, default in pairs
        if not default.done or paper.seconds < _WANTED_RATIO * default.seconds
    ]
    return render("comparison-finished", count=len(pairs), slow=slow, wanted=_WANTED_RATIO)


def compared(records: Sequence[dict[str, Any]]) -> dict[Key, dict[str, SolveRecord]]:
    """Return the runs of the comparison by model, device and budget, and by method."""
    problems: dict[Key, dict[str, SolveRecord]] = {}
    for run in of_goal(records, 5):
        problems.setdefault(run.key, {})[run.cell["method"]] = run
    return problems
