"""Ablation: a sample of the grid, solved with one part of the row generation left out at a time.

``python bench/ablation.py --out bench/results/$(date +%F)-ablation.jsonl`` runs everything;
``python scripts/make_results.py`` puts the means into ``bench/lazy-records.md``. A variant is one
entry of `VARIANTS`: other `LazyParams`, another seed, or a part that no parameter switches off.
``--captures`` takes captured models instead, and ``--out`` should then end in
``-ablation-captures.jsonl``, which gets a table of its own.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from grid import FLOOR, PROFILE, Instance, InstanceRun
from harness import FreshProcesses, parsed, recorded, run_all
from poetmodel.heuristics.earlier_recomputation import EarlierRecomputation
from poetmodel.heuristics.repair import Repair
from poetmodel.model import aggregated
from poetmodel.solver import lazy
from poetmodel.solver.lazy import LazyParams, linear
from poetmodel.solver.lazy.params import CUT_FAMILIES, HEURISTICS
from run_grid import GRACE_S, PRELOADED, measure, warm_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.bench.measurement import Record

KIND: Final = "ablation"
"""Kind of the records."""
LIMIT_S: Final = 10.0
"""Wall time of a solve [s]."""
CAPTURES_LIMIT_S: Final = 30.0
"""The same for captured models [s]."""


class Variant(NamedTuple):
    """What a variant solves with."""

    params: LazyParams = LazyParams()
    seed: int = 0
    earlier: bool = True
    """Whether schedules are repaired by recomputing earlier, too."""
    warm: bool = True
    """Whether rounds of cuts begin from the basis of the last one."""
    dominance: bool = True
    """Whether dominated keeps and page-ins are left out."""
    by_byte: bool = True
    """Whether repair drops what costs most for its bytes first, in place of what costs most."""


VARIANTS: Final[dict[str, Variant]] = {
    "everything": Variant(),
    "everything, seed 1": Variant(seed=1),
    "everything, seed 2": Variant(seed=2),
    **{
        f"no {one} cuts": Variant(LazyParams(cuts=CUT_FAMILIES - {one}))
        for one in sorted(CUT_FAMILIES)
    },
    **{
        f"no {one}": Variant(LazyParams(heuristics=HEURISTICS - {one}))
        for one in sorted(HEURISTICS)
    },
    "no earlier recomputation": Variant(earlier=False),
    "no warm starts of linear relaxations": Variant(warm=False),
    "no dominated keeps": Variant(dominance=False),
    "no prices for bytes in drops": Variant(by_byte=False),
    "no counting of equal decisions": Variant(LazyParams(counted_part_ratio=1.0)),
    "no search for the fastest schedule": Variant(LazyParams(without_schedule_time_ratio=1.0)),
    "no slices of time": Variant(LazyParams(wide_gap_time_ratio=1.0)),
    "no more rows after easy relaxations": Variant(LazyParams(easy_growth_ratio=0.0)),
    "no rows that are tight at the incumbent": Variant(LazyParams(tight_ratio=1.0)),
    "all broken rows at once": Variant(LazyParams(few_rows=10**6, wide_gap_rows=10**6)),
    "all rows of the linear phase at once": Variant(LazyParams(linear_rows=10**6)),
}
"""Each variant by its name."""

_SAMPLE: Final = (
    (1, "paper/resnet18-cifar", "paper-m4", "30%", None),
    (1, "paper/bert", "paper-a72", "40%", "115%"),
    (2, "mobilenetv2", "nrf52840", "35%", None),
    (1, "paper/resnet18-cifar", "paper-a72", "15%", "115%"),
    (3, "traced/bert4-b8", "profile", "50%", None),
    (2, "resnet18-cifar", "mkr1000", "20%", None),
    (1, "paper/bert", "paper-m4", "30%", "115%"),
    (1, "paper/bert", "paper-a72", "30%", "115%"),
    (1, "paper/bert", "paper-a72", "40%", "105%"),
    (1, "paper/resnet50", "paper-a72", "50%", "105%"),
    (1, "paper/resnet18-cifar", "paper-a72", FLOOR, "130%"),
    (2, "mobilenetv2", "nrf52840", "70%", None),
    (2, "resnet18", "jetson-tx2", "50%", None),
    (2, "resnet18-cifar", "rpi4b", "20%", None),
    (3, "traced/bert4-b8", "rpi4b", "35%", "150%"),
    (3, "traced/resnet18-b8", "profile", "50%", None),
    (4, "paper/bert-96", "paper-a72", "20%", None),
    (2, "resnet18-cifar", "jetson-tx2", "35%", None),
    (1, "paper/resnet18-cifar", "paper-m4", "15%", "105%"),
    (2, "resnet18", "nrf52840", "50%", None),
    (4, "paper/bert-24", "paper-m4", "40%", None),
    (2, "resnet18-cifar", "mkr1000", "50%", None),
    (1, "paper/bert", "paper-m4", FLOOR, "130%"),
    (2, "resnet50", "rpi4b", "35%", None),
)
"""Goal, graph, device, budget and deadline of each instance: of each kind that takes a second to
twenty, or ends with a gap."""
SAMPLE: Final = tuple(
    Instance(goal=goal, model=model, device=device, ram=ram, deadline=deadline, limit_s=LIMIT_S)
    for goal, model, device, ram, deadline in _SAMPLE
)
CAPTURES: Final = tuple(
    Instance(
        goal=6, model=f"traced/models/{model}", device=PROFILE, ram=ram, limit_s=CAPTURES_LIMIT_S
    )
    for model, ram in (
        ("gpt2", FLOOR),
        ("vit", FLOOR),
        ("mixer", FLOOR),
        ("whisper", FLOOR),
        ("gpt2", "25%"),
        ("unet2d", "25%"),
        ("mamba", "40%"),
    )
)
"""Captured models near what is hard of them: the minimum RAM, and many nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRun(InstanceRun):
    """One instance, solved by one variant."""

    variant: str

    @property
    def name(self) -> str:
        """What it is called in the records."""
        return f"{self.instance.name} | {self.variant}"


