"""Tables of solves: all methods beside the optimum, times and gaps, user-defined constraints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from measured import (
    ONE_PERCENT,
    bytes_text,
    code,
    figures,
    load,
    markdown,
    percent_text,
    percentile,
    seconds_text,
    share_text,
    times_text,
    whole,
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
CLOSEST: Final = ("dtr-paging", "capuchin", "checkmate")
"""Earlier methods in the table of the distribution."""
FACTORS: Final = (1 + TIE, 1.05, 1.1, 1.25, 1.5, 2.0, 10.0)
"""Multiples of the lowest overhead in that table."""
VARIANTS: Final = ("capuchin:published", "dtr:eq", "dtr, own order")
_PROBLEM: Final = ["kind", "model", "device", "ram"]


def is_heuristic(name: str) -> bool:
    """Return whether a method is an earlier heuristic, which solves no MILP."""
    base = name.partition(":")[0]
    known = METHODS.get(base)
    return name in ("selective", "dtr, own order") or (known is not None and not known.uses_solver)


def overheads(*, layered: bool = False) -> pd.DataFrame:
    """Return each run of the comparison with its overhead relative to the lowest one.

    Returns
    -------
    DataFrame
        `value` is the overhead [J, s]. `low` and `high` are its ratios to the lowest known overhead
        and to the proven bound; a ratio to 0 is 1 if the overhead is 0, else infinite. `proved` is
        whether the lowest is proved to 1 %. `BEST` has a row for each problem. Problems without a
        schedule are omitted.
    """
    runs = load("compared")
    runs = runs[(runs.kind == LAYERED) == layered]
    value = runs.overhead.clip(lower=0)
    # A start schedule of `paper` does not count as its result.
    value = value.mask((runs.method == PAPER) & runs.model_gap.isna())
    runs = runs.assign(value=value)
    heuristics = runs[runs.method.map(is_heuristic)]
    best = heuristics.groupby(_PROBLEM, as_index=False).value.min().assign(method=BEST)
    optimum = runs[runs.method == OPTIMAL].set_index(_PROBLEM)
    proved = optimum.value.notna() & (optimum.gap <= ONE_PERCENT)
    least = runs.groupby(_PROBLEM).value.min()
    bound = optimum.overhead_bound.fillna(0.0).clip(lower=0)
    facts = pd.DataFrame(
        {
            "least": least,
            "bound": bound.mask(proved, least),
            "proved": proved,
            "single_pass": optimum.baseline,
        }
    )
    runs = pd.concat([runs, best]).join(facts.dropna(), on=_PROBLEM).dropna(subset=["least"])
    return runs.assign(low=_times(runs.value, runs.least), high=_times(runs.value, runs.bound))


def _times(value: pd.Series, least: pd.Series) -> pd.Series:
    ratio = (value / least.where(least > 0)).astype(float)
    return ratio.where(least > 0, np.where(value == 0, 1.0, np.inf)).mask(value.isna())


def times_least(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the results of each method on some problems: the optimum, then by problems solved.

    Medians and worst values are over the problems that a method solves.
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
    first = table.method.map({OPTIMAL: 0, BEST: 2}).fillna(1)
    share = -table.solved / table.tried
    order = table.assign(first=first, share=share)
    order = order.sort_values(["first", "share", "median_low", "method"])
    return order.drop(columns=["first", "share"])


def _method_texts(table: pd.DataFrame) -> pd.DataFrame:
    rows = table.to_dict("records")
    return table.assign(
        method=[r["method"] if r["method"] == BEST else code(r["method"]) for r in rows],
        solved=[f"{r['solved']} of {r['tried']}" for r in rows],
        median=[times_text(r["median_low"], r["median_high"]) for r in rows],
        worst=[times_text(r["worst_low"], r["worst_high"]) for r in rows],
    )


def methods() -> str:
    """Return a row for each method that solves a problem, without variants of DTR and Capuchin."""
    table = times_least(overheads())
    texts = _method_texts(table[(table.solved > 0) & ~table.method.isin(VARIANTS)])
    texts = texts.rename(columns={"ties": "as good as the best", "cpu_s": "median CPU time"})
    fixed = dict.fromkeys(("solved", "median", "worst"), lambda text: text)
    counts = {"as good as the best": whole, "median CPU time": seconds_text}
    return markdown(texts, {"method": str, **fixed, **counts})


def distribution() -> str:
    """Return on how many problems methods are within `FACTORS` of the lowest overhead."""
    runs = overheads()
    lines = []
    for method in (OPTIMAL, GREEDY, BEST, *CLOSEST):
        low = runs[runs.method == method].low
        counts = [int((low <= factor).sum()) for factor in FACTORS]
        beyond = int(low.count()) - counts[-1]
        name = method if method == BEST else code(method)
        lines.append((name, *map(whole, (*counts, beyond, low.isna().sum()))))
    heads = [f"up to {factor:g}" for factor in FACTORS]
    return figures(lines, ("method", *heads, "more", "unsolved"))


def methods_readme() -> str:
    """Return the README's rows of methods."""
    texts = _method_texts(times_least(overheads()))
    rows = {row["method"].strip("`"): row for row in texts.to_dict("records")}
    lines = [
        (name, rows[method]["solved"], rows[method]["median"], rows[method]["worst"])
        for method, name in IN_README.items()
    ]
    return figures(lines, ("method", "solved", "overhead (median)", "overhead (worst)"))


