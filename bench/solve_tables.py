"""Tables of solves: all methods compared with the optimum, times and gaps, and ablations.

Functions ``tabulate_…`` return the Markdown of a table on a page, ``load_…`` data frames.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from measured import (
    ONE_PERCENT,
    compute_percentile,
    format_code,
    format_count,
    format_factors,
    format_frame,
    format_integer,
    format_percent,
    format_seconds,
    format_size,
    format_table,
    load_frame,
)
from poetmodel.baselines import METHODS
from poetmodel.sweeps.measurement import FAILED
from poetmodel.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping

TIE: Final = 1e-3
"""Fraction by which an overhead may exceed the lowest and still count as equal."""

# -- methods ---------------------------------------------------------------------------------------

OPTIMAL, GREEDY, PAPER, LAYERED = "optimal", "greedy", "paper", "layered"
BEST: Final = "best of the earlier heuristics"
KINDS: Final = {
    "published": "published graphs",
    "zoo": "built-in networks on boards",
    "captured": "captured PyTorch models",
    "whole steps": "whole steps on microcontrollers",
    "dma": "boards with DMA",
    "time": "least time instead of energy",
}
IN_README: Final = {
    OPTIMAL: "poetmodel",
    "dtr-paging": "DTR with paging",
    "capuchin": "Capuchin",
    "checkmate": "Checkmate",
    "rotor": "rotor",
    "min-cut": "min-cut, after PyTorch",
}
CLOSEST_METHODS: Final = ("dtr-paging", "capuchin", "checkmate")
"""Earlier methods in the table of the distribution."""
FACTORS: Final = (1 + TIE, 1.05, 1.1, 1.25, 1.5, 2.0, 10.0)
"""Multiples of the lowest overhead in that table."""
VARIANTS: Final = ("capuchin:published", "dtr:eq", "dtr, own order")
_PROBLEM: Final = ["kind", "model", "device", "ram"]


def is_heuristic(name: str) -> bool:
    """Return whether a method is an earlier heuristic, one without a solver."""
    base_name = name.partition(":")[0]
    method = METHODS.get(base_name)
    return name in ("selective", "dtr, own order") or (
        method is not None and not method.uses_solver
    )


def load_overheads(*, layered: bool = False) -> pd.DataFrame:
    """Read the runs of the comparison; return each with its overhead relative to the lowest one.

    Returns
    -------
    DataFrame
        `value` is the overhead, `least` the problem's lowest known overhead, `bound` its proven
        bound and `single_pass` its baseline [J, or s if time is minimized]. `low` and `high` are
        the ratios of `value` to `least` and to `bound`; a ratio to 0 is 1 if `value` is 0, else
        infinite. If the optimum is `proved` to 1 %, `bound` equals `least`. The method `BEST` has a
        row for each problem. Problems without a schedule are omitted.
    """
    runs = load_frame("compared")
    runs = runs[(runs.kind == LAYERED) == layered]
    values = runs.overhead.clip(lower=0)
    # A start schedule of `paper` does not count as its result.
    values = values.mask((runs.method == PAPER) & runs.model_gap.isna())
    runs = runs.assign(value=values)
    heuristics = runs[runs.method.map(is_heuristic)]
    best = heuristics.groupby(_PROBLEM, as_index=False).value.min().assign(method=BEST)
    optimum = runs[runs.method == OPTIMAL].set_index(_PROBLEM)
    is_proved = optimum.value.notna() & (optimum.gap <= ONE_PERCENT)
    lowest = runs.groupby(_PROBLEM).value.min()
    bound = optimum.overhead_bound.fillna(0.0).clip(lower=0)
    problem_columns = pd.DataFrame(
        {
            "least": lowest,
            "bound": bound.mask(is_proved, lowest),
            "proved": is_proved,
            "single_pass": optimum.baseline,
        }
    )
    runs = (
        pd.concat([runs, best]).join(problem_columns.dropna(), on=_PROBLEM).dropna(subset=["least"])
    )
    return runs.assign(
        low=_overhead_ratios(runs.value, runs.least), high=_overhead_ratios(runs.value, runs.bound)
    )


def _overhead_ratios(values: pd.Series, reference: pd.Series) -> pd.Series:
    ratio = (values / reference.where(reference > 0)).astype(float)
    return ratio.where(reference > 0, np.where(values == 0, 1.0, np.inf)).mask(values.isna())


def summarize_methods(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each method: the optimum first, `BEST` last, the rest by fraction solved.

    Medians and worst values are over the problems that a method solves. `ties` is the number of
    overheads that exceed the lowest by at most `TIE`.
    """
    solved = runs.assign(ties=runs.value <= runs.least * (1 + TIE)).groupby("method")
    table = pd.DataFrame(
        {
            "tried": solved.size(),
            "solved": solved.value.count(),
            "median_low": solved.low.median(),
            "median_high": solved.high.median(),
            "worst_low": solved.low.max(),
            "worst_high": solved.high.max(),
            "ties": solved.ties.sum(),
            "cpu_s": solved.cpu_s.median(),
        }
    ).reset_index()
    rank = table.method.map({OPTIMAL: 0, BEST: 2}).fillna(1)
    negative_fraction = -table.solved / table.tried
    order = table.assign(first=rank, share=negative_fraction)
    order = order.sort_values(["first", "share", "median_low", "method"])
    return order.drop(columns=["first", "share"])


