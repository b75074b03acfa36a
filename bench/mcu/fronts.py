"""Comparison of frozen int8 fronts with float fronts: steps, agreement with PyTorch, and accuracy.

The last block and the head of a network are trained, all earlier layers are
frozen. Needs PyTorch and
torchao; steps need a C compiler, GCC for Arm and QEMU, and accuracy scikit-learn, for its digits.
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
from mcu.boards import LEARNING_RATE, LOSS_TOLERANCE, ROOMY, STEPS, tools
from poetmodel import torch as pmt
from poetmodel.device import Device
from poetmodel.export.board import Target, ToolchainError, build_program, run_program
from poetmodel.export.deployment import STACK_BYTES, reserved_bytes
from poetmodel.export.exporting import export_step
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
"""Parts: a step on an emulated board; layers of a front beside PyTorch's; accuracy of a trained
end; a step on a stored sample beside a whole step."""
NUMBERS: Final = ("float", "int8")
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
"""Trained ends that learn new digits."""
SAMPLES: Final = 2
"""Number of stored samples; each is used for one training step."""
CLASSES: Final = 5
"""Number of digit classes of the pretrained network; the others of the ten are new."""


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
    found = []
    for network, size in SIZES:
        for numbers in NUMBERS:
            found.append(FrontRun(part=STEP, network=network, size=size, numbers=numbers))
        found.append(FrontRun(part=AGREEMENT, network=network, size=size, repeats=CALIBRATION))
    found.append(FrontRun(part=ACCURACY, network="digits", size=8, repeats=SEEDS))
    found += [
        FrontRun(part=REPLAY, network=network, size=size)
        for network, size in SIZES
        if size == min(s for n, s in SIZES if n == network)
    ]
    yield from (run for run in found if run.part in parts)


def smoke_runs() -> Iterator[FrontRun]:
    """Yield each kind of run that is possible on this machine, at its smallest size."""
    yield FrontRun(part=STEP, network="mobilenetv1-vww", size=32, numbers="float")
    if find_spec("torchao"):
        yield FrontRun(part=STEP, network="mobilenetv1-vww", size=32)
        yield FrontRun(part=AGREEMENT, network="mobilenetv1-vww", size=32)
        yield FrontRun(part=REPLAY, network="mobilenetv1-vww", size=32)
        if find_spec("sklearn"):
            yield FrontRun(part=ACCURACY, network="digits", size=8)


def measure(fields: dict[str, Any], _start: None = None) -> Record:
    """Execute a run; return its record."""
    wanted = FrontRun(**fields)
    begun = time.perf_counter()
    torch.manual_seed(0)
    of_part = {
        STEP: _step_record, AGREEMENT: _of_agreement, ACCURACY: _of_accuracy, REPLAY: _of_replay
    }  # fmt: skip
    try:
        facts = of_part[wanted.part](wanted)
    except ToolchainError as error:
        facts = {"status": FAILED, "reason": str(error)}
    seconds = time.perf_counter() - begun
    return make_record(KIND, wanted.name, cell=fields, workers=1, seconds=seconds, **facts)


# -- networks --------------------------------------------------------------------------------------


def divided(wanted: FrontRun) -> tuple[nn.Sequential, nn.Sequential, list[torch.Tensor]]:
    """Return front and end of a network after some batches in training mode, and the batches."""
    model, _, _ = networks.NETWORKS[wanted.network]()
    batches = [torch.randn(4, 3, wanted.size, wanted.size) for _ in range(CALIBRATION)]
    with torch.no_grad():
        for batch in batches:
            model(batch)  # in training mode, for the statistics of batch norms
    model.eval()
    end = ENDS[wanted.network]
    return model[:-end].requires_grad_(requires_grad=False), model[-end:], batches


def training(wanted: FrontRun) -> Training:
    """Return a network with a frozen front, the loss and a batch of one."""
    front, end, batches = divided(wanted)
    first = front if wanted.numbers == "float" else pmt.quantized(front, batches)
    inputs = (batches[0][:1].clone(), torch.tensor([1]))
    return nn.Sequential(first, end), functional.cross_entropy, inputs


# -- a step on a board -----------------------------------------------------------------------------


def _lower_with_sgd(wanted: FrontRun) -> tuple[LoweredStep, nn.Module, tuple[torch.Tensor, ...]]:
    """Return the step of a network with SGD, the network, and a batch of one."""
    model, loss_fn, inputs = training(wanted)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    step = lower(model, loss_fn, inputs, name=wanted.network, optimizer=optimizer)
    return step, model, inputs


def _step_record(wanted: FrontRun) -> dict[str, Any]:
    step, model, inputs = _lower_with_sgd(wanted)
    trained = [p for p in model.parameters() if p.requires_grad]
    constants = {name for name in step.values if name not in step.graph.tensor_index}
    return {
        "parameters": sum(p.numel() for p in trained),
        **_least(step),
        "constant_bytes": sum(step.buffers[name].bytes for name in constants),
        "weight_bytes": len(Weights.from_step(step).data),
        "exactness": step.graph.exactness,
        "tools": tools(),
        **_ran(step, inputs),
    }


def _least(step: LoweredStep) -> dict[str, Any]:
    """Return the minimum RAM, whole and in tiles, and the reserved bytes [B]."""
    tiles = divide_step(step, "32KiB")
    return {
        "floor_bytes": floor(step.graph).bytes,
        "tiled_floor_bytes": floor(tiles.graph).bytes,
        "reserved_bytes": reserved_bytes(step, STACK_BYTES),
    }


def _roomy() -> Device:
    """Return the board with enough flash for any program."""
    board = Device.load(BOARD)
    if board.flash is None:
        raise ToolchainError(f"{BOARD}: expected a board whose flash is known")
    return replace(board, flash=replace(board.flash, size_bytes=2**30))


def _ran(step: LoweredStep, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Execute the keep-all program on two cores; return its sizes and counts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options: dict[str, Any] = {"paging": False, "recompute": False, "tile": "none"}
        deployment = export_step(step, folder, device=_roomy(), ram=ROOMY, **options)
        given: dict[str, Any] = {
            "inputs": _bytes_of(inputs),
            "learning_rate": LEARNING_RATE,
            "time_limit_s": EMULATION_S,
        }
        found = {}
        for target in (Target.HOST, Target.M4):
            program = build_program(folder, target, settings=["DRIVER=file"])
            found[target] = run_program(
                program, target, folder, steps=STEPS, **given
            ).require_success()
        front = {str(t): _of_front(step, folder, t, given) for t in (Target.M3, Target.M4)}
        device = deployment.device
    host, board = found[Target.HOST], found[Target.M4]
    apart = [abs(board.losses[k] - host.losses[k]) / abs(host.losses[k]) for k in host.losses]
    if max(apart) > LOSS_TOLERANCE or device is None:
        raise ToolchainError(f"losses: expected {host.losses}, and the board has {board.losses}")
    figures = board.metrics
    return {
        "ram_bytes": figures["ram_bytes"],
        "flash_bytes": figures["flash_bytes"],
        "instructions": figures["step_instructions"],
        "front_instructions": front,
        "clock_hz": device.clock_hz,
        "power_w": device.compute.power_w,
        "losses": [board.losses[k] for k in sorted(board.losses)],
    }


def _bytes_of(inputs: tuple[torch.Tensor, ...]) -> bytes:
    """Return a batch in the input format of programs."""
    arrays = (x.float() if x.is_floating_point() else x.int() for x in inputs)
    return b"".join(x.contiguous().numpy().tobytes() for x in arrays)


def _of_replay(wanted: FrontRun) -> dict[str, Any]:
    """Return the costs of steps on batches and on stored samples, by one program on a board."""
    step, _, inputs = _lower_with_sgd(wanted)
    batches = [_bytes_of((inputs[0] * (1 + k), inputs[1])) for k in range(SAMPLES)]
    given: dict[str, Any] = {
        "inputs": b"".join(batches),
        "steps": SAMPLES,
        "learning_rate": LEARNING_RATE,
        "time_limit_s": EMULATION_S,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options: dict[str, Any] = {"paging": False, "recompute": False, "tile": "none"}
        made = export_step(step, folder, device=_roomy(), ram=ROOMY, replay=SAMPLES, **options)
        program = build_program(folder, Target.M4, settings=["DRIVER=file"])
        whole = run_program(program, Target.M4, folder, **given).require_success()
        stored = run_program(
            program, Target.M4, folder, words=("stored",), **given
        ).require_success()
        said = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["replay"]
    if (stored.losses, stored.state) != (whole.losses, whole.state) or made.replay is None:
        raise ToolchainError(
            f"stored steps: expected {whole.losses}, and they have {stored.losses}"
        )
    return {
        "sample_bytes": said["sample_bytes"],
        "output_bytes": sum(made.replay.tensor_bytes[: len(made.replay.front.outputs)]),
        "image_bytes": inputs[0].numel(),
        "ram_bytes": said["step"]["ram_bytes"],
        "stored_ram_bytes": said["stored_step"]["ram_bytes"],
        "instructions": whole.metrics["step_instructions"],
        "stored_instructions": stored.metrics["step_instructions"],
        "tools": tools(),
    }


def _of_front(step: LoweredStep, folder: Path, target: Target, given: dict[str, Any]) -> int | None:
    """Return the instructions of the nodes of a front; None if they cannot be counted.

    A program that counts its nodes stops on the emulated board with more than 2 MiB of RAM.
    """
    program = build_program(folder, target, settings=("PROFILE=1",))
    try:
        counts = (
            run_program(program, target, folder, steps=1, **given)
            .require_success()
            .node_instructions
        )
    except ToolchainError:
        return None
    return sum(counts[k] for k, node in enumerate(step.graph.nodes) if node.name.startswith("0."))


# -- layer by layer, beside PyTorch ----------------------------------------------------------------


class _Values(fx.Interpreter):  # type: ignore[misc, unused-ignore]
    """FX interpreter that stores the value of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = self.values[n.name] = super().run_node(n)
        return value


