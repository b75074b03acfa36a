"""Two states of the code on a sample of the grid: each instance by both, one right after the other.

``git worktree add /tmp/before COMMIT`` makes a checkout of the other state, and
``python -m bench against --set checkout=/tmp/before --out FILE`` runs the sample.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from grid import Instance, InstanceRun, in_running_order, instances
from harness import GRACE_S, REQUIRED, Study, record, recorded
from poetmodel.sweeps.measurement import FAILED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.sweeps.measurement import Record

KIND: Final = "against"
"""Kind of the records."""
HERE, BEFORE = "here", "before"
"""This checkout, and the other one."""
ROOT: Final = Path(__file__).resolve().parents[1]

DEAR_PAGES: Final = ("nrf52840", "jetson-tx2")
"""Devices on which a page costs much of what is computed meanwhile."""

TIGHT: Final = ("15%", "20%", "25%")
"""Budgets that are below the minimum RAM of many graphs; those just above it stay in."""


def _sample() -> Iterator[Instance]:
    """Draw 60 instances: 20 published, half with a deadline, 25 of the zoo, and 15 captured."""
    published, zoo, captured = map(instances, ((1,), (2,), (6,)))
    for number, family in (
        (10, [instance for instance in published if instance.deadline is None]),
        (10, [instance for instance in published if instance.deadline is not None]),
        (10, [instance for instance in zoo if instance.device in DEAR_PAGES]),
        (15, [instance for instance in zoo if instance.device not in DEAR_PAGES]),
        (15, captured),
    ):
        wide = [instance for instance in in_running_order(family) if instance.ram not in TIGHT]
        yield from wide[:number]


SAMPLE: Final = tuple(_sample())


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRun(InstanceRun):
    """One instance, solved by one state of the code."""

    code: str
    """`HERE` or `BEFORE`."""
    turn: int = 0
    """Which of several times."""

    @property
    def name(self) -> str:
        """What it is called in the records."""
        return f"{self.instance.name} | {self.code} | {self.turn}"


def runs(turns: int = 2) -> Iterator[CodeRun]:
    """Yield each instance by both; which one is first changes with each turn."""
    for instance in SAMPLE:
        for turn in range(turns):
            for code in (HERE, BEFORE) if turn % 2 else (BEFORE, HERE):
                yield CodeRun(instance=instance, code=code, turn=turn)


def smoke_runs() -> Iterator[CodeRun]:
    """Yield one instance by both, where the other checkout is this one, too."""
    for code in (BEFORE, HERE):
        yield CodeRun(instance=SAMPLE[0], code=code)


def measure_code(fields: dict[str, Any], checkout: str) -> Record:
    """Solve an instance by the runner of a checkout, and return its record."""
    run = CodeRun.of(fields)
    root = ROOT if run.code == HERE else Path(checkout)
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "one-grid.jsonl"
        earlier = root / "bench" / "run_grid.py"
        goal = str(run.instance.goal)
        runner = (
            [str(earlier), "--goal", goal]
            if earlier.exists()
            else ["-m", "bench", "grid", "--set", f"goals={goal}"]
        )
        chosen = ["--only", run.instance.name, "--limit", str(run.instance.limit_s)]
        done = subprocess.run(
            [sys.executable, *runner, *chosen, "--out", str(kept)],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        records = recorded(kept).records() if kept.exists() else []
    if len(records) != 1:
        reason = done.stderr.strip().splitlines()[-1:]
        facts = {"status": FAILED, "seconds": 0.0, "reason": " ".join(reason), "commit": commit}
        return record(KIND, run.name, cell=fields, **facts)
    return {**records[0], "kind": KIND, "name": run.name, "cell": fields, "commit": commit}


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


STUDY: Final = Study(
    name="against",
    kind=KIND,
    runs=runs,
    smoke_runs=smoke_runs,
    measure=measure_code,
    settings={"checkout": REQUIRED},
    start_of=lambda _run, _store, settings: str(Path(settings["checkout"] or ROOT).resolve()),
    preloaded=(),
    grace_s=2 * GRACE_S,
)
