"""Comparison of frozen int8 fronts with float fronts: steps, agreement with PyTorch, and accuracy.

The last block and the head of a network are trained, all earlier layers are frozen. Needs PyTorch
and torchao; steps need a C compiler, GCC for Arm and QEMU, and accuracy needs scikit-learn, for its
digits.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx, nn
from torch.nn import functional

from harness import PRELOADED, RecordedRun, Study, make_record
from mcu import networks
from mcu.boards import LEARNING_RATE, LOSS_TOLERANCE, ROOMY, STEPS, read_tool_versions
from poetmodel import torch as pmt
from poetmodel.device import Device
from poetmodel.export.board import Target, ToolchainError, build_program, run_program
from poetmodel.export.exporting import export_step
from poetmodel.export.reserves import STACK_BYTES, reserved_bytes
from poetmodel.graph import floor
from poetmodel.lowered.step import Weights
from poetmodel.sweeps.measurement import FAILED
from poetmodel.tiling.choice import divide_step
from poetmodel.torch.lowering.step import lower

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mcu.networks import Training
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.sweeps.measurement import Record

KIND: Final = "int8 front"
"""Kind of the records."""
STEP, AGREEMENT, ACCURACY, REPLAY = PARTS = ("step", "agreement", "accuracy", "replay")
"""Parts: a step on an emulated board; layers of a front compared with PyTorch's; accuracy of a
trained end; a step on a stored sample compared with a whole step."""
NUMBERS: Final = ("float", "int8")
"""Number types of a front."""
ENDS: Final = {"mobilenetv2-035": 6, "mobilenetv1-vww": 9}
"""Number of last modules that are trained: the last block and the head of each network."""
SIZES: Final = (
    ("mobilenetv2-035", 96), ("mobilenetv2-035", 128), ("mobilenetv2-035", 160),
    ("mobilenetv1-vww", 96),
)  # fmt: skip
"""Networks with height and width of their images."""
BOARD: Final = "nrf52840"
EMULATION_S: Final = 600.0
"""Limit of each execution on an emulated core; floats are slow on a Cortex-M3 [s]."""
CALIBRATION: Final = 4
"""Number of batches for the ranges of activations and the statistics of batch norms."""
SEEDS: Final = 5
"""Number of trainings of an end, each with other weights and samples."""
EPOCHS: Final = 30
ENDINGS: Final = (
    "the end, second half, float front",
    "the end, second half, int8 front",
    "the last layer, second half, float front",
)
"""Trainings of an end on the new digits."""
SAMPLES: Final = 2
"""Number of stored samples, each for one training step."""
CLASSES: Final = 5
"""Number of digit classes of the pretrained network; the other five are new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRun(RecordedRun):
    """One measurement."""

    part: str
    """One of `PARTS`."""
    network: str
    """One of `ENDS`; "digits" for accuracy."""
    size: int
    """Height and width of images."""
    numbers: str = "int8"
    """Number type of the front, one of `NUMBERS`."""
    repeats: int = 1
    """Number of compared batches, or of trainings of an end."""
    limit_s: float = 1200.0
    """Limit of the whole run [s]."""

    @property
    def name(self) -> str:
        """Name of the run in records."""
        return f"{self.part} | {self.network} | {self.size} | {self.numbers}"


def runs(parts: tuple[str, ...] = PARTS) -> Iterator[FrontRun]:
    """Yield the measurements of some parts."""
    all_runs = []
    for network, size in SIZES:
        for numbers in NUMBERS:
            all_runs.append(FrontRun(part=STEP, network=network, size=size, numbers=numbers))
        all_runs.append(FrontRun(part=AGREEMENT, network=network, size=size, repeats=CALIBRATION))
    all_runs.append(FrontRun(part=ACCURACY, network="digits", size=8, repeats=SEEDS))
    all_runs += [
        FrontRun(part=REPLAY, network=network, size=size)
        for network, size in SIZES
        if size
        == min(other_size for other_network, other_size in SIZES if other_network == network)
    ]
    yield from (run for run in all_runs if run.part in parts)


def smoke_runs() -> Iterator[FrontRun]:
    """Yield each kind of run, at its smallest size, whose packages are installed."""
    yield FrontRun(part=STEP, network="mobilenetv1-vww", size=32, numbers="float")
    if find_spec("torchao"):
        yield FrontRun(part=STEP, network="mobilenetv1-vww", size=32)
        yield FrontRun(part=AGREEMENT, network="mobilenetv1-vww", size=32)
        yield FrontRun(part=REPLAY, network="mobilenetv1-vww", size=32)
        if find_spec("sklearn"):
            yield FrontRun(part=ACCURACY, network="digits", size=8)


