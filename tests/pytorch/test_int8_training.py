"""Int8 layers that train: their gradients, their updates, and steps of networks of them."""

import copy
import errno
import itertools
import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import poetmodel.torch as pmt
from kit.commands import invoke
from kit.quantized_networks import convert_front, float_front, images, write_onnx
from kit.random_masks import draw_uniform
from poetmodel.errors import InputError
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.int8.front import QuantizedLayer
from poetmodel.torch.int8.gradients import RoundingDraws, update_16_bits, update_stochastic
from poetmodel.torch.int8.operators import find_operator
from poetmodel.torch.int8.training import TrainedLayer, subtract_gradient
from poetmodel.torch.step.optimizers import group_rules
from poetmodel.torch.step.updates import QuantizedUpdate

pytestmark = [pytest.mark.torch, pytest.mark.large]
pytest.importorskip("torchao")


def network():
    """Return convolutions of each kind, pools, and a linear layer, in evaluation mode."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ReLU6(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 4),
    )
    return model.eval()


@pytest.fixture(scope="module")
def batches():
    """Return four batches of images."""
    torch.manual_seed(1)
    return [torch.randn(4, 3, 12, 12) for _ in range(4)]


@pytest.fixture(scope="module")
def trained(batches):
    """Return a network in int8 all of whose layers train."""
    return pmt.quantized(network(), batches, train="all")


@pytest.fixture
def step(trained, batches):
    """Return a copy of the network, and a batch with labels."""
    return copy.deepcopy(trained), batches[0], torch.tensor([0, 1, 2, 3])


def loss_of(model, x, y):
    """Return the loss of a batch, after its backward pass."""
    model.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()


def assert_same(model, twin):
    """Assert that two models have the same state."""
    theirs = twin.state_dict()
    for name, mine in model.state_dict().items():
        assert torch.equal(mine, theirs[name]), name


def integers(*shape, low=-128, high=128):
    """Return random whole numbers of int8."""
    return torch.randint(low, high, shape, dtype=torch.int8)


# -- operators -------------------------------------------------------------------------------------
GEOMETRIES = [
    ((1, 1), (1, 1, 1, 1), (1, 1)),
    ((2, 2), (0, 1, 1, 2), (1, 1)),
    ((2, 1), (1, 0, 0, 1), (1, 2)),
]


@pytest.mark.parametrize(
    ("groups", "geometry"), list(itertools.product((1, 2, 4), GEOMETRIES)), ids=str
)
def test_gradients_of_convolutions_are_those_of_real_values(groups, geometry):
    """On whole numbers, whose sums are exact, with the bits of PyTorch's autograd."""
    torch.manual_seed(2)
    stride, (above, below, left, right), dilation = geometry
    x, zero = integers(2, 7, 8, 4), 3
    weight = integers(8, 3, 3, 4 // groups, low=-127)
    real = ((x.to(torch.int32) - zero).float()).permute(0, 3, 1, 2).requires_grad_()
    filters = weight.float().permute(0, 3, 1, 2).requires_grad_()
    padded = functional.pad(real, (left, right, above, below))
    y = functional.conv2d(padded, filters, None, stride, 0, dilation, groups)
    gradient = torch.randint(-3, 4, y.shape).float()
    y.backward(gradient)
    last = gradient.permute(0, 2, 3, 1).contiguous()
    placed = (list(stride), [above, below, left, right], list(dilation), groups)
    ones = torch.ones(8)
    of_input = find_operator("convolution_input_gradient")(last, weight, ones, [7, 8], *placed)
    assert torch.equal(of_input.permute(0, 3, 1, 2), real.grad)
    of_weight = find_operator("convolution_weight_gradient")(last, x, 1.0, zero, [3, 3], *placed)
    assert torch.equal(of_weight.permute(0, 3, 1, 2), filters.grad)
    if groups == 4:
        depthwise = integers(3, 3, 4, low=-127)
        of_input = find_operator("convolution_input_gradient")(
            last[..., :4].contiguous(), depthwise, ones[:4], [7, 8], *placed
        )
        filters = depthwise.permute(2, 0, 1)[:, None].float()
        padded = functional.pad(real.detach().requires_grad_(), (left, right, above, below))
        padded.retain_grad()
        functional.conv2d(padded, filters, None, stride, 0, dilation, 4).backward(gradient[:, :4])
        inner = padded.grad[:, :, above : above + 7, left : left + 8]
        assert torch.equal(of_input.permute(0, 3, 1, 2), inner)


def test_gradients_of_linear_layers_are_those_of_real_values():
    """Scales of each result meet the gradient; the scale of the input meets the sum."""
    torch.manual_seed(3)
    x, weight, scales = integers(5, 6), integers(4, 6, low=-127), torch.tensor([0.5, 1, 2, 4])
    gradient = torch.randint(-3, 4, (5, 4)).float()
    of_input = find_operator("pointwise_input_gradient")(gradient, weight, scales)
    assert torch.equal(of_input, (gradient * scales) @ weight.float())
    of_weight = find_operator("pointwise_weight_gradient")(gradient, x, 0.25, -7)
    assert torch.equal(of_weight, gradient.T @ (x.float() + 7) * 0.25)


@pytest.mark.parametrize("padding", [0, 1])
def test_gradients_of_pools_are_those_of_real_values(padding):
    """Means share a gradient; of equal maxima the first one has it, as in PyTorch."""
    torch.manual_seed(4)
    x = integers(2, 6, 6, 3, low=-3, high=4)
    x[0, 0] = -128
    real = x.float().permute(0, 3, 1, 2).requires_grad_()
    window, around = [3, 3], [padding] * 4
    y = functional.max_pool2d(real, 3, 2, padding)
    gradient = torch.randint(-3, 4, y.shape).float()
    y.backward(gradient)
    last = gradient.permute(0, 2, 3, 1).contiguous()
    numbers = (window, [2, 2], around)
    found = find_operator("maximum")(x, *numbers, [1, 1])
    mine = find_operator("maximum_gradient")(last, x, found, *numbers, [1, 1])
    assert torch.equal(mine.permute(0, 3, 1, 2), real.grad)
    real.grad = None
    functional.avg_pool2d(real, 3, 2, padding).backward(gradient * 9)
    mine = find_operator("average_gradient")(last * 9, [6, 6], *numbers)
    assert torch.equal(mine.permute(0, 3, 1, 2), real.grad)


def test_bytes_at_a_limit_have_no_gradient():
    """The limits are those of the layer; NaN stays where it is between them."""
    y = torch.tensor([-128, -10, -9, 0, 99, 100, 127], dtype=torch.int8)
    gradient = torch.full((7,), 2.0)
    gradient[3] = torch.nan
    masked = find_operator("mask")(gradient, y, -10, 100)
    assert masked[[0, 1, 5, 6]].tolist() == [0.0] * 4
    assert masked[[2, 4]].tolist() == [2.0, 2.0]
    assert masked[3].isnan()


# -- updates ---------------------------------------------------------------------------------------
def test_16_bits_of_a_weight_follow_their_definition():
    """``w16 = clamp(rint(w16 - 256 change))``, its first byte half up; NaN counts 0."""
    torch.manual_seed(5)
    change = torch.cat((torch.randn(500), torch.tensor([0.5, -0.5, 1e9, -1e9, torch.nan]) / 256))
    change[-3:-1] *= 256
    whole = torch.randint(-127 * 256, 127 * 256 + 1, change.shape)
    high = (whole + 128) >> 8
    weight, residual = high.to(torch.int8), (whole - high * 256).to(torch.int8)
    update_16_bits(weight, residual, change)
    moved = np.rint(whole.numpy().astype(np.float32) - np.nan_to_num(change.numpy()) * 256)
    wanted = np.clip(moved, -127 * 256, 127 * 256).astype(int)
    assert (weight.numpy().astype(int) * 256 + residual.numpy() == wanted).all()
    assert (weight.numpy() == (wanted + 128) >> 8).all()


def test_stochastic_rounding_keeps_the_mean():
    """A change of a tenth of a step moves a tenth of the weights by one; limits hold."""
    torch.manual_seed(6)
    weight = torch.zeros(20_000, dtype=torch.int8)
    update_stochastic(weight, torch.rand(weight.shape), torch.full(weight.shape, 0.1))
    assert set(weight.tolist()) == {-1, 0}
    assert float(weight.float().mean()) == pytest.approx(-0.1, abs=0.01)
    update_stochastic(weight, torch.rand(weight.shape), torch.full(weight.shape, 1e9))
    assert set(weight.tolist()) == {-127}


def test_draws_are_those_of_the_generator_of_exported_code():
    """Philox, as NumPy computes it, with another third word than dropout has."""
    weight = torch.zeros((5, 7), dtype=torch.int8)
    mine = RoundingDraws(update=3, site=2, seed=9).draw_uniform(weight)
    assert mine.shape == weight.shape
    wanted = draw_uniform(3, 2, weight.numel(), stream=1, seed=9)
    assert mine.flatten().tolist() == wanted.tolist()
    part = RoundingDraws(update=3, site=2, seed=9).draw_uniform(weight[3:], first=21)
    assert torch.equal(part, mine[3:])


# -- networks --------------------------------------------------------------------------------------
@pytest.mark.slow
def test_network_without_headroom_has_the_bytes_of_the_frozen_one(batches):
    """Forward is that of a quantized front, bit for bit."""
    frozen = pmt.quantized(network(), batches)
    trains = pmt.quantized(network(), batches, train="all", headroom=1.0)
    assert not list(frozen.parameters())
    assert torch.equal(trains(batches[1]), frozen(batches[1]))


def test_gradients_are_near_those_of_float(trained, batches):
    """They point the same way: cosines of weights and biases of each layer."""
    model, x, y = network(), batches[0], torch.tensor([0, 1, 2, 3])
    layers = trained.trained_layers()
    loss_of(trained, x, y)
    loss_of(model, x, y)
    for name in ("3", "6", "10"):
        layer, real = layers[name], model.get_submodule(name)
        if layer.operator == "depthwise":
            gradient = layer.weight_gradient.grad.permute(2, 0, 1).flatten()
        else:
            gradient = layer.weight_gradient.grad.flatten()
        pairs = ((gradient, real.weight.grad.flatten()), (layer.bias.grad, real.bias.grad))
        for mine, theirs in pairs:
            assert functional.cosine_similarity(mine, theirs, dim=0) > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["16 bits", "stochastic"])
