"""Two states of the code on a sample of the grid: each instance by both, one right after the other.

``git worktree add /tmp/before COMMIT`` makes a checkout of the other state, and
``python bench/against.py --checkout /tmp/before --out bench/results/$(date +%F)-against.jsonl``
runs the sample; ``python scripts/make_results.py`` puts a table into ``docs/built-in-steps.md``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from grid import Instance, InstanceRun, in_running_order, instances
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


def runs(turns: int = 2, limit_s: float | None = None) -> Iterator[CodeRun]:
    """Yield each instance by both, who is first changing with each turn."""
    for sampled in SAMPLE:
        instance = sampled if limit_s is None else replace(sampled, limit_s=limit_s)
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
    parser.add_argument("--limit", type=float, help="limit of each solve [s], in place of its own")
    parser.add_argument("--turns", type=int, default=2, help="times that each instance is solved")
    parser.add_argument("--only", default="", help="instances whose name contains this")
    options = parsed(parser, "against.jsonl", arguments)
    return run_all(
        [run for run in runs(options.turns, options.limit) if options.only in run.instance.name],
        recorded(options.out),
        partial(measure_code, checkout=str(options.checkout.resolve())),
        FreshProcesses(1, preloaded=(), grace_s=2 * GRACE_S),
        kind=KIND,
    )


if __name__ == "__main__":
    sys.exit(main())
