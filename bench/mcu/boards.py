"""Networks on boards: exported as C, built for the board's RAM, executed on an emulated core.

Needs PyTorch, a C compiler, GCC for Arm and QEMU.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from harness import PRELOADED, RecordedRun, Study, make_record
from poetmodel.device import Device
from poetmodel.errors import BudgetError, FlashError, NoScheduleError
from poetmodel.export.board import (
    Target,
    ToolchainError,
    build_program,
    run_program,
)
from poetmodel.export.deployment import STACK_BYTES, reserved_bytes
from poetmodel.export.exporting import export_step
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.lowered.step import Weights
from poetmodel.result import Status
from poetmodel.sweeps.measurement import FAILED
from poetmodel.tiling.choice import divide_step
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mcu.networks import Training
    from poetmodel.export.board import ProgramResult
    from poetmodel.export.deployment import Deployment
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.problem import Problem
    from poetmodel.sweeps.measurement import Record

KIND: Final = "exported step"
"""Kind of the records."""

BOARD, KEEP_ALL, LAST_LAYER = PARTS = ("board", "keep-all", "last layer")
"""Parts: a network on a board; keep-all; all but the last layer frozen."""

ON_BOARDS: Final = (
    "ds-cnn", "autoencoder", "resnet8", "mobilenetv1-vww", "mobilenetv2-035", "resnet8-thin",
    "lenet", "bert-block",
)  # fmt: skip
"""The networks of `mcu.networks` that are tried on every board."""
BOARDS: Final[Mapping[str, Target]] = {
    "nrf52840": Target.M4,
    "nano33ble": Target.M4,
    "stm32f746": Target.M7,
    "rp2350": Target.M4,
    "rp2350-psram": Target.M4,
    "stm32h743": Target.M7,
}
"""Boards, and the core for which programs are built and emulated. The Cortex-M33 of the RP2350
executes programs for a Cortex-M4."""
PLACES: Final = (
    ("nrf52840", None), ("nano33ble", None), ("stm32f746", "256KiB"), ("stm32f746", None),
    ("rp2350", "512KiB"), ("stm32h743", None),
)  # fmt: skip
"""Boards and the usable RAM; None for all of the board's RAM."""
TIGHT: Final = (
    *product(("ds-cnn", "resnet8"), (("nrf52840", "128KiB"), ("stm32f746", "128KiB"))),
    ("mobilenetv2-035-96", ("nrf52840", None)),
    ("mobilenetv2-035-96", ("rp2350-psram", "256KiB")),
    ("mobilenetv2-035-128", ("rp2350-psram", "512KiB")),
    ("mobilenetv1-vww-bytes", ("nrf52840", None)),
)
"""Networks that are tried with less RAM, or on one board only."""
SOLVE_S: Final = 20.0
"""Limit of each solve [s]."""
TILES: Final = ("none", "auto", "32KiB", "8KiB")
"""Sizes of tiles, tried in this order until a schedule is found."""
ROOMY: Final = "4MiB"
"""RAM of the emulated boards for keep-all."""
LARGE: Final = "16MiB"
"""The other memory of an emulated Cortex-M4, for keep-all with larger images."""
MOVED: Final = "EXTRA=-Wl,--defsym=RAM_START=0x21000000,--defsym=EXTERNAL_START=0x20000000"
"""Note in records of programs whose RAM is that memory."""
LEARNING_RATE: Final = 0.01
STEPS: Final = 2
"""Number of executed steps; the loss of the second depends on all updates of the first."""
LOSS_TOLERANCE: Final = 1e-5
"""Maximum relative difference of losses between the board and the host."""
SECOND_TOLERANCES: Final = dict.fromkeys(
    ("mobilenetv2-035", "mobilenetv2-035-96", "mobilenetv2-035-128"), 1e-3
)
"""Maximum relative differences of the second loss for networks whose batch norms, over few values,
amplify the rounding of the first step's exponentials. PyTorch's second loss is 1.4 % off that in
double, that of exported code 0.2 %."""
YES, NO, OPEN = "yes", "no", "open"
MULTIPLIERS: Final = ("pm_conv2d", "pm_depthwise", "pm_mm", "pm_bmm")
"""Prefixes of kernels that multiply and accumulate."""
MOST_PER_MAC: Final = 12
"""Target upper limit on instructions for each multiply-accumulate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardRun(RecordedRun):
    """One network, exported and executed."""

    part: str
    """One of `PARTS`."""
    network: str
    """One of `mcu.networks.NETWORKS`, or of those for larger images."""
    board: str
    """One of `BOARDS`, a shipped device."""
    ram: str | None = None
    """Usable RAM; None for all of the device's RAM."""
    solve_s: float = SOLVE_S
    """Limit of each solve [s]."""
    gap: float = 0.01
    """Gap at which a solve stops."""
    limit_s: float = 1200.0
    """Limit of the whole run: solves, builds, emulation [s]."""
    seed: int = 0
    """Seed of weights and inputs."""

    @property
    def name(self) -> str:
        """Name of the run in records."""
        return f"{self.part} | {self.network} | {self.board} | {self.ram or 'its RAM'}"