def measure(fields: dict[str, Any], _start: None = None) -> Record:
    """Execute a run; return its record, of a failure if tools fail."""
    run = FrontRun(**fields)
    begin_s = time.perf_counter()
    torch.manual_seed(0)
    functions = {
        STEP: _step_record,
        AGREEMENT: _agreement_record,
        ACCURACY: _accuracy_record,
        REPLAY: _replay_record,
    }
    try:
        facts = functions[run.part](run)
    except ToolchainError as error:
        facts = {"status": FAILED, "reason": str(error)}
    seconds = time.perf_counter() - begin_s
    return make_record(KIND, run.name, cell=fields, workers=1, seconds=seconds, **facts)


# -- networks --------------------------------------------------------------------------------------


def split_network(run: FrontRun) -> tuple[nn.Sequential, nn.Sequential, list[torch.Tensor]]:
    """Return frozen front and end of a network after `CALIBRATION` batches, and these batches."""
    model, _, _ = networks.NETWORKS[run.network]()
    batches = [torch.randn(4, 3, run.size, run.size) for _ in range(CALIBRATION)]
    with torch.no_grad():
        for batch in batches:
            model(batch)  # in training mode, for the statistics of batch norms
    model.eval()
    end_size = ENDS[run.network]
    return model[:-end_size].requires_grad_(requires_grad=False), model[-end_size:], batches


def make_training(run: FrontRun) -> Training:
    """Return a network with a frozen front, the loss and a batch of one."""
    front, end, batches = split_network(run)
    run_front = front if run.numbers == "float" else pmt.quantized(front, batches)
    inputs = (batches[0][:1].clone(), torch.tensor([1]))
    return nn.Sequential(run_front, end), functional.cross_entropy, inputs


# -- a step on a board -----------------------------------------------------------------------------


def _lower_with_sgd(run: FrontRun) -> tuple[LoweredStep, nn.Module, tuple[torch.Tensor, ...]]:
    """Capture the step of a network with SGD; return it, the network, and a batch of one."""
    model, loss_fn, inputs = make_training(run)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    step = lower(model, loss_fn, inputs, name=run.network, optimizer=optimizer)
    return step, model, inputs


def _step_record(run: FrontRun) -> dict[str, Any]:
    step, model, inputs = _lower_with_sgd(run)
    trained = [p for p in model.parameters() if p.requires_grad]
    constants = {name for name in step.values if name not in step.graph.tensor_index}
    return {
        "parameters": sum(p.numel() for p in trained),
        **_floor_record(step),
        "constant_bytes": sum(step.buffers[name].bytes for name in constants),
        "weight_bytes": len(Weights.from_step(step).data),
        "exactness": step.graph.exactness,
        "tools": read_tool_versions(),
        **_execute_programs(step, inputs),
    }


def _floor_record(step: LoweredStep) -> dict[str, Any]:
    """Return the minimum RAM, whole and in tiles, and the reserved bytes [B]."""
    tiles = divide_step(step, "32KiB")
    return {
        "floor_bytes": floor(step.graph).bytes,
        "tiled_floor_bytes": floor(tiles.graph).bytes,
        "reserved_bytes": reserved_bytes(step, STACK_BYTES),
    }


def _load_roomy_board() -> Device:
    """Return the device `BOARD` with enough flash for any program."""
    board = Device.load(BOARD)
    if board.flash is None:
        raise ToolchainError(f"{BOARD}: expected a board whose flash is known")
    return replace(board, flash=replace(board.flash, size_bytes=2**30))


