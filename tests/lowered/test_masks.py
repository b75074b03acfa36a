"""Saved activations as bits and bytes, with bitwise equal results."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import poetmodel as pm
from kit.kernel_calls import execute_steps, list_kernels
from kit.networks import trainings
from kit.random_masks import draw_mask
from kit.traced_models import FunctionModule
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.lowered.calls import DataType
from poetmodel.planner import make_plan
from poetmodel.torch.lowering.step import lower

TRAINED = {
    "all": lambda _name, _layer: True,
    "biases": lambda name, _layer: name.endswith("bias"),
    "last": lambda _name, layer: layer > 1,
    "first": lambda _name, layer: layer <= 1,
}
"""Which parameters are trained, by their names and the number of their layer."""


def train(model, which):
    """Freeze the other parameters, and statistics beside frozen weights; return the rest."""
    layers = {name: k for k, name in enumerate(dict(model.named_children()))}
    for name, parameter in model.named_parameters():
        layer = layers[name.partition(".")[0]]
        parameter.requires_grad_(TRAINED[which](name, layer))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train(module.weight.requires_grad)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def steps(training, which="all"):
    """Return a step that saves PyTorch's tensors, and one with masks."""
    model, loss, inputs = training
    trained = train(model, which)
    before, after = (
        lower(model, loss, inputs, optimizer=torch.optim.SGD(trained, lr=0.1), masks=masks)
        for masks in (False, True)
    )
    return before, after


def bits(step, memory):
    """Return the loss and all state after steps, byte by byte."""
    left = {value.name: memory[value.pieces[0].buffer].tobytes() for value in step.states}
    return {**left, "loss": memory[step.loss.buffer].tobytes()}


def check(before, after, *inputs):
    """Hold losses and state of two steps to each other, bit by bit, after three steps."""
    expected = bits(before, execute_steps(before, *inputs, steps=3))
    assert bits(after, execute_steps(after, *inputs, steps=3)) == expected


def layers():
    """Return activations with every kind of mask between convolutions, and dropout."""

    def logits(own, x):
        x = functional.max_pool2d(torch.relu(own.first(x)), 3, 2, 1)
        x = functional.leaky_relu(functional.relu6(own.second(x)), 0.1)
        x = functional.hardsigmoid(functional.avg_pool2d(own.norm(own.third(x)), 2))
        x = functional.adaptive_max_pool2d(functional.dropout(x, 0.3), 2)
        return own.head(x.flatten(1))

    torch.manual_seed(0)
    inputs = (torch.randn(3, 2, 11, 11), torch.tensor([0, 2, 1]))
    first, second = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 6, 3, padding=1)
    layers = {"first": first, "second": second, "third": nn.Conv2d(6, 6, 1)}
    model = FunctionModule(logits, **layers, norm=nn.BatchNorm2d(6), head=nn.Linear(6 * 4, 3))
    return model, functional.cross_entropy, inputs


@pytest.mark.slow
@pytest.mark.parametrize("which", TRAINED)
def test_training_has_the_same_bits(which):
    """Whatever is trained, dropout included."""
    training = layers()
    before, after = steps(training, which)
    assert "pm_dropout_bits" in list_kernels(after)
    assert not any(
        kernel.startswith(("pm_max_pool2d_back", "pm_mask")) for kernel in list_kernels(after)
    )
    check(before, after, *training[2])


