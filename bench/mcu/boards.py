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
from poetmodel.export.exporting import export_step
from poetmodel.export.reserves import STACK_BYTES, reserved_bytes
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
TIGHT_PLACES: Final = (
    *product(("ds-cnn", "resnet8"), (("nrf52840", "128KiB"), ("stm32f746", "128KiB"))),
    ("mobilenetv2-035-96", ("nrf52840", None)),
    ("mobilenetv2-035-96", ("rp2350-psram", "256KiB")),
    ("mobilenetv2-035-128", ("rp2350-psram", "512KiB")),
    ("mobilenetv1-vww-bytes", ("nrf52840", None)),
)
"""Networks that are tried with less RAM or on single boards, each with board and RAM."""
SOLVE_S: Final = 20.0
"""Limit of each solve [s]."""
TILES: Final = ("none", "auto", "32KiB", "8KiB")
"""Sizes of tiles, tried in this order until a schedule is found."""
ROOMY: Final = "4MiB"
"""Budget of keep-all on emulated boards."""
LARGE: Final = "16MiB"
"""Budget of keep-all with larger images, in the second memory of an emulated Cortex-M4."""
MOVED_SETTING: Final = "EXTRA=-Wl,--defsym=RAM_START=0x21000000,--defsym=EXTERNAL_START=0x20000000"
"""Setting for builds of programs whose RAM is the memory `LARGE`."""
LEARNING_RATE: Final = 0.01
STEPS: Final = 2
"""Number of executed steps; the loss of the second depends on all updates of the first."""
LOSS_TOLERANCE: Final = 1e-5
"""Maximum relative difference of losses between the board and the host."""
SECOND_TOLERANCES: Final = dict.fromkeys(
    ("mobilenetv2-035", "mobilenetv2-035-96", "mobilenetv2-035-128"), 1e-3
)
"""Maximum relative differences of the second loss for networks whose batch norms, over few values,
amplify the rounding of the first step's exponentials. PyTorch's second loss in single precision
differs by 1.4 % from that in double precision, the loss of exported code by 0.2 %."""
YES, NO, OPEN = "yes", "no", "open"
"""Statuses: exported and executed; proved not to fit; neither found nor proved."""
MULTIPLIERS: Final = ("pm_conv2d", "pm_depthwise", "pm_mm", "pm_bmm")
"""Prefixes of kernels that multiply and accumulate."""
MAX_PER_MAC: Final = 12
"""Intended maximum of instructions for each multiply-accumulate."""


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
    """Yield the runs of some parts, with solves of at most `solve_s` [s]."""
    extra_s = 0.0 if solve_s == SOLVE_S else len(TILES) * solve_s
    for part in parts:
        larger_networks = dict.fromkeys(name for name, _ in TIGHT_PLACES if name not in ON_BOARDS)
        further = {
            BOARD: TIGHT_PLACES,
            KEEP_ALL: product(larger_networks, (("rp2350-psram", LARGE),)),
        }
        pairs = (
            (name, place)
            for name in ON_BOARDS
            for place in (PLACES if part == BOARD else ((_roomy_board(name), ROOMY),))
        )
        for name, (board, ram) in (*pairs, *further.get(part, ())):
            run = BoardRun(part=part, network=name, board=board, ram=ram, solve_s=solve_s)
            yield replace(run, limit_s=run.limit_s + extra_s)


def _roomy_board(network: str) -> str:
    """Return the board whose flash holds the weights of a network, for runs with `ROOMY` RAM."""
    return "rp2350-psram" if network in ("autoencoder", "mobilenetv2-035") else "nrf52840"


def smoke_runs() -> Iterator[BoardRun]:
    """Yield each kind of run at its smallest size; one does not fit, one commits to flash."""
    for part in PARTS:
        yield BoardRun(part=part, network="bert-block", board="nano33ble", ram=ROOMY, solve_s=3.0)
    yield BoardRun(part=BOARD, network="bert-block", board="nrf52840", ram="16KiB", solve_s=3.0)
    yield BoardRun(part=BOARD, network="bert-block", board="nano33ble", ram="64KiB", solve_s=3.0)


# -- one run ---------------------------------------------------------------------------------------


