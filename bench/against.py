"""Two states of the code on a sample of the grid: each instance by both, one right after the other.

``git worktree add /tmp/before COMMIT`` makes a checkout of the other state, and
``python bench/against.py --checkout /tmp/before --out bench/results/$(date +%F)-against.jsonl``
runs the sample; ``python scripts/make_results.py`` puts a table into ``docs/what-trains-where.md``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from grid import Instance, InstanceRun
from harness import FreshProcesses, parsed, record, recorded, run_all
from poetmodel.bench.measurement import FAILED
from run_grid import GRACE_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.bench.measurement import Record

KIND: Final = "against"
"""Kind of the records."""
HERE, BEFORE = "here", "before"
"""This checkout, and the other one."""
ROOT: Final = Path(__file__).resolve().parents[1]

_SAMPLE: Final = (
    (2, "resnet18-cifar", "rpi4b", "50%", None),
    (2, "resnet18-cifar", "mkr1000", "35%", None),
    (2, "resnet18", "rpi4b", "50%", None),
    (2, "resnet50", "rpi4b", "70%", None),
    (2, "mobilenetv2", "rpi4b", "70%", None),
    (2, "mobilenetv2", "nrf52840", "50%", None),
    (2, "bert-base", "rpi4b", "50%", None),
    (2, "vgg16-cifar", "jetson-tx2", "70%", None),
    (1, "paper/vgg16-cifar", "paper-m4", "50%", "115%"),
    (1, "paper/resnet18-cifar", "paper-m4", "15%", "115%"),
    (1, "paper/resnet18-cifar", "paper-m4", "40%", None),
    (1, "paper/resnet50", "paper-a72", "50%", None),
    (1, "paper/bert", "paper-a72", "40%", "130%"),
    (1, "paper/resnet50", "paper-a72", "40%", "115%"),
    (3, "traced/bert4-b8", "rpi4b", "50%", None),
    (3, "traced/resnet18-b8", "rpi4b", "50%", None),
)
SAMPLE: Final = tuple(
    Instance(goal=goal, model=model, device=device, ram=ram, deadline=deadline)
    for goal, model, device, ram, deadline in _SAMPLE
)
"""Instances of the grid, of every kind of graph."""


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
    """Yield each instance by both, who is first changing with each turn."""
    for instance in SAMPLE:
        for turn in range(turns):
            for code in (HERE, BEFORE) if turn % 2 else (BEFORE, HERE):
                yield CodeRun(instance=instance, code=code, turn=turn)


def measure_code(fields: dict[str, Any], _start: None = None, *, checkout: str) -> Record:
    """Solve an instance by the runner of a checkout, and return its record."""
    run = CodeRun.of(fields)
    root = ROOT if run.code == HERE else Path(checkout)
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "one-grid.jsonl"
        runner = [sys.executable, str(root / "bench" / "run_grid.py")]
        chosen = ["--goal", str(run.instance.goal), "--only", run.instance.name]
        limit = ["--limit", str(run.instance.limit_s), "--out", str(kept)]
        done = subprocess.run(
            [*runner, *chosen, *limit],
            env=os.environ | {"PYTHONPATH": str(root / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        records = recorded(kept).records() if kept.exists() else []
    if len(records) != 1:
        reason = done.stderr.strip().splitlines()[-1:]
        facts = {"status": FAILED, "seconds": 0.0, "reason": " ".join(reason)}
        return record(KIND, run.name, cell=fields, commit=commit, **facts)
    return {**records[0], "kind": KIND, "name": run.name, "cell": fields, "commit": commit}


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Solve the sample by both; return the exit status: 130 where that was stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, required=True, help="folder of the other state")
    parser.add_argument("--turns", type=int, default=2, help="times that each instance is solved")
    parser.add_argument("--only", default="", help="instances whose name contains this")
    options = parsed(parser, "against.jsonl", arguments)
    return run_all(
        [run for run in runs(options.turns) if options.only in run.instance.name],
        recorded(options.out),
        partial(measure_code, checkout=str(options.checkout.resolve())),
        FreshProcesses(1, preloaded=(), grace_s=2 * GRACE_S),
        kind=KIND,
    )


if __name__ == "__main__":
    sys.exit(main())
