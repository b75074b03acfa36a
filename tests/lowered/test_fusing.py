"""Gradients that are no tensors: updates by SGD that make them."""

from itertools import product

import pytest
import torch

from kit.digits import compute_state
from kit.export_agreement import make_batches_like
from kit.kernel_calls import list_kernels
from kit.programs import require_programs
from kit.rotation import mark_seeds_except
from kit.traced_models import FunctionModule
from poetmodel.export.board import Target
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.lowered.fusing import fuse_updates, split_fused_updates
from poetmodel.tiling.choice import divide_step
from poetmodel.torch.lowering.step import lower

RATE = 0.05
PLACES = {
    "kept": ({"ram": "100%", "paging": False}, ()),
    "paged": ({"ram": "95%", "recompute": False}, ()),
    "read in place": ({"ram": "60%", "device": "nano33ble"}, ("DRIVER=ram",)),
    "in tiles": ({"ram": "95%", "tile": 256}, ()),
    "with commits": ({"ram": "95%", "commit": True}, ()),
}
"""Where weights are: options of the export, and what the program is built with."""
RULES = {"plain": {}, "decay": {"weight_decay": 0.1}, "maximize": {"maximize": True}}


def twice():
    """Return a layer that is applied two times: its gradient is a sum of two products."""
    return FunctionModule(lambda parts, x: parts[0](torch.tanh(parts[0](x))), torch.nn.Linear(9, 9))


def perceptron():
    """Return two layers whose sizes are no multiples of a block of the kernels."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(37, 11), torch.nn.ReLU(), torch.nn.Linear(11, 5))


def filters():
    """Return convolutions: in groups, of two filters per channel, transposed, of one window.

    Images are so small that at batch size 1 each gradient has the size of its operands.
    """
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 9, 3, padding=1), torch.nn.ReLU()),
        *(torch.nn.Conv2d(9, 9, 3, padding=1, groups=9), torch.nn.ReLU()),
        *(torch.nn.Conv2d(9, 12, 3, stride=2, groups=3), torch.nn.ReLU()),
        *(torch.nn.Conv2d(12, 24, (1, 2), padding=(0, 1), groups=12), torch.nn.ReLU()),
        *(torch.nn.ConvTranspose2d(24, 8, 2), torch.nn.ReLU()),
        *(torch.nn.Conv2d(8, 13, 1), torch.nn.ReLU(), torch.nn.Conv2d(13, 5, (2, 3))),
        torch.nn.Flatten(),
    )


def captured(model, batch=3, **rule):
    """Return a step with SGD, and a batch for it."""
    torch.manual_seed(1)
    weight = next(model.parameters())
    image = (3, 3) if weight.dim() == 4 else ()
    inputs = (torch.randn(batch, weight.shape[1], *image), torch.randint(0, 5, (batch,)))
    clip, updates = rule.pop("clip", None), rule.pop("updates", True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, **rule) if updates else None
    loss = torch.nn.functional.cross_entropy
    return lower(model, loss, inputs, optimizer=optimizer, clip_grad_norm=clip), inputs


@pytest.mark.parametrize(
    ("model", "batch", "made"),
    [
        (perceptron, 3, {"pm_mm_sgd": 2, "pm_sgd": 2}),
        (filters, 1, {"pm_conv2d_dw_sgd": 5, "pm_depthwise_dw_sgd": 2}),
    ],
)
def test_gradients_of_weights_are_no_tensors(model, batch, made):
    """They are removed with their nodes; those of biases stay. The step needs less RAM."""
    joined, _ = captured(model(), batch)
    two = split_fused_updates(joined)
    gone = set(two.graph.tensor_index) - set(joined.graph.tensor_index)
    weights = [p.numel() for p in model().parameters() if p.dim() > 1]
    assert sorted(two.buffers[name].elements for name in gone) == sorted(weights)
    assert {kernel: list_kernels(joined).count(kernel) for kernel in made} == made
    assert not {"pm_conv2d_dw", "pm_depthwise_dw"} & set(list_kernels(joined))
    assert len(joined.graph.nodes) == len(two.graph.nodes) - len(weights)
    assert not gone & joined.buffers.keys()
    assert checkpoint_all_peak_bytes(joined.graph) < checkpoint_all_peak_bytes(two.graph)
    assert floor(joined.graph).bytes <= floor(two.graph).bytes


def test_small_gradients_of_large_images_stay():
    """They are small, and a separate node is a stage in which a node may be recomputed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(5)
    )
    inputs = (torch.randn(1, 3, 9, 9), torch.tensor([1]))
    model(inputs[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    step = lower(model, torch.nn.functional.cross_entropy, inputs, optimizer=optimizer)
    assert "pm_conv2d_dw" in list_kernels(step)
    assert "pm_conv2d_dw_sgd" not in list_kernels(step)


@pytest.mark.parametrize(
    ("model", "kernel"), [(perceptron, "pm_mm_sgd"), (filters, "pm_conv2d_dw_sgd")]
)
def test_parting_is_undone_by_fusing(model, kernel):
    """Fused updates that are split and fused again have the same nodes and calls."""
    joined, _ = captured(model(), batch=1, weight_decay=0.1)
    again = fuse_updates(split_fused_updates(joined))
    assert again.calls == joined.calls
    assert again.graph == joined.graph
    assert fuse_updates(joined) is joined
    tiles = divide_step(joined, 640)
    assert list_kernels(tiles).count(kernel) > list_kernels(joined).count(kernel)


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        *((perceptron, rule) for rule in ({"momentum": 0.9}, {"clip": 0.5}, {"updates": False})),
        (twice, {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_gradients_that_something_else_reads_stay(model, rule):
    """Not fused: other rules, norms of all gradients, returned gradients, sums of two uses."""
    step, _ = captured(model(), **rule)
    assert "pm_mm" in list_kernels(step)
    assert "pm_mm_sgd" not in list_kernels(step)
    assert split_fused_updates(step).graph == step.graph


QUICK = {("in tiles", "decay", perceptron, 1)}
SLOW = {
    ("read in place", "decay", perceptron, 1),
    ("kept", "plain", perceptron, 3),
    ("in tiles", "plain", filters, 3),
    ("with commits", "maximize", filters, 1),
}


@pytest.mark.parametrize(
    ("place", "rule", "model", "batch"),
    mark_seeds_except(product(PLACES, RULES, (perceptron, filters), (1, 3)), QUICK, SLOW),
)
def test_state_has_the_bits_of_two_nodes(place, rule, model, batch, tmp_path):
    """Wherever the weight is, in whatever blocks the gradient is summed."""
    require_programs(Target.HOST)
    step, inputs = captured(model(), batch, **RULES[rule])
    batches = make_batches_like(inputs, 3)
    data = b"".join(x.float().numpy().tobytes() + y.int().numpy().tobytes() for x, y in batches)
    options, settings = PLACES[place]
    states = [
        compute_state(split_fused_updates(step), tmp_path / "two", data, 3),
        compute_state(step, tmp_path / "one", data, 3, options, settings),
    ]
    source = (tmp_path / "one" / "src" / "pm_step.c").read_text(encoding="utf-8")
    assert "_sgd(" in source
    assert states[0] == states[1]