def measure_board(fields: dict[str, Any], _start: None = None) -> Record:
    """Export, build and execute a network; return the record, of a failure if tools fail."""
    from mcu.networks import count_forward_macs, count_parameters

    run = BoardRun(**fields)
    begin_s = time.perf_counter()
    training = make_training(run)
    with tempfile.TemporaryDirectory() as folder:
        try:
            facts = _export_and_execute(run, training, Path(folder))
        except ToolchainError as error:
            facts = {"status": FAILED, "reason": str(error)}
    return make_record(
        KIND,
        run.name,
        cell=fields,
        workers=1,
        seconds=time.perf_counter() - begin_s,
        parameters=count_parameters(training),
        batch=len(training[2][0]),
        forward_macs=count_forward_macs(training),
        tools=read_tool_versions(),
        **facts,
    )


def make_training(run: BoardRun) -> Training:
    """Return network, loss and inputs of a run; for `LAST_LAYER` all other layers are frozen."""
    import torch

    from mcu.networks import LARGER, NETWORKS

    torch.manual_seed(run.seed)
    model, loss_fn, inputs = (NETWORKS | LARGER)[run.network]()
    if run.part == LAST_LAYER:
        model.eval()  # so that running statistics of frozen batch norms stay
        last = [m for m in model.modules() if isinstance(m, torch.nn.Linear)][-1]
        model.requires_grad_(requires_grad=False)
        last.requires_grad_()
    return model, loss_fn, inputs


def capture_step(run: BoardRun, training: Training) -> LoweredStep:
    """Capture the step of a network, updated by plain SGD."""
    import torch

    from poetmodel.torch.lowering.step import lower

    model, loss_fn, inputs = training
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    return lower(model, loss_fn, inputs, name=run.network, optimizer=optimizer)


def _export_and_execute(run: BoardRun, training: Training, folder: Path) -> dict[str, Any]:
    step = capture_step(run, training)
    keep_all_field = {"keep_all_bytes": checkpoint_all_peak_bytes(step.graph)}
    deployment, tried = _export_first_fitting(run, step, folder)
    if deployment is None:
        answers = {outcome["answer"] for outcome in tried}
        answer = NO if answers == {NO} else OPEN
        reason = tried[-1]["reason"]
        return {"status": answer, "reason": reason, "tried": tried, **keep_all_field}
    results = _execute_programs(run, training, deployment, folder)
    return {
        "status": YES,
        "reason": "",
        "tried": tried,
        **keep_all_field,
        **_decision_record(deployment),
        **_measurement_record(deployment, results[Target.HOST], results[BOARDS[run.board]]),
        **(
            _instruction_record(deployment, folder)
            if (run.part, run.ram) == (KEEP_ALL, ROOMY)
            else {}
        ),
    }


def _export_first_fitting(
    run: BoardRun, step: LoweredStep, folder: Path
) -> tuple[Deployment | None, list[dict[str, Any]]]:
    """Export the step with one tile size after the other until it fits.

    Returns the deployment, None if no size fits, and the outcome of each attempt. On boards with
    memory-mapped flash each size is tried without and with commits, because state that is replaced
    on flash needs commits.
    """
    may_decide = run.part == BOARD
    device = Device.load(run.board)
    is_in_place = may_decide and device.stores_in_flash and device.is_memory_mapped
    options: dict[str, Any] = {"device": run.board, "ram": run.ram}
    options |= {"paging": may_decide, "recompute": may_decide}
    outcomes: list[dict[str, Any]] = []
    attempts = product(
        TILES if may_decide else TILES[:1], (False, True) if is_in_place else (False,)
    )
    for tile, commit in attempts:
        begin_s = time.perf_counter()
        outcome: dict[str, Any] = {"commit": commit, "answer": NO, "reason": ""}
        outcome["tile"] = None if tile == "none" else tile
        options |= {"tile": tile, "commit": commit}
        deployment, is_final = None, False
        try:
            deployment = export_step(step, folder, time_limit=run.solve_s, gap=run.gap, **options)
            outcome["answer"] = YES
            if deployment.tile_bytes is not None:
                outcome["tile"] = f"{deployment.tile_bytes / 1024:g}KiB"
            if is_in_place and not commit and deployment.written_bytes:
                outcome |= {"answer": NO, "reason": "state on flash needs commits"}
                deployment = None
        except FlashError as error:
            outcome["reason"] = str(error)
            is_final = not is_in_place  # smaller tiles need more code
        except BudgetError as error:
            tiled_step = step if tile == "auto" else divide_step(step, tile)
            outcome |= {"reason": str(error), **_floor_record(tiled_step, run.board)}
        except NoScheduleError as error:
            reason = _describe_missing_storage(step, error.result.problem)
            proved = bool(reason) or error.result.status is Status.INFEASIBLE
            reason = reason or error.result.reason
            outcome |= {"answer": NO if proved else OPEN, "reason": reason}
        outcomes.append({**outcome, "seconds": time.perf_counter() - begin_s})
        if deployment is not None or is_final:
            return deployment, outcomes
    return None, outcomes