def test_network_learns(batches, rounding):
    """The loss of a batch falls, its weights stay int8, and no float tensor has their size."""
    model = pmt.quantized(network(), batches, train="all", rounding=rounding)
    y = torch.tensor([0, 1, 2, 3])
    optimizer = pmt.QuantizedSGD(model, lr=1.0)
    first = loss_of(model, batches[0], y)
    for _ in range(40):
        optimizer.step()
        last = loss_of(model, batches[0], y)
    assert last < 0.8 * first
    for layer in model.trained_layers().values():
        assert layer.weight.dtype == torch.int8
        assert layer.weight_gradient.untyped_storage().nbytes() == 4
        assert hasattr(layer, "residual") == (rounding == "16 bits")


def test_layers_in_front_stay_as_they_are(batches):
    """With ``last-1`` only the end has parameters, and gradients end there."""
    model = pmt.quantized(network(), batches, train="last-1")
    assert list(model.trained_layers()) == ["10"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = pmt.QuantizedSGD(model, lr=1.0)
    loss_of(model, batches[0], torch.tensor([0, 1, 2, 3]))
    optimizer.step()
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert changed <= {"10.weight", "10.residual", "10.bias"}
    assert {"10.residual", "10.bias"} <= changed


def test_frozen_layers_between_trained_ones_pass_gradients_on(batches):
    """Patterns select layers; frozen ones behind the first pass the gradient on."""
    model = pmt.quantized(network(), batches, train=["0", "10"])
    assert list(model.trained_layers()) == ["0", "10"]
    loss_of(model, batches[0], torch.tensor([0, 1, 2, 3]))
    assert model.get_submodule("0").weight_gradient.grad.abs().max() > 0


def test_converted_modules_and_onnx_files_train_likewise(tmp_path, told):
    """They have the layers of one another, and the same steps; the rest is frozen, or float."""
    onnx = pytest.importorskip("onnx")
    module = convert_front(float_front(), images(8), dtype=torch.uint8)
    write_onnx(module, tmp_path / "net.onnx", head=nn.Linear(10, 3))
    own = nn.Sequential(pmt.quantized(module, train="last-2"), nn.Linear(10, 3))
    file = pmt.from_onnx(tmp_path / "net.onnx", train="last-2")
    own[1].load_state_dict({"weight": file.head.weight.detach(), "bias": file.head.bias.detach()})
    assert not list(pmt.from_onnx(tmp_path / "net.onnx").front.parameters())
    for model in (own, file):
        optimizer = pmt.QuantizedSGD(model, lr=0.5)
        for _ in range(2):
            loss_of(model, images(), torch.tensor([0, 2]))
            optimizer.step()
    layers = [list(front.trained_layers().values()) for front in (own[0], file.front)]
    assert [len(each) for each in layers] == [2, 2]
    for mine, theirs in zip(*layers, strict=True):
        assert torch.equal(mine.weight, theirs.weight)
        assert torch.equal(mine.residual, theirs.residual)
    assert torch.equal(own(images()), file(images()))
    with told.raises(InputError, "name"):
        pmt.from_onnx(tmp_path / "net.onnx", train="dense")
    value = partial(onnx.helper.make_tensor_value_info, shape=[1, 3])
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])], "float", [value("x", 1)], [value("y", 1)]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    onnx.save(model, tmp_path / "float.onnx")
    with told.raises(InputError, "float"):
        pmt.from_onnx(tmp_path / "float.onnx", train="all")


