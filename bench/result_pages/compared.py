"""The page that sets every method beside the optimum, on the same problems."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from compared import (
    CURVES,
    GREEDY,
    LAYERED,
    MAIN,
    NUMBERS,
    OF_STATE,
    OPTIMAL,
    OWN_ORDER,
    PAPER,
    SELECTIVE,
)
from poetmodel.baselines import METHODS
from poetmodel.bench.measurement import NOT_APPLICABLE
from poetmodel.units import format_bytes
from result_pages.drawing import BLUE, COLOURS, PALE, Chart
from result_pages.records import ONE_PERCENT, Line, percent_text, seconds_text
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

CHART: Final = "compared.svg"
"""Name of the page's chart."""
TIE: Final = 1e-3
"""A schedule whose overhead is above that of the best by no more than this share is as good."""
BEST: Final = "best of the earlier heuristics"
"""What a row is called for which, problem by problem, the best schedule of all earlier methods
without a solver counts; the greedy start is not among them."""
IN_README: Final = (
    GREEDY,
    "dtr-paging",
    "capuchin",
    "pofo",
    "checkmate",
    "rotor",
    "min-cut",
    SELECTIVE,
    "dtr",
    PAPER,
)
"""Methods of the README's table, the optimum and `BEST` aside."""
_LINES: Final = ("-", "--", ":")
_FEW_DECADES: Final = 100
"""Ratio of the ends of an axis below which powers of ten alone are too few ticks."""
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class MethodRecord(Line):
    """The record of a problem that one method scheduled."""

    @property
    def overhead(self) -> float | None:
        """Energy or time of its schedule beyond a single pass [J, s]; None without one.

        That of `PAPER` counts where it is its solver's, and not the schedule that it began with.
        """
        found = self.record.get("overhead", self.record.get("overhead_j"))
        begun_with = self.cell["method"] == PAPER and self.record.get("model_gap") is None
        return None if found is None or begun_with else max(0.0, float(found))

    @property
    def baseline(self) -> float:
        """What a single pass takes of what is minimized [J, s]."""
        return float(self.record.get("baseline", self.record["baseline_energy_j"]))

    @property
    def cpu_s(self) -> float:
        """Processor time [s]; wall time of a process that was ended, of which no other is known."""
        return float(self.record.get("cpu_s", self.seconds))

    @property
    def bound(self) -> float:
        """What is proved that every schedule pays [J, s]."""
        found = self.record.get("overhead_bound", self.record.get("overhead_bound_j"))
        return max(0.0, float(found or 0.0))

    @property
    def proved(self) -> bool:
        """Whether its schedule is proved to 1 % of the overhead."""
        return self.overhead is not None and self.gap is not None and self.gap <= ONE_PERCENT


@dataclass(frozen=True, slots=True)
class Compared:
    """One problem and what each method makes of it."""

    kind: str
    model: str
    device: str
    ram: str
    runs: Mapping[str, MethodRecord]
    """Records by method, those of the optimum among them."""

    @property
    def optimum(self) -> MethodRecord:
        """The record of the optimum."""
        return self.runs[OPTIMAL]

    @property
    def solved(self) -> bool:
        """Whether some method has a schedule; if not there is nothing to compare."""
        return any(run.overhead is not None for run in self.runs.values())

    @property
    def least(self) -> float:
        """The least overhead that any method found [J, s]."""
        found = (run.overhead for run in self.runs.values())
        return min(value for value in found if value is not None)

    def best(self) -> MethodRecord | None:
        """Return the best record of the earlier methods that need no solver."""
        found = [run for name, run in self.runs.items() if is_heuristic(name)]
        able = [run for run in found if run.overhead is not None]
        return min(able, key=lambda run: run.overhead or 0.0, default=None)

    def record_of(self, method: str) -> MethodRecord | None:
        """Return the record of a method, or that of the best for `BEST`."""
        return self.best() if method == BEST else self.runs.get(method)

    def ratio(self, run: MethodRecord) -> Interval:
        """Return how many times the least overhead a record pays: an interval without a proof.

        The least overhead lies between what is proved and what was found. Where both are 0, that of
        the record is 1 if it is 0 too, else infinite.
        """
        value = run.overhead or 0.0
        bound = self.least if self.optimum.proved else self.optimum.bound
        return _times(value, self.least), _times(value, bound)

    def ties(self, run: MethodRecord) -> bool:
        """Return whether a record has an overhead as low as any."""
        return run.overhead is not None and run.overhead <= self.least * (1 + TIE)


