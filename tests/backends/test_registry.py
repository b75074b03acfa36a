"""The list of back ends: which there are, whether they solve, and what their licences refuse."""

import subprocess
import sys

import pytest

from poetmodel.backends import backend, backend_names, registry
from poetmodel.errors import BackendError, BackendUnavailableError, InputError, LicenceError


def printed(script):
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


@pytest.mark.parametrize("name", ["", "HiGHS", "cplex"])
def test_unknown_name_is_refused(name):
    """An unknown name is an input error that lists the known ones."""
    with pytest.raises(InputError, match=f"backend '{name}': expected one of highs, scip, gurobi"):
        backend(name)


def test_no_solver_is_loaded_before_it_is_used():
    """Looking a back end up, or asking whether it is there, imports no solver."""
    code = (
        "import sys\n"
        "from poetmodel.backends import backend, backend_names\n"
        "[backend(name).available() for name in backend_names()]\n"
        "print([m for m in ('highspy', 'pyscipopt', 'gurobipy', 'pyomo') if m in sys.modules])\n"
    )
    assert printed(code) == "[]\n"


@pytest.mark.parametrize("name", backend_names())
def test_installed_back_ends_pass(name):
    """Each solver that is here solves the small model, and has nothing against its size."""
    try:
        registry.try_out(name)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    assert registry.refusal(name, columns=2, rows=1) is None


@pytest.mark.parametrize("size", [{"columns": 2001, "rows": 1}, {"columns": 1, "rows": 2001}])
@pytest.mark.gurobi
def test_limited_licence_refuses_columns_and_rows(size):
    """The licence that comes with Gurobi takes 2,000 of each; HiGHS has none to refuse with."""
    pytest.importorskip("gurobipy")
    assert registry.refusal("highs", **size) is None
    refused = registry.refusal("gurobi", **size)
    if refused is None:
        pytest.skip("the licence at hand has no size limit")
    assert "size-limited licence" in str(refused)


def test_wrong_value_and_other_failures_are_no_refusal(monkeypatch):
    """A value other than the known one is an error; only the licence's no is a refusal."""
    monkeypatch.setattr(registry, "_least", lambda *_: 2.0)
    with pytest.raises(BackendError, match="it says 2"):
        registry.try_out("highs")

    def no(*_):
        raise LicenceError("too large")

    monkeypatch.setattr(registry, "_least", no)
    assert str(registry.refusal("highs", columns=1, rows=1)) == "too large"


# -- what a solve loads, and what it leaves of Pyomo ---------------------------------------------
SOLVE = (
    "import sys\nimport poetmodel as pm\n"
    "graph = pm.zoo.mlp()\n"
    "costs = pm.Costs.estimate(graph, pm.Device.load('mkr1000'))\n"
    "result = pm.solve(pm.Problem(graph, costs, ram='70%'))\n"
    "assert result.status == 'optimal', result.status\n"
    "assert result.statistics['columns'] > 0, 'no model was stated'\n"
)


def test_default_solve_loads_little():
    """A model is stated and solved without Pyomo, scipy.stats and networkx."""
    heavy = "{'pyomo', 'scipy.stats', 'scipy.optimize', 'networkx', 'rich', 'torch'}"
    assert printed(SOLVE + f"print(sorted({heavy} & set(sys.modules)))") == "[]\n"


@pytest.mark.slow
def test_pyomo_has_scipy_afterwards():
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
def test_scipy_may_be_loaded_before():
    """A process that has loaded scipy, or all of Pyomo, solves as well."""
    for first in ("import scipy.sparse", "import pyomo.environ", "import scipy.stats"):
        assert printed(f"{first}\n{SOLVE}print('solved')") == "solved\n"