def _execute_programs(step: LoweredStep, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Execute the keep-all program on the host and on a board; return the board's sizes and counts.

    Raises `ToolchainError` if losses differ by more than `LOSS_TOLERANCE`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export_options: dict[str, Any] = {"paging": False, "recompute": False, "tile": "none"}
        deployment = export_step(
            step, folder, device=_load_roomy_board(), ram=ROOMY, **export_options
        )
        execution_options: dict[str, Any] = {
            "inputs": _format_batch(inputs),
            "learning_rate": LEARNING_RATE,
            "time_limit_s": EMULATION_S,
        }
        results = {}
        for target in (Target.HOST, Target.M4):
            program = build_program(folder, target, settings=["DRIVER=file"])
            results[target] = run_program(
                program, target, folder, steps=STEPS, **execution_options
            ).require_success()
        front_instructions = {
            str(t): _count_front_instructions(step, folder, t, execution_options)
            for t in (Target.M3, Target.M4)
        }
        device = deployment.device
    host, board = results[Target.HOST], results[Target.M4]
    differences = [abs(board.losses[k] - host.losses[k]) / abs(host.losses[k]) for k in host.losses]
    if max(differences) > LOSS_TOLERANCE or device is None:
        raise ToolchainError(f"losses: expected {host.losses}, and the board has {board.losses}")
    metrics = board.metrics
    return {
        "ram_bytes": metrics["ram_bytes"],
        "flash_bytes": metrics["flash_bytes"],
        "instructions": metrics["step_instructions"],
        "front_instructions": front_instructions,
        "clock_hz": device.clock_hz,
        "power_w": device.compute.power_w,
        "losses": [board.losses[k] for k in sorted(board.losses)],
    }


def _format_batch(inputs: tuple[torch.Tensor, ...]) -> bytes:
    """Return a batch in the input format of programs."""
    arrays = (x.float() if x.is_floating_point() else x.int() for x in inputs)
    return b"".join(x.contiguous().numpy().tobytes() for x in arrays)


def _replay_record(run: FrontRun) -> dict[str, Any]:
    """Return the costs of steps on batches and on stored samples, by one program on a board.

    Raises `ToolchainError` unless losses and state of both are equal.
    """
    step, _, inputs = _lower_with_sgd(run)
    batches = [_format_batch((inputs[0] * (1 + k), inputs[1])) for k in range(SAMPLES)]
    execution_options: dict[str, Any] = {
        "inputs": b"".join(batches),
        "steps": SAMPLES,
        "learning_rate": LEARNING_RATE,
        "time_limit_s": EMULATION_S,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export_options: dict[str, Any] = {"paging": False, "recompute": False, "tile": "none"}
        deployment = export_step(
            step, folder, device=_load_roomy_board(), ram=ROOMY, replay=SAMPLES, **export_options
        )
        program = build_program(folder, Target.M4, settings=["DRIVER=file"])
        whole = run_program(program, Target.M4, folder, **execution_options).require_success()
        stored = run_program(
            program, Target.M4, folder, words=("stored",), **execution_options
        ).require_success()
        replay_sizes = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["replay"]
    if (stored.losses, stored.state) != (whole.losses, whole.state) or deployment.replay is None:
        raise ToolchainError(
            f"stored steps: expected {whole.losses}, and they have {stored.losses}"
        )
    return {
        "sample_bytes": replay_sizes["sample_bytes"],
        "output_bytes": sum(deployment.replay.tensor_bytes[: len(deployment.replay.front.outputs)]),
        "image_bytes": inputs[0].numel(),
        "ram_bytes": replay_sizes["step"]["ram_bytes"],
        "stored_ram_bytes": replay_sizes["stored_step"]["ram_bytes"],
        "instructions": whole.metrics["step_instructions"],
        "stored_instructions": stored.metrics["step_instructions"],
        "tools": read_tool_versions(),
    }


def _count_front_instructions(
    step: LoweredStep, folder: Path, target: Target, execution_options: dict[str, Any]
) -> int | None:
    """Return the instructions of the nodes of a front; None if counting fails.

    It fails for programs with more than 2 MiB of RAM, in which the emulated board stops.
    """
    program = build_program(folder, target, settings=("PROFILE=1",))
    try:
        counts = (
            run_program(program, target, folder, steps=1, **execution_options)
            .require_success()
            .node_instructions
        )
    except ToolchainError:
        return None
    return sum(counts[k] for k, node in enumerate(step.graph.nodes) if node.name.startswith("0."))


# -- comparison with PyTorch, layer by layer -------------------------------------------------------


class _Values(fx.Interpreter):  # type: ignore[misc, unused-ignore]
    """FX interpreter that stores the value of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = self.values[n.name] = super().run_node(n)
        return value


def compare_layers(
    front: pmt.QuantizedFront, module: fx.GraphModule, x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the absolute differences of each layer's results from PyTorch's [steps of a byte].

    Both compute with equal operands. `module` is the converted module from which `front` was made,
    and `x` a batch. Differences are by layer name.
    """
    interpreter = _Values(module)
    with torch.no_grad():
        interpreter.run(x)
    nodes = {node.name: node for node in module.graph.nodes}
    offsets = {torch.int8: 0, torch.uint8: 128}

    def to_int8(name: str) -> torch.Tensor:
        result: torch.Tensor = (
            interpreter.values[name].to(torch.int32) - offsets[nodes[name].args[5]]
        )
        return result.permute(0, *range(2, result.ndim), 1).to(torch.int8).contiguous()

    differences = {}
    for wire in front.wires[:-1]:  # the last one dequantizes
        operands = [to_int8(front.wires[n - 1].node) if n else x for n in wire.inputs]
        with torch.no_grad():
            results = front.get_submodule(wire.layer)(*operands)
        differences[wire.layer] = (
            results.flatten(1).int() - to_int8(wire.node).flatten(1).int()
        ).abs()
    return differences


def convert_front(front: nn.Module, batches: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Export a front, calibrate it with batches, and convert it by torchao's XNNPACK quantizer."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.testing.pt2e import _xnnpack_quantizer as xnnpack

    config = xnnpack.get_symmetric_quantization_config(is_per_channel=True)
    quantizer = xnnpack.XNNPACKQuantizer().set_global(config)
    prepared = prepare_pt2e(torch.export.export(front, (batches[0],)).module(), quantizer)
    with torch.no_grad():
        for batch in batches:
            prepared(batch)
    module: fx.GraphModule = convert_pt2e(prepared)
    return module


def _agreement_record(run: FrontRun) -> dict[str, Any]:
    front, _, batches = split_network(run)
    module = convert_front(front, batches)
    own_front = pmt.quantized(module)
    value_count = different_count = max_steps = 0
    for batch in batches[: run.repeats]:
        for differences in compare_layers(own_front, module, torch.randn_like(batch)).values():
            value_count += differences.numel()
            different_count += int((differences > 0).sum())
            max_steps = max(max_steps, int(differences.max()))
    layers = len(own_front.wires) - 1
    return {
        "layers": layers,
        "values": value_count,
        "differ": different_count,
        "most_steps": max_steps,
    }


# -- accuracy --------------------------------------------------------------------------------------


def make_digits_network() -> tuple[nn.Sequential, nn.Sequential]:
    """Return front and end of a small network for images of 8 x 8 pixels."""
    front = [*networks.convolution(1, 16), nn.ReLU(), *networks.separable(16, 32, 2)]
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    return (
        nn.Sequential(*front, *networks.separable(32, 32)),
        nn.Sequential(*networks.separable(32, 64), *end),
    )


def _load_digits(seed: int, *, new: bool) -> tuple[torch.Tensor, ...]:
    """Return images and labels for training, then for testing, of the old or the new classes."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    is_chosen = (y >= CLASSES) == new
    images = torch.from_numpy(x[is_chosen]).float().view(-1, 1, 8, 8) / 8 - 1
    labels = torch.from_numpy(y[is_chosen]) % CLASSES
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    split_point = 2 * len(order) // 3
    return (
        images[order[:split_point]],
        labels[order[:split_point]],
        images[order[split_point:]],
        labels[order[split_point:]],
    )


def _train(
    model: nn.Module, trained: nn.Module, data: tuple[torch.Tensor, ...], rate: float = 0.02
) -> float:
    """Train the module `trained` of a model by plain SGD; return the accuracy on test samples.

    The model is in evaluation mode afterwards. `data` is the result of `_load_digits`.
    """
    x, y, test_images, test_labels = data
    optimizer = torch.optim.SGD(trained.parameters(), lr=rate)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(y)).split(8):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        is_right = model(test_images).argmax(1) == test_labels
    return float(is_right.float().mean())


def _accuracy_record(run: FrontRun) -> dict[str, Any]:
    ways = ("all of it, first half", *ENDINGS)
    accuracies: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(run.repeats):
        torch.manual_seed(seed)
        front, end = make_digits_network()
        network, data = nn.Sequential(front, end), _load_digits(seed, new=False)
        accuracies[ways[0]].append(_train(network, network, data))
        front.requires_grad_(requires_grad=False)
        int8_front = pmt.quantized(front, data[0].split(64))
        new_data = _load_digits(seed, new=True)
        for way, trial_front in zip(ENDINGS[:2], (front, int8_front), strict=True):
            torch.manual_seed(seed)
            own_end = copy.deepcopy(
                end
            )  # in evaluation mode, so that statistics of batch norms stay
            accuracies[way].append(_train(nn.Sequential(trial_front, own_end), own_end, new_data))
        torch.manual_seed(seed)
        own_end = copy.deepcopy(end)
        accuracies[ENDINGS[2]].append(_train(nn.Sequential(front, own_end), own_end[-1], new_data))
    return {
        "accuracy": accuracies,
        "mean": {way: statistics.mean(values) for way, values in accuracies.items()},
    }


STUDY: Final = Study(
    name="fronts",
    kind=KIND,
    runs=runs,
    smoke_runs=smoke_runs,
    measure=measure,
    preloaded=(*PRELOADED, "torch"),
)
