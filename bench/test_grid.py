"""Every kind of instance of the grid once, at its smallest size; `run_grid.py` runs them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cases import GAP
from grid import METHODS
from poetmodel.bench.measurement import FAILED
from run_grid import measure

if TYPE_CHECKING:
    from grid import Instance

pytestmark = pytest.mark.usefixtures("warm")


def test_instance(benchmark: Any, instance: Instance, *, smoke: bool) -> None:
    """Stating, solving and verifying one instance."""
    if not smoke:
        pytest.skip("python bench/run_grid.py runs the grid")
    benchmark.group = f"grid {instance.goal}"
    facts = benchmark.pedantic(measure, args=(instance.to_dict(),), rounds=1, iterations=1)
    if "backend" in METHODS[instance.method] and facts["status"] == FAILED:
        pytest.skip(facts["reason"])
    benchmark.extra_info.update({name: facts[name] for name in ("status", "gap", "statistics")})
    assert facts["status"] in ("optimal", "feasible")
    assert facts["gap"] <= GAP
