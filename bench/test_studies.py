"""Executes each study of ``python -m bench`` once, at its smallest size."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from poetmodel.export.board import Target, list_missing_programs
from poetmodel.sweeps.measurement import FAILED
from studies import STUDIES, study_of

if TYPE_CHECKING:
    from harness import Study

ROOT: Final = Path(__file__).resolve().parents[1]

NEEDS: Final = {
    "mcu": (Target.HOST, Target.M4),
    "aifes": (Target.M4,),
    "fronts": (Target.M3, Target.M4),
}
"""Studies that build and run programs, and for which processors."""


@pytest.mark.parametrize("name", STUDIES)
def test_study(benchmark: Any, name: str, tmp_path: Path, *, smoke: bool) -> None:
    """Every kind of run leaves a record that is no failure."""
    if not smoke:
        pytest.skip(f"python -m bench {name} runs it")
    missing = {each for target in NEEDS.get(name, ()) for each in list_missing_programs(target)}
    if name == "fused" and not (shutil.which("g++") or shutil.which("clang++")):
        missing.add("g++")
    if missing:
        pytest.skip(f"needs {', '.join(sorted(missing))}")
    try:
        study = study_of(name)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    runs = len(list(study.smoke_runs()))
    if not runs:
        pytest.skip("needs what is not kept here")
    out = tmp_path / f"smoke-{name}.jsonl"
    benchmark.group = "studies"
    # In a separate process, like users, because Inductor's state would affect other studies.
    command = [sys.executable, "-m", "bench", name, "--out", str(out), "--smoke"]
    run = partial(subprocess.run, command, cwd=ROOT, check=False)
    assert benchmark.pedantic(run, rounds=1, iterations=1).returncode == 0
    _check(study, out, runs)


def _check(study: Study, out: Path, runs: int) -> None:
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({study.key_of(record) for record in records}) == len(records) >= runs
    failed = [record for record in records if record["status"] == FAILED]
    # Runs with Gurobi may fail: its bundled licence is limited, or it is not installed.
    assert not [each for each in failed if "urobi" not in each["reason"]], failed
