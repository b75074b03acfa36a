"""The names that `import poetmodel` offers."""

import inspect
import subprocess
import sys

import pytest

import poetmodel as pm
from poetmodel.solver import solve


def test_public_names_load():
    """Every name of ``__all__`` is there, and listed by ``dir``; a misspelt name says so."""
    assert set(pm.__all__) <= set(dir(pm))
    assert [name for name in pm.__all__ if getattr(pm, name) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'slove'"):
        pm.slove  # noqa: B018


@pytest.mark.parametrize(
    "before", ["", "import poetmodel.solver.facade\n", "pm.solve\nimport poetmodel.solver\n"]
)
def test_solve_is_called_whatever_was_imported_before(before):
    """``pm.solve`` works as a function whatever was imported."""
    script = f"""
import poetmodel as pm
from poetmodel.solver import solve
{before}
graph = pm.Graph(name="pair", nodes=(pm.operation("a", output_bytes=8),
                                     pm.operation("b", output_bytes=4, inputs=("a",))))
costs = pm.Costs.from_arrays(graph, compute_time_s=[1, 1], compute_energy_j=[2, 3])
print(pm.solve(pm.Problem(graph, costs, ram=12)).status)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "optimal"


def test_signatures_are_those_of_the_contract():
    """Keyword names that users write down in scripts."""
    assert list(inspect.signature(solve).parameters) == [
        "problem_or_model", "formulation", "backend", "time_limit", "gap", "threads", "seed",
        "start", "on_progress",
    ]  # fmt: skip
    limits = {"ram", "deadline", "deadline_counts", "aux_bytes", "recompute"}
    assert {"graph", "costs", *limits} <= set(inspect.signature(pm.Problem).parameters)
    assert {"formulation", "reductions"} <= set(inspect.signature(pm.build).parameters)