def test_weight_decay_takes_real_weights(step):
    """Without a gradient a weight shrinks by the rate times the decay, residual included."""
    model, x, _ = step
    layer = model.get_submodule("6")
    before = layer.real_weight()
    zeros = torch.zeros(layer.weight.shape)
    subtract_gradient(layer.state, zeros, layer.weight_scale, 0.5, weight_decay=0.1)
    off = (layer.real_weight() - before * 0.95).abs() / layer.weight_scale[:, None]
    assert off.max() <= 0.5 / 256 + 1e-6
    assert x is not None


# -- compiled steps --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rounding", "options"),
    [
        ("16 bits", {}),
        pytest.param("16 bits", {"clip_grad_norm": 0.05}, marks=pytest.mark.slow),
        ("stochastic", {}),
    ],
    ids=str,
)
def test_compiled_steps_have_the_bits_of_eager(step, batches, rounding, options):
    """State, moments of 0 elements, and losses of five steps, with weight decay."""
    model, x, y = step
    if rounding != "16 bits":
        model = pmt.quantized(network(), batches, train="last-2", rounding=rounding)
    twin = copy.deepcopy(model)
    optimizer = pmt.QuantizedSGD(model, lr=0.5, weight_decay=1e-3)
    own = pmt.QuantizedSGD(twin, lr=0.5, weight_decay=1e-3)
    compiled = pmt.compile(
        twin, functional.cross_entropy, (x, y), ram="100%", optimizer=own, **options
    )
    for _ in range(5):
        loss = loss_of(model, x, y)
        if options:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options["clip_grad_norm"])
        optimizer.step()
        assert float(compiled(x, y)) == loss
    assert_same(model, twin)