def runs(parts: tuple[str, ...] = PARTS, solve_s: float = SOLVE_S) -> Iterator[BoardRun]:
    """Yield all runs, the references of each network first."""
    more_s = 0.0 if solve_s == SOLVE_S else len(TILES) * solve_s
    for part in parts:
        larger = dict.fromkeys(name for name, _ in TIGHT if name not in ON_BOARDS)
        more = {BOARD: TIGHT, KEEP_ALL: product(larger, (("rp2350-psram", LARGE),))}
        places = PLACES if part == BOARD else (("nrf52840", ROOMY),)
        for name, (board, ram) in (*product(ON_BOARDS, places), *more.get(part, ())):
            run = BoardRun(part=part, network=name, board=board, ram=ram, solve_s=solve_s)
            yield replace(run, limit_s=run.limit_s + more_s)


def smoke_runs() -> Iterator[BoardRun]:
    """Yield each kind of run at its smallest size; one does not fit, one commits to flash."""
    for part in PARTS:
        yield BoardRun(part=part, network="bert-block", board="nano33ble", ram=ROOMY, solve_s=3.0)
    yield BoardRun(part=BOARD, network="mobilenetv1-vww", board="nrf52840", solve_s=3.0)
    yield BoardRun(part=BOARD, network="bert-block", board="nano33ble", ram="64KiB", solve_s=3.0)


# -- one run ---------------------------------------------------------------------------------------


def measure_board(fields: dict[str, Any], _start: None = None) -> Record:
    """Export, build and execute a network; return the record."""
    from mcu.networks import forward_macs, parameters

    wanted = BoardRun(**fields)
    begun = time.perf_counter()
    training = network(wanted)
    with tempfile.TemporaryDirectory() as folder:
        try:
            facts = _facts(wanted, training, Path(folder))
        except ToolchainError as error:
            facts = {"status": FAILED, "reason": str(error)}
    return make_record(
        KIND,
        wanted.name,
        cell=fields,
        workers=1,
        seconds=time.perf_counter() - begun,
        parameters=parameters(training),
        batch=len(training[2][0]),
        forward_macs=forward_macs(training),
        tools=tools(),
        **facts,
    )


def network(wanted: BoardRun) -> Training:
    """Return a network with the weights and inputs of its seed."""
    import torch

    from mcu.networks import LARGER, NETWORKS

    torch.manual_seed(wanted.seed)
    model, loss_fn, inputs = (NETWORKS | LARGER)[wanted.network]()
    if wanted.part == LAST_LAYER:
        model.eval()  # frozen batch norms keep their running statistics
        last = [m for m in model.modules() if isinstance(m, torch.nn.Linear)][-1]
        model.requires_grad_(requires_grad=False)
        last.requires_grad_()
    return model, loss_fn, inputs


