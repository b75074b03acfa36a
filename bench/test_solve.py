"""How long it takes to find a schedule and prove how good it is, case by case."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

import poetmodel as pm
from cases import GAP, THREADS, Case
from poetmodel.bench.measurement import solve_facts
from poetmodel.bench.tables import model_gap

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel import SolveResult

pytestmark = pytest.mark.usefixtures("warm")


def run(case: Case) -> SolveResult:
    """Solve a case: build, solve, verify."""
    return pm.solve(
        case.problem(),
        time_limit=case.limit_s,
        gap=GAP,
        threads=THREADS,
        seed=case.seed,
    )


def test_solve(benchmark: Any, case: Case, keep: Callable[..., None]) -> None:
    """Building, solving and verifying one case, once; what comes out goes into the record."""
    benchmark.group = f"{case.group}: {case.model}"
    result = benchmark.pedantic(run, args=(case,), rounds=1, iterations=1)
    baseline_j = result.baseline_energy_j
    benchmark.extra_info.update(
        status=str(result.status),
        gap=result.gap,
        model_gap=model_gap(result.statistics),
        overhead_ratio=None if result.overhead_j is None else result.overhead_j / baseline_j,
        columns=result.statistics.get("columns"),
        rows=result.statistics.get("rows"),
        violations=len(result.violations),
        seed=case.seed,
        limit_s=case.limit_s,
        versions=dict(result.versions),
    )
    facts = solve_facts(result)
    del facts["schedule"]
    keep(
        "solve",
        case.name,
        seconds=benchmark.stats.stats.min,
        case=asdict(case),
        model_gap=model_gap(result.statistics),
        **facts,
    )
    assert result.formulation
    assert not result.violations