def _format_methods(table: pd.DataFrame) -> pd.DataFrame:
    records = table.to_dict("records")
    return table.assign(
        method=[
            row["method"] if row["method"] == BEST else format_code(row["method"])
            for row in records
        ],
        solved=[f"{row['solved']} of {row['tried']}" for row in records],
        median=[format_factors(row["median_low"], row["median_high"]) for row in records],
        worst=[format_factors(row["worst_low"], row["worst_high"]) for row in records],
    )


def tabulate_methods() -> str:
    """Return a row for each method that solves a problem, except `VARIANTS`."""
    table = summarize_methods(load_overheads())
    texts = _format_methods(table[(table.solved > 0) & ~table.method.isin(VARIANTS)])
    texts = texts.rename(columns={"ties": "as good as the best", "cpu_s": "median CPU time"})
    fixed = dict.fromkeys(("solved", "median", "worst"), lambda text: text)
    counts = {"as good as the best": format_integer, "median CPU time": format_seconds}
    return format_frame(texts, {"method": str, **fixed, **counts})


def tabulate_distribution() -> str:
    """Return how often the overhead of each method is within `FACTORS` of the lowest one."""
    runs = load_overheads()
    lines = []
    for method in (OPTIMAL, GREEDY, BEST, *CLOSEST_METHODS):
        ratios = runs[runs.method == method].low
        counts = [int((ratios <= factor).sum()) for factor in FACTORS]
        larger_count = int(ratios.count()) - counts[-1]
        name = method if method == BEST else format_code(method)
        lines.append((name, *map(format_integer, (*counts, larger_count, ratios.isna().sum()))))
    heads = [f"up to {factor:g}" for factor in FACTORS]
    return format_table(lines, ("method", *heads, "more", "unsolved"))


def tabulate_readme_methods() -> str:
    """Return the rows of the README's methods: problems solved, and overheads."""
    texts = _format_methods(summarize_methods(load_overheads()))
    rows = {row["method"].strip("`"): row for row in texts.to_dict("records")}
    lines = [
        (name, rows[method]["solved"], rows[method]["median"], rows[method]["worst"])
        for method, name in IN_README.items()
    ]
    return format_table(lines, ("method", "solved", "overhead (median)", "overhead (worst)"))


def tabulate_kinds() -> str:
    """Return a row for each kind of problem: proofs, `BEST`, and the greedy start."""
    lines = []
    runs = load_overheads()
    for kind, heading in KINDS.items():
        of_kind = runs[runs.kind == kind]
        optimum = of_kind[of_kind.method == OPTIMAL]
        if optimum.empty:
            continue
        rows = _format_methods(summarize_methods(of_kind)).set_index("method")
        best, greedy = rows.loc[BEST], rows.loc[format_code(GREEDY)]
        proved = f"{sum(optimum.proved)} of {len(optimum)}"
        lines.append((heading, proved, best.solved, best["median"], best.worst, greedy["median"]))
    heads = ("problems", "proved to 1 %", "best: solved", "median", "worst", "greedy: median")
    return format_table(lines, heads)


def load_layered_runs() -> pd.DataFrame:
    """Return the runs on random layered graphs, with overheads as fractions of a single pass."""
    runs = load_overheads(layered=True)
    columns = ["model", "ram", "graph_nodes", "method", "status", "least_bound", "overhead"]
    fractions = runs.assign(
        least_bound=runs.bound / runs.single_pass, overhead=runs.value / runs.single_pass
    )
    return fractions[fractions.method != BEST].sort_values(["graph_nodes", "model", "ram"])[
        [*columns, "cpu_s"]
    ]


