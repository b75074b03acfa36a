"""What the page of results says of the default beside other formulations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from blocks import folded, table
from grid import METHODS
from result_pages.records import SolveRecord, of_goal, percent_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from result_pages.records import Key

PUBLISHED: Final = """\
What others report of solving this kind of problem, on machines and graphs of their own:

| work | what it decides | reported | source |
| --- | --- | --- | --- |
| Checkmate | recomputation | optimal schedules "under an hour" with off-the-shelf MILP solvers | \
Jain et al., MLSys 2020, arXiv:1910.02653, abstract |
| POET | recomputation and paging | solved "in under ten minutes by commodity solvers"; solves \
were limited to 10 minutes, and BERT ran into that on the Cortex-M4 and the Jetson TX2, where less \
than 30 minutes would do | Patil et al., ICML 2022, sections 1, 6.1 and 6.2 |
| Moccasin | recomputation | a number of integer variables linear in the nodes, not quadratic; "up \
to an order of magnitude faster" than its predecessors | Bartan et al., ICML 2023, \
arXiv:2304.14463, abstract |

None of these figures is measured here."""


def section(records: Sequence[dict[str, Any]]) -> str:
    """Return all that is said of the comparison, without its heading."""
    parts = (
        "One run, one machine. Bold times ended at their limit with the gap that was left, for "
        "`paper` that of its own model; *rejected* means that the verifier refuses it. "
        "Ratios are of times to the same gap, the one asked for; `>` where the other method "
        "ran into its limit before it had that.",
        finished_sentence(records),
        folded("Instances", comparison_table(records)),
        PUBLISHED,
    )
    return "\n\n".join(parts)


def time_ratio(other: SolveRecord | None, default: SolveRecord | None) -> str:
    """Return how much longer a method took to the gap asked for than the default.

    Where the other method ran into its limit first the ratio is a lower bound and says so; where
    the default did there is none.
    """
    if other is None or default is None or other.gap is None or not default.done:
        return "-"
    return f"{'' if other.done else '> '}{other.seconds / default.seconds:.0f}x"


def comparison_table(records: Sequence[dict[str, Any]]) -> str:
    """Return every instance of the comparison with all methods."""
    instances = compared(records).values()
    methods = [name for name in METHODS if any(name in found for found in instances)]
    rows = []
    for found in instances:
        times = [method_text(found.get(name)) for name in methods]
        ratios = [time_ratio(found.get(name), found.get("default")) for name in methods[1:]]
        rows.append((next(iter(found.values())).label, *times, *ratios))
    heads = ("instance", *methods, *(f"{name} / default" for name in methods[1:]))
    return table(heads, rows, right=1)


_WANTED_RATIO: Final = 500.0
"""How many times as long as the default ``paper`` should take wherever it finishes."""


def finished_sentence(records: Sequence[dict[str, Any]]) -> str:
    """Return on how many of the instances that `paper` finishes the default is quick enough.

    Names how long `paper` takes on the others, and what that leaves to the default.
    """
    pairs = [
        (found["paper"], found["default"])
        for found in compared(records).values()
        if "paper" in found and "default" in found and found["paper"].done
    ]
    slow = [
        paper.seconds
        for paper, default in pairs
        if not default.done or paper.seconds < _WANTED_RATIO * default.seconds
    ]
    text = (
        f"Wanted: at most a {_WANTED_RATIO:.0f}th of the time of `paper` on every instance that "
        f"`paper` finishes. That holds for {len(pairs) - len(slow)} of {len(pairs)}."
    )
    if not slow:
        return text
    least, most = min(slow), max(slow)
    return (
        f"{text} On the others `paper` itself takes {seconds_text(least)} to "
        f"{seconds_text(most)}, of which a {_WANTED_RATIO:.0f}th is "
        f"{1e3 * least / _WANTED_RATIO:.1f} to {1e3 * most / _WANTED_RATIO:.0f} ms."
    )


def compared(
    records: Sequence[dict[str, Any]],
) -> dict[Key, dict[str, SolveRecord]]:
    """Return the runs of the comparison by model, device and budget, and by method."""
    found: dict[Key, dict[str, SolveRecord]] = {}
    for run in of_goal(records, 5):
        found.setdefault(run.key, {})[run.cell["method"]] = run
    return found


def method_text(run: SolveRecord | None) -> str:
    """Return how one method fared: its time, with the gap where one was left."""
    if run is None:
        return "-"
    if run.status == "failed":
        return "too large for its licence" if "licence" in run.record["reason"] else "failed"
    if run.status == "infeasible":
        return "infeasible"
    text = run.time_text if run.done else f"{run.time_text}, gap {percent_text(run.gap)}"
    if run.record.get("violations"):
        text += ", rejected"
    return text
