"""Inference on a device: what `pm_infer` writes is what PyTorch says in evaluation mode."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import poetmodel.torch as pmt  # noqa: E402
from kit.export_agreement import QUICK_BUILD  # noqa: E402
from kit.kernel_calls import Memory  # noqa: E402
from kit.programs import needs  # noqa: E402
from kit.rotation import rotating  # noqa: E402
from kit.shared_objects import build  # noqa: E402
from poetmodel.errors import BudgetError, InputError  # noqa: E402
from poetmodel.export.board import Target, run  # noqa: E402
from poetmodel.export.deployment import STACK_BYTES, reserved_bytes  # noqa: E402
from poetmodel.export.exporting import export_step  # noqa: E402
from poetmodel.export.io import load_step, save_step  # noqa: E402
from poetmodel.export.step import Ref  # noqa: E402
from poetmodel.export.tiles import tiled  # noqa: E402
from poetmodel.graph import floor  # noqa: E402
from poetmodel.torch.errors import CaptureError  # noqa: E402
from poetmodel.torch.lowering.inference import with_inference  # noqa: E402
from poetmodel.torch.lowering.step import lower  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.export.deployment import Deployment
    from poetmodel.export.step import LoweredStep

pytestmark = pytest.mark.torch

STEPS = 3
LABELS: Final = torch.tensor([3, 1])


class Convolutional(nn.Module):
    """Convolutions with batch norm, and dropout: in evaluation mode it computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 10, 3), nn.BatchNorm2d(10), nn.ReLU(), nn.Flatten(),
            nn.Dropout(0.4), nn.Linear(40, 4),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers make."""
        return self.layers(x)


class Perceptron(nn.Module):
    """Linear layers whose result is a view, with other constants in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers make."""
        factor = torch.tensor([1.0, 2.0, 3.0, 4.0]) * 0.5
        found = self.layers(x) * factor
        if not self.training:
            found = found * torch.tensor([4.0, 3.0, 2.0, 1.0]) + self.shift
        return found.t().contiguous().t()


def inputs_of(model: nn.Module, batches: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches for a network."""
    shape = (2, 2, 8, 8) if isinstance(model, Convolutional) else (2, 6)
    return [(torch.randn(shape), LABELS) for _ in range(batches)]


NETWORKS: Final = {"convolutional": Convolutional, "perceptron": Perceptron}


