"""Every kind of own constraint once, at its smallest size; `constraints.py` runs them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from constraints import GAP, measure_own, smoke_runs

if TYPE_CHECKING:
    from constraints import OwnRun

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.parametrize("run", list(smoke_runs()), ids=lambda run: run.name)
def test_own_constraint(benchmark: Any, run: OwnRun, *, smoke: bool) -> None:
    """Stating, building, solving and verifying one instance with a constraint."""
    if not smoke:
        pytest.skip("python bench/constraints.py runs them all")
    benchmark.group = "own constraints"
    facts = benchmark.pedantic(measure_own, args=(run.to_dict(),), rounds=1, iterations=1)
    benchmark.extra_info.update({name: facts[name] for name in ("status", "gap", "statistics")})
    assert facts["status"] == "optimal"
    assert facts["gap"] <= GAP