def _times(value: float, least: float) -> float:
    if least > 0:
        return value / least
    return 1.0 if value == 0 else math.inf


def by_solver(name: str) -> bool:
    """Return whether a method solves a program."""
    return name == PAPER or (name in METHODS and METHODS[name].by_solver)


def is_heuristic(name: str) -> bool:
    """Return whether a method is one of earlier work, and solves no program."""
    known = name.partition(":")[0] in METHODS or name in (SELECTIVE, OWN_ORDER)
    return known and not by_solver(name)


def problems_of(
    records: Iterable[Mapping[str, Any]], kinds: Sequence[str] = MAIN, *, unsolved: bool = False
) -> list[Compared]:
    """Return the problems of some kinds for which the optimum is on record, in their order.

    Those on which no method has a schedule are left out, unless asked for.
    """
    found: dict[tuple[str, str, str, str], dict[str, MethodRecord]] = {}
    for record in records:
        cell = record["cell"]
        key = (cell["kind"], cell["model"], cell["device"], cell["ram"])
        if cell["kind"] in kinds:
            found.setdefault(key, {})[cell["method"]] = MethodRecord(record)
    complete = (Compared(*key, runs=runs) for key, runs in found.items() if OPTIMAL in runs)
    return [problem for problem in complete if problem.solved or unsolved]


# -- a row of the table ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """What a method makes of some problems."""

    method: str
    problems: Sequence[Compared]

    @property
    def runs(self) -> list[tuple[Compared, MethodRecord]]:
        """The problems on which it has a schedule."""
        pairs = ((problem, problem.record_of(self.method)) for problem in self.problems)
        return [(p, run) for p, run in pairs if run is not None and run.overhead is not None]

    @property
    def tried(self) -> int:
        """On how many problems it was tried."""
        if self.method == BEST:
            return len(self.problems)
        return sum(self.method in problem.runs for problem in self.problems)

    @property
    def ties(self) -> int:
        """On how many it is as good as any."""
        return sum(problem.ties(run) for problem, run in self.runs)

    def _over(self, of: Callable[[Iterable[float]], float]) -> str:
        ratios = [problem.ratio(run) for problem, run in self.runs]
        if not ratios:
            return "-"
        return interval_text((of(low for low, _ in ratios), of(high for _, high in ratios)))

    @property
    def median(self) -> str:
        """The median of its overheads, each relative to the least."""
        return self._over(statistics.median)

    @property
    def worst(self) -> str:
        """The worst of them."""
        return self._over(max)

    @property
    def middle(self) -> Interval | None:
        """The median as numbers."""
        ratios = [problem.ratio(run) for problem, run in self.runs]
        if not ratios:
            return None
        lows, highs = zip(*ratios, strict=True)
        return statistics.median(lows), statistics.median(highs)

    @property
    def seconds(self) -> str:
        """The median processor time of all runs, those without a schedule included."""
        if self.method == BEST:
            return "-"
        times = [p.runs[self.method].cpu_s for p in self.problems if self.method in p.runs]
        return seconds_text(statistics.median(times)) if times else "-"


def interval_text(interval: Interval) -> str:
    """Return a number of times, or a range where that is not proved."""
    low, high = map(_number, interval)
    if low == high:
        return low
    return f"at least {low}" if math.isinf(interval[1]) else f"{low} to {high}"


def _number(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:.2f}" if value < 10 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def rows(problems: Sequence[Compared]) -> list[Row]:
    """Return a row for each method that was tried, the optimum first, the best median next."""
    names = {name for problem in problems for name in problem.runs}
    found = [Row(name, problems) for name in names if name != OPTIMAL]
    return [Row(OPTIMAL, problems), *sorted(found, key=_place)]


def _place(row: Row) -> tuple[float, float, str]:
    """Return what rows are sorted by: how many problems are solved, then the median overhead."""
    middle = row.middle
    share = len(row.runs) / row.tried if row.tried else 0.0
    return -share, math.inf if middle is None else middle[0], row.method


# -- the page --------------------------------------------------------------------------------------