def kinds() -> str:
    """Return a row for each kind of problem: proofs, the best earlier heuristic, greedy."""
    lines = []
    runs = overheads()
    for kind, heading in KINDS.items():
        of_kind = runs[runs.kind == kind]
        optimum = of_kind[of_kind.method == OPTIMAL]
        if optimum.empty:
            continue
        rows = _method_texts(times_least(of_kind)).set_index("method")
        best, greedy = rows.loc[BEST], rows.loc[code(GREEDY)]
        proved = f"{sum(optimum.proved)} of {len(optimum)}"
        lines.append((heading, proved, best.solved, best["median"], best.worst, greedy["median"]))
    heads = ("problems", "proved to 1 %", "best: solved", "median", "worst", "greedy: median")
    return figures(lines, heads)


def layered() -> pd.DataFrame:
    """Return the runs on random layered graphs, with overheads as percentages of a single pass."""
    runs = overheads(layered=True)
    columns = ["model", "ram", "graph_nodes", "method", "status", "least_bound", "overhead"]
    shares = runs.assign(
        least_bound=runs.bound / runs.single_pass, overhead=runs.value / runs.single_pass
    )
    return shares[shares.method != BEST].sort_values(["graph_nodes", "model", "ram"])[
        [*columns, "cpu_s"]
    ]


def methods_by_kind() -> pd.DataFrame:
    """Return the results of each method on all problems and on each kind."""
    runs = overheads()
    parts = [("all", runs), *runs.groupby("kind")]
    return pd.concat([times_least(part).assign(problems=name) for name, part in parts])


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


def solves() -> pd.DataFrame:
    """Return every instance of the grid, by goal and problem.

    Captured models come from the newest ``*-captures.jsonl``.
    """
    cells = load("grid")
    found = pd.concat([cells[~cells.goal.isin(_CAPTURED)], load("captures")], ignore_index=True)
    model, size = found.model.str.rstrip("0123456789"), found.model.str.extract(r"(\d+)$")[0]
    ram = found.ram.str.rstrip("%").where(~found.ram.str.startswith("floor"), "-1").astype(float)
    deadline = found.deadline.str.rstrip("%").astype(float).fillna(math.inf)
    size = size.fillna("0").astype(int)
    order = found.assign(family=model, size=size, share=ram, late=-deadline)
    order = order.sort_values(["goal", "family", "size", "device", "share", "late", "method"])
    return order.assign(
        below=order.ram_budget_bytes < order.floor_bytes,
        infeasible=order.status == "infeasible",
        overhead_ratio=order.overhead_j / order.baseline_energy_j,
        columns_=[_size(facts, "columns") for facts in order.statistics],
        rows_=[_size(facts, "rows") for facts in order.statistics],
        to_1=[_time_to(row, ONE_PERCENT) for row in order.to_dict("records")],
        memory_bytes=order.peak_memory_bytes + order.worker_memory_bytes.fillna(0),
    )


def _size(facts: object, name: str) -> int:
    found: Any = facts if isinstance(facts, dict) else {}
    return int(found.get(f"max_{name}", found.get(name, 0)))


def _time_to(run: Mapping[str, Any], gap: float) -> float:
    """Return the time at which a solve reached a gap [s]; NaN if never."""
    for seconds, reached in run["gaps"] if isinstance(run["gaps"], list) else ():
        if reached <= gap:
            return float(seconds)
    return float(run["seconds"]) if run["gap"] <= gap else math.nan