def captured(
    model: nn.Module, *, trains: bool = True, loss: Any = functional.cross_entropy
) -> LoweredStep:
    """Return a step with its inference."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if trains else None
    (inputs,) = inputs_of(model)
    step = lower(model, loss, inputs, optimizer=optimizer)
    return with_inference(step, model, loss, inputs)


def tight_ram(step: LoweredStep, more_bytes: int = 128) -> int:
    """Return little more RAM than the least that the largest node needs."""
    return floor(step.graph).bytes + reserved_bytes(step, STACK_BYTES) + more_bytes


def homes(folder: Path) -> set[str]:
    """Return where state is."""
    document = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return {home for state in document["states"] for home in state["home"].split("+")}


def file_of(batches: list[tuple[torch.Tensor, torch.Tensor]], real: str) -> bytes:
    """Return the file of inputs."""
    return b"".join(
        x.numpy().astype(real).tobytes() + y.int().numpy().tobytes() for x, y in batches
    )


def check_inference(
    model: nn.Module,
    deployment: Deployment,
    folder: Path,
    target: Target = Target.HOST_DOUBLE,
    settings: tuple[str, ...] = (),
    tolerance: float = 1e-12,
) -> None:
    """Train some steps, and hold the inference to PyTorch with the state that they left."""
    needs(target)
    batches = inputs_of(model, 2)
    real = "<f8" if target is Target.HOST_DOUBLE else "<f4"
    quick = (QUICK_BUILD,) if target is Target.HOST_DOUBLE else ()
    program = build(folder, target, settings=("POISON=1", *quick, *settings))
    given: dict[str, Any] = {"inputs": file_of(batches, real), "steps": STEPS, "learning_rate": 0.1}
    with_it = run(program, target, folder, words=("infer=outputs.bin",), **given)
    found = np.fromfile(folder / "outputs.bin", real).reshape(len(LABELS), 4)
    (folder / "pm_storage.bin").unlink(missing_ok=True)
    without = run(program, target, folder, **given).require_success()
    assert with_it.require_success().state == without.state
    twin = copy.deepcopy(model).double().eval()
    if deployment.step.learning_rate is not None:
        twin.load_state_dict(state_of(folder, without.state, real), strict=False)
    with torch.no_grad():
        expected = twin(batches[0][0].double()).numpy()
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def state_of(folder: Path, data: bytes, real: str) -> dict[str, torch.Tensor]:
    """Return the state that a program has written, by name."""
    document = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    found, place = {}, 0
    for state in document["states"]:
        kind = np.dtype("<i4" if state["dtype"] == "int32" else real)
        values = np.frombuffer(data, kind, int(np.prod(state["shape"], dtype=int)), place)
        found[state["name"]] = torch.tensor(values.reshape(state["shape"]))
        place += values.nbytes
    assert place == len(data)
    return found


PLACES: Final[dict[str, tuple[str, dict[str, Any], tuple[str, ...]]]] = {
    "ram": ("ram", {"ram": "64KiB", "paging": False}, ()),
    "storage": ("storage", {}, ()),
    "dma": ("storage", {"device": "stm32h743"}, ("LATE=1",)),
    "mapped": ("mapped", {"device": "nano33ble"}, ("DRIVER=ram",)),
    "commit": ("storage", {"commit": True}, ()),
    "tiles": ("storage", {"tile": 200}, ()),
}
"""Where state is: its home, options, and what the program is built with."""


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("network", rotating(NETWORKS, ("convolutional",)))
def test_inference_after_steps_is_that_of_torch(network: str, place: str, tmp_path: Path) -> None:
    """It reads the state that the steps left, wherever the home is, and leaves it as it is."""
    torch.manual_seed(0)
    model = NETWORKS[network]()
    step = captured(model)
    home, options, settings = PLACES[place]
    # Offsets at cache lines take more than the sum of the sizes.
    options = {"ram": tight_ram(step, 640 if place == "dma" else 128)} | options
    deployment = export_step(step, tmp_path, infer=True, gap=0.5, **options)
    assert home in homes(tmp_path)
    check_inference(model, deployment, tmp_path, settings=settings)


@pytest.mark.parametrize("tile_bytes", [None, 200])
@pytest.mark.parametrize("network", NETWORKS)
def test_inference_computes_what_torch_does(network: str, tile_bytes: int | None) -> None:
    """Its calls, in order, make what the model returns in evaluation mode, in double."""
    torch.manual_seed(0)
    model = NETWORKS[network]()
    step = captured(model)
    step = step if tile_bytes is None else tiled(step, tile_bytes)
    ((x, y),) = inputs_of(model)
    with torch.no_grad():
        expected = copy.deepcopy(model).double().eval()(x.double()).flatten()
    np.testing.assert_allclose(computed(step, (x, y)), expected, rtol=1e-12, atol=1e-12)


def computed(step: LoweredStep, inputs: tuple[torch.Tensor, ...]) -> np.ndarray:
    """Return what the calls of an inference make, one after the other, in double."""
    inference = step.inference
    assert inference is not None
    assert inference.output is not None
    memory = Memory(inference.buffers)
    for name in memory.buffers.keys() & (step.values.keys() | inference.values.keys()):
        memory[name][...] = {**step.values, **inference.values}[name]
    for value, given in zip(inference.inputs, inputs, strict=False):
        memory[value.pieces[0].buffer][...] = given.flatten()
    for node, calls in zip(inference.graph.nodes, inference.calls, strict=True):
        memory.execute(calls, workspace_bytes=node.workspace_bytes)
    return memory[inference.output.pieces[0].buffer]


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_inference_without_optimizer_reads_flash(network: str, tmp_path: Path) -> None:
    """Where nothing updates, all state is constant, and the inference is that of the export."""
    torch.manual_seed(0)
    model = NETWORKS[network]()
    deployment = export_step(captured(model, trains=False), tmp_path, infer=True)
    assert homes(tmp_path) == {"flash"}
    check_inference(model, deployment, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", [Target.M3, Target.M4, Target.M7])
def test_inference_runs_on_boards(target: Target, tmp_path: Path) -> None:
    """In float, on emulated boards, with part of the state on storage."""
    torch.manual_seed(0)
    model = Convolutional()
    step = captured(model)
    deployment = export_step(step, tmp_path, infer=True, ram=tight_ram(step, 1024), gap=0.5)
    assert "storage" in homes(tmp_path)
    check_inference(model, deployment, tmp_path, target, tolerance=1e-5)


class Wide(nn.Module):
    """A network whose evaluation takes more room than its training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers make."""
        if self.training:
            return self.layer(x)
        first = x.repeat(1, 40)
        second = (first.exp() * 0.1).repeat(1, 2).sum(1, keepdim=True)
        third = (first * 0.5).repeat(1, 2).sin().sum(1, keepdim=True)
        return self.layer(x) + second * third * first.cumsum(1)[:, -1:]


@pytest.mark.slow
def test_inference_pages_tensors_of_its_own(tmp_path: Path) -> None:
    """What does not fit goes to slots of its own, in storage's driver of a step."""
    torch.manual_seed(0)
    model = Wide()
    step = captured(model)
    assert step.inference is not None
    more = floor(step.inference.graph).bytes - floor(step.graph).bytes + step.graph.state_bytes
    ram = tight_ram(step, more + 256)
    deployment = export_step(step, tmp_path, infer=True, ram=ram, recompute=False, gap=0.5)
    assert any(slot.endswith("of the inference") for slot in deployment.slots)
    check_inference(model, deployment, tmp_path)


