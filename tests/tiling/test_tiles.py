"""Tiles: a step whose larger tensors are in slices of channels has the bits of the whole one."""

import json
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import poetmodel.torch as pmt
from kit.kernel_calls import Memory
from kit.quantized_networks import convert_front
from kit.rotation import mark_seeds_except
from kit.traced_models import FunctionModule
from poetmodel.budgets import TileChoice
from poetmodel.device import Device
from poetmodel.errors import BudgetError, InputError
from poetmodel.export.exporting import export_step
from poetmodel.export.reserves import reserved_bytes
from poetmodel.graph import Phase, floor
from poetmodel.lowered.calls import Ref
from poetmodel.plan.alignment import ALIGNMENT
from poetmodel.tiling.choice import MAX_CANDIDATES, choose_tiles, divide_step, needed_bytes
from poetmodel.tiling.tiles import make_distinct_tilings, min_tiled_bytes, tile_step
from poetmodel.torch.lowering.inference import with_inference
from poetmodel.torch.lowering.step import lower

OPTIMIZERS = {
    "sgd": lambda found: torch.optim.SGD(found, lr=0.1, weight_decay=0.01),
    "momentum": lambda found: torch.optim.SGD(found, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda found: torch.optim.Adam(found, lr=0.01),
    "amsgrad": lambda found: torch.optim.AdamW(found, lr=0.01, amsgrad=True),
    "gradients": None,
}
LABELS = torch.tensor([3, 1])


class Residual(nn.Module):
    """Dense and depthwise convolutions, batch norms, a sum of two paths, a mask, a mean."""

    def __init__(self, between=None, act=nn.functional.relu6):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.inner, self.other = nn.Conv2d(12, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.between, self.act = between or nn.Identity(), act
        self.each = nn.Conv2d(12, 12, 3, padding=1, stride=2, groups=12)
        self.point, self.head = nn.Conv2d(12, 20, 1), nn.Linear(20, 4)

    def forward(self, x):
        """Return four numbers for each image."""
        x = functional.relu(self.norm(self.first(x)))
        x = self.between(x + self.act(self.other(self.inner(x))))
        x = functional.relu(self.point(functional.relu(self.each(x))))
        return self.head(x.mean((2, 3)))


def residual(batch=2, **parts):
    """Return a network whose activations are larger than its weights."""
    return (
        Residual(**parts),
        functional.cross_entropy,
        (torch.randn(batch, 3, 8, 8), LABELS[:batch]),
    )


def single():
    """Return it with one sample: masks are bits that lie as channels do."""
    return residual(1, between=nn.Dropout(0.3))


def channels():
    """Return it with dropout of whole channels."""
    return residual(between=nn.Dropout2d(0.3), act=functional.hardswish)


def evaluated():
    """Return the model with batch norms of given statistics."""
    model, *others = residual()
    return model.eval(), *others


def pools():
    """Return a network in which products read all places of slices of channels."""
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, padding=1),
        nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 4),
    )  # fmt: skip
    return model, functional.cross_entropy, (torch.randn(2, 2, 8, 8), LABELS)


def wider():
    """Return a network that grows: interpolation, a transposed convolution, a norm of groups."""
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.PReLU(8), nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.ConvTranspose2d(8, 8, 2, stride=2), nn.GELU(), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1),
        nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    return model, functional.cross_entropy, (torch.randn(2, 2, 4, 4), LABELS)


def convolutions():
    """Return a network whose second convolution is its largest layer."""
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 10, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(90, 4),
    )  # fmt: skip
    return model, functional.cross_entropy, (torch.randn(2, 2, 8, 8), LABELS)


def autoencoder():
    """Return a network of linear layers."""
    layers = [nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 20)]
    return nn.Sequential(*layers), functional.mse_loss, (torch.randn(3, 20), torch.randn(3, 20))


def encoder():
    """Return a block of BERT."""
    model = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return model, functional.mse_loss, (torch.randn(2, 5, 8), torch.randn(2, 5, 8))


