"""Steps whose int8 weights train, exported and run: near eager PyTorch, the same on each board."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import poetmodel.torch as pmt
from kit.export_agreement import SCHEDULES, Exported
from kit.nor_flash import build_power_cuts
from kit.programs import require_programs, run_command
from kit.rotation import mark_seeds_except
from kit.shared_objects import build
from poetmodel.export.board import Target, run_program
from poetmodel.tiling.choice import divide_step
from poetmodel.torch.lowering.step import lower

pytestmark = [pytest.mark.torch, pytest.mark.large]
pytest.importorskip("torchao")

STEPS = 20
RATE = 0.25
EXACTNESS = "int8 weights, trained by quantization-aware scaling: not the numbers of float training"
WAYS = {
    "recomputed": {"share": 0.6, "paging": False},
    "mapped, committed": {"share": 0.1, "device": "nano33ble", "commit": True},
}
KINDS = ("weight", "residual")


class Block(nn.Module):
    """Layers of each kind that has a backward pass in int8, with a sum around two of them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 9, 3, 2, 1)
        self.depthwise = nn.Conv2d(9, 9, 3, 1, 1, groups=9)
        self.project = nn.Conv2d(9, 9, 1)
        self.grouped = nn.Conv2d(9, 12, 3, padding=1, groups=3)
        self.head = nn.Linear(12 * 3 * 3, 4)

    def forward(self, x):
        """Return four numbers for each image."""
        x = functional.relu6(self.first(x))
        x = x + self.project(functional.relu6(self.depthwise(x)))
        x = functional.avg_pool2d(functional.relu(self.grouped(x)), 2, 1)
        return self.head(functional.max_pool2d(x, 3, 2, 1).flatten(1))


def batches(count=4, size=12):
    """Return batches of two images with their labels."""
    random = torch.Generator().manual_seed(3)
    return [
        (torch.randn(2, 3, size, size, generator=random), torch.randn(2, 4, generator=random))
        for _ in range(count)
    ]


def network(train="all", rounding="16 bits"):
    """Return a network in int8."""
    torch.manual_seed(0)
    given = [x for x, _ in batches()]
    return pmt.quantized(Block().eval(), given, train=train, rounding=rounding)


def step_of(model, loss=functional.mse_loss, *, decay=1e-3, **options):
    """Return a step with the network's optimizer."""
    optimizer = pmt.QuantizedSGD(model, lr=RATE, weight_decay=decay, seed=5)
    return lower(model, loss, batches()[0], optimizer=optimizer, **options)


@pytest.fixture(scope="module")
def whole():
    """Return a network all of whose layers train, and its step."""
    model = network()
    return model, step_of(model)


@pytest.fixture(scope="module")
def kept(whole, tmp_path_factory):
    """Return the results of the step with everything kept in RAM."""
    return Exported(whole[1], tmp_path_factory.mktemp("kept"))


def on_host(exported, steps=STEPS):
    """Return the results of steps of a program, in float."""
    return exported.outcome(batches(), steps, target=Target.HOST)


def eager(model, loss=functional.mse_loss, *, decay=1e-3, clip=None, accumulate=1, steps=STEPS):
    """Return the losses of eager steps, and the state that they leave."""
    twin = copy.deepcopy(model)
    optimizer = pmt.QuantizedSGD(twin, lr=RATE, weight_decay=decay, seed=5)
    losses = []
    for number in range(steps):
        x, y = batches()[number % 4]
        found = loss(twin(x), y)
        losses.append(found.item())
        (found / accumulate).backward()
        if (number + 1) % accumulate == 0:
            if clip:
                torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: x.numpy() for name, x in twin.state_dict().items()}


