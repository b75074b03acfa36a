"""Steps with float and with int8 weights, of whole networks and their last layers, in little RAM.

Each row is one solve with a verified schedule; no program is built or executed. Needs
PyTorch and torchao.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from harness import PRELOADED, RecordedRun, Study, make_record
from mcu.boards import NO, OPEN, YES
from poetmodel.errors import BudgetError, FlashError, NoScheduleError
from poetmodel.export.exporting import export_step
from poetmodel.result import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mcu.networks import Training
    from poetmodel.export.deployment import Deployment
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.sweeps.measurement import Record

KIND: Final = "int8 step"
"""Kind of the records."""
FLOAT, INT8 = KINDS = ("float", "int8")
"""Number types of weights; frozen and trained layers have the same."""
NETWORKS: Final = ("mobilenetv1-vww", "resnet8", "mobilenetv2-035-96")
"""Networks of `mcu.networks`. The setting ``networks`` may also name ``mobilenetv1-vww-bytes``."""
TRAINED: Final = ("all", "last-4")
"""Trained layers in the notation of `poetmodel.torch.quantized`."""
BUDGETS: Final = ("64KiB", "128KiB", "256KiB")
"""Usable RAM of the board."""
BOARD: Final = "nrf52840"
SOLVE_S: Final = 300.0
"""Limit of each solve [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8StepRun(RecordedRun):
    """One network with float or int8 weights within a budget."""

    network: str
    """A network of `mcu.networks`."""
    trained: str
    """One of `TRAINED`."""
    weights: str
    """One of `KINDS`."""
    ram: str
    """One of `BUDGETS`."""
    solve_s: float = SOLVE_S
    """Limit of the solves of all sizes of tiles together [s]."""
    limit_s: float = 900.0
    """Limit of capture, tiling and solves [s]."""
    seed: int = 0
    """Seed of weights and inputs."""

    @property
    def name(self) -> str:
        """Name of the run in records."""
        return f"{self.network} | {self.trained} | {self.weights} | {self.ram}"


def runs(
    networks: tuple[str, ...] = NETWORKS, weights: tuple[str, ...] = KINDS, solve_s: float = SOLVE_S
) -> Iterator[Int8StepRun]:
    """Yield a run for each network, choice of layers, type of weights and budget."""
    for network, trained, kind, ram in product(networks, TRAINED, weights, BUDGETS):
        limit_s = 600.0 + solve_s
        yield Int8StepRun(
            network=network,
            trained=trained,
            weights=kind,
            ram=ram,
            solve_s=solve_s,
            limit_s=limit_s,
        )


def smoke_runs() -> Iterator[Int8StepRun]:
    """Yield a run of a small network with each type of weights; int8 only with torchao."""
    for kind in KINDS if find_spec("torchao") else (FLOAT,):
        yield Int8StepRun(
            network="resnet8-thin", trained="last-4", weights=kind, ram="64KiB", solve_s=2.0
        )


def measure(fields: dict[str, Any], _start: None = None) -> Record:
    """Capture, export and solve a run; return its record."""
    run = Int8StepRun(**fields)
    begin_s = time.perf_counter()
    step = capture_step(run)
    with tempfile.TemporaryDirectory() as folder:
        facts = _export_record(run, step, Path(folder))
    seconds = time.perf_counter() - begin_s
    return make_record(KIND, run.name, cell=fields, workers=1, seconds=seconds, **facts)


def capture_step(run: Int8StepRun) -> LoweredStep:
    """Capture the step of a run, updated by plain SGD.

    Batch norms are in evaluation mode and frozen. In int8 they are folded into convolutions. The
    conversion of bytes to numbers is not quantized.
    """
    import torch

    from mcu.networks import LARGER
    from mcu.networks import NETWORKS as ALL
    from poetmodel.torch import QuantizedSGD, quantized
    from poetmodel.torch.lowering.step import lower

    torch.manual_seed(run.seed)
    training: Training = (ALL | LARGER)[run.network]()
    model, loss_fn, inputs = training
    if run.weights == INT8:
        batches = [torch.randn(2, *inputs[0].shape[1:]) for _ in range(2)]
        network: torch.nn.Module
        if inputs[0].dtype == torch.uint8:
            conversion, real_model = model.eval()
            network = torch.nn.Sequential(
                conversion, quantized(real_model, batches, train=run.trained)
            )
        else:
            network = quantized(model.eval(), batches, train=run.trained)
        optimizer: torch.optim.Optimizer = QuantizedSGD(network, lr=0.01)
        return lower(network, loss_fn, inputs, name=run.network, optimizer=optimizer)
    model.requires_grad_(requires_grad=False).eval()
    layer_types = (torch.nn.Conv2d, torch.nn.Linear)
    layers = [module for module in model.modules() if isinstance(module, layer_types)]
    for layer in layers if run.trained == "all" else layers[-4:]:
        layer.requires_grad_()
    trained = [p for p in model.parameters() if p.requires_grad]
    rule = torch.optim.SGD(trained, lr=0.01)
    return lower(model, loss_fn, inputs, name=run.network, optimizer=rule)


def _export_record(run: Int8StepRun, step: LoweredStep, folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"device": BOARD, "ram": run.ram, "tile": "auto"}
    try:
        deployment = export_step(step, folder, time_limit=run.solve_s, **options)
    except (BudgetError, FlashError) as error:
        return {"status": NO, "reason": str(error)}
    except NoScheduleError as error:
        is_proved = error.result.status is Status.INFEASIBLE
        return {"status": NO if is_proved else OPEN, "reason": error.result.reason}
    return {"status": YES, "reason": "", **_decision_record(deployment)}


def _decision_record(deployment: Deployment) -> dict[str, Any]:
    result, graph = deployment.result, deployment.step.graph
    simulation = result.simulation
    if simulation is None:
        raise ValueError(f"{graph.name}: expected the result of a solve")
    return {
        "tile_bytes": deployment.tile_bytes,
        "gap": result.gap,
        "energy_j": simulation.energy_j,
        "time_s": simulation.time_s,
        "nodes_count": len(graph.nodes),
        "instructions": sum(node.instructions or 0 for node in graph.nodes),
        "ram_map": deployment.ram_map(),
        "flash_map": deployment.flash_map(),
        "state_bytes": graph.state_bytes,
        "read_bytes": simulation.read_bytes,
        "written_bytes": simulation.written_bytes,
        "steps_until_worn": simulation.steps_until_worn,
    }


STUDY: Final = Study(
    name="int8-steps",
    kind=KIND,
    runs=runs,
    smoke_runs=smoke_runs,
    measure=measure,
    preloaded=(*PRELOADED, "torch"),
)