def proved(runs: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return the number of proved instances of each group, and their times.

    Infeasible instances, and those that met their limit, count with their time.
    """
    lines = []
    for name, group in runs.groupby(by, sort=False):
        able = group[~group.infeasible]
        middle = able.to_1.fillna(math.inf).median()
        lines.append(
            {
                by: name,
                "instances": len(group),
                "below": int(group.below.sum()),
                "infeasible": int((group.infeasible & ~group.below).sum()),
                "able": len(able),
                "within_1": int((able.gap <= ONE_PERCENT).sum()),
                "within_01": int((able.gap <= ONE_PERCENT / 10).sum()),
                "within_5": int((able.gap <= 5 * ONE_PERCENT).sum()),
                "median_s": able.seconds.median(),
                "p95_s": percentile(able.seconds, 0.95),
                "median_to_1_s": middle if math.isfinite(middle) else math.nan,
            }
        )
    return pd.DataFrame(lines)


def answer(run: Mapping[str, Any]) -> str:
    """Format the result of a solve: its time, bold at its limit, with the remaining gap."""
    if run["status"] == FAILED:
        return "too large for its licence" if "licence" in run["reason"] else "failed"
    if run["status"] == "infeasible":
        return "infeasible"
    done = run["gap"] <= run["requested_gap"]
    time = seconds_text(run["seconds"])
    rejected = ", rejected" if run.get("violations", 0) > 0 else ""
    left = "" if done else f", gap {percent_text(run['gap'])}"
    return f"{time if done else f'**{time}**'}{left}{rejected}"


def grid() -> str:
    """Return a row for each grid: the number of proved instances, and their times."""
    lines = [
        (
            GOALS[r["goal"]],
            *(f"{r[n]}" for n in ("instances", "below", "infeasible", "able")),
            share_text(r["within_1"], r["able"]),
            share_text(r["within_01"], r["able"]),
            *(seconds_text(r[name]) for name in ("median_s", "p95_s", "median_to_1_s")),
        )
        for r in proved(solves(), "goal").to_dict("records")
        if r["goal"] != 5
    ]
    heads = ("grid", "instances", "below the minimum RAM", "else infeasible", "others",
             "proved to 1 %", "to 0.1 %", "median time", "95th percentile",
             "median to 1 %")  # fmt: skip
    return figures(lines, heads)


MOMENTS_S: Final = (0.1, 1.0, 10.0, 60.0)
"""Times in the table of mean gaps [s]."""


def gaps_over_time() -> str:
    """Return a row for each grid: the mean gap after some times, 100 % before a first schedule.

    Infeasible instances are omitted; a gap holds until the next recorded one.
    """
    runs = solves()
    runs = runs[~runs.infeasible & (runs.goal != 5)]
    lines = []
    for goal, group in runs.groupby("goal", sort=False):
        rows = group.to_dict("records")
        means = (sum(_gap_at(run, at_s) for run in rows) / len(rows) for at_s in MOMENTS_S)
        lines.append((GOALS[goal], f"{len(rows)}", *map(percent_text, means)))
    heads = ("grid", "instances", *(f"after {at_s:g} s" for at_s in MOMENTS_S))
    return figures(lines, heads)


def _gap_at(run: Mapping[str, Any], at_s: float) -> float:
    """Return the gap of a solve after some time [s]: 1 before its first schedule."""
    known = run["gaps"] if isinstance(run["gaps"], list) else ()
    reached = [gap for seconds, gap in known if seconds <= at_s]
    if run["seconds"] <= at_s and not math.isnan(run["gap"]):
        reached.append(run["gap"])
    return float(min(reached, default=1.0))


def tiled() -> str:
    """Return a row for each solve of a step in tiles: overhead, bound and gap at the limit."""
    lines = [
        (
            code(run["network"]),
            bytes_text(parse_size(run["ram"], field="ram")),
            bytes_text(run["tile_bytes"]),
            whole(run["graph_nodes"]),
            f"{1000 * run['overhead_j']:.4g} mJ",
            f"{1000 * run['overhead_bound_j']:.4g} mJ",
            percent_text(run["gap"]),
        )
        for run in load("tiled").to_dict("records")
    ]
    heads = ("network", "RAM", "tiles", "nodes", "overhead", "bound", "gap")
    return figures(lines, heads)


def missed() -> str:
    """Return the published instances not proved to 1 %, and their solves with two threads."""
    runs = solves()
    left = runs[(runs.goal == 1) & ~runs.infeasible & ~(runs.gap <= ONE_PERCENT)]
    left = left.sort_values("gap", ascending=False)
    again = {run["name"]: run for run in load("grid-again").to_dict("records")}
    texts = left.assign(
        deadline=left.deadline.fillna("-"),
        twice=[answer(again[name]) if name in again else "-" for name in left.name],
    )
    texts = texts.rename(columns={"model": "graph", "ram": "RAM", "twice": "two threads"})
    words = dict.fromkeys(("device", "RAM", "deadline"), str)
    figures = {"gap": percent_text, "two threads": lambda text: text}
    return markdown(texts, {"graph": code, **words, **figures})


def scale() -> str:
    """Return the solves of large models on the smaller device."""
    runs = solves()
    runs = runs[(runs.goal == 4) & (runs.device == "paper-m4")]
    texts = runs.assign(end=[answer(run) for run in runs.to_dict("records")]).rename(
        columns={
            "model": "graph",
            "graph_nodes": "nodes",
            "ram": "RAM",
            "end": "time",
            "memory_bytes": "memory",
        }
    )
    return markdown(
        texts,
        {
            "graph": code,
            "nodes": whole,
            "RAM": str,
            "time": lambda text: text,
            "memory": bytes_text,
        },
    )


def captured() -> str:
    """Return the results of the solves of captured models, by budget."""
    runs = solves()
    runs = runs[runs.goal.isin(_CAPTURED)]
    budgets = ("60%", "40%", "25%", "floor+2%")
    lines = []
    for model, of_model in runs.groupby("model", sort=False):
        ends = {run["ram"]: answer(run) for run in of_model.to_dict("records")}
        name = code(model.removeprefix("traced/"))
        lines.append((name, *(ends.get(ram, "-") for ram in budgets)))
    return figures(lines, ("graph", *budgets))


_PUBLISHED, _MODELS = "published graphs", "captured models"
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
    ("one count for equal decisions", _MODELS, "ablation-captures",
     "no counting of equal decisions"),
    ("repair of answers", _PUBLISHED, "ablation-again", "no repair"),
    ("repair of answers", _MODELS, "ablation-captures", "no repair"),
    ("repair on the way", _PUBLISHED, "ablation-answers", "no repair_on_the_way"),
    ("local search", _PUBLISHED, "ablation-again", "no local_search"),
    ("local search", _MODELS, "ablation-captures", "no local_search"),
    ("dominated keeps", _PUBLISHED, "ablation-dominance", "no dominated keeps"),
)  # fmt: skip
"""Components of ``lazy``: graphs, kind of records, and the variant without the component."""
_INSTANCE: Final = ["model", "device", "ram", "deadline", "limit_s"]


def ablation() -> str:
    """Return proofs and times with and without each component, on the same instances."""
    lines = []
    for part, graphs, kind, variant in ABLATIONS:
        runs = load(kind).fillna({"deadline": "none", "gap": 1.0})
        gaps = [
            runs[runs.variant == name].set_index(_INSTANCE).gap.rename(column)
            for name, column in (("everything", "with"), (variant, "without"))
        ]
        both = pd.concat(gaps, axis=1, join="inner")
        count = len(both)
        lines.append(
            (
                part,
                f"{count} {graphs}",
                *(f"{(both[name] <= ONE_PERCENT).sum()} of {count}" for name in both),
                *(percent_text(both[name].mean()) for name in both),
            )
        )
    heads = ("part", "instances", "proved to 1 % with it", "without it", "mean gap with it",
             "without it")  # fmt: skip
    return figures(lines, heads)


def others() -> str:
    """Return the default beside other formulations, at 50 % RAM."""
    runs = solves()
    lines = []
    names = ("default", "compact", "paper")
    runs = runs[(runs.goal == 5) & (runs.ram == "50%")]
    for (model, device), found in runs.groupby(["model", "device"], sort=False):
        ends = {run["method"]: answer(run) for run in found.to_dict("records")}
        label = f"`{model}` on {device}"
        lines.append((label, *(ends.get(name, "-") for name in names)))
    return figures(lines, ("instance", *names))