def test_small_activations_in_a_row_take_no_more():
    """If another gradient reads the values anyway, a mask would save no memory."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Hardtanh(), nn.Linear(2, 4))
    training = model, functional.cross_entropy, (torch.ones(2, 2), torch.tensor([1, 1]))
    train(model, "biases")
    before, after = steps(training, "biases")
    assert checkpoint_all_peak_bytes(after.graph) <= checkpoint_all_peak_bytes(before.graph)


@pytest.mark.slow
@given(training=trainings(), which=st.sampled_from(sorted(TRAINED)))
@settings(max_examples=7)
def test_random_networks_have_the_same_bits(training, which):
    """Random networks have the same bits, too, with at most the same RAM."""
    if not train(training[0], which):
        return
    before, after = steps(training, which)
    check(before, after, *training[2])
    assert checkpoint_all_peak_bytes(after.graph) <= checkpoint_all_peak_bytes(before.graph)
    assert floor(after.graph).bytes <= floor(before.graph).bytes


SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.0, -3.0, 6.0, 0.1, -1e-45)
ACTIVATIONS = {
    "relu": (torch.relu, "pm_above_bits"),
    "relu6": (functional.relu6, "pm_between_bits"),
    "hardtanh": (lambda x: functional.hardtanh(x, -3.0, 0.1), "pm_between_bits"),
    "threshold": (lambda x: functional.threshold(x, 0.1, 20.0), "pm_above_bits"),
    "leaky relu": (lambda x: functional.leaky_relu(x, 0.2), "pm_above_bits"),
    "rising": (lambda x: functional.leaky_relu(x, -0.5), "pm_above_bits"),
    "hardsigmoid": (functional.hardsigmoid, "pm_between_bits"),
}


@pytest.mark.parametrize("turned", [pytest.param(False, marks=pytest.mark.slow), True])
def test_special_numbers_have_the_same_gradients(turned):
    """At limits and beyond, for infinities, both zeros and NaN, however the operand lies."""
    x = torch.tensor(SPECIAL).repeat(7, 1)

    def activated(own, x):
        """Return the sum over all activations, each of the input and a bias of its own."""
        found = []
        for function, bias in zip(functions, own.biases, strict=True):
            y = x + bias
            found.append(function(y.t() if turned else y).mul(x[0, SPECIAL.index(3.0)]).sum())
        return sum(found)

    functions, asks = zip(*ACTIVATIONS.values(), strict=True)
    biases = nn.ParameterList(torch.zeros(7, len(SPECIAL)) for _ in functions)
    model = FunctionModule(activated, biases=biases)
    before, after = (lower(model, None, (x,), masks=masks) for masks in (False, True))
    kernels = Counter(list_kernels(after))
    assert {kernel: kernels[kernel] for kernel in asks} == Counter(asks)
    buffers = dict(zip(ACTIVATIONS, after.gradients, strict=True))
    found = [
        {name: left[value.pieces[0].buffer].tobytes() for name, value in buffers.items()}
        for left in (execute_steps(step, x) for step in (before, after))
    ]
    assert found[0] == found[1]


def test_masks_are_made_only_where_no_gradient_reads_values():
    """The gradient of a layer's weights reads its input; a bias, or a frozen layer, does not."""
    model = nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 2))
    inputs = (torch.randn(8, 9), torch.randint(0, 2, (8,)))
    found = {}
    for trained in ("0.weight 2.weight", "0.weight 2.bias 4.weight", "0.weight", "4.weight"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained.split())
        step = lower(model, functional.cross_entropy, inputs)
        found[trained] = [node.name for node in step.graph.nodes if node.op == "mask"]
    assert found == {
        "0.weight 2.weight": ["3/relu.mask"],
        "0.weight 2.bias 4.weight": ["1/relu.mask"],
        "0.weight": ["1/relu.mask", "3/relu.mask"],
        "4.weight": [],
    }


def test_relu6_leaves_its_operand_free():
    """Where the next layer's weights keep the result, the gradient reads that, and no mask."""
    model = nn.Sequential(nn.Linear(9, 9), nn.ReLU6(), nn.Linear(9, 2))
    before, after = steps((model, functional.mse_loss, (torch.randn(8, 9), torch.randn(8, 2))))
    read = [
        node.inputs[-1]
        for step in (before, after)
        for node in step.graph.nodes
        if node.op == "hardtanh_backward"
    ]
    assert read == ["0/addmm", "1/hardtanh"]
    assert "mask" not in {node.op for node in after.graph.nodes}


