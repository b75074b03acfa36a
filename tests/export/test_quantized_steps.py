"""Steps with an int8 front, exported and run: they train as in PyTorch, with the same bytes."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import poetmodel.torch as pmt
from kit.export_agreement import SCHEDULES, Exported, batches_like, lowered, torch_steps
from kit.programs import needs
from kit.quantized_networks import converted, float_front, images
from kit.rotation import rotating
from kit.shared_objects import build
from poetmodel.export.board import Target, run
from poetmodel.export.exporting import export_step
from poetmodel.torch.lowering.inference import with_inference

STEPS = 3
WHOLE_LAYERS = {"ram": "101%", "tile": "512B"}
"""Layers in int8 stay whole, whatever the size of tiles."""
EXACTNESS = "int8 front: exact against its definition, not against float"


def training(*, wrapped=True):
    """Return a network with an int8 front, whose loss takes no function of the C library."""
    torch.manual_seed(0)
    module = converted(float_front(), images(8))
    front = pmt.quantized(module) if wrapped else module
    end = (nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3))
    return nn.Sequential(front, *end), functional.mse_loss, (images(), torch.randn(2, 3))


def batches():
    """Return three batches of numbers that a float has: others would be rounded before a front."""
    return [(x.float(), y) for x, y in batches_like(training()[2], 3)]


@pytest.mark.parametrize(
    "schedule",
    [
        "keep-all",
        *rotating(("blocking", "recomputed", "mapped"), ()),
        pytest.param("tiles", marks=pytest.mark.slow),
    ],
)
def test_schedules_train_as_torch(schedule, tmp_path):
    """Losses and state are those of PyTorch with the definition of the front, in double."""
    options = {**SCHEDULES, "tiles": WHOLE_LAYERS}[schedule]
    exported = Exported(lowered(training(), "momentum"), tmp_path, **options)
    found = exported.outcome(batches(), STEPS)
    apart = found.differences(torch_steps(training(), batches(), STEPS, "momentum"))
    assert max(apart.values()) <= 1e-12, apart
    assert exported.manifest["exactness"] == EXACTNESS


@pytest.mark.parametrize(
    "target",
    [Target.M4, *(pytest.param(t, marks=pytest.mark.slow) for t in (Target.M3, Target.M7))],
)
def test_boards_have_the_bits_of_the_host(target, tmp_path):
    """In float, each core leaves the same losses and state, byte for byte."""
    exported = Exported(lowered(training(), "momentum"), tmp_path, share=0.2, paging=False)
    host = exported.outcome(batches(), STEPS, target=Target.HOST)
    assert exported.outcome(batches(), STEPS, target=target).same_bits(host)


def test_inference_has_the_front_too(tmp_path):
    """``pm_infer`` of the whole, in int8 and float, is what PyTorch says."""
    needs(Target.HOST)
    net, loss_fn, inputs = training()
    step = with_inference(lowered((net, loss_fn, inputs), "sgd"), net, loss_fn, inputs)
    export_step(step, tmp_path, ram="1MiB", infer=True)
    raw = b"".join(x.numpy().tobytes() for x in inputs)
    words = ("infer=outputs.bin",)
    program = build(tmp_path, Target.HOST)
    run(
        program, Target.HOST, tmp_path, inputs=raw, steps=1, learning_rate=0.0, words=words
    ).require_success()
    found = np.fromfile(tmp_path / "outputs.bin", "<f4").reshape(2, 3)
    with torch.no_grad():
        np.testing.assert_allclose(found, net(inputs[0]).numpy(), rtol=1e-5)


class Pixels(nn.Module):
    """Bytes of a camera, as rows of pixels or as planes, with a mean and a scale a channel."""

    def __init__(self, net, *, rows):
        super().__init__()
        self.net, self.rows = net, rows

    def forward(self, x):
        """Return what the network says of an image."""
        x = x.permute(0, 3, 1, 2).contiguous() if self.rows else x
        mean = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)
        return self.net(((x.float() / 255 - mean) * 4).to(self.net[1].weight.dtype))


@pytest.mark.parametrize("rows", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bytes_become_int8_at_once(rows, tmp_path):
    """One table for each channel: no tensor of real numbers in front of the first layer."""

    def seen():
        net, loss_fn, (_, y) = training()
        shape = (2, 17, 13, 3) if rows else (2, 3, 17, 13)
        return Pixels(net, rows=rows), loss_fn, (torch.zeros(shape, dtype=torch.uint8), y)

    random = torch.Generator().manual_seed(1)
    shape = seen()[2][0].shape
    given = [
        (torch.randint(256, shape, generator=random, dtype=torch.uint8), y) for _, y in batches()
    ]
    step = lowered(seen(), "momentum")
    kernels = {call.kernel for calls in step.calls for call in calls}
    assert "pm_q8_lookup" in kernels
    assert not kernels & {"pm_lookup", "pm_q8_quantize"}
    found = Exported(step, tmp_path).outcome(given, STEPS)
    apart = found.differences(torch_steps(seen(), given, STEPS, "momentum"))
    assert max(apart.values()) <= 1e-12, apart


def test_state_returns_to_a_model_whose_front_is_converted(tmp_path):
    """What a program has trained is loaded, and saved again; the front has no part in it."""
    net, loss_fn, inputs = training(wrapped=False)
    exported = Exported(lowered((net, loss_fn, inputs), "sgd"), tmp_path)
    found = exported.run(batches(), 1, target=Target.HOST).require_success()
    (tmp_path / "state.bin").write_bytes(found.state)
    before = net[1].weight.detach().clone()
    pmt.load_state(tmp_path, net)
    assert not torch.equal(net[1].weight, before)
    pmt.save_state(net, tmp_path / "again.bin", folder=tmp_path)
    assert (tmp_path / "again.bin").read_bytes() == found.state
