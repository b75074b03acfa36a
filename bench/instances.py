"""The problems of the instance library, with the best results on record.

`poetmodel bench instances DIR` writes the published graphs of the grid, and the problems on which
all methods are compared.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import compared
import grid
from measured import records
from poetmodel.result import Status
from poetmodel.sweeps.instances import BestResults, Instance, file_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from poetmodel.problem import Problem
    from poetmodel.sweeps.measurement import Record

PUBLISHED_GOAL: Final = 1
"""Goal of the grid with the published graphs."""
MOCCASIN: Final = (
    "Left out: the graphs of Moccasin, random_layered_n*.json of "
    "github.com/haoming-codes/moccasin, whose licence differs."
    if compared.DATA not in os.environ
    else "Contains the graphs of Moccasin, github.com/haoming-codes/moccasin, whose licence "
    "differs: do not publish this folder."
)
"""Note on graphs under another licence, which are written only if the user has them."""
PROOFS: Final = {"cell": ("default", "compact"), compared.KIND: (compared.OPTIMAL,)}
"""Methods whose bounds are valid for the problem, by kind of record. The bound of `paper` is valid
only for its own model."""
NOT_SCHEDULES: Final = (compared.OWN_ORDER,)
"""Methods whose result is a program that no schedule can represent."""

Key = tuple[Any, ...]


def instances() -> Iterator[Instance]:
    """Yield the problems with a feasible budget, each once, with the best results on record."""
    results = _results()
    named: dict[str, Key] = {}
    for kind, key, problem in _problems():
        name = file_name(*(word for word in key if word))
        if name in named:  # a problem of two studies
            assert named[name] == key, name
            continue
        named[name] = key
        of_problem = [record for record in results[key] if _is_of(record, problem)]
        yield Instance(name=name, kind=kind, problem=problem, best=_best(of_problem))


def _is_of(record: Record, problem: Problem) -> bool:
    """Return whether budget and baseline of a record are the problem's; these may have changed."""
    same_ram = record.get("ram_budget_bytes") == problem.ram_budget_bytes
    stated = record.get("baseline_energy_j") or 0.0
    return same_ram and math.isclose(stated, problem.baseline_energy_j, rel_tol=1e-9)


def _problems() -> Iterator[tuple[str, Key, Problem]]:
    """Yield kind, key and problem of each problem, the published ones first."""
    for instance in grid.instances((PUBLISHED_GOAL,)):
        problem = instance.problem()
        if problem.usable_ram_bytes >= problem.floor.bytes:
            yield compared.PUBLISHED, _grid_key(instance.to_dict()), problem
    for run in compared.problems():
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


def _results() -> dict[Key, list[Record]]:
    """Return the records of both studies by the key of their problem."""
    found: dict[Key, list[Record]] = defaultdict(list)
    for record in records("grid"):
        if record["cell"]["goal"] == PUBLISHED_GOAL:
            found[_grid_key(record["cell"])].append(record)
    for record in records(compared.KIND):
        found[_compared_key(record["cell"])].append(record)
    return found


def _best(found: list[Record]) -> BestResults:
    """Return the best results among the records of a problem."""
    best = BestResults()
    for record in found:
        method, overhead = record["cell"]["method"], record.get("overhead")
        if overhead is None:  # older records, which minimize energy
            overhead = record.get("overhead_j")
        of_paper = method == compared.PAPER and record.get("model_gap") is None
        valid = method not in NOT_SCHEDULES and not of_paper and not record.get("violations")
        if valid and overhead is not None and (best.overhead is None or overhead < best.overhead):
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
