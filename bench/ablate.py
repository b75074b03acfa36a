"""Solves without each part of ``lazy`` that a policy can switch off."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import grid
from against import load_pinned
from harness import RecordedRun, Study, describe_result, make_record, warm_up
from poetmodel.clock import processor_clock
from poetmodel.errors import InputError
from poetmodel.solver.policy import SWITCHES, Policy
from poetmodel.solver.request import Request
from poetmodel.solver.search import Search
from poetmodel.solver.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from poetmodel.sweeps.measurement import Record

LIMIT_S: Final = 20.0
"""Limit of a solve in processor time [s]."""
WALL_RATIO: Final = 100.0
"""Maximum wall time of a solve, as a multiple of its limit. A run that meets it says nothing."""
KIND: Final = "ablation"
"""Kind of the records."""
EVERYTHING: Final = "everything"
"""Name of the default policy."""
_HARD: Final = (
    ("paper/bert", "paper-a72", "30%", "115%"),
    ("paper/bert", "paper-a72", "40%", "105%"),
    ("paper/bert", "paper-a72", "40%", "115%"),
    ("paper/bert", "paper-a72", "15%", "130%"),
    ("paper/bert", "paper-m4", "30%", "115%"),
    ("paper/bert", "paper-m4", "floor+2%", "130%"),
    ("paper/bert", "paper-m0", "60%", "130%"),
    ("paper/resnet50", "paper-a72", "50%", "105%"),
    ("paper/resnet50", "paper-m4", "60%", "105%"),
    ("paper/resnet50", "paper-m0", "floor+2%", "130%"),
    ("paper/resnet18", "paper-a72", "60%", "105%"),
    ("paper/resnet18-cifar", "paper-a72", "15%", "115%"),
    ("paper/resnet18-cifar", "paper-a72", "floor+2%", "130%"),
    ("paper/resnet18-cifar", "paper-m4", "15%", "105%"),
    ("traced/bert4-b8", "rpi4b", "35%", "150%"),
    ("paper/resnet18-cifar", "paper-m4", "30%", None),
    ("mobilenetv2", "nrf52840", "35%", None),
    ("mobilenetv2", "nrf52840", "70%", None),
    ("resnet18-cifar", "mkr1000", "20%", None),
    ("resnet18-cifar", "jetson-tx2", "35%", None),
    ("resnet18-cifar", "rpi4b", "20%", None),
    ("resnet18", "nrf52840", "50%", None),
    ("resnet50", "rpi4b", "35%", None),
    ("resnet50", "rpi4b", "20%", None),
    ("traced/bert4-b8", "profile", "50%", None),
    ("traced/models/gpt2", "profile", "25%", None),
    ("traced/models/gpt2", "profile", "floor+2%", None),
    ("traced/models/unet2d", "profile", "25%", None),
    ("traced/models/mamba", "profile", "40%", None),
    ("traced/models/vit", "profile", "floor+2%", None),
)
"""Model, device, budget and deadline of instances that are hard to prove; half of them have a
deadline."""
_LATE: Final = (
    ("paper/resnet50", "paper-a72", "floor+2%", "105%"),
    ("paper/bert", "paper-a72", "20%", "105%"),
    ("paper/bert", "paper-a72", "15%", "105%"),
    ("paper/resnet18-cifar", "paper-a72", "floor+2%", "130%"),
    ("paper/resnet18-cifar", "paper-a72", "20%", "105%"),
    ("paper/bert", "paper-a72", "floor+2%", "115%"),
    ("paper/bert", "paper-a72", "floor+2%", "105%"),
    ("paper/resnet18-cifar", "paper-a72", "floor+2%", "115%"),
    ("paper/resnet18-cifar", "paper-a72", "floor+2%", "105%"),
    ("paper/bert", "paper-a72", "15%", "115%"),
    ("paper/resnet18-cifar", "paper-a72", "15%", "115%"),
    ("paper/resnet18-cifar", "paper-a72", "15%", "105%"),
    ("paper/resnet50", "paper-a72", "15%", "105%"),
)
"""As `_HARD`: instances for whose deadline the heuristics before a proof find no schedule."""


def _make_instances(
    named: tuple[tuple[str, str, str, str | None], ...],
) -> tuple[grid.Instance, ...]:
    return tuple(
        grid.Instance(goal=0, model=model, device=device, ram=ram, deadline=deadline)
        for model, device, ram, deadline in named
    )


SAMPLES: Final[Mapping[str, Callable[[], tuple[grid.Instance, ...]]]] = {
    "hard": lambda: _make_instances(_HARD),
    "late": lambda: _make_instances(_LATE),
    "pinned": load_pinned,
}
"""Instances by the name of their sample. Those of ``against`` have proofs, whose times count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRun(RecordedRun):
    """A solve of an instance without one part, or with everything."""

    instance: grid.Instance
    variant: str = EVERYTHING
    """`EVERYTHING`, or "no" and the name of a switch."""

    @property
    def name(self) -> str:
        """Name of the run in records."""
        return f"{self.instance.name} | {self.variant}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the instance, and the variant."""
        return {**asdict(self.instance), "variant": self.variant}

    def with_limit(self, limit_s: float) -> AblationRun:
        """Return the run with another limit [s]."""
        return replace(self, instance=replace(self.instance, limit_s=limit_s))

    @property
    def policy(self) -> Policy:
        """The policy of the variant."""
        name = self.variant.removeprefix("no ")
        return Policy(**SWITCHES[name]) if self.variant != EVERYTHING else Policy()


