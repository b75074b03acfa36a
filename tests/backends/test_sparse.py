"""What a solve loads, and what it leaves of Pyomo."""

from __future__ import annotations

import subprocess
import sys

import pytest

SOLVE = (
    "import sys\nimport poetmodel as pm\n"
    "graph = pm.zoo.mlp()\n"
    "costs = pm.Costs.estimate(graph, pm.Device.load('mkr1000'))\n"
    "result = pm.solve(pm.Problem(graph, costs, ram='70%'))\n"
    "assert result.status == 'optimal', result.status\n"
    "assert result.statistics['columns'] > 0, 'no model was stated'\n"
)


def printed(script: str) -> str:
    """Return what a script prints in a process of its own."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_default_solve_loads_little() -> None:
    """A model is stated and solved without Pyomo, scipy.stats and networkx."""
    heavy = "{'pyomo', 'scipy.stats', 'scipy.optimize', 'networkx', 'rich', 'torch'}"
    assert printed(SOLVE + f"print(sorted({heavy} & set(sys.modules)))") == "[]\n"


@pytest.mark.slow
def test_pyomo_has_scipy_afterwards() -> None:
    """Pyomo's own compiler, scipy.stats and every import hook work in the same process."""
    after = (
        "import pyomo.environ as pyo\n"
        "from pyomo.common import dependencies\n"
        "from pyomo.repn.plugins.standard_form import LinearStandardFormCompiler\n"
        "model = pm.build(result.problem)\n"
        "form = LinearStandardFormCompiler().write(model, mixed_form=True)\n"
        "assert form.A.nnz > 0\n"
        "assert dependencies.scipy_available\n"
        "assert dependencies.scipy.stats.norm.cdf(0) == 0.5\n"
        "assert 'scipy.stats' in sys.modules and 'scipy.spatial' in sys.modules\n"
        "hook = dependencies.DeferredImportCallbackFinder\n"
        "print(sum(isinstance(found, hook) for found in sys.meta_path))"
    )
    assert printed(SOLVE + after) == "1\n"


@pytest.mark.slow
def test_scipy_may_be_loaded_before() -> None:
    """A process that has loaded scipy, or all of Pyomo, solves as well."""
    for first in ("import scipy.sparse", "import pyomo.environ", "import scipy.stats"):
        assert printed(f"{first}\n{SOLVE}print('solved')") == "solved\n"
