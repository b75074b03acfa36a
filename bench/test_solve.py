"""How long it takes to find a schedule and prove how good it is, case by case."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import pytest

import poetmodel as pm
from grid import GAP, LIMIT_S, SMOKE_LIMIT_S, graph_of
from poetmodel.bench.measurement import solve_facts
from poetmodel.bench.tables import model_gap
from poetmodel.graph import checkpoint_all_peak_bytes, floor

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("warm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem, solved by default and without a deadline."""

    group: str
    """Table that it belongs to: ``main``, ``reference`` or ``zoo``."""
    model: str
    device: str
    ram: str
    """RAM budget, as a share of the keep-all peak."""
    deadline_counts: str | None = None
    """Which time counts; None takes the device's default."""
    limit_s: float = LIMIT_S
    """Wall time, building included [s]."""
    seed: int = 0
    expected_overhead_ratio: float | None = None
    """The least overhead, where it is known, as a fraction of the baseline."""

    @property
    def name(self) -> str:
        """Its name in the records."""
        parts = (self.group, self.model, self.device, self.ram, "default", f"s{self.seed}")
        return " | ".join(parts)

    @property
    def is_possible(self) -> bool:
        """Whether the budget is at least the minimum RAM of the graph."""
        graph = graph_of(self.model)
        share = floor(graph).bytes / checkpoint_all_peak_bytes(graph)
        return float(self.ram.rstrip("%")) / 100 >= share

    def problem(self) -> pm.Problem:
        """Return what is solved."""
        graph = graph_of(self.model)
        costs = pm.Costs.estimate(graph, pm.Device.load(self.device))
        return pm.Problem(graph, costs, ram=self.ram, deadline_counts=self.deadline_counts)


_MAIN: Final = Case(group="main", model="resnet18-cifar", device="rpi4b", ram="40%")
_ZOO: Final = (
    *("vgg16-cifar", "resnet18-cifar", "vgg16", "resnet18"),
    *("resnet50", "mobilenetv2", "bert-base", "transformer"),
)
_KNOWN: Final = (
    ("paper/vgg16-cifar", "paper-m4", "50%", 0.20337e-2),
    ("paper/vgg16-cifar", "paper-a72", "50%", 0.01765e-2),
    ("paper/resnet18-cifar", "paper-a72", "30%", 0.17027e-2),
    ("paper/resnet18-cifar", "paper-m4", "40%", 0.16307e-2),
    ("paper/bert", "paper-a72", "40%", 0.14904e-2),
)
CASES: Final = (
    _MAIN,
    *(replace(_MAIN, group="zoo", model=x, ram=ram) for x, ram in product(_ZOO, ("50%", "70%"))),
    *(
        Case(
            group="reference", model=model, device=device, ram=ram, deadline_counts="compute",
            expected_overhead_ratio=ratio,
        )
        for model, device, ram, ratio in _KNOWN
    ),
)  # fmt: skip
"""Every case, budgets that no schedule can keep among them: a run leaves these out."""
_SMALL: Final = Case(
    group="main", model="mlp", device="mkr1000", ram="70%", limit_s=SMOKE_LIMIT_S
)  # fmt: skip
SMOKE_CASES: Final = (
    _SMALL,
    replace(_SMALL, group="zoo"),
    replace(
        _SMALL, group="reference", model="paper/linear", device="paper-m4", ram="50%",
        deadline_counts="compute",
    ),
)  # fmt: skip
"""A case of each group at its smallest size."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the benchmark its cases."""
    smoke = metafunc.config.getoption("smoke")
    chosen = SMOKE_CASES if smoke else [case for case in CASES if case.is_possible]
    metafunc.parametrize("case", chosen, ids=[case.name for case in chosen])


def run(case: Case) -> pm.SolveResult:
    """Build, solve and verify a case."""
    return pm.solve(case.problem(), time_limit=case.limit_s, gap=GAP, threads=1, seed=case.seed)


def test_solve(benchmark: Any, case: Case, keep: Callable[..., None]) -> None:
    """Building, solving and verifying one case, once; what comes out goes into the record."""
    benchmark.group = f"{case.group}: {case.model}"
    result = benchmark.pedantic(run, args=(case,), rounds=1, iterations=1)
    overhead_j, statistics = result.overhead_j, result.statistics
    benchmark.extra_info.update(
        status=str(result.status),
        gap=result.gap,
        overhead_ratio=None if overhead_j is None else overhead_j / result.baseline_energy_j,
        columns=statistics.get("columns"),
        rows=statistics.get("rows"),
        versions=dict(result.versions),
    )
    facts = solve_facts(result)
    del facts["schedule"]
    own_gap, seconds = model_gap(statistics), benchmark.stats.stats.min
    keep("solve", case.name, seconds=seconds, case=asdict(case), model_gap=own_gap, **facts)
    assert not result.violations