@pytest.mark.parametrize("rounding", ["16 bits", "stochastic"])
def test_compiled_step_keeps_its_budget(batches, rounding):
    """Updates of more weights than are updated at a time; certified in bits and in bytes."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(432, 40), nn.ReLU(), nn.Linear(40, 4))
    own = pmt.quantized(model, batches, train="all", rounding=rounding)
    optimizer = pmt.QuantizedSGD(own, lr=0.5, weight_decay=1e-3)
    given = (functional.cross_entropy, (batches[0], torch.tensor([0, 1, 2, 3])))
    certificate = pmt.compile(own, *given, ram="100%", optimizer=optimizer).verify(*given[1])
    assert certificate.equal
    assert certificate.within_budget


def test_gradients_of_micro_batches_accumulate(step, batches):
    """Two compiled halves of a batch, and one update: the bits of eager, which sums them."""
    model, _, y = step
    twin = copy.deepcopy(model)
    optimizer, own = pmt.QuantizedSGD(model, lr=0.5), pmt.QuantizedSGD(twin, lr=0.5)
    loss_fn = functional.cross_entropy
    compiled = pmt.compile(twin, loss_fn, (batches[0], y), ram="100%", accumulate=2)
    for pair in (batches[:2], batches[2:]):
        for x in pair:
            (loss_fn(model(x), y) / 2).backward()
            compiled(x, y)
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
    assert_same(model, twin)


@pytest.mark.parametrize("rounding", ["16 bits", "stochastic"])
def test_update_of_an_accumulating_step_is_that_of_eager(batches, rounding):
    """The update sums gradients of batches, and is made with the last one, clipped."""
    model = pmt.quantized(network(), batches, train="last-1", rounding=rounding)
    optimizer = pmt.QuantizedSGD(model, lr=0.5, weight_decay=1e-2, seed=3)
    (layer,) = model.trained_layers().values()
    gradients = torch.randn(3, *layer.weight.shape)
    state = [*(tensor.clone() for tensor in layer.state), torch.zeros(layer.weight.shape)]
    ((rule, _),) = group_rules(optimizer)
    draws = partial(optimizer.draws, 0) if rounding == "stochastic" else None
    update = QuantizedUpdate(rule, site=0, draw_numbers=draws, batches=3)
    rate, factor = torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.25)
    for count, gradient in enumerate(gradients):
        update.overwrite_state(
            state, [gradient], layer.weight_scale, rate, torch.tensor(count), factor
        )
        same = [torch.equal(a, b) for a, b in zip(state, layer.state, strict=False)]
        assert all(same) == (count < 2)
    layer.weight_gradient.grad = (gradients[0] + gradients[1] + gradients[2]) * factor
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(state, layer.state, strict=False))
    assert not state[-1].any()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's
def test_backend_has_the_bits_of_eager(step, batches):
    """Layers in int8 under ``torch.compile``, with an optimizer of its own beside it."""
    model, _, y = step
    twin = copy.deepcopy(model)
    optimizer, own = pmt.QuantizedSGD(model, lr=0.5), pmt.QuantizedSGD(twin, lr=0.5)

    def loss_of_twin(x, y):
        return functional.cross_entropy(twin(x), y)

    own_backend = pmt.backend(ram="100%")
    compiled = torch.compile(loss_of_twin, backend=own_backend, fullgraph=True, dynamic=False)
    for x in batches[:2]:
        loss = loss_of(model, x, y)
        twin.zero_grad()
        mine = compiled(x, y)
        mine.backward()
        assert mine.item() == loss
        optimizer.step()
        own.step()
    assert_same(model, twin)


@pytest.mark.parametrize("failing", [False, True])
def test_updates_go_on_after_a_kill(batches, tmp_path, failing, monkeypatch):
    """Stochastic rounding depends on the number of the update, which a state file has.

    A step that fails at its commit does not count as an update.
    """
    x, y = batches[0], torch.tensor([0, 1, 2, 3])

    def compile_step():
        model = pmt.quantized(network(), batches, train="last-1", rounding="stochastic")
        optimizer = pmt.QuantizedSGD(model, lr=0.5, seed=7)
        steps = pmt.recover(tmp_path, model, optimizer)
        step = pmt.compile(
            model, functional.cross_entropy, (x, y), optimizer=optimizer, storage=tmp_path,
            ram="100%",
        )  # fmt: skip
        return model, optimizer, step, steps

    model, optimizer, step, _ = compile_step()
    step(x, y)
    if failing:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", partial(_raise, OSError(errno.EIO, "no medium")))
            with pytest.raises(pmt.PageError):
                step(x, y)
    step(x, y)
    assert optimizer.param_groups[0]["updates"] == 2
    (path,) = tmp_path.glob(".poetmodel-state-*")
    left = path.with_name(f"{path.name}-left")
    shutil.copy(path, left)
    step(x, y)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    step.close()
    model, optimizer, step, steps = compile_step()
    assert (steps, optimizer.param_groups[0]["updates"]) == (2, 2)
    step(x, y)
    assert {k: v for k, v in model.state_dict().items() if not torch.equal(v, expected[k])} == {}
    step.close()


def _raise(error, *_):
    raise error


def test_updates_go_on_from_a_stored_optimizer(batches):
    """Stochastic rounding draws by the number of the update, which a state dict has."""
    model = pmt.quantized(network(), batches, train="last-1", rounding="stochastic")
    optimizer = pmt.QuantizedSGD(model, lr=0.5, seed=7)
    y = torch.tensor([0, 1, 2, 3])

    def weights_after_a_step(model, optimizer):
        loss_of(model, batches[0], y)
        optimizer.step()
        return next(iter(model.trained_layers().values())).weight

    weights_after_a_step(model, optimizer)
    twin, own = copy.deepcopy((model, optimizer))
    other = copy.deepcopy(model)
    stored = pmt.QuantizedSGD(other, lr=0.1)
    stored.load_state_dict(optimizer.state_dict())
    another = copy.deepcopy(model)
    fresh = pmt.QuantizedSGD(another, lr=0.5, seed=7)
    expected = weights_after_a_step(model, optimizer)
    assert torch.equal(weights_after_a_step(twin, own), expected)
    assert torch.equal(weights_after_a_step(other, stored), expected)
    assert not torch.equal(weights_after_a_step(another, fresh), expected)


def test_traced_step_has_its_label_and_int8_state(step):
    """Weights and residuals are state of one byte each, and results are labelled as quantized."""
    model, x, y = step
    optimizer = pmt.QuantizedSGD(model, lr=0.5)
    graph = pmt.trace(model, functional.cross_entropy, (x, y), optimizer=optimizer).graph
    assert graph.exactness.startswith("int8 weights")
    count = sum(layer.weight.numel() for layer in model.trained_layers().values())
    replaced = {graph.tensors[i].name: graph.tensors[i].bytes for i in graph.state_tensors}
    of_weights = [size for name, size in replaced.items() if name.endswith(("weight", "residual"))]
    assert sum(of_weights) == 2 * count


def test_commands_say_what_the_numbers_are(step, tmp_path):
    """Limits, schedules and reports of a traced step have the label."""
    model, x, y = step
    given = (functional.cross_entropy, (x[:1], y[:1]))
    graph = pmt.trace(model, *given, optimizer=pmt.QuantizedSGD(model, lr=0.5)).graph
    names = ("net.graph.json", "a.json", "a.html")
    path, schedule, page = (tmp_path / name for name in names)
    graph.save(path)
    limits = invoke("limits", str(path), "--device", "nrf52840", "--time-limit", "20")
    assert graph.exactness in " ".join(limits.out.split())
    options = ("--device", "nrf52840", "--ram", "100%", "--time-limit", "20")
    solved = invoke("solve", str(path), *options, "--out", str(schedule))
    assert graph.exactness in " ".join(solved.out.split())
    invoke("report", str(schedule), "--graph", str(path), "--out", str(page))
    assert graph.exactness in page.read_text(encoding="utf-8")


def test_choose_trains_int8_layers(batches):
    """A layer's weight and residual are one tensor, with scores of real gradients; proved."""
    model = pmt.quantized(network(), batches, train=["3", "6", "10"])
    loss_fn, inputs = functional.cross_entropy, (batches[0][:1], torch.tensor([1]))
    options = {"device": "nrf52840", "scores": "gradient-norm", "paging": False}
    every = pmt.choose(model, loss_fn, inputs, ram="100%", **options)
    assert every.layers == ("3", "6", "10")
    fewer = pmt.choose(model, loss_fn, inputs, ram="60%", **options)
    assert fewer.status == "optimal"
    assert not fewer.note
    assert set(fewer.layers) < set(every.layers)
    assert fewer.result.energy_j < every.result.energy_j
    graph = fewer.step.graph
    state = {graph.tensors[i].name for i in graph.state_tensors}
    trained = {layer for layer in "36" if f"{layer}.residual" in state}
    assert trained == set(fewer.layers) - {"10"}
    fewer.freeze(model)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(fewer.parameters)
    with pytest.raises(InputError, match="cannot be trained"):
        pmt.choose(model, loss_fn, inputs, **{**options, "scores": {"0": 1.0}}, ram="100%")


