"""The problems of the instance library, with the best results on record.

`poetmodel bench instances DIR` writes the published graphs of the grid, and the problems on which
all methods are compared. ``python bench/instances.py`` adds best schedules to `SCHEDULES`.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import compared
import grid
import poetmodel as pm
from harness import make_record
from measured import RESULTS, read_records
from poetmodel.result import Status
from poetmodel.schedule import GraphIdentity, Schedule
from poetmodel.sweeps.instances import TOLERANCE, BestResults, Instance, file_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from poetmodel.problem import Problem
    from poetmodel.sweeps.measurement import Record

PUBLISHED_GOAL: Final = 1
"""Goal of the grid with the published graphs."""
MOCCASIN: Final = (
    "Left out: the graphs of Moccasin, random_layered_n*.json of "
    "github.com/haoming-codes/moccasin, whose licence differs."
    if compared.DATA_VARIABLE not in os.environ
    else "Contains the graphs of Moccasin, github.com/haoming-codes/moccasin, whose licence "
    "differs: do not publish this folder."
)
"""Note on graphs under another licence, which are written only if the user has them."""
SCHEDULES: Final = RESULTS / "best-schedules.jsonl"
"""File of the best schedules: records with recomputations, transfers, and spans of stages."""
GAP: Final = 1e-6
"""Gap at which a solve for a best schedule ends."""
PROOFS: Final = {"cell": ("default", "compact"), compared.KIND: (compared.OPTIMAL,)}
"""Methods whose bounds are valid for the problem, by kind of record. The bound of ``paper`` is only
valid for its own model."""
PROGRAM_METHODS: Final = (compared.OWN_ORDER,)
"""Methods whose result is a program that no schedule can represent."""

Key = tuple[Any, ...]
"""Kind of problem or "", model, device, budget, and deadline or None."""


def instances() -> Iterator[Instance]:
    """Yield the problems with a feasible budget, each once, with the best results on record."""
    results = _group_records()
    keys_by_name: dict[str, Key] = {}
    lines = SCHEDULES.read_text(encoding="utf-8").splitlines() if SCHEDULES.exists() else ()
    entries = {entry["name"]: entry for entry in map(json.loads, lines)}
    for kind, key, problem in _list_problems():
        name = file_name(*(word for word in key if word))
        if name in keys_by_name:  # both studies contain the problem
            assert keys_by_name[name] == key, name
            continue
        keys_by_name[name] = key
        problem_records = [record for record in results[key] if _is_record_of(record, problem)]
        entry = entries.get(name)
        yield Instance(
            name=name,
            kind=kind,
            problem=problem,
            best=_find_best(problem_records),
            schedule=None if entry is None else _read_schedule(entry, problem),
        )


def _read_schedule(entry: Mapping[str, Any], problem: Problem) -> Schedule:
    """Return a schedule of `SCHEDULES`: recomputations, first computations omitted, and spans."""
    n_nodes = len(problem.graph.nodes)
    return Schedule.from_spans(
        R=sorted([*map(tuple, entry["R"]), *((t, t) for t in range(n_nodes))]),
        kept=[tuple(span) for span in entry["kept"]],
        stored=[tuple(span) for span in entry["stored"]],
        M_in=[tuple(pair) for pair in entry["M_in"]],
        M_out=[tuple(pair) for pair in entry["M_out"]],
        resident=entry.get("resident", ()),
        identity=GraphIdentity.from_graph(problem.graph),
    )


def solve_best(time_limit_s: float = 10.0) -> None:
    """Add to `SCHEDULES` the problems without a schedule that a solve with a limit solves best.

    A schedule is added if its overhead is that on record, or less.
    """
    for instance in instances():
        best = instance.best.overhead
        if best is None or instance.schedule is not None:
            continue
        settings: dict[str, Any] = {"gap": GAP, "threads": 1, "seed": 0}
        result = pm.solve(instance.problem, time_limit=time_limit_s, **settings)
        tolerance = TOLERANCE * max(best, 1e-6 * instance.problem.objective.baseline)
        if result.overhead is None or result.overhead > best + tolerance:
            continue
        schedule = result.require_schedule()
        cell = {"limit_s": time_limit_s, **settings}
        entry: dict[str, Any] = {
            **make_record("best schedule", instance.name, cell=cell, status=str(result.status)),
            "R": [[t, k] for t, k in schedule.R if k < t],
            "kept": schedule.kept,
            "stored": schedule.stored,
            "M_in": schedule.M_in,
            "M_out": schedule.M_out,
        }
        if schedule.resident:
            entry["resident"] = schedule.resident
        with SCHEDULES.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry, separators=(",", ":")) + "\n")


def _is_record_of(record: Record, problem: Problem) -> bool:
    """Return whether a record, which may be outdated, has the problem's budget and baseline."""
    same_ram = record.get("ram_budget_bytes") == problem.ram_budget_bytes
    recorded_baseline_j = record.get("baseline_energy_j") or 0.0
    return same_ram and math.isclose(recorded_baseline_j, problem.baseline_energy_j, rel_tol=1e-9)