def test_what_is_found_is_written_at_a_limit_that_is_over_at_once(tmp_path: Path) -> None:
    """There is a schedule for the step and one for the inference, however short the time was."""
    step = captured(Convolutional())
    deployment = export_step(step, tmp_path, infer=True, ram=tight_ram(step, 1024), time_limit=1e-3)
    assert deployment.inference is not None
    assert deployment.result is not None
    assert deployment.result.require_schedule()
    assert "pm_infer" in (tmp_path / "include/pm.h").read_text(encoding="utf-8")


def test_inference_without_room_is_refused(tmp_path: Path) -> None:
    """One sentence says how much is missing."""
    step = captured(Wide())
    with pytest.raises(
        BudgetError, match=r"state in RAM leaves [\d,]+ B for an inference, and one"
    ):
        export_step(step, tmp_path, infer=True, ram=tight_ram(step, 512), paging=False)
    assert not (tmp_path / "src").exists()


def test_model_keeps_its_modes() -> None:
    """Capturing in evaluation mode puts each module back as it was."""
    model = Convolutional()
    model.layers[1].eval()
    before = [module.training for module in model.modules()]
    captured(model)
    assert [module.training for module in model.modules()] == before


def test_inference_is_the_forward_pass_alone() -> None:
    """Neither loss nor gradients are in it; the target is no input; dropout is gone."""
    step = captured(Convolutional())
    inference = step.inference
    assert inference is not None
    assert {node.phase for node in inference.graph.nodes} == {"forward"}
    assert [value.name for value in inference.inputs] == ["inputs[0]"]
    kernels = {call.kernel for calls in inference.calls for call in calls}
    assert "pm_batch_norm_fixed" in kernels
    assert not kernels & {"pm_dropout", "pm_log_softmax", "pm_batch_norm"}


def test_inference_shares_the_weights_of_its_step() -> None:
    """It brings only constants that the step has not: those of evaluation mode."""
    torch.manual_seed(0)
    step = captured(Perceptron())
    assert step.inference is not None
    sizes = sorted(values.size for values in step.inference.values.values())
    assert sizes == [4, 4]  # the factor of evaluation mode, and the shift
    assert not step.inference.values.keys() & step.values.keys()