def measure_variant(
    fields: dict[str, Any], _start: None = None, *, threads: int = 1, workers: int = 1
) -> Record:
    """Solve an instance with the parameters of a variant and return its record.

    The process is the run's own, so what is set here holds for this run alone. The primal worker
    gets the parameters, but nothing else of a variant.
    """
    variant = fields["variant"]
    params, seed, earlier, warm, dominance, by_byte = VARIANTS[variant]
    lazy.solve_lazily = partial(lazy.solve_lazily, params=params)
    if not earlier:
        EarlierRecomputation.relieve = lambda *_: False  # type: ignore[method-assign]
    if not warm:
        linear.carried_basis = lambda *_: None
    if not dominance:
        aggregated.without_dominated_keeps = lambda _, events, **__: events  # type: ignore[attr-defined]
    if not by_byte:
        Repair.drop_order = lambda self, restoration: -self.noisy_price(restoration)  # type: ignore[method-assign]
    warm_up()
    run = VariantRun.of(fields)
    return {
        **measure({**run.instance.to_dict(), "seed": seed}, threads=threads, workers=workers),
        "kind": KIND,
        "name": run.name,
        "cell": fields,
        "variant": variant,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the variants; return the exit status: 130 where the run was stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=VARIANTS, help="a variant; more by more; default: all"
    )
    parser.add_argument("--captures", action="store_true", help="captured models, 30 s each")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each solve")
    options = parsed(parser, "ablation.jsonl", arguments)
    sample = CAPTURES if options.captures else SAMPLE
    names = options.only or VARIANTS
    return run_all(
        [VariantRun(instance=one, variant=name) for one in sample for name in names],
        recorded(options.out),
        partial(measure_variant, threads=options.threads, workers=options.workers),
        FreshProcesses(options.workers, preloaded=PRELOADED, grace_s=GRACE_S),
        kind=KIND,
        workers=options.workers,
    )


if __name__ == "__main__":
    sys.exit(main())