def steps_apart(
    front: pmt.QuantizedFront, module: fx.GraphModule, x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return each layer's difference from PyTorch's, for the same operands [steps of a byte].

    `module` is the converted module from which `front` was made.
    """
    run_of = _Values(module)
    with torch.no_grad():
        run_of.run(x)
    nodes = {node.name: node for node in module.graph.nodes}
    less = {torch.int8: 0, torch.uint8: 128}

    def value(name: str) -> torch.Tensor:
        made: torch.Tensor = run_of.values[name].to(torch.int32) - less[nodes[name].args[5]]
        return made.permute(0, *range(2, made.ndim), 1).to(torch.int8).contiguous()

    apart = {}
    for wire in front.wires[:-1]:  # the last one dequantizes
        operands = [value(front.wires[n - 1].node) if n else x for n in wire.inputs]
        with torch.no_grad():
            found = front.get_submodule(wire.layer)(*operands)
        apart[wire.layer] = (found.flatten(1).int() - value(wire.node).flatten(1).int()).abs()
    return apart


def converted(front: nn.Module, batches: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Return a front converted by torchao's quantizer for XNNPACK."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.testing.pt2e import _xnnpack_quantizer as xnnpack

    config = xnnpack.get_symmetric_quantization_config(is_per_channel=True)
    quantizer = xnnpack.XNNPACKQuantizer().set_global(config)
    prepared = prepare_pt2e(torch.export.export(front, (batches[0],)).module(), quantizer)
    with torch.no_grad():
        for batch in batches:
            prepared(batch)
    made: fx.GraphModule = convert_pt2e(prepared)
    return made


def _of_agreement(wanted: FrontRun) -> dict[str, Any]:
    front, _, batches = divided(wanted)
    module = converted(front, batches)
    mine = pmt.quantized(module)
    values = differ = most = 0
    for batch in batches[: wanted.repeats]:
        for apart in steps_apart(mine, module, torch.randn_like(batch)).values():
            values += apart.numel()
            differ += int((apart > 0).sum())
            most = max(most, int(apart.max()))
    layers = len(mine.wires) - 1
    return {"layers": layers, "values": values, "differ": differ, "most_steps": most}


# -- accuracy --------------------------------------------------------------------------------------


def digits_network() -> tuple[nn.Sequential, nn.Sequential]:
    """Return front and end of a small network for images of 8 x 8 pixels."""
    front = [*networks.convolution(1, 16), nn.ReLU(), *networks.separable(16, 32, 2)]
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    return (
        nn.Sequential(*front, *networks.separable(32, 32)),
        nn.Sequential(*networks.separable(32, 64), *end),
    )


def _digits(seed: int, *, new: bool) -> tuple[torch.Tensor, ...]:
    """Return images and labels for training and for testing, of the old or the new classes."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    chosen = (y >= CLASSES) == new
    images = torch.from_numpy(x[chosen]).float().view(-1, 1, 8, 8) / 8 - 1
    labels = torch.from_numpy(y[chosen]) % CLASSES
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    cut = 2 * len(order) // 3
    return images[order[:cut]], labels[order[:cut]], images[order[cut:]], labels[order[cut:]]


def _learn(
    model: nn.Module, trained: nn.Module, data: tuple[torch.Tensor, ...], rate: float = 0.02
) -> float:
    """Train the module `trained` of a model by plain SGD; return the accuracy on test samples."""
    x, y, other, labels = data
    optimizer = torch.optim.SGD(trained.parameters(), lr=rate)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(y)).split(8):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(other).argmax(1) == labels
    return float(right.float().mean())


def _of_accuracy(wanted: FrontRun) -> dict[str, Any]:
    ways = ("all of it, first half", *ENDINGS)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(wanted.repeats):
        torch.manual_seed(seed)
        front, end = digits_network()
        whole, data = nn.Sequential(front, end), _digits(seed, new=False)
        found[ways[0]].append(_learn(whole, whole, data))
        front.requires_grad_(requires_grad=False)
        mine = pmt.quantized(front, data[0].split(64))
        new = _digits(seed, new=True)
        for way, first in zip(ENDINGS[:2], (front, mine), strict=True):
            torch.manual_seed(seed)
            own = copy.deepcopy(
                end
            )  # in evaluation mode, so that batch norms keep their statistics
            found[way].append(_learn(nn.Sequential(first, own), own, new))
        torch.manual_seed(seed)
        own = copy.deepcopy(end)
        found[ENDINGS[2]].append(_learn(nn.Sequential(front, own), own[-1], new))
    return {"accuracy": found, "mean": {way: statistics.mean(each) for way, each in found.items()}}


STUDY: Final = Study(
    name="fronts",
    kind=KIND,
    runs=runs,
    smoke_runs=smoke_runs,
    measure=measure,
    preloaded=(*PRELOADED, "torch"),
)
