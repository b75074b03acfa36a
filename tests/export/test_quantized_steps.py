"""Steps with an int8 front, exported and run: they train as in PyTorch, with the same bytes."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import poetmodel.torch as pmt
from kit.export_agreement import (
    SCHEDULES,
    Exported,
    lower_training,
    make_batches_like,
    train_in_torch,
)
from kit.programs import require_programs
from kit.quantized_networks import convert_front, float_front, images
from kit.rotation import mark_seeds_except
from kit.shared_objects import build
from poetmodel.export.board import Target, run_program
from poetmodel.export.exporting import export_step
from poetmodel.export.reserves import reserved_bytes
from poetmodel.tiling.choice import needed_bytes
from poetmodel.torch.lowering.inference import with_evaluation, with_inference

STEPS = 3
IN_TILES = {"ram": "101%", "tile": "128B"}
EXACTNESS = "int8 front: exact against its definition, not against float"


def training(*, wrapped=True, width=8):
    """Return a network with an int8 front, whose loss calls no function of the C library."""
    torch.manual_seed(0)
    module = convert_front(float_front(width), images(8))
    front = pmt.quantized(module) if wrapped else module
    end = (nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3))
    return nn.Sequential(front, *end), functional.mse_loss, (images(), torch.randn(2, 3))


def batches():
    """Return three batches of numbers that a float has: others would be rounded before a front."""
    return [(x.float(), y) for x, y in make_batches_like(training()[2], 3)]


@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    mark_seeds_except(
        product(SCHEDULES, ("gradients", "sgd", "momentum", "adam", "clipped")),
        {("tiles", "adam")},
        {("keep-all", "momentum")},
    ),
)
def test_schedules_train_as_torch(schedule, optimizer, tmp_path):
    """Losses, gradients and state are PyTorch's with the definition of the front, in double."""
    options = {**SCHEDULES, "tiles": IN_TILES}[schedule]
    exported = Exported(lower_training(training(), optimizer), tmp_path, **options)
    steps = 1 if optimizer == "gradients" else STEPS
    found = exported.outcome(batches(), steps)
    apart = found.differences(train_in_torch(training(), batches(), steps, optimizer))
    assert max(apart.values()) <= 1e-12, apart
    assert exported.manifest["exactness"] == EXACTNESS


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [Target.M4, *mark_seeds_except([Target.M3, Target.M7], ())],
)
def test_boards_have_the_bits_of_the_host(target, tmp_path):
    """In float, in tiles, each core leaves the same losses and state, byte for byte."""
    options = {"share": 0.3, "paging": False, "tile": "128B"}
    exported = Exported(lower_training(training(), "momentum"), tmp_path, **options)
    host = exported.outcome(batches(), STEPS, target=Target.HOST)
    assert exported.outcome(batches(), STEPS, target=target).has_same_bits(host)


def infer(folder, inputs):
    """Return the result of ``pm_infer`` of a folder's program for a batch."""
    run_program(
        build(folder, Target.HOST),
        Target.HOST,
        folder,
        inputs=inputs,
        steps=1,
        learning_rate=0.0,
        words=("infer=outputs.bin",),
    ).require_success()
    return np.fromfile(folder / "outputs.bin", "<f4").reshape(2, 3)


@pytest.mark.slow
def test_inference_has_the_front_too(tmp_path):
    """``pm_infer`` of the whole network, in int8 and float, equals PyTorch."""
    require_programs(Target.HOST)
    net, loss_fn, inputs = training()
    step = with_inference(lower_training((net, loss_fn, inputs), "sgd"), net, loss_fn, inputs)
    export_step(step, tmp_path, ram="1MiB", infer=True)
    raw = b"".join(x.numpy().tobytes() for x in inputs)
    found = infer(tmp_path, raw)
    with torch.no_grad():
        np.testing.assert_allclose(found, net(inputs[0]).numpy(), rtol=1e-5)


@pytest.mark.slow
def test_inference_on_bytes_maps_them_to_int8_as_the_step_does(tmp_path):
    """Training step, inference and evaluation share one table of int8, and no table of reals."""
    require_programs(Target.HOST)
    net, loss_fn, inputs = training()
    step = lower_training((net, loss_fn, inputs), "sgd")
    for add in (with_inference, with_evaluation):
        step = add(step, net, loss_fn, inputs)
    scale = 1 / 256
    deployment = export_step(
        step, tmp_path, ram="1MiB", infer=True, byte_inputs={"inputs[0]": f"uint8:{scale}"}
    )
    exported = deployment.step
    steps = (exported, *exported.forward_passes)
    tables = [name for one in steps for name in one.values if "table" in name]
    assert tables == ["inputs[0] table as int8"]
    random = torch.Generator().manual_seed(2)
    x = torch.randint(256, inputs[0].shape, generator=random, dtype=torch.uint8)
    raw = x.numpy().tobytes() + inputs[1].numpy().tobytes()
    found = infer(tmp_path, raw)
    with torch.no_grad():
        np.testing.assert_allclose(found, net(x * scale).numpy(), rtol=1e-5)


