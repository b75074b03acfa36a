"""Gradients that the backward pass of a compiled function adds to ``.grad`` itself."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import poetmodel.torch as pmt
from kit.rotation import mark_seeds_except
from poetmodel.torch.graph.tensors import heap_peak_bytes

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute",  # Dynamo reads it
    "ignore:Using backward.. with create_graph=True",
)
WIDTH, ROWS = 128, 16
OPTIONS = {"fullgraph": True, "dynamic": False}


class Network(nn.Module):
    """Layers, one of which is used twice, a convolution, and a weight with an expanded gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x):
        """Return a loss."""
        for layer in (*self.layers, self.layers[0]):
            x = nn.functional.gelu(layer(x)) + self.frozen
        maps = self.conv(x.view(-1, 2, 8, WIDTH // 16))
        return x.square().mean() + maps.square().mean() + self.scale.sum()


def compiled(ram, model=None, **options):
    """Return a network that adds gradients itself, and its back end."""
    torch._dynamo.reset()
    model = model or Network()
    back = pmt.backend(ram, cache=False, gap=0.1, add_gradients=True, **options)
    model.compile(backend=back, **OPTIONS)
    return model, back


def gradients(model):
    """Return all gradients."""
    return [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("ram", mark_seeds_except(["100%", "70%"], ["70%"]))
def test_added_gradients_have_the_bits_of_autograd(ram):
    """Over several backward passes, after ``zero_grad``, and in hooks; ``.grad`` does not count."""
    eager = Network()
    model, back = compiled(ram, copy.deepcopy(eager))
    seen = ([], [])
    for own, each in zip(seen, (eager, model), strict=True):
        for k, parameter in enumerate(each.parameters()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, k=k, own=own: own.append((k, p.grad.sum().item()))
                )
    for step in range(4):
        x = torch.randn(8 * ROWS, WIDTH)
        eager(x).backward()
        (record,) = back.plans or (None,)
        if record is None:
            model(x).backward()
        else:
            filled = all(gradient is not None for gradient in gradients(model))
            peak = heap_peak_bytes(lambda x=x: model(x).backward())
            beside = 0 if filled else record.added_bytes
            assert peak <= record.predicted_peak_bytes + beside
        assert all(map(torch.equal, gradients(model), gradients(eager)))
        assert [g.stride() for g in gradients(model)] == [g.stride() for g in gradients(eager)]
        if step == 1:
            for each in (eager, model):
                each.zero_grad()
    assert sorted(seen[0]) == sorted(seen[1])
    assert record.added_bytes == sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert record.predicted_peak_bytes <= record.ram_budget_bytes
    assert "of gradients added to .grad not counted" in back.summary()


@pytest.mark.slow
def test_added_gradients_lower_the_least_budget():
    """All that are returned are there together at the end of the backward pass."""
    model, x = Network(), torch.randn(ROWS, WIDTH)
    weights = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    step = torch.compile(model, backend=pmt.backend(3 * weights // 4, cache=False), **OPTIONS)
    with pytest.raises(BackendCompilerFailed, match="returned gradients"):
        step(x)
    step, back = compiled(3 * weights // 4)
    step(x).backward()
    assert heap_peak_bytes(lambda: step(x).backward()) <= back.plans[0].ram_budget_bytes


@pytest.fixture(scope="module")
def adding():
    """Return a network that adds gradients itself."""
    return compiled("100%")[0]


def penalize(model, x):
    """Use a parameter outside of the compiled function too."""
    (model(x) + model.scale.square().sum()).backward()


def differentiate(model, x):
    """Compute a gradient that is not for ``.grad``."""
    torch.autograd.grad(model(x), [model.scale])


def select(model, x):
    """Accumulate the gradient of one parameter alone."""
    model(x).backward(inputs=[model.scale])


def penalize_first(model, x):
    """Use a parameter in an operation whose backward pass follows that of the function."""
    loss = model.scale.square().sum()
    (loss + model(x)).backward()


def differentiate_a_leaf(model, x):
    """Set a gradient of a parameter itself."""
    loss = model(x)
    torch.autograd.backward([loss, model.scale], [torch.ones(()), torch.ones(WIDTH, WIDTH)])


def hook(model, x):
    """Register a hook that uses the gradient."""
    model.scale.register_hook(lambda gradient: 2 * gradient)
    model(x).backward()


def differentiate_twice(model, x):
    """Make gradients that can be differentiated."""
    model(x).backward(create_graph=True)


def call_twice(model, x):
    """Add the gradients of two calls up before they are accumulated."""
    (model(x) + model(x)).backward()


def call_in_checkpoint(model, x):
    """Call the function under hooks of saved tensors."""
    checkpoint(model, x, use_reentrant=False).backward()


@pytest.mark.parametrize(
    ("use", "fault"),
    [
        (penalize, "scale.* also gets gradients from elsewhere"),
        *mark_seeds_except(
            [
                (penalize_first, "scale.* also gets gradients from elsewhere"),
                (differentiate_a_leaf, "scale.* also gets gradients from elsewhere"),
                (differentiate, "torch.autograd.grad"),
            ],
            (),
        ),
        (select, "torch.autograd.grad"),
        (hook, "scale.* has a hook of register_hook"),
        (differentiate_twice, "create_graph=True"),
        (call_twice, "also gets gradients from elsewhere"),
        (call_in_checkpoint, "hooks of saved tensors"),
    ],
)
def test_what_would_not_have_the_bits_is_refused_by_name(use, fault, adding):
    """No gradient has changed, and the function works on afterwards."""
    model, x = adding, torch.randn(ROWS, WIDTH)
    model(x).backward()
    before = [gradient.clone() for gradient in gradients(model)]
    with pytest.raises(pmt.CaptureError, match=f"add_gradients: .*{fault}"):
        use(model, x)
    assert all(map(torch.equal, gradients(model), before))
    model.scale._backward_hooks = None
    model.zero_grad()
    model(x).backward()
    eager = Network()
    eager.load_state_dict(model.state_dict())
    eager(x).backward()
    assert all(map(torch.equal, gradients(model), gradients(eager)))


class Block(nn.Module):
    """A layer with an activation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """Return activations."""
        return self.layer(x).tanh()


def test_a_fault_of_a_later_call_is_found_before_gradients_are_added():
    """Blocks are compiled one by one; the backward pass reaches the first one last."""
    torch._dynamo.reset()
    blocks = nn.Sequential(Block(), Block())
    back = pmt.backend("100%", cache=False, add_gradients=True)
    for block in blocks:
        block.compile(backend=back, **OPTIONS)
    x = torch.randn(ROWS, WIDTH)
    blocks(x).sum().backward()
    before = [gradient.clone() for gradient in gradients(blocks)]
    handle = blocks[0].layer.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(pmt.CaptureError, match="has a hook of register_hook"):
        blocks(x).sum().backward()
    assert all(map(torch.equal, gradients(blocks), before))
    handle.remove()
    blocks(x).sum().backward()
    assert all(torch.equal(g, 2 * b) for g, b in zip(gradients(blocks), before, strict=True))


def test_gradients_are_added_by_kernels_of_eager_alone():
    """Inductor's kernels return them."""
    with pytest.raises(pmt.CaptureError.__mro__[1], match="add_gradients: needs kernels='eager'"):
        pmt.backend("60%", kernels="inductor", add_gradients=True)
