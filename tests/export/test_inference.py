"""Inference on a device: `pm_infer` writes the result of PyTorch in evaluation mode."""

import copy
import json
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import poetmodel.torch as pmt
from kit.kernel_calls import Memory, list_kernels
from kit.programs import require_programs
from kit.rotation import mark_seeds_except
from kit.shared_objects import build
from kit.traced_models import FunctionModule
from poetmodel.errors import BudgetError, InputError
from poetmodel.export.board import Target, run_program
from poetmodel.export.exporting import export_step
from poetmodel.export.reserves import STACK_BYTES, reserved_bytes
from poetmodel.graph import floor
from poetmodel.lowered.calls import Ref
from poetmodel.lowered.io import load_step, save_step
from poetmodel.tiling.tiles import tile_step
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.lowering.inference import with_inference
from poetmodel.torch.lowering.step import lower

STEPS = 3
LABELS = torch.tensor([3, 1])


def convolutional():
    """Return convolutions with batch norm, and dropout: in evaluation mode others."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 10, 3), nn.BatchNorm2d(10), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.4), nn.Linear(40, 4),
    )  # fmt: skip


def perceptron():
    """Return linear layers whose result is a view, with other constants in evaluation mode."""

    def scores(own, x):
        found = own.layers(x) * (torch.tensor([1.0, 2.0, 3.0, 4.0]) * 0.5)
        if not own.training:
            found = found * torch.tensor([4.0, 3.0, 2.0, 1.0]) + own.shift
        return found.t().contiguous().t()

    layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    return FunctionModule(scores, layers=layers, shift=nn.Buffer(torch.randn(4)))


def inputs_of(model, batches=1):
    """Return batches for a network."""
    shape = (2, 2, 8, 8) if isinstance(model, nn.Sequential) else (2, 6)
    return [(torch.randn(shape), LABELS) for _ in range(batches)]


NETWORKS = {"convolutional": convolutional, "perceptron": perceptron}


def captured(model, *, trains=True, loss=functional.cross_entropy):
    """Return a step with its inference."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if trains else None
    (inputs,) = inputs_of(model)
    step = lower(model, loss, inputs, optimizer=optimizer)
    return with_inference(step, model, loss, inputs)


@cache
def known(network):
    """Return a network and its step, which tests only read."""
    torch.manual_seed(0)
    model = NETWORKS[network]()
    return model, captured(model)


def tight_ram(step, more_bytes=128):
    """Return little more RAM than the least that the largest node needs."""
    return floor(step.graph).bytes + reserved_bytes(step, STACK_BYTES) + more_bytes


def homes(folder):
    """Return where state is."""
    document = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return {home for state in document["states"] for home in state["home"].split("+")}


def file_of(batches, real):
    """Return the file of inputs."""
    return b"".join(
        x.numpy().astype(real).tobytes() + y.int().numpy().tobytes() for x, y in batches
    )


def check_inference(
    model, deployment, folder, target=Target.HOST_DOUBLE, settings=(), tolerance=1e-12
):
    """Train some steps, and hold the inference to PyTorch with the state that they left."""
    require_programs(target)
    batches = inputs_of(model, 2)
    real = "<f8" if target is Target.HOST_DOUBLE else "<f4"
    program = build(folder, target, settings=("POISON=1", *settings))
    given = {"inputs": file_of(batches, real), "steps": STEPS, "learning_rate": 0.1}
    with_it = run_program(program, target, folder, words=("infer=outputs.bin",), **given)
    found = np.fromfile(folder / "outputs.bin", real).reshape(len(LABELS), 4)
    (folder / "pm_storage.bin").unlink(missing_ok=True)
    without = run_program(program, target, folder, **given).require_success()
    assert with_it.require_success().state == without.state
    twin = copy.deepcopy(model).double().eval()
    if deployment.step.learning_rate is not None:
        twin.load_state_dict(state_of(folder, without.state, real), strict=False)
    with torch.no_grad():
        expected = twin(batches[0][0].double()).numpy()
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def state_of(folder, data, real):
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