class Twice(nn.Module):
    """A pointwise convolution that is used twice, and a path around it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.last, self.head = nn.Conv2d(16, 8, 3, padding=2, dilation=2), nn.Linear(8, 4)

    def forward(self, x):
        """Return four numbers for each image."""
        first = functional.relu(self.first(x))
        x = self.second(functional.silu(self.second(first)))
        x = self.last(torch.cat([first, x * torch.sigmoid(x.mean((2, 3), keepdim=True))], 1))
        return self.head(x.amax((2, 3)))


def twice():
    """Return a network with a weight whose gradient is a sum of two."""
    return Twice(), functional.cross_entropy, (torch.randn(2, 2, 8, 8), LABELS)


class Scaled(nn.Module):
    """A convolution, a parameter that divides its results in another way, a layer, a head."""

    def __init__(self, parameter_shape, images_shape, layer):
        super().__init__()
        self.first, self.shift = nn.Conv2d(3, 16, 3, padding=1), torch.randn(parameter_shape)
        self.shift, self.images_shape = nn.Parameter(self.shift), images_shape
        self.layer, self.head = layer, nn.Linear(16, 4)

    def forward(self, x):
        """Return four numbers for each image."""
        x = self.first(x)
        x = functional.relu(x.view(self.images_shape) + self.shift).view(x.shape)
        return self.head(self.layer(x).mean((2, 3)))


def scaled(parameter_shape, images_shape, *, batch, layer=None):
    """Return a network whose parameter has that shape, and images another shape in its sum."""
    return (
        Scaled(parameter_shape, images_shape, layer or nn.Identity()),
        functional.cross_entropy,
        (torch.randn(batch, 3, 8, 8), torch.arange(batch) % 4),
    )


class Recurrent(nn.Module):
    """An LSTM over the rows of a sequence."""

    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.LSTM(6, 12, batch_first=True), nn.Linear(12, 4)

    def forward(self, x):
        """Return four numbers for each sequence."""
        return self.head(self.rows(x)[0][:, -1])


def recurrent():
    """Return a network whose weights all steps of a sequence read."""
    return Recurrent(), functional.cross_entropy, (torch.randn(2, 5, 6), LABELS)


def quantized(batch=2):
    """Return a network whose front is in int8; its last plane becomes real numbers."""
    front = nn.Sequential(
        nn.MaxPool2d(2), nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(),
        nn.Conv2d(12, 12, 3, stride=2, padding=1, groups=12), nn.Conv2d(12, 20, 1), nn.AvgPool2d(2),
        nn.Conv2d(20, 20, 3, padding=1, groups=20),
    )  # fmt: skip
    end = (nn.Conv2d(20, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))
    front = pmt.quantized(convert_front(front, torch.randn(4, 3, 16, 16)))
    inputs = (torch.randn(batch, 3, 16, 16), LABELS[:batch])
    return nn.Sequential(front, *end), functional.cross_entropy, inputs


class TrainedInt8(nn.Module):
    """Layers of each kind that reads slices of int8 gradients, with a sum around two of them."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Conv2d(3, 12, 3, 2, 1), nn.Conv2d(12, 12, 3, padding=1)
        self.each, self.point = nn.Conv2d(12, 12, 3, 1, 1, groups=12), nn.Conv2d(12, 20, 1)
        self.last, self.head = nn.Conv2d(20, 9, 3, 2, 1), nn.Linear(9 * 4, 4)

    def forward(self, x):
        """Return four numbers for each image."""
        x = functional.relu(self.first(x))
        x = x + self.inner(functional.relu6(self.each(x)))
        x = functional.avg_pool2d(functional.relu(self.point(x)), 2, 1)
        x = functional.max_pool2d(self.last(x), 2, 1)
        return self.head(x.flatten(1))


