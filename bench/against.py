"""Two states of the code on instances of the grid: each by both, one right after the other.

``git worktree add /tmp/before COMMIT`` makes a checkout of the other state, and
``python -m bench against --set checkout=/tmp/before --out FILE`` solves the 36 instances of
``pinned.txt`` three times. At the end it prints which answers differ, and the ratio of CPU times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from math import isclose
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any, Final

from grid import Instance, InstanceRun, in_running_order, instances
from harness import REQUIRED, Study, record
from poetmodel.errors import InputError
from poetmodel.sweeps.measurement import FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from poetmodel.sweeps.measurement import Record

KIND: Final = "against"
"""Kind of the records."""
HERE, BEFORE = "here", "before"
"""This checkout, and the other one."""
DECIDED: Final = ("optimal", "infeasible")
"""Statuses of runs that are timed: both have a proof."""
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
PINNED_FILE: Final = Path(__file__).with_name("pinned.txt")
"""The instances of `SAMPLE` that records prove in 0.075 s of processor time or more, by name."""
SAMPLES: Final = ("pinned", "drawn")
"""Which instances are solved: those of `PINNED_FILE`, or all of `SAMPLE`."""
EQUAL_RATIO: Final = 1e-6
"""Up to which relative difference two values are equal."""


def pinned() -> tuple[Instance, ...]:
    """Return the instances of `PINNED_FILE`, in its order."""
    known = {instance.name: instance for instance in SAMPLE}
    names = PINNED_FILE.read_text(encoding="utf-8").splitlines()
    return tuple(known[name] for name in names)


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


def runs(turns: int = 3, sample: str = SAMPLES[0]) -> Iterator[CodeRun]:
    """Yield each instance by both; which one is first changes with each turn.

    Raises
    ------
    InputError
        If the sample is none of `SAMPLES`.
    """
    if sample not in SAMPLES:
        raise InputError(f"sample: expected one of {', '.join(SAMPLES)}, got {sample!r}")
    chosen = pinned() if sample == SAMPLES[0] else SAMPLE
    for instance in chosen:
        for turn in range(turns):
            for code in (HERE, BEFORE) if turn % 2 else (BEFORE, HERE):
                yield CodeRun(instance=instance, code=code, turn=turn)


def smoke_runs() -> Iterator[CodeRun]:
    """Yield one instance by both, where the other checkout is this one, too."""
    for code in (BEFORE, HERE):
        yield CodeRun(instance=SAMPLE[0], code=code)


_SERVER: Final = """
import json, sys
sys.path[:0] = ["bench"]
import grid
grid.warm_up()
for line in sys.stdin:
    print(json.dumps(grid.measure(json.loads(line))), flush=True)
"""
"""Solves instances of the grid, a line each; graphs are read once."""


class CheckoutProcess:
    """A process that solves instances by the code of a checkout."""

    def __init__(self, root: Path) -> None:
        self.commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def solve(self, instance: Instance) -> Record:
        """Return the record of an instance, FAILED if the process ended before it answered."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        with suppress(BrokenPipeError):
            print(json.dumps(asdict(instance)), file=requests, flush=True)
        answer = answers.readline()
        if not answer:
            reason = f"the process ended with {self._process.wait()}"
            return {"status": FAILED, "seconds": 0.0, "reason": reason}
        return dict(json.loads(answer))


_PROCESSES: Final[dict[Path, CheckoutProcess]] = {}
"""The process of each checkout: they end with their input, when this one ends."""


def measure_code(fields: dict[str, Any], checkout: str) -> Record:
    """Solve an instance by the code of a checkout, and return its record."""
    run = CodeRun.of(fields)
    root = ROOT if run.code == HERE else Path(checkout)
    if root not in _PROCESSES or not _PROCESSES[root].is_running:
        _PROCESSES[root] = CheckoutProcess(root)
    facts = _PROCESSES[root].solve(run.instance)
    known = {"kind": KIND, "name": run.name, "cell": fields, "commit": _PROCESSES[root].commit}
    return {**record(KIND, run.name), **facts, **known}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the records of both states say of the instances that each solved."""

    different: tuple[str, ...]
    """Instances whose answers differ: in their status, or by more than `EQUAL_RATIO`."""
    ratios: Mapping[str, float]
    """Median CPU time of `HERE` over that of `BEFORE`, by instance that no run left open."""

    @property
    def mean_ratio(self) -> float:
        """The geometric mean of `ratios`."""
        return geometric_mean(self.ratios.values())

    def text(self) -> str:
        """Return both findings as lines."""
        lines = [f"different: {name}" for name in self.different]
        count = len(self.ratios)
        if count:
            lines.append(f"CPU time of {count} instances: {self.mean_ratio:.3f} times that before")
        return "\n".join([f"answers that differ: {len(self.different)}", *lines])


def compare(records: Iterable[Record]) -> Comparison:
    """Compare the answers and the CPU times of two states of the code."""
    by_name: dict[str, dict[str, list[Record]]] = {}
    for each in records:
        run = CodeRun.of(each["cell"])
        by_name.setdefault(run.instance.name, {HERE: [], BEFORE: []})[run.code].append(each)
    whole = {name: codes for name, codes in by_name.items() if all(codes.values())}
    different = [
        name
        for name, codes in whole.items()
        if not all(_is_same_answer(codes[BEFORE][0], each) for each in chain(*codes.values()))
    ]
    ratios = {
        name: _median_cpu_s(codes[HERE]) / _median_cpu_s(codes[BEFORE])
        for name, codes in whole.items()
        if all(each["status"] in DECIDED for each in chain(*codes.values()))
    }
    return Comparison(different=tuple(different), ratios=ratios)


def _median_cpu_s(records: Sequence[Record]) -> float:
    return median([float(each["cpu_s"]) for each in records])


def _is_same_answer(one: Record, other: Record) -> bool:
    if one["status"] != other["status"]:
        return False
    first, second = one.get("objective_value"), other.get("objective_value")
    if first is None or second is None:
        return first is second
    return isclose(first, second, rel_tol=EQUAL_RATIO)


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
    alone=False,
    summarize=lambda records: compare(records).text(),
)