def assert_near(found, model, **options):
    """Compare with eager steps: at most one of a hundred weights differs, and that by little."""
    losses, state = eager(model, **options)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-3)
    apart = count = moved = 0
    for name, mine in found.tensors.items():
        if name.endswith("bias"):
            np.testing.assert_allclose(mine, state[name], rtol=1e-3, atol=1e-5)
        elif name.endswith("weight"):
            residual = name.replace("weight", "residual")
            one, two = (
                x[name].astype(int) * 256 + x.get(residual, 0) for x in (found.tensors, state)
            )
            apart += np.count_nonzero(one != two)
            count += one.size
            assert np.abs(one - two).max() <= (2 if residual in state else 256)
            moved += np.count_nonzero(model.state_dict()[name].numpy() != mine)
    assert apart <= 0.01 * count
    assert moved > 0.05 * count, "weights must move for this to say anything"


def test_whole_steps_are_near_eager(whole, kept):
    """After 20 steps, sums of real numbers in another order: the same weights but for some."""
    assert_near(on_host(kept), whole[0])
    assert kept.manifest["exactness"] == EXACTNESS
    sizes = {s["name"]: s["bytes"] for s in kept.manifest["states"]}
    for name, layer in whole[0].trained_layers().items():
        assert [sizes[f"{name}.{kind}"] for kind in KINDS] == [layer.weight.numel()] * 2


@pytest.mark.parametrize("batches_", mark_seeds_except([1, 2], [1]))
def test_stochastic_steps_are_near_eager(batches_, tmp_path):
    """Rounded by the numbers of eager PyTorch; weights need a byte, and there is no residual."""
    model = network(rounding="stochastic")
    exported = Exported(step_of(model, accumulate=batches_), tmp_path)
    assert_near(on_host(exported), model, accumulate=batches_)
    names = {value["name"] for value in exported.manifest["states"]}
    assert not any(name.endswith("residual") for name in names)


@pytest.mark.parametrize(
    "schedule",
    ["recomputed", *mark_seeds_except(("blocking", "mapped", "dma", "mapped, committed"), ())],
)
def test_schedules_have_the_bits_of_keep_all(schedule, whole, kept, tmp_path):
    """Whatever is recomputed, or paged out: the same losses and state."""
    options = WAYS.get(schedule, SCHEDULES.get(schedule))
    exported = Exported(whole[1], tmp_path, **options)
    assert exported.ops["again"] or exported.ops["page_in"] or schedule == "dma"
    assert on_host(exported, 6).has_same_bits(on_host(kept, 6))


@pytest.mark.parametrize(
    "target",
    [Target.HOST, *mark_seeds_except([Target.M3, Target.M4], ())],
)
def test_tiles_have_the_bits_of_the_whole_step(target, whole, kept, tmp_path):
    """Slices of gradients, weights and residuals, on each core; the state has the same bytes."""
    sliced = Exported(divide_step(whole[1], 600), tmp_path)
    states = {value.name: len(value.pieces) for value in sliced.deployment.step.states}
    assert states["first.weight"] == states["first.residual"] == 3
    assert sliced.outcome(batches(), 3, target=target).has_same_bits(on_host(kept, 3))


POWER_CUTS = {
    "paged": ("16 bits", {"share": 0.3}, (8, 8, 1024, 3)),
    "paged, stochastic": ("stochastic", {"share": 0.3}, (4, 4, 1024, 2)),
    "in RAM": ("16 bits", {"share": 1.0, "paging": False}, (32, 32, 1024, 2)),
    "in place": ("16 bits", {"share": 0.1, "device": "nano33ble"}, (4, 4, 16384, 8)),
    "in tiles": ("16 bits", {"share": 0.3}, (16, 64, 4096, 2)),
}
"""Rounding, options of the export, and flash: write unit, what an operation programs, erase block
[B], generations."""


@pytest.mark.parametrize(
    "case",
    mark_seeds_except(POWER_CUTS, {"paged"}),
)
def test_no_power_cut_loses_int8_state(case, tmp_path):
    """A restart has weights, residuals and biases of one whole step, and continues with its bits.

    Steps with stochastic rounding draw the numbers of the step that was resumed.
    """
    require_programs("cc")
    rounding, options, flash = POWER_CUTS[case]
    step = step_of(network(rounding=rounding), functional.mse_loss)
    step = divide_step(step, 600) if case == "in tiles" else step
    exported = Exported(step, tmp_path / "folder", commit=True, **options)
    sizes = {value["name"]: value["bytes"] for value in exported.manifest["states"]}
    assert sizes["grouped.weight"] == 12 * 3 * 9
    program = build_power_cuts(tmp_path / "folder", tmp_path / "app", *flash)
    assert run_command([program, "0", "60"], tmp_path) == "60 trials\n"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["blocking", "mapped, committed"])