def summarize_methods_by_kind() -> pd.DataFrame:
    """Return the rows of `summarize_methods` for all problems and for each kind of problem."""
    runs = load_overheads()
    parts = [("all", runs), *runs.groupby("kind")]
    return pd.concat([summarize_methods(part).assign(problems=name) for name, part in parts])


# -- solves ----------------------------------------------------------------------------------------

GOALS: Final = {
    1: "Published graphs",
    2: "The zoo on every device",
    3: "Graphs traced from PyTorch",
    4: "Scale",
    5: "Against others",
    6: "Captured models",
    7: "Captured whole steps",
}
_CAPTURED: Final = (6, 7)


def load_solves() -> pd.DataFrame:
    """Read every instance of the grid; return them sorted by goal and problem.

    Records of captured models are in the newest ``*-captures.jsonl``.
    """
    cells = load_frame("grid")
    solves = pd.concat(
        [cells[~cells.goal.isin(_CAPTURED)], load_frame("captures")], ignore_index=True
    )
    families, sizes = solves.model.str.rstrip("0123456789"), solves.model.str.extract(r"(\d+)$")[0]
    percentages = (
        solves.ram.str.rstrip("%").where(~solves.ram.str.startswith("floor"), "-1").astype(float)
    )
    deadline = solves.deadline.str.rstrip("%").astype(float).fillna(math.inf)
    sizes = sizes.fillna("0").astype(int)
    ordered = solves.assign(family=families, size=sizes, share=percentages, late=-deadline)
    ordered = ordered.sort_values(["goal", "family", "size", "device", "share", "late", "method"])
    return ordered.assign(
        below=ordered.ram_budget_bytes < ordered.floor_bytes,
        infeasible=ordered.status == "infeasible",
        overhead_ratio=ordered.overhead_j / ordered.baseline_energy_j,
        columns_=[_model_size(facts, "columns") for facts in ordered.statistics],
        rows_=[_model_size(facts, "rows") for facts in ordered.statistics],
        to_1=[_time_to_gap_s(row, ONE_PERCENT) for row in ordered.to_dict("records")],
        memory_bytes=ordered.peak_memory_bytes + ordered.worker_memory_bytes.fillna(0),
    )


def _model_size(statistics: object, name: str) -> int:
    sizes: Any = statistics if isinstance(statistics, dict) else {}
    return int(sizes.get(f"max_{name}", sizes.get(name, 0)))


def _time_to_gap_s(run: Mapping[str, Any], gap: float) -> float:
    """Return the time at which a solve reached a gap [s]; NaN if it did not."""
    for seconds, reached_gap in run["gaps"] if isinstance(run["gaps"], list) else ():
        if reached_gap <= gap:
            return float(seconds)
    return float(run["seconds"]) if run["gap"] <= gap else math.nan