def trained_int8(batch=2, *, rounding="16 bits", **options):
    """Return a step that trains int8 weights, and its inference."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    x = torch.randn(4, 3, 12, 12)
    model = pmt.quantized(TrainedInt8().eval(), [x], train="all", rounding=rounding)
    given = (model, functional.cross_entropy, (x[:batch], LABELS[:batch]))
    optimizer = pmt.QuantizedSGD(model, lr=0.3, weight_decay=0.01, seed=5)
    return with_inference(lower(*given, optimizer=optimizer, **options), *given)


NETWORKS = (
    twice,
    recurrent,
    residual,
    single,
    channels,
    evaluated,
    pools,
    wider,
    convolutions,
    autoencoder,
    encoder,
    quantized,
)


def lowered(network, optimizer="sgd", **options):
    """Return a step of a network with an optimizer, and its inference where that is wanted."""
    torch.manual_seed(0)
    model, loss, inputs = network()
    make = OPTIMIZERS[optimizer]
    found = None if make is None else make(list(model.parameters()))
    infer = options.pop("infer", False)
    step = lower(model, loss, inputs, optimizer=found, **options)
    return with_inference(step, model, loss, inputs) if infer else step


def fill(memory, values, random):
    """Fill inputs with random numbers."""
    for value in values:
        array = memory[value.pieces[0].buffer]
        integers = array.dtype == np.int32
        array[...] = (
            random.integers(0, 4, array.shape) if integers else random.normal(size=array.shape)
        )


def execute(memory, step):
    """Run all calls of a step."""
    for node, calls in zip(step.graph.nodes, step.calls, strict=True):
        memory.execute(calls, workspace_bytes=node.workspace_bytes)


def results(step, *, steps=2):
    """Return the loss, state and gradients after some steps, and the result of an inference."""
    random = np.random.default_rng(1)
    memory = Memory(step.buffers, learning_rate=step.learning_rate or 0.0)
    for name, values in step.values.items():
        memory[name][...] = values
    for _ in range(steps):
        fill(memory, step.inputs, random)
        execute(memory, step)
    found = {"loss": memory[step.loss.buffer]}
    for value in (*step.states, *step.gradients):
        found[value.name] = np.concatenate([memory[ref.buffer] for ref in value.pieces])
    inferring = step.inference
    if inferring is not None:
        there = Memory(inferring.buffers)
        for name in inferring.buffers:
            given = inferring.values.get(name)
            if given is None and name in step.values:
                given = memory[name]
            if given is not None:
                there[name][...] = given
        fill(there, inferring.inputs, random)
        execute(there, inferring)
        found["inference"] = there[inferring.output.pieces[0].buffer]
    return found


def pieces(step):
    """Return how many tiles each state tensor has, those in one piece left out."""
    return {v.name: len(v.pieces) for v in step.states if len(v.pieces) > 1}


def check_same(step, tile_bytes):
    """Hold a step in tiles to the whole one, bit by bit, and return it."""
    found = tile_step(step, tile_bytes)
    expected, made = results(step), results(found)
    assert expected.keys() == made.keys()
    for name, values in made.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
    return found


@pytest.mark.parametrize(
    ("network", "optimizer", "tile_bytes"),
    mark_seeds_except(
        product(NETWORKS, OPTIMIZERS, (800, 300)),
        {(twice, "gradients", 300), (quantized, "sgd", 300)},
        {
            (pools, "momentum", 300), (wider, "sgd", 800), (single, "sgd", 300),
            (channels, "gradients", 800), (recurrent, "sgd", 800), (evaluated, "amsgrad", 800),
        },
    ),
)  # fmt: skip
def test_tiles_have_the_bits_of_the_whole_step(network, optimizer, tile_bytes):
    """Loss, state, gradients: every sum has the order that it has without tiles."""
    check_same(lowered(network, optimizer), tile_bytes)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_parameter_for_groups_of_channels_changes_no_numbers(batch):
    """A convolution reads all of its input channels, however its output channels are grouped."""
    step = lowered(lambda: scaled((8, 1, 1), (batch, 2, 8, 8, 8), batch=batch))
    assert pieces(check_same(step, 2048))["shift"] == 2


def scaled_int8(batch):
    """Return a network with an int8 front, whose results have a parameter for each image."""
    front = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(2), nn.AvgPool2d(2))
    model, loss, (x, labels) = scaled((batch, 1, 1, 1), (batch, 16, 2, 2), batch=batch)
    model.first = pmt.quantized(convert_front(front, torch.randn(4, 3, 8, 8)))
    return model, loss, (x, labels)


IMAGE_LAYERS = {
    "none": nn.Identity,
    "convolution": lambda: nn.Conv2d(16, 16, 3, padding=1),
    "depthwise convolution": lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16),
    "transposed convolution": lambda: nn.ConvTranspose2d(16, 16, 2, 2),
    "pool": lambda: nn.MaxPool2d(2),
    "batch norm": lambda: nn.BatchNorm2d(16),
    "int8": None,
}


@pytest.mark.parametrize("layer", mark_seeds_except(IMAGE_LAYERS, {"convolution", "pool", "int8"}))
def test_a_parameter_for_each_image_changes_no_numbers(layer):
    """Where slices are of images, kernels compute the images of their slice."""
    make = IMAGE_LAYERS[layer]
    step = lowered(
        lambda: (
            scaled((8, 1, 1, 1), (8, 16, 8, 8), batch=8, layer=make()) if make else scaled_int8(8)
        )
    )
    assert pieces(check_same(step, 800))["shift"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("network", [residual, *mark_seeds_except((pools, autoencoder), ())])
def test_an_inference_reads_the_tiles_of_its_step(network):
    """It is in tiles itself, and its results have the bits of the whole one."""
    step = lowered(network, "adam", infer=True)
    found = check_same(step, 300)
    assert pieces(found)
    assert len(found.inference.graph.nodes) > len(step.inference.graph.nodes)


@pytest.mark.slow
def test_gradients_that_are_summed_over_batches_are_in_tiles_too():
    """Their sums and the counter of batches are state: the counter changes once in a step."""
    step = lowered(residual, "momentum", accumulate=2)
    found = check_same(step, 300)
    assert found.accumulate == 2
    assert pieces(found)


def test_no_tensor_of_a_network_of_convolutions_is_larger_than_a_tile():
    """Slices are of multiples of four channels, as few as there can be, and alike in a group."""
    step = lowered(residual)
    found = tile_step(step, 2048)
    graph = found.graph
    assert max(graph.tensor_bytes) <= 2048
    assert floor(graph).bytes * 3 <= floor(step.graph).bytes
    names = {name.partition("[")[2] for name in graph.tensor_index if "norm" in name}
    assert {"0:4]", "4:8]", "8:12]"} <= names
    # 6,144 B of 12 channels: three slices of 2,048 B; two of eight and four channels take 4,096.
    assert set(pieces(tile_step(step, 4096)).values()) == {2}
    assert pieces(found)["norm.weight"] == 3
    assert graph.flops == step.graph.flops


def test_what_fits_stays_whole():
    """Without a larger tensor the step is the same; a large weight leaves activations whole."""
    step = lowered(autoencoder)
    assert tile_step(step, 720) is step
    assert divide_step(step, None) is divide_step(step, "none") is step
    found = tile_step(step, 400)
    assert set(pieces(found)) == {"0.weight"}
    assert not any("relu[" in name for name in found.graph.tensor_index)


def test_an_int8_front_in_tiles_needs_less_than_a_float_one():
    """Of its layers each makes slices, and reads slices where results are of single channels.

    The largest node whole: 16 x 16 x 24 B in, 8 x 8 x 24 B out. In slices of four channels: a
    sixth of the first, and all of the second, which the next layer reads.
    """

    def front(*, int8):
        layers = nn.Sequential(
            nn.Conv2d(2, 4, 1), nn.Conv2d(4, 24, 1), nn.ReLU(),
            nn.Conv2d(24, 24, 3, stride=2, padding=1, groups=24), nn.ReLU(), nn.Conv2d(24, 4, 1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        ).requires_grad_(requires_grad=False)  # fmt: skip
        if int8:
            layers = pmt.quantized(convert_front(layers, torch.randn(4, 2, 16, 16)))
        inputs = (torch.randn(1, 2, 16, 16), LABELS[:1])
        return nn.Sequential(layers, nn.Linear(4, 4)), functional.cross_entropy, inputs

    step = lowered(lambda: front(int8=True))
    assert floor(step.graph).bytes == (256 + 64) * 24
    found = floor(tile_step(step, 1024).graph).bytes
    assert found == 256 * 4 + 64 * 24
    assert found < floor(tile_step(lowered(lambda: front(int8=False)), 1024).graph).bytes


INT8_TRAINING = {
    "16 bits": {},
    "one sample": {"batch": 1},
    "stochastic": {"rounding": "stochastic"},
    "summed": {"accumulate": 2},
    "stochastic, summed": {"rounding": "stochastic", "accumulate": 2},
    "clipped": {"clip_grad_norm": 0.5},
}


@pytest.mark.large
@pytest.mark.parametrize("case", mark_seeds_except(INT8_TRAINING, {"16 bits"}))
def test_int8_layers_that_train_are_in_tiles(case):
    """Gradients, weights and residuals are in slices, with the bits of the whole step.

    The largest node whole: the gradient of 20 channels of 6 x 6 float32 numbers and that of their
    means, 5 x 5. In slices of four channels all nodes need less than a third. With sums of
    gradients or one sample, an update of 9 channels needs more: less than half, four of nine. The
    sums of input gradients go over slices of results. Weights of depthwise convolutions stay whole.
    """
    step = trained_int8(**INT8_TRAINING[case])
    found = check_same(step, 300)
    if case == "clipped":
        return
    has_large_update = "summed" in case or case == "one sample"
    parts = 2 if has_large_update else 3
    assert floor(found.graph).bytes * parts < floor(step.graph).bytes
    tiles = pieces(found)
    layers = ("first", "inner", "point", "last")
    kinds = ("weight",) if "stochastic" in case else ("weight", "residual")
    assert {f"{layer}.{kind}" for layer in layers for kind in kinds} <= tiles.keys()
    assert not any(name.startswith("each.weight") for name in tiles)
    chains = [node for node in found.graph.nodes if node.op.endswith("input_gradient")]
    assert any(node.in_place for node in chains)


def test_a_weight_has_gradients_and_updates_in_tiles():
    """10 channels of 216 B in tiles of 1,296 B: fours, each with its moment, read and replaced."""
    step = lowered(convolutions, "momentum")
    found = check_same(step, 1296)
    state = next(value for value in found.states if value.name == "2.weight")
    names = [f"2.weight[{part}]" for part in ("0:4", "4:8", "8:10")]
    assert state.pieces == tuple(map(Ref, names))
    assert state.shape == (10, 6, 3, 3)
    assert pieces(found)["2.weight.momentum_buffer"] == 3
    graph = found.graph
    for name in names:
        i = graph.tensor_index[name]
        update = graph.nodes[graph.users_of[i][-1]]
        assert update.phase == Phase.UPDATE
        assert graph.tensors[graph.replacement_of[i]].name == f"{name}+"
    assert sum(graph.tensor_bytes[i] for i in graph.state_tensors) == sum(
        step.graph.tensor_bytes[i] for i in step.graph.state_tensors
    )


def test_sums_over_slices_are_chains_in_place():
    """Each link continues the one before; a weight is replaced after its last reader."""
    found = tile_step(lowered(residual, "momentum"), 2048)
    graph = found.graph
    links = [node for node in graph.nodes if node.name.startswith("inner/convolution_backward[")]
    assert len(links) == 9
    assert sum(bool(node.in_place) for node in links) == 6
    for node in graph.nodes:
        for made, before in node.in_place:
            assert before in node.inputs
            assert made in {tensor.name for tensor in node.outputs}
    for i, new in graph.replacement_of.items():
        assert graph.node_of[new] == max(graph.users_of[i])


def test_operators_on_a_group_go_slice_by_slice():
    """The output of one slice is computed before the next one is read."""
    found = tile_step(lowered(evaluated), 2048)
    parts = [
        node.name.partition("[")[2]
        for node in found.graph.nodes
        if node.phase == Phase.FORWARD and node.name.startswith(("norm/", "relu["))
    ]
    assert parts == sorted(parts, key=["0:4]", "4:8]", "8:12]"].index)


def test_what_cannot_be_split_stays_whole():
    """Shared weights and clipped gradients are whole; other nodes are in tiles."""

    def tied():
        tokens, rows = torch.tensor([[1, 2, 3]]), nn.Embedding(10, 6)
        layers = {"embedding": rows, "inner": nn.Linear(6, 6), "head": nn.Linear(6, 10)}
        layers["head"].weight = rows.weight
        model = FunctionModule(
            lambda own, x: own.head(own.inner(own.embedding(x))).flatten(0, 1), **layers
        )
        return model, functional.cross_entropy, (tokens, tokens.flatten())

    assert set(pieces(check_same(lowered(tied), 64))) == {"inner.weight", "inner.bias"}
    clipped = lowered(autoencoder, "sgd", clip_grad_norm=0.1)
    assert not pieces(check_same(clipped, 64))
    with pytest.raises(InputError, match="tile: expected a size above 0"):
        divide_step(clipped, 0)
    with pytest.raises(InputError, match="tile: auto is chosen for the RAM of a device"):
        divide_step(clipped, "auto")


@pytest.mark.slow
def test_auto_is_the_cheapest_of_sizes_that_fit(tmp_path):
    """From the largest on; only if the whole step does not fit. Less RAM is refused."""
    step, device = lowered(residual), Device.load("nrf52840")
    whole = needed_bytes(step, device, paging=True)
    auto, none = TileChoice.AUTO, TileChoice.WHOLE
    assert choose_tiles(step, auto, device, ram_bytes=whole, paging=True) == (None, step)
    assert choose_tiles(step, none, device, ram_bytes=1, paging=True) == (None, step)
    size, found = choose_tiles(step, auto, device, ram_bytes=whole - 1, paging=True)
    assert needed_bytes(found, device, paging=True) < whole
    assert needed_bytes(tile_step(step, size * 2), device, paging=True) >= whole
    deployment = export_step(step, tmp_path / "auto", ram="14KiB", gap=0.5)
    tried = {trial.tile_bytes: trial.value for trial in deployment.tile_trials}
    assert 1 < len(tried) <= MAX_CANDIDATES
    assert next(iter(tried)) == 3072
    assert tried[deployment.tile_bytes] == min(tried.values())
    manifest = json.loads((tmp_path / "auto" / "manifest.json").read_text(encoding="utf-8"))
    assert {each["tile_bytes"]: each["value"] for each in manifest["tile_trials"]} == tried
    size = deployment.tile_bytes
    assert deployment.step.graph.sha256 == tile_step(step, size).graph.sha256
    for size in tried:
        most = deployment.ram_bytes - reserved_bytes(step, deployment.stack_bytes)
        assert needed_bytes(tile_step(step, size), device, paging=True) <= most
    with pytest.raises(BudgetError, match=r"one node alone of the step, whole, needs"):
        export_step(step, tmp_path / "none", ram="14KiB", tile="none")
    with pytest.raises(BudgetError, match=r"one node alone of the step, in tiles of \d"):
        export_step(step, tmp_path / "less", ram="8KiB")


def test_channels_with_several_groupings_have_a_bound_on_ram_too():
    """Buffers that no kernel can divide stay undivided in the bound, as in tiles."""
    step = lowered(lambda: scaled((8, 1, 1), (2, 2, 8, 8, 8), batch=2))
    bound = min_tiled_bytes(step, alignment=1, reads_in_place=False, is_resident=False)
    assert 0 < bound <= floor(tile_step(step, 16).graph).bytes


@pytest.mark.parametrize("paging", [True, False])
@pytest.mark.parametrize("make", [autoencoder, pytest.param(residual, marks=pytest.mark.slow)])
def test_no_tiles_need_less_than_their_bound(make, paging):
    """The bound holds for each size; distinct sizes are tried, with the result of `tile_step`."""
    step, device = lowered(make, "sgd"), Device.load("nrf52840")
    bound = min_tiled_bytes(step, alignment=ALIGNMENT, reads_in_place=False, is_resident=not paging)
    sizes = [2**k for k in range(12, 3, -1)]
    found = dict(make_distinct_tilings(step, sizes))
    assert 1 < len(found) < len(sizes)
    last = None
    for size in sizes:
        alone = tile_step(step, size)
        last = found.get(size, last)
        assert last is not None
        assert (last.graph, last.calls) == (alone.graph, alone.calls)
        assert needed_bytes(alone, device, paging=paging) >= bound > 0


@pytest.mark.slow
def test_advice_on_ram_is_what_the_device_has(tmp_path):
    """Refusals advise no more RAM than there is, and options with which a step fits."""
    step, device = lowered(residual, "sgd"), Device.load("nrf52840")

    def refused(board, **options):
        with pytest.raises(BudgetError) as caught:
            export_step(step, tmp_path / "c", device=board, **options)
        return caught.value.faults[0]

    advised = re.search(r"give at least ([\d,]+) B$", refused(device, ram="8KiB"))
    enough = int(advised[1].replace(",", ""))
    assert export_step(step, tmp_path / "enough", ram=enough, gap=0.5).ram_bytes == enough
    small = replace(device, ram_bytes=enough - 1)
    told = refused(small, ram="8KiB")
    assert "give" not in told
    assert f"device nrf52840 has {enough - 1:,} B; take a smaller network" in told
    whole = refused(replace(device, ram_bytes=enough), tile="none")
    (tile,) = re.findall(r"take tile (\d+)B, with which it needs", whole)
    export_step(
        step, tmp_path / "tiles", device=replace(device, ram_bytes=enough), tile=int(tile), gap=0.5
    )
    paged = refused(replace(device, ram_bytes=enough), paging=False)
    assert "allow paging, with which it needs" in paged