def captured(wanted: BoardRun, training: Training) -> LoweredStep:
    """Return the step of a network, updated by plain SGD."""
    import torch

    from poetmodel.torch.lowering.step import lower

    model, loss_fn, inputs = training
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    return lower(model, loss_fn, inputs, name=wanted.network, optimizer=optimizer)


def _facts(wanted: BoardRun, training: Training, folder: Path) -> dict[str, Any]:
    step = captured(wanted, training)
    alone = {"keep_all_bytes": checkpoint_all_peak_bytes(step.graph)}
    deployment, tried = _first_fitting_deployment(wanted, step, folder)
    if deployment is None:
        answers = {each["answer"] for each in tried}
        answer = NO if answers == {NO} else OPEN
        reason = tried[-1]["reason"]
        return {"status": answer, "reason": reason, "tried": tried, **alone}
    ran = _ran(wanted, training, deployment, folder)
    return {
        "status": YES,
        "reason": "",
        "tried": tried,
        **alone,
        **_decision_record(deployment),
        **_measurement_record(deployment, ran[Target.HOST], ran[BOARDS[wanted.board]]),
        **(
            _instruction_record(deployment, folder)
            if (wanted.part, wanted.ram) == (KEEP_ALL, ROOMY)
            else {}
        ),
    }


def _first_fitting_deployment(
    wanted: BoardRun, step: LoweredStep, folder: Path
) -> tuple[Deployment | None, list[dict[str, Any]]]:
    """Return the first deployment of all tile sizes that fits, and the result of each size.

    State that is replaced on flash needs commits: sizes that do not fit are tried with them.
    """
    free = wanted.part == BOARD
    device = Device.load(wanted.board)
    in_place = free and device.stores_in_flash and device.is_memory_mapped
    options: dict[str, Any] = {"device": wanted.board, "ram": wanted.ram}
    options |= {"paging": free, "recompute": free}
    tried: list[dict[str, Any]] = []
    ways = product(TILES if free else TILES[:1], (False, True) if in_place else (False,))
    for tile, commit in ways:
        begun = time.perf_counter()
        outcome: dict[str, Any] = {"commit": commit, "answer": NO, "reason": ""}
        outcome["tile"] = None if tile == "none" else tile
        options |= {"tile": tile, "commit": commit}
        deployment, ended = None, False
        try:
            deployment = export_step(
                step, folder, time_limit=wanted.solve_s, gap=wanted.gap, **options
            )
            outcome["answer"] = YES
            if deployment.tile_bytes is not None:
                outcome["tile"] = f"{deployment.tile_bytes / 1024:g}KiB"
            if in_place and not commit and deployment.written_bytes:
                outcome |= {"answer": NO, "reason": "state on flash needs commits"}
                deployment = None
        except FlashError as error:
            outcome["reason"] = str(error)
            ended = not in_place  # smaller tiles need more code
        except BudgetError as error:
            found = step if tile == "auto" else divide_step(step, tile)
            outcome |= {"reason": str(error), **_largest(found, wanted.board)}
        except NoScheduleError as error:
            reason = _homeless(step, error.result.problem)
            proved = bool(reason) or error.result.status is Status.INFEASIBLE
            reason = reason or error.result.reason
            outcome |= {"answer": NO if proved else OPEN, "reason": reason}
        tried.append({**outcome, "seconds": time.perf_counter() - begun})
        if deployment is not None or ended:
            return deployment, tried
    return None, tried


def _homeless(step: LoweredStep, problem: Problem) -> str:
    """Return the reason if RAM and storage together cannot hold all state; else no fields."""
    limits, state = problem.resolved(), step.graph.state_bytes
    ram, storage = limits.usable_ram_bytes, limits.aux_limit_bytes
    if storage is None or state <= ram + storage:
        return ""
    return (
        f"there is {format_bytes(state)} of state, and room for {format_bytes(ram)} in RAM and "
        f"{format_bytes(storage)} on storage"
    )


