"""The problems of the instance library, as a clean install finds them."""

import subprocess
import sys
from pathlib import Path

from poetmodel.sweeps.tables import rows
from tables import TABLES, read_figure_records

BENCH = Path(__file__).parents[2] / "bench"
EXTRAS = ("pandas", "matplotlib", "plotly", "torch", "sklearn", "mnist1d", "distributed", "pytest")


def test_the_registry_needs_no_extra():
    """`poetmodel bench instances` works with the dependencies of the package alone."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
sys.path.insert(0, {str(BENCH)!r})
import instances
print(instances.MOCCASIN[:8])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "Left out\n"), done.stderr


def test_rejected_schedules_are_marked():
    """In the tables of solvers a time of ``paper`` has a mark where the verifier rejects it."""
    records = rows(read_figure_records("solvers"))
    solved = [row for row in records if row["status"] in ("optimal", "feasible")]
    rejected = [row for row in solved if row["violations"]]
    assert {row["formulation"] for row in rejected} == {"paper"}
    assert TABLES["solvers"]().count("†") == len(rejected) > 0
    assert "†" in TABLES["solvers-readme"]()