# -- refusals --------------------------------------------------------------------------------------
def test_refusals_are_sentences(step, batches, told, tmp_path):
    """Layers, roundings and factors that there are none of; optimizers without an update."""
    model, x, y = step
    given = (functional.cross_entropy, (x, y))
    first = nn.Conv2d(3, 4, 3)
    with_momentum = pmt.QuantizedSGD(model, lr=1.0)
    with_momentum.param_groups[0]["momentum"] = 0.9
    calls = {
        "name": lambda: pmt.quantized(network(), batches, train="conv*"),
        "last": lambda: pmt.quantized(network(), batches, train="last-9"),
        "rounding": lambda: pmt.quantized(network(), batches, train="all", rounding="nearest"),
        "headroom": lambda: pmt.quantized(network(), batches, train="all", headroom=0.5),
        "rate": lambda: pmt.QuantizedSGD(model, lr=-1.0),
        "seed": lambda: pmt.QuantizedSGD(model, lr=1.0, seed=-1),
        "group": with_momentum.step,
        "layer": lambda: pmt.quantized(nn.Sequential(first, nn.GELU()), batches, train="all"),
        "no weights": lambda: pmt.quantized(nn.Sequential(nn.ReLU()), batches, train="all"),
    }
    for name, call in calls.items():
        with told.raises(InputError, name):
            call()
    given = (lambda *_: pytest.fail("a step was captured"), (x, y))
    parameters = list(model.parameters())
    optimizers = {
        "adam": torch.optim.Adam(parameters),
        "momentum": torch.optim.SGD(parameters, momentum=0.9),
    }
    for name, optimizer in optimizers.items():
        with told.raises(CaptureError, name):
            pmt.compile(model, *given, ram="100%", optimizer=optimizer)
        with told.raises(CaptureError, f"export, {name}"):
            pmt.export(model, *given, folder=tmp_path / name, optimizer=optimizer)
        assert not (tmp_path / name).exists()
    stochastic = pmt.quantized(network(), batches, train="last-1", rounding="stochastic")
    with told.raises(CaptureError, "count"):
        plain = torch.optim.SGD(stochastic.parameters(), lr=1.0)
        pmt.compile(stochastic, *given, ram="100%", optimizer=plain)
    with told.raises(CaptureError, "input"):
        model(x.clone().requires_grad_())


