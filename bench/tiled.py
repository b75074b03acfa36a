"""Study of the MIP gap at the time limit, for whole steps that need nearly all RAM of a board.

Steps are stated as by ``poetmodel export``, in tiles unless they fit. Tensors are not placed in an
arena. Needs PyTorch.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import poetmodel as pm
from harness import PRELOADED, RecordedRun, Study, describe_result, make_record, warm_up
from mcu.boards import BOARD, BoardRun, capture_step, make_training
from poetmodel.budgets import TileChoice
from poetmodel.device import Costs, Device
from poetmodel.export.reserves import STACK_BYTES, reserved_bytes
from poetmodel.tiling.choice import choose_tiles
from poetmodel.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.sweeps.measurement import Record

KIND: Final = "tiled step"
"""Kind of the records."""
DEVICE: Final = "nrf52840"
BUDGETS: Final = (("ds-cnn", "128KiB"), ("resnet8", "128KiB"), ("mobilenetv1-vww", "256KiB"))
"""Networks, and the RAM of each step."""
LIMIT_S: Final = 300.0
"""Time limit of a solve [s]."""
GAP: Final = 0.01
"""Gap at which a solve ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledRun(RecordedRun):
    """One solve of a whole step."""

    network: str
    """A network of `mcu.networks`."""
    ram: str
    """RAM of the step, inputs, stack and runtime included."""
    limit_s: float = LIMIT_S
    """Time limit [s]."""
    seed: int = 0
    """Seed of the solver."""

    @property
    def name(self) -> str:
        """Name of the run in records."""
        return f"{self.network} | {self.ram} | {self.seed}"

    def build_problem(self) -> tuple[int | None, pm.Problem]:
        """Capture the step; return the tile size [B], the largest that fits, and the problem.

        The size is None if the step is not divided.
        """
        board_run = BoardRun(part=BOARD, network=self.network, board=DEVICE, ram=self.ram)
        step, device = capture_step(board_run, make_training(board_run)), Device.load(DEVICE)
        budget_bytes = parse_size(self.ram, field="ram") - reserved_bytes(step, STACK_BYTES)
        tile_bytes, step = choose_tiles(
            step, TileChoice.AUTO, device, ram_bytes=budget_bytes, paging=True
        )
        return tile_bytes, pm.Problem(
            step.graph, Costs.estimate(step.graph, device), ram=budget_bytes
        )


def runs(seeds: tuple[int, ...] = (0,)) -> Iterator[TiledRun]:
    """Yield each network with each seed of the solver."""
    for name, ram in BUDGETS:
        for seed in seeds:
            yield TiledRun(network=name, ram=ram, seed=seed)


def smoke_runs() -> Iterator[TiledRun]:
    """Yield the smallest network, for a second."""
    name, ram = BUDGETS[0]
    yield TiledRun(network=name, ram=ram, limit_s=1.0)


def measure(fields: dict[str, Any], _start: None = None) -> Record:
    """Solve a whole step; return the record. Capture and tiling are not timed."""
    run = TiledRun(**fields)
    warm_up()
    tile_bytes, problem = run.build_problem()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    result = pm.solve(problem, time_limit=run.limit_s, gap=GAP, threads=1, seed=run.seed)
    return make_record(
        KIND,
        run.name,
        cell=asdict(run),
        workers=1,
        threads=1,
        seconds=time.perf_counter() - begin_s,
        cpu_s=time.process_time() - begin_cpu_s,
        tile_bytes=tile_bytes,
        graph_nodes=len(problem.graph.nodes),
        **describe_result(result),
    )


STUDY: Final = Study(
    name="tiled",
    kind=KIND,
    runs=runs,
    smoke_runs=smoke_runs,
    measure=measure,
    preloaded=(*PRELOADED, "torch"),
)