def test_chain_takes_what_arithmetic_says():
    """Of n reals a mask has n / 32 as many bytes; no gradient of frozen layers reads values.

    Each of five activations has 8 x 8 x 8 reals, N = 2048 B, and a mask of 64 B. Before, the
    gradient of the pool is made (N) beside all five (5 N). After, a convolution in the middle has
    its input and output (2 N), beside the masks of the layers before it, forward and backward.
    The pool's result has 32 B.
    """
    parts = [part for _ in range(5) for part in (nn.Conv2d(8, 8, 1, bias=False), nn.ReLU())]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1))
    inputs = (torch.randn(1, 8, 8, 8), torch.randn(1, 8, 1, 1))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "0.weight")
    before, after = (lower(model, functional.mse_loss, inputs, masks=on) for on in (False, True))
    assert checkpoint_all_peak_bytes(before.graph) == 6 * 2048 + 32
    assert checkpoint_all_peak_bytes(after.graph) == 2 * 2048 + 4 * 64
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())
    inputs = (torch.randn(1, 1, 16, 16), torch.randn(1, 256))
    before, after = (
        lower(model, functional.mse_loss, inputs, masks=masks) for masks in (False, True)
    )
    assert floor(before.graph).bytes == 2 * 4096
    assert floor(after.graph).bytes == 4096 + 1024


def test_largest_window_that_a_byte_counts():
    """Places in windows of 256 elements are bytes; in larger ones they stay integers."""
    for size, kind in ((16, DataType.UINT8), (17, DataType.INT32)):
        torch.manual_seed(size)
        model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(size))
        inputs = (torch.randn(2, 1, 2 * size, size), torch.randn(2, 2, 2, 1))
        before, after = steps((model, functional.mse_loss, inputs))
        assert after.buffers["1/max_pool2d_with_indices:1"].type is kind
        check(before, after, *inputs)


def test_indices_that_are_returned_stay():
    """Indices that are used for more than the gradient stay as in PyTorch."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())

    def loss(y, target):
        values, indices = functional.max_pool2d(y, 2, return_indices=True)
        return (values * indices - target).square().sum()

    inputs = (torch.randn(1, 1, 8, 8), torch.randn(1, 2, 3, 3))
    before, after = steps((model, loss, inputs))
    assert "pm_max_pool2d_places" not in list_kernels(after)
    check(before, after, *inputs)


def test_dropout_draws_its_documented_mask_into_bits():
    """The mask is that of the generator, in another step another one."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.4))
    inputs = (torch.randn(7, 4), torch.randn(7, 5))
    _, after = steps((model, functional.mse_loss, inputs))
    memory = execute_steps(after, *inputs, steps=3)
    packed = memory["1/native_dropout:1"]
    assert (packed.dtype, len(packed)) == ("uint8", 5)
    unpacked = torch.from_numpy(packed.copy()).unsqueeze(1).bitwise_right_shift(torch.arange(8))
    found = unpacked.bitwise_and(1).flatten()[:35].bool()
    assert found.tolist() == draw_mask(2, 0, 35, 0.4).tolist()


def test_masks_are_paged_and_made_again():
    """A plan that pages and recomputes masks, or frees them, computes the same bits."""
    training = layers()
    before, after = steps(training, "biases")
    names = [tensor.name for tensor in after.graph.tensors if ".mask" in tensor.name]
    again, paged = names[:2], names[2:]
    assert len(paged) > 1
    drawn = "native_dropout.mask"
    problem = pm.Problem(
        after.graph, pm.Costs.estimate(after.graph, pm.Device.load("nrf52840")), ram="100%"
    ).subject_to(
        again=lambda v: [v.recomputations[name] >= 1 for name in (*again, drawn)],
        paged=lambda v: [v.page_ins[name] >= 1 for name in paged],
    )
    result = pm.solve(problem, gap=0.5)
    plan = make_plan(problem.graph, problem.costs, result.require_schedule(), mode="blocking")
    found = execute_steps(after, *training[2], steps=3, program=plan.program)
    assert bits(after, found) == bits(before, execute_steps(before, *training[2], steps=3))