def _list_problems() -> Iterator[tuple[str, Key, Problem]]:
    """Yield kind, key and problem of each problem, the published ones first."""
    for instance in grid.instances((PUBLISHED_GOAL,)):
        problem = instance.problem()
        if problem.usable_ram_bytes >= problem.floor.bytes:
            yield compared.PUBLISHED, _grid_key(instance.to_dict()), problem
    for run in compared.list_problems():
        yield run.kind, _compared_key(run.to_dict()), run.problem()


def _grid_key(cell: Mapping[str, Any]) -> Key:
    deadline = cell["deadline"] and f"serial {cell['deadline']}"
    return ("", cell["model"], cell["device"], cell["ram"], deadline)


def _compared_key(cell: Mapping[str, Any]) -> Key:
    same_as_grid = cell["kind"] in (
        compared.PUBLISHED,
        compared.ZOO,
        compared.CAPTURED,
        compared.DMA,
    )
    kind = "" if same_as_grid else cell["kind"]
    return (kind, cell["model"], cell["device"], cell["ram"], None)


def _group_records() -> dict[Key, list[Record]]:
    """Return the records of both studies, grouped by the key of their problem."""
    grouped: dict[Key, list[Record]] = defaultdict(list)
    for record in read_records("grid"):
        if record["cell"]["goal"] == PUBLISHED_GOAL:
            grouped[_grid_key(record["cell"])].append(record)
    for record in read_records(compared.KIND):
        grouped[_compared_key(record["cell"])].append(record)
    return grouped


def _find_best(records: list[Record]) -> BestResults:
    """Return the lowest overhead of a valid schedule and the highest bound among records."""
    best = BestResults()
    for record in records:
        method, overhead = record["cell"]["method"], record.get("overhead")
        if overhead is None:  # older records, in which energy is minimized
            overhead = record.get("overhead_j")
        is_unsolved_paper = method == compared.PAPER and record.get("model_gap") is None
        is_valid = (
            method not in PROGRAM_METHODS and not is_unsolved_paper and not record.get("violations")
        )
        if (
            is_valid
            and overhead is not None
            and (best.overhead is None or overhead < best.overhead)
        ):
            best = replace(
                best,
                overhead=max(0.0, overhead),
                method=compared.OPTIMAL if record["kind"] == "cell" else method,
                commit=record["commit"],
            )
        if method not in PROOFS[record["kind"]]:
            continue
        if record["status"] == Status.INFEASIBLE:
            best = replace(best, infeasible=True, bound_commit=record["commit"])
        bound = record.get("overhead_bound")
        bound = record.get("overhead_bound_j") if bound is None else bound
        if bound is not None and bound > best.bound:
            best = replace(best, bound=bound, bound_commit=record["commit"])
    return best


if __name__ == "__main__":
    solve_best()