PLACES = {
    "ram": ("ram", {"ram": "64KiB", "paging": False}, ()),
    "storage": ("storage", {}, ()),
    "dma": ("storage", {"device": "stm32h743"}, ("LATE=1",)),
    "mapped": ("mapped", {"device": "nano33ble"}, ("DRIVER=ram",)),
    "commit": ("storage", {"commit": True}, ()),
    "tiles": ("storage", {"tile": 200}, ()),
}
"""Where state is: its home, options, and what the program is built with."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "place"),
    mark_seeds_except(
        product(NETWORKS, PLACES), {("convolutional", "dma"), ("perceptron", "mapped")}
    ),
)
def test_inference_after_steps_is_that_of_torch(network, place, tmp_path):
    """It reads the state that the steps left, wherever the home is, and leaves it as it is."""
    torch.manual_seed(0)
    model = NETWORKS[network]()
    step = captured(model)
    home, options, settings = PLACES[place]
    # Offsets at cache lines take more than the sum of the sizes, and a commit a larger stack.
    options = {"ram": tight_ram(step, 640 if place in {"dma", "commit"} else 128)} | options
    deployment = export_step(step, tmp_path, infer=True, gap=0.5, **options)
    assert home in homes(tmp_path)
    check_inference(model, deployment, tmp_path, settings=settings)


@pytest.mark.parametrize("tile_bytes", [None, 200])
@pytest.mark.parametrize("network", NETWORKS)
def test_inference_computes_what_torch_does(network, tile_bytes):
    """Its calls, in order, compute the model's result in evaluation mode, in double."""
    model, step = known(network)
    step = step if tile_bytes is None else tile_step(step, tile_bytes)
    ((x, y),) = inputs_of(model)
    with torch.no_grad():
        expected = copy.deepcopy(model).double().eval()(x.double()).flatten()
    np.testing.assert_allclose(computed(step, (x, y)), expected, rtol=1e-12, atol=1e-12)


def computed(step, inputs):
    """Return the results of the calls of an inference, in order, in double."""
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
def test_inference_without_optimizer_reads_flash(network, tmp_path):
    """Without an optimizer, all state is in flash, and the inference is as in PyTorch."""
    torch.manual_seed(0)
    model = NETWORKS[network]()
    deployment = export_step(captured(model, trains=False), tmp_path, infer=True)
    assert homes(tmp_path) == {"flash"}
    check_inference(model, deployment, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", mark_seeds_except((Target.M3, Target.M4, Target.M7), (Target.M4,))
)
def test_inference_runs_on_boards(target, tmp_path):
    """In float, on emulated boards, with part of the state on storage."""
    torch.manual_seed(0)
    model = convolutional()
    step = captured(model)
    deployment = export_step(step, tmp_path, infer=True, ram=tight_ram(step, 1024), gap=0.5)
    assert "storage" in homes(tmp_path)
    check_inference(model, deployment, tmp_path, target, tolerance=1e-5)


def wide():
    """Return a network whose evaluation needs more RAM than its training."""

    def scores(own, x):
        if own.training:
            return own.layer(x)
        first = x.repeat(1, 40)
        second = (first.exp() * 0.1).repeat(1, 2).sum(1, keepdim=True)
        third = (first * 0.5).repeat(1, 2).sin().sum(1, keepdim=True)
        return own.layer(x) + second * third * first.cumsum(1)[:, -1:]

    return FunctionModule(scores, layer=nn.Linear(6, 4))


@pytest.mark.slow
def test_inference_pages_tensors_of_its_own(tmp_path):
    """Tensors that do not fit use slots of their own, with the step's storage driver."""
    torch.manual_seed(0)
    model = wide()
    step = captured(model)
    assert step.inference is not None
    more = floor(step.inference.graph).bytes - floor(step.graph).bytes + step.graph.state_bytes
    ram = tight_ram(step, more + 256)
    deployment = export_step(step, tmp_path, infer=True, ram=ram, recompute=False, gap=0.5)
    assert any(slot.endswith("of the inference") for slot in deployment.slots)
    check_inference(model, deployment, tmp_path)


def test_what_is_found_is_written_at_a_limit_that_is_over_at_once(tmp_path):
    """There is a schedule for the step and one for the inference, however short the time was."""
    _, step = known("convolutional")
    deployment = export_step(step, tmp_path, infer=True, ram=tight_ram(step, 1024), time_limit=1e-3)
    assert deployment.inference is not None
    assert deployment.result is not None
    assert deployment.result.require_schedule()
    assert "pm_infer" in (tmp_path / "include/pm.h").read_text(encoding="utf-8")