def _describe_missing_storage(step: LoweredStep, problem: Problem) -> str:
    """Describe the problem if RAM and storage together cannot hold all state; empty if they can."""
    limits, state = problem.resolved(), step.graph.state_bytes
    ram, storage = limits.usable_ram_bytes, limits.aux_limit_bytes
    if storage is None or state <= ram + storage:
        return ""
    return (
        f"there is {format_bytes(state)} of state, and room for {format_bytes(ram)} in RAM and "
        f"{format_bytes(storage)} on storage"
    )


def _floor_record(step: LoweredStep, board: str) -> dict[str, Any]:
    """Return record fields of the node with the largest working set, the minimum RAM."""
    device, graph = Device.load(board), step.graph
    is_mapped = device.storage is not None and device.storage.memory_mapped
    minimum = floor(graph, memory_mapped=is_mapped)
    return {
        "floor_node": graph.nodes[minimum.node].name,
        "floor_op": graph.nodes[minimum.node].op,
        "floor_bytes": minimum.bytes,
        "reserved_bytes": reserved_bytes(step, STACK_BYTES),
    }


def _decision_record(deployment: Deployment) -> dict[str, Any]:
    """Return the decisions of a deployment: status, gap, recomputations, transfers and costs."""
    result, plan, graph = deployment.result, deployment.plan, deployment.step.graph
    simulation = result.simulation
    if simulation is None:
        raise ValueError(f"{graph.name}: expected the result of a solve")
    table = result.problem.table
    replacements = () if table.commit is None else table.commit.replacements
    page_outs = {i: times for i, times in simulation.page_outs.items() if i not in replacements}
    transfer_costs = (table.transfer_totals(simulation.page_ins, page_outs), table.commit_totals())
    return {
        "solved": str(result.status),
        "gap": result.gap,
        "nodes_count": len(graph.nodes),
        "recomputations": sum(simulation.recomputations.values()),
        "read_bytes": simulation.read_bytes,
        "written_bytes": simulation.written_bytes,
        "transfer_s": sum(cost.time_s for cost in transfer_costs),
        "transfer_j": sum(cost.energy_j for cost in transfer_costs),
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


def _format_batch(training: Training) -> bytes:
    """Return the batch of a training in the input format of its program."""
    arrays = (
        x if x.element_size() == 1 else x.float() if x.is_floating_point() else x.int()
        for x in training[2]
    )
    return b"".join(x.contiguous().numpy().tobytes() for x in arrays)


def _execute_programs(
    run: BoardRun, training: Training, deployment: Deployment, folder: Path
) -> dict[Target, ProgramResult]:
    """Build and execute the programs for this machine and for the board; return their results."""
    settings = ["DRIVER=ram" if deployment.plan.memory_mapped else "DRIVER=file"]
    storage = deployment.device.storage
    if deployment.commit:
        settings = ["DRIVER=nor"]
        if storage is not None and storage.endurance_cycles is not None:
            settings.append(f"ENDURANCE={int(storage.endurance_cycles)}")
    results = {}
    for target in (Target.HOST, BOARDS[run.board]):
        moved_setting = (MOVED_SETTING,) if target.is_board and run.ram == LARGE else ()
        program = build_program(folder, target, settings=(*settings, *moved_setting))
        results[target] = run_program(
            program,
            target,
            folder,
            inputs=_format_batch(training),
            steps=STEPS,
            learning_rate=LEARNING_RATE,
        ).require_success()
    return results


def _measurement_record(
    deployment: Deployment, host: ProgramResult, board: ProgramResult
) -> dict[str, Any]:
    """Return the measured metrics; raise `ToolchainError` if losses differ from the host's."""
    differences = [abs(board.losses[k] - host.losses[k]) / abs(host.losses[k]) for k in host.losses]
    second_tolerance = SECOND_TOLERANCES.get(deployment.step.graph.name, LOSS_TOLERANCE)
    if (
        len(board.losses) != STEPS
        or differences[0] > LOSS_TOLERANCE
        or not max(differences) <= second_tolerance
    ):
        raise ToolchainError(f"losses: expected {host.losses}, and the board has {board.losses}")
    metrics = board.metrics
    inputs = deployment.ram_map()["inputs"]
    runtime = metrics["ram_bytes"] - deployment.arena.bytes - inputs - metrics["stack_limit_bytes"]
    device = deployment.device
    return {
        "losses": [board.losses[k] for k in sorted(board.losses)],
        "loss_difference": max(differences),
        "state_sha256": hashlib.sha256(board.state).hexdigest(),
        "ram_bytes": metrics["ram_bytes"],
        "ram_limit_bytes": metrics["ram_limit_bytes"],
        "stack_bytes": metrics["stack_bytes"],
        "stack_limit_bytes": metrics["stack_limit_bytes"],
        "input_bytes": inputs,
        "runtime_bytes": runtime,
        "flash_bytes": metrics["flash_bytes"],
        "weight_bytes": len(Weights.from_step(deployment.step).data),
        "instructions": metrics["step_instructions"],
        "clock_hz": device.clock_hz,
        "power_w": device.compute.power_w,
        **(_wear_record(deployment, metrics) if deployment.commit else {}),
    }


def _wear_record(deployment: Deployment, metrics: Mapping[str, int]) -> dict[str, Any]:
    """Return the erases of emulated flash; raise `ToolchainError` if more than predicted."""
    block_bytes = deployment.layout.erase_block_bytes
    page_erases = sum(-(-size // block_bytes) * times for size, times in deployment.page_writes)
    predicted_erases = deployment.commit_erases + page_erases
    counted_erases = metrics["storage_erases"] - deployment.commit_erases  # minus those of pm_init
    if counted_erases > STEPS * predicted_erases:
        raise ToolchainError(
            f"erases: expected {predicted_erases} in a step, and flash has {counted_erases / STEPS}"
        )
    return {
        "commits": True,
        "generations": deployment.generations,
        "stored_bytes": deployment.stored_bytes,
        "step_erases": counted_erases / STEPS,
    }


def _instruction_record(deployment: Deployment, folder: Path) -> dict[str, Any]:
    """Return the record field of multiplying nodes, with the error if counting fails."""
    try:
        return {"nodes": _count_multiplying_nodes(deployment, folder)}
    except ToolchainError as error:
        return {"nodes": [], "not_counted": str(error).splitlines()[0]}


def _count_multiplying_nodes(deployment: Deployment, folder: Path) -> list[dict[str, Any]]:
    """Execute a program that counts; return instructions and multiply-accumulates of nodes."""
    inputs = (folder / "inputs.bin").read_bytes()
    program = build_program(folder, Target.M4, settings=("PROFILE=1",))
    result = run_program(
        program, Target.M4, folder, inputs=inputs, steps=1, learning_rate=LEARNING_RATE
    )
    counts = result.require_success().node_instructions
    nodes = []
    for k, node in enumerate(deployment.step.graph.nodes):
        kernels = [c.kernel for c in deployment.step.calls[k] if c.kernel.startswith(MULTIPLIERS)]
        if kernels and node.flops:
            facts = {"node": node.name, "kernel": kernels[0], "macs": node.flops // 2}
            nodes.append({**facts, "instructions": counts[k]})
    return nodes


def read_tool_versions() -> dict[str, str]:
    """Return the versions of PyTorch, compilers and emulator, which must be installed."""
    import torch

    names = ("cc", "arm-none-eabi-gcc", "qemu-system-arm")
    versions = {"torch": torch.__version__}
    for name in names:
        process = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
        versions[name] = process.stdout.splitlines()[0]
    return versions


STUDY: Final = Study(
    name="mcu",
    kind=KIND,
    runs=runs,
    smoke_runs=smoke_runs,
    measure=measure_board,
    preloaded=(*PRELOADED, "torch"),
)