def _largest(step: LoweredStep, board: str) -> dict[str, Any]:
    """Return the node with the largest working set, and its RAM, a bound for all schedules."""
    device, graph = Device.load(board), step.graph
    mapped = device.storage is not None and device.storage.memory_mapped
    least = floor(graph, memory_mapped=mapped)
    return {
        "floor_node": graph.nodes[least.node].name,
        "floor_op": graph.nodes[least.node].op,
        "floor_bytes": least.bytes,
        "reserved_bytes": reserved_bytes(step, STACK_BYTES),
    }


def _decision_record(deployment: Deployment) -> dict[str, Any]:
    """Return the decisions of a deployment: status, gap, recomputations, transfers and costs."""
    result, plan, graph = deployment.result, deployment.plan, deployment.step.graph
    simulation = None if result is None else result.simulation
    if result is None or simulation is None:
        raise ValueError(f"{graph.name}: expected the result of a solve")
    table = result.problem.table
    parts = () if table.commit is None else table.commit.replacements
    outs = {i: times for i, times in simulation.page_outs.items() if i not in parts}
    paid = (table.transfer_totals(simulation.page_ins, outs), table.commit_totals())
    return {
        "solved": str(result.status),
        "gap": result.gap,
        "nodes_count": len(graph.nodes),
        "recomputations": sum(simulation.recomputations.values()),
        "read_bytes": simulation.read_bytes,
        "written_bytes": simulation.written_bytes,
        "transfer_s": sum(cost.time_s for cost in paid),
        "transfer_j": sum(cost.energy_j for cost in paid),
        "steps_until_worn": deployment.steps_until_worn
        if deployment.commit
        else simulation.steps_until_worn,
        "memory_mapped": plan.memory_mapped,
        "state_bytes": graph.state_bytes,
        "resident_state_bytes": sum(graph.tensor_bytes[i] for i in plan.resident or ()),
        "arena_bytes": deployment.arena.bytes,
        "arena_bound_bytes": deployment.arena.lower_bound_bytes,
        "ram_map": deployment.ram_map(),
        "versions": dict(result.versions),
    }


# -- builds and executions -------------------------------------------------------------------------


def _batches(training: Training) -> bytes:
    """Return the batch of a training in the input format of its program."""
    arrays = (
        x if x.element_size() == 1 else x.float() if x.is_floating_point() else x.int()
        for x in training[2]
    )
    return b"".join(x.contiguous().numpy().tobytes() for x in arrays)


def _ran(
    wanted: BoardRun, training: Training, deployment: Deployment, folder: Path
) -> dict[Target, ProgramResult]:
    """Build and execute the programs for this machine and for the board; return their runs."""
    settings = ["DRIVER=ram" if deployment.plan.memory_mapped else "DRIVER=file"]
    storage = None if deployment.device is None else deployment.device.storage
    if deployment.commit:
        settings = ["DRIVER=nor"]
        if storage is not None and storage.endurance_cycles is not None:
            settings.append(f"ENDURANCE={int(storage.endurance_cycles)}")
    found = {}
    for target in (Target.HOST, BOARDS[wanted.board]):
        moved = (MOVED,) if target.is_board and wanted.ram == LARGE else ()
        program = build_program(folder, target, settings=(*settings, *moved))
        found[target] = run_program(
            program,
            target,
            folder,
            inputs=_batches(training),
            steps=STEPS,
            learning_rate=LEARNING_RATE,
        ).require_success()
    return found