def test_operators_without_a_kernel_are_refused_before_batches_run(batches, told):
    """A batch norm that cannot be folded into a convolution, a layer without a backward pass."""

    def first_only():
        yield batches[0]
        pytest.fail("a second batch was asked for")

    first = nn.Conv2d(3, 4, 3)
    networks = {
        "batch norm": nn.Sequential(first, nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)),
        "softmax": nn.Sequential(first, nn.Softmax(1), nn.Conv2d(4, 4, 1)),
    }
    for name, model in networks.items():
        with told.raises(InputError, name):
            pmt.quantized(model.eval(), first_only(), train="all")
        with told.raises(InputError, f"front, {name}"):
            pmt.quantized(model.eval(), first_only())


@pytest.mark.parametrize("has_weights", [False, True])
def test_layers_without_a_gradient_are_refused(told, has_weights):
    """An operator without a known gradient computes; training it or one before it is refused."""
    scale = torch.ones(1) if has_weights else None
    layer = QuantizedLayer("quantize", {}, (1.0, 0), weight_scale=scale)
    x = torch.zeros(1, 4)
    assert torch.equal(layer(x), x.to(torch.int8))
    with told.raises(InputError, "with weights" if has_weights else "without weights"):
        layer(x, proxies=(torch.zeros(()).expand(1, 4),))


@pytest.mark.parametrize("copied", [False, True])
def test_optimizers_of_pytorch_are_refused_by_name(trained, batches, copied):
    """Before they change a parameter; also after a copy of the model, whose proxies have memory.

    Without int8 weights they work.
    """
    model = copy.deepcopy(trained) if copied else trained
    before = [parameter.clone() for parameter in model.parameters()]
    loss_of(model, batches[0], torch.tensor([0, 1, 2, 3]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(
        InputError, match=r"SGD cannot update int8 weights: use poetmodel\.torch\.Qu"
    ):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    model.zero_grad()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    weight = other.weight.clone()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert not torch.equal(other.weight, weight)


def test_layer_alone_is_a_layer_of_a_front(step):
    """A trained layer that is called by itself returns its bytes."""
    model, _, _ = step
    layer = model.get_submodule("6")
    assert isinstance(layer, TrainedLayer)
    x = integers(1, 2, 2, 8)
    assert layer(x).dtype == torch.int8