class Pixels(nn.Module):
    """Bytes of a camera, as rows of pixels or as planes, with a mean and a scale a channel."""

    def __init__(self, net, *, rows):
        super().__init__()
        self.net, self.rows = net, rows

    def forward(self, x):
        """Return the result of the network for an image."""
        x = x.permute(0, 3, 1, 2).contiguous() if self.rows else x
        mean = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)
        return self.net(((x.float() / 255 - mean) * 4).to(self.net[1].weight.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [False, True])
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
    step = lower_training(seen(), "momentum")
    kernels = {call.kernel for calls in step.calls for call in calls}
    assert "pm_q8_lookup" in kernels
    assert not kernels & {"pm_lookup", "pm_q8_quantize"}
    found = Exported(step, tmp_path).outcome(given, STEPS)
    apart = found.differences(train_in_torch(seen(), given, STEPS, "momentum"))
    assert max(apart.values()) <= 1e-12, apart


def scoring(scores):
    """Return the training of a wider front, and a head of so many scores."""
    net, loss_fn, (x, _) = training(width=24)
    torch.manual_seed(scores)
    net[3] = nn.Linear(24, scores)
    return net, loss_fn, (x, torch.randn(2, scores))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Return folders of a step with three scores, and of one with four that migrates its state.

    The RAM is slightly below that of the largest undivided node, so that ``auto`` divides it.
    """
    base = tmp_path_factory.mktemp("boards")
    before = None
    for scores, name in ((3, "old"), (4, "new")):
        net, loss_fn, inputs = scoring(scores)
        step = with_evaluation(lower_training((net, loss_fn, inputs), "sgd"), net, loss_fn, inputs)
        given = {"paging": False, "commit": True, "evaluate": True, "replay": 3, "gap": 0.5}
        given |= {"migrate_from": before}
        whole = export_step(step, base / "whole", ram="64KiB", tile="none", **given)
        room = needed_bytes(step, whole.device, paging=False) - 16
        ram = reserved_bytes(step, whole.stack_bytes) + whole.replay.ram_bytes + room
        made = export_step(step, base / name, ram=ram, **given)
        assert "0.2_expand/q8_pointwise[0:" in " ".join(n.name for n in made.step.graph.nodes)
        before = base / name
    return base


@pytest.mark.slow
@pytest.mark.parametrize("target", [Target.M3, Target.M4, Target.M7])
def test_boards_evaluate_replay_and_migrate_in_tiles(programs, target):
    """Steps on stored samples, evaluations and migrated state have the host's bits.

    The new program continues from the old one's state after a restart.
    """
    require_programs(target)

    def outcome(where):
        (programs / "pm_storage.bin").unlink(missing_ok=True)
        build_of = {
            name: build(programs / name, where, settings=("UNITS=device", "POISON=1"))
            for name in ("old", "new")
        }

        def ran(name, scores, *words):
            rows = make_batches_like(scoring(scores)[2], STEPS)
            given = {
                "inputs": b"".join(x.float().numpy().tobytes() for row in rows for x in row),
                "steps": STEPS,
                "learning_rate": 0.1,
                "words": (*words, "evaluate"),
            }
            return run_program(build_of[name], where, programs, **given).require_success()

        return ran("old", 3, "stored"), ran("new", 4, "resume")

    (old, new), (host_old, host_new) = outcome(target), outcome(Target.HOST)
    assert (old.losses, old.state) == (host_old.losses, host_old.state)
    assert (new.losses, new.state) == (host_new.losses, host_new.state)
    assert list(new.losses) == list(range(STEPS + 1, 2 * STEPS + 1))
    for found, expected in ((old, host_old), (new, host_new)):
        assert found.evaluations == expected.evaluations
        assert len(found.evaluations) == STEPS


@pytest.mark.slow
def test_state_returns_to_a_model_whose_front_is_converted(tmp_path):
    """The state of a program is loaded and saved again; the front is not part of it."""
    net, loss_fn, inputs = training(wrapped=False)
    exported = Exported(lower_training((net, loss_fn, inputs), "sgd"), tmp_path)
    found = exported.run(batches(), 1, target=Target.HOST).require_success()
    (tmp_path / "state.bin").write_bytes(found.state)
    before = net[1].weight.detach().clone()
    pmt.load_state(tmp_path, net)
    assert not torch.equal(net[1].weight, before)
    pmt.save_state(net, tmp_path / "again.bin", folder=tmp_path)
    assert (tmp_path / "again.bin").read_bytes() == found.state
