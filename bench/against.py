"""Comparison of two checkouts of the code: instances of the grid, solved by each in turn.

``git worktree add /tmp/before COMMIT`` makes a checkout of the other state, and
``python -m bench against --set checkout=/tmp/before --out FILE`` solves the 36 instances of
``pinned.txt`` three times with each. Finally it prints the results that differ, and the ratio of
CPU times.
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

from grid import Instance, InstanceRun, instances, mix_instances
from harness import REQUIRED, Study, make_record
from poetmodel.errors import InputError
from poetmodel.sweeps.measurement import FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from poetmodel.sweeps.measurement import Record

KIND: Final = "against"
"""Kind of the records."""
HERE, BEFORE = "here", "before"
"""This checkout and the other one, in records."""
DECIDED: Final = ("optimal", "infeasible")
"""Statuses with a proof; times are compared where all runs of an instance have one of them."""
ROOT: Final = Path(__file__).resolve().parents[1]

EXPENSIVE_PAGING: Final = ("nrf52840", "jetson-tx2")
"""Devices on which the energy of a page is a large fraction of that of computations."""

TIGHT_BUDGETS: Final = ("15%", "20%", "25%")
"""Budgets below the minimum RAM of many graphs, which the sample leaves out."""


def _draw_sample() -> Iterator[Instance]:
    """Yield 60 instances: 20 published, 10 of them with deadline, 25 of the zoo, 15 captured."""
    published, zoo, captured = map(instances, ((1,), (2,), (6,)))
    for count, family in (
        (10, [instance for instance in published if instance.deadline is None]),
        (10, [instance for instance in published if instance.deadline is not None]),
        (10, [instance for instance in zoo if instance.device in EXPENSIVE_PAGING]),
        (15, [instance for instance in zoo if instance.device not in EXPENSIVE_PAGING]),
        (15, captured),
    ):
        candidates = [
            instance for instance in mix_instances(family) if instance.ram not in TIGHT_BUDGETS
        ]
        yield from candidates[:count]


SAMPLE: Final = tuple(_draw_sample())
PINNED_FILE: Final = Path(__file__).with_name("pinned.txt")
"""File with the names of sampled instances whose proofs on record took at least 0.075 s of CPU."""
SAMPLES: Final = ("pinned", "drawn")
"""Options for the sample: the instances of `PINNED_FILE`, or all 60."""
EQUAL_RATIO: Final = 1e-6
"""Maximum relative difference of equal objective values."""


def load_pinned() -> tuple[Instance, ...]:
    """Read `PINNED_FILE`; return its instances in the same order."""
    instances_by_name = {instance.name: instance for instance in SAMPLE}
    names = PINNED_FILE.read_text(encoding="utf-8").splitlines()
    return tuple(instances_by_name[name] for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRun(InstanceRun):
    """One instance, solved by one checkout."""

    code: str
    """`HERE` or `BEFORE`."""
    turn: int = 0
    """Number of the repetition, from 0."""

    @property
    def name(self) -> str:
        """Name of the run in records."""
        return f"{self.instance.name} | {self.code} | {self.turn}"


def runs(turns: int = 3, sample: str = SAMPLES[0]) -> Iterator[CodeRun]:
    """Yield each instance with both checkouts, in alternating order over the turns.

    Raises
    ------
    InputError
        If the sample is not one of `SAMPLES`.
    """
    if sample not in SAMPLES:
        raise InputError(f"sample: expected one of {', '.join(SAMPLES)}, got {sample!r}")
    chosen = load_pinned() if sample == SAMPLES[0] else SAMPLE
    for instance in chosen:
        for turn in range(turns):
            for code in (HERE, BEFORE) if turn % 2 else (BEFORE, HERE):
                yield CodeRun(instance=instance, code=code, turn=turn)


def smoke_runs() -> Iterator[CodeRun]:
    """Yield one instance with both checkouts; the other checkout is this one, too."""
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
"""Program of a `CheckoutProcess`: solves the instance in each line of its standard input and prints
the record as a line of JSON. Graphs are cached."""


class CheckoutProcess:
    """A process, started with this object, that solves instances with the code of a checkout.

    `commit` is the checkout's commit.
    """

    def __init__(self, root: Path) -> None:
        self.commit = _run_command("git", "-C", str(root), "rev-parse", "HEAD")
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
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    def solve(self, instance: Instance) -> Record:
        """Solve an instance; return its record, with status FAILED if the process ended first."""
        process_input, process_output = self._process.stdin, self._process.stdout
        assert process_input is not None
        assert process_output is not None
        with suppress(BrokenPipeError):
            print(json.dumps(asdict(instance)), file=process_input, flush=True)
        line = process_output.readline()
        if not line:
            reason = f"the process ended with {self._process.wait()}"
            return {"status": FAILED, "seconds": 0.0, "reason": reason}
        return dict(json.loads(line))


_PROCESSES: Final[dict[Path, CheckoutProcess]] = {}
"""The process of each checkout; each ends when this process closes its input."""


def measure_code(fields: dict[str, Any], checkout: str) -> Record:
    """Solve an instance with this checkout or with the one at `checkout`; return the record.

    Starts a process for the checkout unless one is running.
    """
    run = CodeRun.from_fields(fields)
    root = ROOT if run.code == HERE else Path(checkout)
    if root not in _PROCESSES or not _PROCESSES[root].is_running:
        _PROCESSES[root] = CheckoutProcess(root)
    facts = _PROCESSES[root].solve(run.instance)
    identity = {"kind": KIND, "name": run.name, "cell": fields, "commit": _PROCESSES[root].commit}
    return {**make_record(KIND, run.name), **facts, **identity}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences in results and CPU times between two checkouts."""

    different: tuple[str, ...]
    """Instances whose statuses, or values by more than `EQUAL_RATIO`, differ."""
    ratios: Mapping[str, float]
    """Median CPU time of `HERE` over that of `BEFORE`, by instance that every run proved."""

    @property
    def mean_ratio(self) -> float:
        """The geometric mean of `ratios`, of which there must be at least one."""
        return geometric_mean(self.ratios.values())

    def format_text(self) -> str:
        """Format the differences and the mean ratio, in lines."""
        lines = [f"different: {name}" for name in self.different]
        count = len(self.ratios)
        if count:
            lines.append(f"CPU time of {count} instances: {self.mean_ratio:.3f} times that before")
        return "\n".join([f"answers that differ: {len(self.different)}", *lines])


