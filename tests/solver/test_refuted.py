"""No claim is refuted: of new random problems in each run, and of what once was.

``refuted.jsonl`` has problems on which an earlier version, or a solver, was wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kit.claims import BACKENDS, KINDS, RESOLVED, WAYS, examine, new_seeds, wrong_claims
from kit.worked import bench_device
from poetmodel.device import Costs
from poetmodel.errors import LicenceError
from poetmodel.graph.io import graph_from_dict
from poetmodel.problem import Problem
from poetmodel.problem.totals import Constraint
from poetmodel.result import Status
from poetmodel.solver import solve
from poetmodel.solver.outcome import verify_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.result import SolveResult

UNRESOLVED: Final = frozenset({"mid-507833"})
"""Their objective is less than 1e-13 of parts that cancel out: no value of it can be proved."""
GAPS: Final = (1e-6, 0.05)
BATCH: Final = 60
"""New problems in each run."""
KEPT: Final = ("scaled rows/1276", "rows/4405")
"""Seeds of problems with which something was wrong once."""
CASES: Final = {
    case["name"]: case
    for case in map(
        json.loads,
        Path(__file__).with_name("refuted.jsonl").read_text(encoding="utf-8").splitlines(),
    )
}


def problem_of(case: dict[str, Any]) -> Problem:
    """Return the problem of a line of the file."""
    graph, given = graph_from_dict(case["graph"], source=case["name"]), case["device"]
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[time_s for time_s, _ in case["compute"]],
        compute_energy_j=[energy_j for _, energy_j in case["compute"]],
        page_in=case["page_in"],
        page_out=case["page_out"],
        device=bench_device(
            idle_power_w=given["idle_power_w"],
            storage=given["storage"],
            ram_bytes=2**52,
            memory_mapped=given["memory_mapped"],
        ),
    )
    rows = tuple(Constraint(**row) for row in case.get("constraints", ()))
    own = tuple(case.get("own_objective", {}).items())
    return Problem(graph, costs, constraints=rows, own_objective=own, **case["problem"])


def answers(
    problem: Problem, gap: float, solvers: tuple[str, ...]
) -> Iterator[tuple[str, SolveResult]]:
    """Yield what each formulation answers with each solver."""
    for backend in solvers:
        for label, way in WAYS.items():
            try:
                yield f"{label}, {backend}", way(problem, backend=backend, gap=gap)
            except LicenceError:
                assert backend == "gurobi"


@pytest.mark.parametrize(
    ("gap", "solvers"),
    [
        pytest.param(1e-6, BACKENDS[:1], id="highs"),
        *(pytest.param(gap, BACKENDS, id=f"all-{gap}", marks=pytest.mark.slow) for gap in GAPS),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_what_was_refuted_once_holds(name: str, gap: float, solvers: tuple[str, ...]) -> None:
    """Every formulation and solver agrees with the best schedule that any of them finds."""
    problem = problem_of(CASES[name])
    found = dict(answers(problem, gap, solvers))
    best = [verify_schedule(problem, one.schedule) for one in found.values() if one.schedule]
    least = min((candidate.value for candidate in best), default=None)
    wrong = {way: wrong_claims(problem, result, least, gap) for way, result in found.items()}
    assert not {way: what for way, what in wrong.items() if what}
    proved = {result.status for result in found.values()} <= {Status.OPTIMAL, Status.INFEASIBLE}
    assert proved == (name not in UNRESOLVED)


def test_rewarded_page_ins_are_not_forgotten() -> None:
    """Page-ins that an objective rewards need a copy on storage, which is limited there."""
    result = solve(problem_of(CASES["big-507597"]), gap=0.0)
    assert (result.status, result.objective_value) == (Status.OPTIMAL, -9.0)


@pytest.mark.parametrize("formulation", ["lazy", "compact"])
def test_the_least_peak_is_right_to_the_byte(formulation: str) -> None:
    """Of 7.5 GB, among tensors that are 64 B apart; a tolerance of 1e-7 is 750 B there."""
    result = solve(problem_of(CASES["real-184"]), formulation=formulation, gap=1e-9)
    assert (result.status, result.objective_value) == (Status.OPTIMAL, 6442451200)


def test_no_claim_on_new_problems_is_refuted() -> None:
    """Against exhaustive search or each other, in four ways each; a failure names its seeds."""
    counts, faults = Counter[str](), []
    for seed in [*KEPT, *new_seeds(BATCH)]:
        found, more = examine(seed)
        faults += found
        counts += more
    assert not faults
    assert min(counts[kind] for kind in KINDS) >= BATCH // len(KINDS)
    assert counts["left open"] < counts["solves"] // 10


def test_a_wrong_claim_would_be_noticed() -> None:
    """A bound above the optimum, a proof of nothing and a worse optimum are each a fault."""
    problem = next(
        problem
        for number in range(100)
        if (problem := KINDS["plain"](f"plain/{number}")).minimize == "energy"
        and (solved := solve(problem)).status == Status.OPTIMAL
        and solved.gap == 0.0
        and solved.schedule is not None
        and verify_schedule(problem, solved.schedule).value > 1
    )
    result = solve(problem)
    assert result.schedule is not None
    least = verify_schedule(problem, result.schedule).value
    assert not wrong_claims(problem, result, least, 0.0)
    below = least * (1 - 10 * RESOLVED)
    assert "bound" in wrong_claims(problem, result, below, 0.0)
    assert "where there is none" in wrong_claims(problem, result, None, 0.0)