def runs(
    parts: tuple[str, ...] = tuple(SWITCHES),
    seeds: int = 3,
    every: int = 1,
    limit_s: float = LIMIT_S,
    sample: str = "hard",
) -> Iterator[AblationRun]:
    """Yield the runs with everything and without each of `parts`, with several seeds.

    `sample` is one of `SAMPLES`; with ``every=4``, only its instances 1, 5, 9 and so on.
    """
    if sample not in SAMPLES:
        raise InputError(f"sample: expected one of {', '.join(SAMPLES)}, got {sample!r}")
    for seed in range(seeds):
        for instance in SAMPLES[sample]()[::every]:
            seeded = replace(instance, seed=seed, limit_s=limit_s)
            for variant in (EVERYTHING, *(f"no {part}" for part in parts)):
                yield AblationRun(instance=seeded, variant=variant)


def measure(fields: dict[str, Any], _start: None = None) -> Record:
    """Solve a run within its limit of processor time; return its record."""
    run = AblationRun(
        instance=grid.Instance(**{name: fields[name] for name in fields if name != "variant"}),
        variant=fields["variant"],
    )
    warm_up()
    problem, limit_s = run.instance.problem(), run.instance.limit_s
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    with processor_clock(WALL_RATIO * limit_s):
        request = Request(
            time_limit_s=limit_s, gap=grid.GAP, seed=run.instance.seed, policy=run.policy
        )
        search = Search(problem=problem, request=request)
        Task(problem=problem, formulation="lazy").solve(search, None)
        result = search.result(formulation="lazy")
    return make_record(
        KIND,
        run.name,
        cell=fields,
        seconds=time.perf_counter() - begin_s,
        cpu_s=time.process_time() - begin_cpu_s,
        **describe_result(result),
    )


STUDY: Final = Study(
    name="ablation",
    kind=KIND,
    runs=runs,
    smoke_runs=lambda: [run.with_limit(1.0) for run in _smoke_runs()],
    measure=measure,
    grace_s=WALL_RATIO * LIMIT_S,
)


def _smoke_runs() -> Iterator[AblationRun]:
    instance = grid.Instance(goal=0, model="paper/linear", device="paper-m4", ram="70%")
    for variant in (EVERYTHING, *(f"no {part}" for part in SWITCHES)):
        yield AblationRun(instance=instance, variant=variant)