def count_proofs(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """Count the instances and proofs of each group of runs; return them with their times.

    `below` counts budgets below the minimum RAM, `able` instances that are not proved infeasible.
    Runs that ended at their limit count with their time. `median_to_1_s` is NaN unless most
    instances were proved to 1 %.
    """
    lines = []
    for name, group in runs.groupby(column, sort=False):
        feasible = group[~group.infeasible]
        median_to_1_s = feasible.to_1.fillna(math.inf).median()
        lines.append(
            {
                column: name,
                "instances": len(group),
                "below": int(group.below.sum()),
                "infeasible": int((group.infeasible & ~group.below).sum()),
                "able": len(feasible),
                "within_1": int((feasible.gap <= ONE_PERCENT).sum()),
                "within_01": int((feasible.gap <= ONE_PERCENT / 10).sum()),
                "within_5": int((feasible.gap <= 5 * ONE_PERCENT).sum()),
                "median_s": feasible.seconds.median(),
                "p95_s": compute_percentile(feasible.seconds, 0.95),
                "median_to_1_s": median_to_1_s if math.isfinite(median_to_1_s) else math.nan,
            }
        )
    return pd.DataFrame(lines)


def format_result(run: Mapping[str, Any]) -> str:
    """Format a solve: its time, with a larger gap than requested in bold and with that gap.

    Infeasible, failed and rejected solves are named.
    """
    if run["status"] == FAILED:
        return "too large for its licence" if "licence" in run["reason"] else "failed"
    if run["status"] == "infeasible":
        return "infeasible"
    is_done = run["gap"] <= run["requested_gap"]
    time_text = format_seconds(run["seconds"])
    rejected_text = ", rejected" if run.get("violations", 0) > 0 else ""
    gap_text = "" if is_done else f", gap {format_percent(run['gap'])}"
    return f"{time_text if is_done else f'**{time_text}**'}{gap_text}{rejected_text}"


def tabulate_grid() -> str:
    """Return a row for each goal of the grid: the number of instances and proofs, and times."""
    lines = [
        (
            GOALS[row["goal"]],
            *(f"{row[name]}" for name in ("instances", "below", "infeasible", "able")),
            format_count(row["within_1"], row["able"]),
            format_count(row["within_01"], row["able"]),
            *(format_seconds(row[name]) for name in ("median_s", "p95_s", "median_to_1_s")),
        )
        for row in count_proofs(load_solves(), "goal").to_dict("records")
        if row["goal"] != 5
    ]
    heads = ("grid", "instances", "below the minimum RAM", "else infeasible", "others",
             "proved to 1 %", "to 0.1 %", "median time", "95th percentile",
             "median to 1 %")  # fmt: skip
    return format_table(lines, heads)


TIMES_S: Final = (0.1, 1.0, 10.0, 60.0)
"""Times in the table of mean gaps [s]."""


def tabulate_gaps_over_time() -> str:
    """Return a row for each goal of the grid: the mean gap after each of `TIMES_S`.

    A gap is valid until the next recorded one, and 100 % before the first schedule. Infeasible
    instances are omitted.
    """
    runs = load_solves()
    runs = runs[~runs.infeasible & (runs.goal != 5)]
    lines = []
    for goal, group in runs.groupby("goal", sort=False):
        rows = group.to_dict("records")
        means = (sum(_gap_at(run, at_s) for run in rows) / len(rows) for at_s in TIMES_S)
        lines.append((GOALS[goal], f"{len(rows)}", *map(format_percent, means)))
    heads = ("grid", "instances", *(f"after {at_s:g} s" for at_s in TIMES_S))
    return format_table(lines, heads)


def _gap_at(run: Mapping[str, Any], time_s: float) -> float:
    """Return the gap of a solve after some time [s]: 1 before its first schedule."""
    recorded = run["gaps"] if isinstance(run["gaps"], list) else ()
    gaps = [gap for seconds, gap in recorded if seconds <= time_s]
    if run["seconds"] <= time_s and not math.isnan(run["gap"]):
        gaps.append(run["gap"])
    return float(min(gaps, default=1.0))


def tabulate_tiled() -> str:
    """Return a row for each solve of a step in tiles: overhead, bound and gap at the limit."""
    lines = [
        (
            format_code(run["network"]),
            format_size(parse_size(run["ram"], field="ram")),
            format_size(run["tile_bytes"]),
            format_integer(run["graph_nodes"]),
            f"{1000 * run['overhead_j']:.4g} mJ",
            f"{1000 * run['overhead_bound_j']:.4g} mJ",
            format_percent(run["gap"]),
        )
        for run in load_frame("tiled").to_dict("records")
    ]
    heads = ("network", "RAM", "tiles", "nodes", "overhead", "bound", "gap")
    return format_table(lines, heads)


def tabulate_missed() -> str:
    """Return a row for each published instance not proved to 1 %, with its solve by two threads."""
    runs = load_solves()
    open_runs = runs[(runs.goal == 1) & ~runs.infeasible & ~(runs.gap <= ONE_PERCENT)]
    open_runs = open_runs.sort_values("gap", ascending=False)
    again_by_name = {run["name"]: run for run in load_frame("grid-again").to_dict("records")}
    texts = open_runs.assign(
        deadline=open_runs.deadline.fillna("-"),
        twice=[
            format_result(again_by_name[name]) if name in again_by_name else "-"
            for name in open_runs.name
        ],
    )
    texts = texts.rename(columns={"model": "graph", "ram": "RAM", "twice": "two threads"})
    text_columns = dict.fromkeys(("device", "RAM", "deadline"), str)
    number_columns = {"gap": format_percent, "two threads": lambda text: text}
    return format_frame(texts, {"graph": format_code, **text_columns, **number_columns})


def tabulate_scale() -> str:
    """Return a row for each solve of a large model on the smaller device."""
    runs = load_solves()
    runs = runs[(runs.goal == 4) & (runs.device == "paper-m4")]
    texts = runs.assign(end=[format_result(run) for run in runs.to_dict("records")]).rename(
        columns={
            "model": "graph",
            "graph_nodes": "nodes",
            "ram": "RAM",
            "end": "time",
            "memory_bytes": "memory",
        }
    )
    return format_frame(
        texts,
        {
            "graph": format_code,
            "nodes": format_integer,
            "RAM": str,
            "time": lambda text: text,
            "memory": format_size,
        },
    )


def tabulate_captured() -> str:
    """Return a row for each captured model: the results of its solves, by budget."""
    runs = load_solves()
    runs = runs[runs.goal.isin(_CAPTURED)]
    budgets = ("60%", "40%", "25%", "floor+2%")
    lines = []
    for model, of_model in runs.groupby("model", sort=False):
        results = {run["ram"]: format_result(run) for run in of_model.to_dict("records")}
        name = format_code(model.removeprefix("traced/"))
        lines.append((name, *(results.get(ram, "-") for ram in budgets)))
    return format_table(lines, ("graph", *budgets))


_PUBLISHED, _MODELS = "published graphs", "captured models"
_WITH_DEADLINE: Final = "published graphs with a deadline"
"""Equal decisions are only counted if a sum over all stages is limited, as by a deadline."""
ABLATIONS: Final = (
    ("another seed", _PUBLISHED, "ablation-again", "everything, seed 1"),
    ("another seed", _MODELS, "ablation-captures", "everything, seed 1"),
    ("interval cuts", _PUBLISHED, "ablation", "no interval cuts"),
    ("interval cuts", _MODELS, "ablation-captures", "no interval cuts"),
    ("rounded rows", _PUBLISHED, "ablation", "no rounded rows"),
    ("rounded rows", _MODELS, "ablation-captures", "no rounding cuts"),
    ("rows found by linear relaxations", _PUBLISHED, "ablation", "no rows by linear relaxations"),
    (
        "few rows at once in the linear phase",
        _MODELS,
        "ablation-captures",
        "all rows of the linear phase at once",
    ),
    (
        "more rows after easy relaxations",
        _MODELS,
        "ablation-captures",
        "no more rows after easy relaxations",
    ),
    ("one count for equal decisions", _WITH_DEADLINE, "ablation", "no counting of equal decisions"),
    ("repair of answers", _PUBLISHED, "ablation-again", "no repair"),
    ("repair of answers", _MODELS, "ablation-captures", "no repair"),
    ("repair on the way", _PUBLISHED, "ablation-answers", "no repair_on_the_way"),
    ("local search", _PUBLISHED, "ablation-again", "no local_search"),
    ("local search", _MODELS, "ablation-captures", "no local_search"),
)  # fmt: skip
"""Components of ``lazy``: name, graphs, kind of records, and the variant without the component."""
_INSTANCE: Final = ["model", "device", "ram", "deadline", "limit_s"]


def tabulate_ablation() -> str:
    """Return proofs and mean gaps with and without each component, on the same instances."""
    lines = []
    for component, graphs, kind, variant in ABLATIONS:
        runs = load_frame(kind).fillna({"deadline": "none", "gap": 1.0})
        gaps = [
            runs[runs.variant == name].set_index(_INSTANCE).gap.rename(column)
            for name, column in (("everything", "with"), (variant, "without"))
        ]
        gaps_of_both = pd.concat(gaps, axis=1, join="inner")
        count = len(gaps_of_both)
        lines.append(
            (
                component,
                f"{count} {graphs}",
                *(
                    f"{(gaps_of_both[name] <= ONE_PERCENT).sum()} of {count}"
                    for name in gaps_of_both
                ),
                *(format_percent(gaps_of_both[name].mean()) for name in gaps_of_both),
            )
        )
    heads = ("part", "instances", "proved to 1 % with it", "without it", "mean gap with it",
             "without it")  # fmt: skip
    return format_table(lines, heads)


def tabulate_formulations() -> str:
    """Return the results of the default and of other formulations, at 50 % RAM."""
    runs = load_solves()
    lines = []
    methods = ("default", "compact", "paper")
    runs = runs[(runs.goal == 5) & (runs.ram == "50%")]
    for (model, device), group in runs.groupby(["model", "device"], sort=False):
        results = {run["method"]: format_result(run) for run in group.to_dict("records")}
        label = f"`{model}` on {device}"
        lines.append((label, *(results.get(name, "-") for name in methods)))
    return format_table(lines, ("instance", *methods))