def test_tiles_are_read_by_inference() -> None:
    """It has a call for each tile, and names no parameter whole."""
    step = tiled(captured(Perceptron()), 200)
    assert step.inference is not None
    pieces = {ref.buffer for value in step.states for ref in value.pieces}
    calls = [call for calls in step.inference.calls for call in calls]
    read = {a.buffer for call in calls for a in call.arguments if isinstance(a, Ref)}
    assert {"layers.0.weight[0:8]", "layers.0.weight[8:16]"} <= read & pieces
    assert "layers.0.weight" not in read


def test_step_file_keeps_the_inference(tmp_path: Path) -> None:
    """A folder made from a step file is the one made from the step, with state on storage too."""
    step = captured(Perceptron())
    save_step(step, tmp_path / "x.step.json")
    loaded = load_step(tmp_path / "x.step.json")
    for folder, each in (("a", step), ("b", loaded)):
        export_step(each, tmp_path / folder, infer=True, ram=tight_ram(step))
    assert "storage" in homes(tmp_path / "a")
    for name in ("src/pm_step.c", "include/pm.h", "src/pm_weights.c", "README.md"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_folder_says_what_inference_writes(tmp_path: Path) -> None:
    """Manifest, README, header; without `infer` none of them knows of it."""
    step = captured(Perceptron())
    for infer in (True, False):
        folder = tmp_path / str(infer)
        export_step(step, folder, infer=infer)
        text = {p: (folder / p).read_text(encoding="utf-8") for p in ("README.md", "include/pm.h")}
        outputs = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["outputs"]
        assert outputs == (
            [{"name": "output", "shape": [2, 4], "dtype": "float32", "bytes": 32}] if infer else []
        )
        assert all(("pm_infer(" in each) is infer for each in text.values())
        assert f"#define PM_OUTPUTS {8 if infer else 0} " in text["include/pm.h"]


def test_infer_needs_a_step_captured_for_it(tmp_path: Path) -> None:
    """Which step has none is said, and what to do."""
    step = lower(nn.Linear(6, 4), functional.cross_entropy, (torch.randn(2, 6), LABELS))
    with pytest.raises(InputError, match="infer: Linear was captured without its forward pass"):
        export_step(step, tmp_path, infer=True)


class Both(nn.Module):
    """Returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layers make."""
        found = self.layer(x)
        return found, found.argmax(1)


class Noisy(Both):
    """Draws random numbers in evaluation mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers make."""
        return functional.dropout(self.layer(x), 0.5)


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (Both(), lambda out, y: functional.cross_entropy(out[0], y), "one tensor .* got tuple"),
        (Noisy(), functional.cross_entropy, "draws random numbers in evaluation mode too"),
    ],
)
def test_models_without_one_certain_output_are_refused(
    model: nn.Module, loss: Any, message: str, tmp_path: Path
) -> None:
    """Models that return several tensors, or another one each time, cannot be inferred."""
    with pytest.raises(CaptureError, match=message):
        pmt.export(model, loss, (torch.randn(2, 6), LABELS), infer=True, folder=tmp_path)


class OwnLoss(Perceptron):
    """Returns its loss."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return functional.cross_entropy(super().forward(x), y)


def test_model_that_returns_its_loss_is_asked_for_it() -> None:
    """Such as the score of an autoencoder: all inputs are the model's."""
    torch.manual_seed(0)
    model = OwnLoss()
    inputs = (torch.randn(2, 6), LABELS)
    step = with_inference(lower(model, None, inputs), model, None, inputs)
    assert step.inference is not None
    assert len(step.inference.inputs) == 2
    found = computed(step, inputs)
    expected = copy.deepcopy(model).double().eval()(inputs[0].double(), LABELS)
    assert found == pytest.approx(expected.item(), rel=1e-12)