def test_inference_is_the_forward_pass_alone():
    """It has neither loss nor gradients; the target is no input; dropout is omitted.

    The capture in evaluation mode restores each module.
    """
    model = convolutional()
    model[1].eval()
    before = [module.training for module in model.modules()]
    inference = captured(model).inference
    assert [module.training for module in model.modules()] == before
    assert {node.phase for node in inference.graph.nodes} == {"forward"}
    assert [value.name for value in inference.inputs] == ["inputs[0]"]
    found = set(list_kernels(inference))
    assert "pm_batch_norm_fixed" in found
    assert not found & {"pm_dropout", "pm_log_softmax", "pm_batch_norm"}


def test_inference_reads_the_weights_of_its_step():
    """It brings only constants of evaluation mode; it has a call for each tile of a parameter."""
    _, step = known("perceptron")
    sizes = sorted(values.size for values in step.inference.values.values())
    assert sizes == [4, 4]  # the factor of evaluation mode, and the shift
    assert not step.inference.values.keys() & step.values.keys()
    step = tile_step(step, 200)
    pieces = {ref.buffer for value in step.states for ref in value.pieces}
    calls = [call for calls in step.inference.calls for call in calls]
    read = {a.buffer for call in calls for a in call.arguments if isinstance(a, Ref)}
    assert {"layers.0.weight[0:8]", "layers.0.weight[8:16]"} <= read & pieces
    assert "layers.0.weight" not in read


def test_step_file_keeps_the_inference(tmp_path):
    """A folder made from a step file is the one made from the step, with state on storage too."""
    _, step = known("perceptron")
    save_step(step, tmp_path / "x.step.json")
    loaded = load_step(tmp_path / "x.step.json")
    for folder, each in (("a", step), ("b", loaded)):
        export_step(each, tmp_path / folder, infer=True, ram=tight_ram(step))
    assert "storage" in homes(tmp_path / "a")
    for name in ("src/pm_step.c", "include/pm.h", "src/pm_weights.c", "README.md"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_folder_says_what_inference_writes(tmp_path):
    """Manifest, README and header mention it; without `infer`, none of them does."""
    _, step = known("perceptron")
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


def test_infer_needs_a_step_captured_for_it(tmp_path):
    """A step that was captured without it is refused with a remedy; missing RAM is stated."""
    step = lower(nn.Linear(6, 4), functional.cross_entropy, (torch.randn(2, 6), LABELS))
    with pytest.raises(InputError, match="infer: Linear was captured without its forward pass"):
        export_step(step, tmp_path, infer=True)
    step = captured(wide())
    with pytest.raises(
        BudgetError, match=r"state in RAM leaves [\d,]+ B for an inference, and one"
    ):
        export_step(step, tmp_path, infer=True, ram=tight_ram(step, 512), paging=False)
    assert not (tmp_path / "src").exists()


@pytest.mark.parametrize(
    ("after", "loss", "message"),
    [
        (
            lambda y: (y, y.argmax(1)),
            lambda out, y: functional.cross_entropy(out[0], y),
            "one tensor .* got tuple",
        ),
        (
            lambda y: functional.dropout(y, 0.5),
            functional.cross_entropy,
            "draws random numbers in evaluation mode, too",
        ),
    ],
)
def test_models_without_one_certain_output_are_refused(after, loss, message, tmp_path):
    """Models that return several tensors, or another one each time, cannot be inferred."""
    model = FunctionModule(lambda parts, x: after(parts[0](x)), nn.Linear(6, 4))
    with pytest.raises(CaptureError, match=message):
        pmt.export(model, loss, (torch.randn(2, 6), LABELS), infer=True, folder=tmp_path)


def test_model_that_returns_its_loss_is_asked_for_it():
    """Such as the score of an autoencoder: all inputs are the model's."""
    torch.manual_seed(0)
    model = FunctionModule(
        lambda parts, x, y: functional.cross_entropy(parts[0](x), y), perceptron()
    )
    inputs = (torch.randn(2, 6), LABELS)
    step = with_inference(lower(model, None, inputs), model, None, inputs)
    assert step.inference is not None
    assert len(step.inference.inputs) == 2
    found = computed(step, inputs)
    expected = copy.deepcopy(model).double().eval()(inputs[0].double(), LABELS)
    assert found == pytest.approx(expected.item(), rel=1e-12)