def page(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return the page."""
    problems = problems_of(records)
    layered = sorted(problems_of(records, [LAYERED], unsolved=True), key=_layered_place)
    heuristics = [row for row in rows(problems) if not by_solver(row.method)]
    text = render(
        "compared",
        records=records,
        source=source,
        chart=CHART,
        **_told(problems),
        limit=_limit_text(run for problem in problems for run in problem.runs.values()),
        core_share=core_share(records),
        left_out=len(problems_of(records, unsolved=True)) - len(problems),
        rows=[*rows(problems), Row(BEST, problems)],
        by_kind={kind: of_kind for kind in MAIN if (of_kind := problems_of(records, [kind]))},
        rows_of=lambda of_kind: [*rows(of_kind), Row(BEST, of_kind)],
        **_ties(problems, [row.method for row in heuristics]),
        layered=layered,
        layered_limit=_limit_text(problem.optimum for problem in layered),
        layered_share=core_share(problem.optimum.record for problem in layered),
        layered_methods=[row.method for row in rows(layered) if row.runs and row.method != OPTIMAL],
        layered_label=_layered_label,
        overhead=_overhead_text,
        of_state=OF_STATE,
    )
    return f"{text}\n"


def readme_table(records: Sequence[dict[str, Any]]) -> str:
    """Return the README's table of methods, with what it comes to."""
    problems = problems_of(records)
    chosen = [row for row in rows(problems) if row.method in (OPTIMAL, *IN_README)]
    earlier = (row for row in chosen if row.method != OPTIMAL)
    return render(
        "compared-readme",
        rows=[*chosen, Row(BEST, problems)],
        kind_of=_kind_of,
        exact=next((row for row in earlier if row.method == "checkmate"), None),
        limit=_limit_text(run for problem in problems for run in problem.runs.values()),
        records=records,
        core_share=core_share(records),
        **_told(problems),
    )


def _kind_of(method: str) -> str:
    """Return what a method of the README's table is."""
    if method in (OPTIMAL, GREEDY):
        return "this package"
    if not by_solver(method):
        return "heuristic"
    if method == PAPER:
        return "published program"
    return "exact" if METHODS[method].pages else "exact, no paging"


def lead(records: Sequence[dict[str, Any]]) -> str:
    """Return what all problems come to, in one sentence without its full stop."""
    return render("compared-readme", block="lead", **_told(problems_of(records)))


def _told(problems: Sequence[Compared]) -> dict[str, Any]:
    """Return what page and README say of all problems."""
    optima = [problem.optimum for problem in problems]
    single = [row for row in rows(problems) if is_heuristic(row.method)]
    half = [row for row in single if 2 * len(row.runs) >= row.tried]
    return {
        "most": max(single, key=lambda row: len(row.runs), default=None),
        "lowest": min(half, key=lambda row: row.middle or (math.inf, math.inf), default=None),
        "problems": problems,
        "kinds": Counter(problem.kind for problem in problems),
        "proved": sum(run.proved for run in optima),
        "free": sum(problem.least == 0 for problem in problems),
        "best": Row(BEST, problems),
        "best_name": BEST,
        "greedy": Row(GREEDY, problems),
        "optimum": Row(OPTIMAL, problems),
        "least": statistics.median(p.least / p.optimum.baseline for p in problems),
        "unsolved": _unsolved(problems),
        "optimal": OPTIMAL,
    }


def _unsolved(problems: Sequence[Compared]) -> Counter[bool]:
    """Return how many problems Checkmate leaves unsolved: with a proof, and at its limit."""
    found = [problem.runs.get("checkmate") for problem in problems]
    return Counter(run.status == NOT_APPLICABLE for run in found if run and run.overhead is None)


def _ties(problems: Sequence[Compared], names: Sequence[str]) -> dict[str, Any]:
    """Return on how many problems each heuristic is as good as the best schedule known, and any."""
    counts = [(name, Row(name, problems).ties) for name in names]
    tied = sum(
        any(problem.ties(run) for name, run in problem.runs.items() if name in names)
        for problem in problems
    )
    return {"winners": sorted((c for c in counts if c[1]), key=lambda c: -c[1]), "tied": tied}


def core_share(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Return for which share of its time a run of a second or more had a core, in the median."""
    shares = [
        record["cpu_s"] / record["seconds"]
        for record in records
        if record["seconds"] >= 1 and "cpu_s" in record
    ]
    return statistics.median(shares) if shares else None


def _limit_text(runs: Iterable[MethodRecord]) -> str:
    """Return the processor time that runs had, or all of these where they differ."""
    return " or ".join(f"{limit:g} s" for limit in sorted({run.cell["limit_s"] for run in runs}))


# -- layered graphs --------------------------------------------------------------------------------


def _layered_place(problem: Compared) -> tuple[bool, int]:
    """Return what random graphs are sorted by: Moccasin's last, and the smallest first."""
    return NUMBERS not in problem.model, problem.optimum["graph_nodes"]


def _layered_label(problem: Compared) -> str:
    nodes, _, seed = problem.model.partition(NUMBERS)
    if seed:
        return f"`random_layered({nodes}, {seed})`"
    return f"Moccasin's of {problem.optimum['graph_nodes']:,} nodes"


def _overhead_text(problem: Compared, name: str) -> str:
    """Return the overhead of a method over the baseline; of the optimum with what is proved."""
    run, baseline = problem.runs.get(name), problem.optimum.baseline
    if run is None or run.overhead is None:
        proved = name == OPTIMAL and problem.optimum.bound
        return f"at least {percent_text(problem.optimum.bound / baseline)}" if proved else "-"
    value = percent_text(run.overhead / baseline)
    if name != OPTIMAL or run.proved:
        return value
    return f"{percent_text(run.bound / baseline)} to {value}"


# -- the chart -------------------------------------------------------------------------------------


def chart(records: Sequence[dict[str, Any]]) -> Chart:
    """Return the overhead against RAM, one line a method, for a network of each kind."""
    shown: dict[str, Any] = {}
    for kind, model, device, budgets in CURVES:
        problems = [
            problem
            for problem in problems_of(records, [kind])
            if (problem.model, problem.device) == (model, device) and problem.ram in budgets
        ]
        problems.sort(key=lambda problem: problem.optimum["ram_budget_bytes"])
        if not problems:
            continue
        lines: dict[str, list[list[float]]] = {}
        for row in rows(problems):
            for problem, run in row.runs:
                share = problem.optimum["ram_budget_bytes"] / problem.optimum["keep_all_bytes"]
                paid = (run.overhead or 0.0) / problem.optimum.baseline
                lines.setdefault(row.method, []).append([100 * share, 100 * paid])
        bound = [
            [
                100 * problem.optimum["ram_budget_bytes"] / problem.optimum["keep_all_bytes"],
                100 * problem.optimum.bound / problem.optimum.baseline,
            ]
            for problem in problems
        ]
        peak = format_bytes(problems[0].optimum["keep_all_bytes"])
        name = model.rpartition("/")[2]
        heading = f"{kind}: {name}" + ("" if device == "profile" else f" on {device}")
        shown[heading] = {"lines": lines, "bound": bound, "peak": peak}
    return Chart(shown=shown, paint=_paint, height_inches=10.4)


def _paint(figure: Any, shown: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = figure.subplots(3, 2, squeeze=False).ravel()
    names = dict.fromkeys(name for panel in shown.values() for name in panel["lines"])
    others = sorted(name for name in names if name != OPTIMAL)
    styles = {
        name: (COLOURS[1:][n % 6], _LINES[n // 6 % len(_LINES)]) for n, name in enumerate(others)
    }
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    for axes, (heading, panel) in zip(panels, shown.items(), strict=False):
        for name, points in panel["lines"].items():
            paid = [(x, y) for x, y in points if y > 0]
            if not paid:
                continue
            if name == OPTIMAL:
                axes.plot(*zip(*paid, strict=True), "o-", color=BLUE, linewidth=2.4, markersize=4,
                          label=name, zorder=5)  # fmt: skip
                continue
            colour, line = styles[name]
            axes.plot(*zip(*paid, strict=True), line, color=colour, linewidth=1.2, marker=".",
                      markersize=4, label=name)  # fmt: skip
        below = [(x, y) for x, y in panel["bound"] if y > 0]
        if below:
            x, y = zip(*below, strict=True)
            floor = min(y) / 3
            axes.fill_between(x, floor, y, color=PALE, alpha=0.6, label="proved: nothing is here")
            axes.set_ylim(bottom=floor)
        axes.set(yscale="log", xlabel=f"RAM, share of keep-all's {panel['peak']}")
        axes.set_title(heading)
        axes.xaxis.set_major_formatter("{x:g} %")
        bottom, top = axes.get_ylim()
        if top < _FEW_DECADES * bottom:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.12g} %")
        axes.yaxis.set_minor_formatter(NullFormatter())
    known = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=4)
    figure.supylabel("energy (in the last panel: time) beyond a single pass", fontsize=9)