def test_schedules_draw_the_same_numbers(schedule, tmp_path):
    """Where rounding is stochastic, in parts and whole: the bits of keep-all."""
    step = step_of(network(rounding="stochastic"))
    kept_all = Exported(step, tmp_path / "kept")
    exported = Exported(step, tmp_path / "other", **WAYS.get(schedule, SCHEDULES.get(schedule)))
    assert on_host(exported, 4).has_same_bits(on_host(kept_all, 4))


@pytest.mark.parametrize(
    "target",
    [Target.M4, *mark_seeds_except([Target.M3, Target.M7], ())],
)
def test_boards_have_the_bits_of_the_host(target, kept):
    """With a unit for floats or none: each core leaves the same losses and state."""
    found = kept.outcome(batches(), 3, target=target)
    assert found.has_same_bits(on_host(kept, 3))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"accumulate": 3}, {"clip_grad_norm": 0.05}], ids=str)
def test_gradients_that_are_kept_update_as_eager_does(options, tmp_path):
    """Sums of batches, and gradients whose norm is bounded, are tensors; updates follow."""
    model = network()
    exported = Exported(step_of(model, **options), tmp_path / "kept")
    given = {"clip": options.get("clip_grad_norm"), "accumulate": options.get("accumulate", 1)}
    losses, state = eager(model, steps=9, **given)
    found = on_host(exported, 9)
    stored = Exported(exported.deployment.step, tmp_path / "stored", **WAYS["mapped, committed"])
    assert on_host(stored, 9).has_same_bits(found)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-4)
    for name, layer in model.trained_layers().items():
        mine = found.tensors[f"{name}.weight"]
        assert np.count_nonzero(mine != state[f"{name}.weight"]) <= 0.01 * mine.size
        assert (layer.weight.numpy() != mine).any()


def test_end_behind_a_front_is_stored_evaluated_and_loaded(tmp_path):
    """Commits, stored samples and inference include trained layers, and files return them."""
    require_programs(Target.HOST)
    model = network(train="last-2")
    optimizer = pmt.QuantizedSGD(model, lr=RATE)
    given = {"ram": "120%", "device": "nrf52840", "gap": 0.5, "time_limit": 60}
    more = {"commit": True, "replay": 2, "evaluate": True, "infer": True}
    folder = tmp_path / "folder"
    entropy = functional.cross_entropy
    labelled = [(x, torch.tensor([k % 4, 1])) for k, (x, _) in enumerate(batches())]
    pmt.export(model, entropy, labelled[0], folder=folder, optimizer=optimizer, **given, **more)
    raw = b"".join(x.numpy().tobytes() + y.numpy().astype("<i4").tobytes() for x, y in labelled)
    words = ("infer=outputs.bin",)
    found = run_program(
        build(folder, Target.HOST), Target.HOST, folder,
        inputs=raw, steps=8, learning_rate=RATE, words=words,
    ).require_success()  # fmt: skip
    (folder / "state.bin").write_bytes(found.state)
    twin = copy.deepcopy(model)
    pmt.load_state(folder, twin)
    changed = {n for n, x in twin.state_dict().items() if not torch.equal(x, model.state_dict()[n])}
    assert changed >= {"head.weight", "head.residual", "head.bias"}
    assert not any(name.startswith(("first", "depthwise", "project")) for name in changed)
    pmt.save_state(twin, tmp_path / "again.bin", folder=folder)
    assert (tmp_path / "again.bin").read_bytes() == found.state
    outputs = np.fromfile(folder / "outputs.bin", "<f4").reshape(2, 4)
    with torch.no_grad():
        np.testing.assert_array_equal(outputs, twin(labelled[-1][0]).numpy())