def _measurement_record(
    deployment: Deployment, host: ProgramResult, board: ProgramResult
) -> dict[str, Any]:
    """Return the measured metrics; raise `ToolchainError` if losses differ from the host."""
    apart = [abs(board.losses[k] - host.losses[k]) / abs(host.losses[k]) for k in host.losses]
    second = SECOND_TOLERANCES.get(deployment.step.graph.name, LOSS_TOLERANCE)
    if len(board.losses) != STEPS or apart[0] > LOSS_TOLERANCE or not max(apart) <= second:
        raise ToolchainError(f"losses: expected {host.losses}, and the board has {board.losses}")
    figures = board.metrics
    inputs = deployment.ram_map()["inputs"]
    runtime = figures["ram_bytes"] - deployment.arena.bytes - inputs - figures["stack_limit_bytes"]
    device = deployment.device
    if device is None:
        raise ToolchainError("expected a deployment for a device")
    return {
        "losses": [board.losses[k] for k in sorted(board.losses)],
        "loss_difference": max(apart),
        "state_sha256": hashlib.sha256(board.state).hexdigest(),
        "ram_bytes": figures["ram_bytes"],
        "ram_limit_bytes": figures["ram_limit_bytes"],
        "stack_bytes": figures["stack_bytes"],
        "stack_limit_bytes": figures["stack_limit_bytes"],
        "input_bytes": inputs,
        "runtime_bytes": runtime,
        "flash_bytes": figures["flash_bytes"],
        "weight_bytes": len(Weights.from_step(deployment.step).data),
        "instructions": figures["step_instructions"],
        "clock_hz": device.clock_hz,
        "power_w": device.compute.power_w,
        **(_wear_record(deployment, figures) if deployment.commit else {}),
    }


def _wear_record(deployment: Deployment, figures: Mapping[str, int]) -> dict[str, Any]:
    """Return the erases of emulated flash; raise `ToolchainError` if more than predicted."""
    block = deployment.layout.erase_block_bytes
    pages = sum(-(-size // block) * times for size, times in deployment.page_writes)
    predicted = deployment.commit_erases + pages
    counted = figures["storage_erases"] - deployment.commit_erases  # of pm_init
    if counted > STEPS * predicted:
        raise ToolchainError(
            f"erases: expected {predicted} in a step, and flash has {counted / STEPS}"
        )
    return {
        "commits": True,
        "generations": deployment.generations,
        "stored_bytes": deployment.stored_bytes,
        "step_erases": counted / STEPS,
    }


def _instruction_record(deployment: Deployment, folder: Path) -> dict[str, Any]:
    """Return the nodes with their instruction counts, or the reason of a failed count."""
    try:
        return {"nodes": _products(deployment, folder)}
    except ToolchainError as error:
        return {"nodes": [], "not_counted": str(error).splitlines()[0]}


def _products(deployment: Deployment, folder: Path) -> list[dict[str, Any]]:
    """Return instructions and multiply-accumulates of the nodes that multiply."""
    inputs = (folder / "inputs.bin").read_bytes()
    program = build_program(folder, Target.M4, settings=("PROFILE=1",))
    spent = run_program(
        program, Target.M4, folder, inputs=inputs, steps=1, learning_rate=LEARNING_RATE
    )
    counts = spent.require_success().node_instructions
    found = []
    for k, node in enumerate(deployment.step.graph.nodes):
        kernels = [c.kernel for c in deployment.step.calls[k] if c.kernel.startswith(MULTIPLIERS)]
        if kernels and node.flops:
            facts = {"node": node.name, "kernel": kernels[0], "macs": node.flops // 2}
            found.append({**facts, "instructions": counts[k]})
    return found


def tools() -> dict[str, str]:
    """Return the versions of compilers and emulator."""
    import torch

    names = ("cc", "arm-none-eabi-gcc", "qemu-system-arm")
    found = {"torch": torch.__version__}
    for name in names:
        said = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
        found[name] = said.stdout.splitlines()[0]
    return found


STUDY: Final = Study(
    name="mcu",
    kind=KIND,
    runs=runs,
    smoke_runs=smoke_runs,
    measure=measure_board,
    preloaded=(*PRELOADED, "torch"),
)
