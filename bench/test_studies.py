"""Execution of each study of ``python -m bench``, with its smoke runs.

Smoke runs that take more than a few seconds are ``slow``: ``-m slow`` executes them.
"""

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
from studies import STUDIES, load_study

if TYPE_CHECKING:
    from harness import Study

ROOT: Final = Path(__file__).resolve().parents[1]

TARGETS: Final = {
    "mcu": (Target.HOST, Target.M4),
    "aifes": (Target.M4,),
    "fronts": (Target.M3, Target.M4),
}
"""Targets of the studies that build and run programs."""
SLOW: Final = ("fused", "library", "coverage", "processes")
"""Studies whose smallest run takes tens of seconds; ``training`` measures as most of them do."""
QUICK_RUNS: Final = {
    "compared": "published",
    "mcu": "board | bert-block | nano33ble | 64KiB",
    "fronts": "agreement",
    "int8-steps": "int8",
}
"""Part of the names of the quick smoke runs, of studies that have slow ones, too."""


def list_cases() -> list[Any]:
    """Return a parameter for each study and part of its smoke runs; "" stands for all of them."""
    quick = [pytest.param(name, part, id=f"{name}-quick") for name, part in QUICK_RUNS.items()]
    slow_studies = (*SLOW, *QUICK_RUNS)
    whole = [
        pytest.param(name, "", id=name, marks=[pytest.mark.slow] if name in slow_studies else [])
        for name in STUDIES
    ]
    return [*quick, *whole]


@pytest.mark.parametrize(("name", "only"), list_cases())
def test_study(benchmark: Any, name: str, only: str, tmp_path: Path, *, smoke: bool) -> None:
    """Each smoke run is recorded; only runs with Gurobi may fail."""
    if not smoke:
        pytest.skip(f"python -m bench {name} runs it")
    missing_programs = {
        program for target in TARGETS.get(name, ()) for program in list_missing_programs(target)
    }
    if name == "fused" and not (shutil.which("g++") or shutil.which("clang++")):
        missing_programs.add("g++")
    if missing_programs:
        pytest.skip(f"needs {', '.join(sorted(missing_programs))}")
    try:
        study = load_study(name)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    run_count = sum(only in run.name for run in study.smoke_runs())
    if not run_count:
        pytest.skip("needs a source that is not in this repository")
    path = tmp_path / f"smoke-{name}.jsonl"
    benchmark.group = "studies"
    # In a separate process, like users, because Inductor's state would affect other studies.
    command = [sys.executable, "-m", "bench", name, "--out", str(path), "--smoke", "--only", only]
    run = partial(subprocess.run, command, cwd=ROOT, check=False)
    assert benchmark.pedantic(run, rounds=1, iterations=1).returncode == 0
    _check_records(study, path, run_count)


def _check_records(study: Study, path: Path, run_count: int) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({study.key_of(record) for record in records}) == len(records) >= run_count
    failed = [record for record in records if record["status"] == FAILED]
    # Runs with Gurobi may fail: its bundled licence is limited, or it is not installed.
    assert not [record for record in failed if "urobi" not in record["reason"]], failed