def compare(records: Iterable[Record]) -> Comparison:
    """Compare results and CPU times of instances with records of both checkouts."""
    by_name: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        run = CodeRun.from_fields(record["cell"])
        by_name.setdefault(run.instance.name, {HERE: [], BEFORE: []})[run.code].append(record)
    complete = {name: codes for name, codes in by_name.items() if all(codes.values())}
    different = [
        name
        for name, codes in complete.items()
        if not all(_is_same_answer(codes[BEFORE][0], record) for record in chain(*codes.values()))
    ]
    ratios = {
        name: _median_cpu_s(codes[HERE]) / _median_cpu_s(codes[BEFORE])
        for name, codes in complete.items()
        if all(record["status"] in DECIDED for record in chain(*codes.values()))
    }
    return Comparison(different=tuple(different), ratios=ratios)


def _median_cpu_s(records: Sequence[Record]) -> float:
    return median([float(record["cpu_s"]) for record in records])


def _is_same_answer(first: Record, second: Record) -> bool:
    if first["status"] != second["status"]:
        return False
    first_value, second_value = first.get("objective_value"), second.get("objective_value")
    if first_value is None or second_value is None:
        return first_value is second_value
    return isclose(first_value, second_value, rel_tol=EQUAL_RATIO)


def _run_command(*command: str) -> str:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.stdout.strip()


STUDY: Final = Study(
    name="against",
    kind=KIND,
    runs=runs,
    smoke_runs=smoke_runs,
    measure=measure_code,
    settings={"checkout": REQUIRED},
    start_of=lambda _run, _store, settings: str(Path(settings["checkout"] or ROOT).resolve()),
    has_own_process=False,
    summarize=lambda records: compare(records).format_text(),
)
