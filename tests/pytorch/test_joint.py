"""Capture: results, layouts of real kernels, and refusals."""

import inspect
import logging
import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kit.eager_steps import check_replay, compile_keep_all, find_differences
from kit.rotation import mark_seeds_except
from kit.traced_models import FunctionModule, image_step, residual, row_step
from poetmodel.errors import InputError
from poetmodel.torch import CaptureError, capture, trace
from poetmodel.torch.capturing.joint_graph import InputKind, Lookup, OutputKind
from poetmodel.torch.capturing.replay import execute_kernel, replay
from poetmodel.torch.capturing.surroundings import make_fake_mode, native_operators
from poetmodel.torch.capturing.values import KnownValues
from poetmodel.torch.graph.tensors import tensors_in

nn = torch.nn
functional = nn.functional


def test_roles_name_parameters_buffers_and_inputs():
    """All placeholders and outputs have a role, named below the user's module.

    An argument stands for the user's own tensor, so that a step sees an optimizer's changes.
    """
    model, loss_fn, inputs = residual()
    joint = capture(model, loss_fn, inputs)
    assert [a.name for a in joint.arguments_of(InputKind.PARAMETER)] == [
        "0.weight", "0.bias", "1.conv.weight", "1.bn.weight", "1.bn.bias", "4.weight", "4.bias",
    ]  # fmt: skip
    assert [a.name for a in joint.arguments_of(InputKind.BUFFER)] == [
        "1.bn.running_mean", "1.bn.running_var", "1.bn.num_batches_tracked",
    ]  # fmt: skip
    assert [(a.name, a.position) for a in joint.arguments_of(InputKind.USER_INPUT)] == [
        ("inputs[0]", 0),
        ("inputs[1]", 1),
    ]
    assert len(joint.arguments_of(InputKind.TANGENT)) == 1
    named = [result.name for result in joint.results]
    assert named.count("loss") == 1
    gradients = [r.target for r in joint.results if r.kind is OutputKind.GRADIENT]
    assert gradients == list(joint.arguments_of(InputKind.PARAMETER))
    mutated = [r.target for r in joint.results if r.kind is OutputKind.MUTATION]
    assert mutated == list(joint.arguments_of(InputKind.BUFFER))
    assert joint.value(joint.arguments_of(InputKind.PARAMETER)[0]) is model[0].weight
    assert joint.value(joint.arguments_of(InputKind.USER_INPUT)[0]) is inputs[0]
    others = joint.flat_inputs((inputs[0] + 1, inputs[1]))
    assert joint.value(joint.arguments_of(InputKind.USER_INPUT)[0], others) is others[0]
    assert torch.equal(joint.value(joint.arguments_of(InputKind.TANGENT)[0]), torch.ones(()))
    loss = nn.CrossEntropyLoss(weight=torch.ones(4))
    model = FunctionModule(lambda p, x: p[0](x), nn.Linear(4, 4))
    joint = capture(model, loss, (torch.randn(3, 4), torch.tensor([0, 1, 2])))
    assert joint.module.get_submodule("model") is model
    assert [a.name for a in joint.arguments_of(InputKind.BUFFER)] == ["loss.weight"]
    assert joint.value(joint.arguments_of(InputKind.BUFFER)[0]) is loss.weight


class Unusual(Exception):  # noqa: N818 - of a user
    """An exception of a user's own."""


def unusual(_, __):
    """Raise it."""
    raise Unusual("no")


SCALE = torch.ones(4)


EXPLAINED = {
    "branch": lambda p, x: p[0](x) if p[0](x).sum() > 0 else -x,
    "item": lambda p, x: p[0](x) * p[0](x).sum().item(),
    "mask": lambda p, x: p[0](x)[p[0](x) > 0].sum() * x,
    "convert": lambda p, x: p[0](x) * float(x.numpy().sum()),
    "foreign": lambda p, x: p[0](x) * SCALE.mul_(2),  # a tensor of the file
    "wrong": lambda p, x: p[0](x[:, :2]),
}


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("branch", ("depends on parameters", "torch.where", "outside of the step")),
        pytest.param("item", ("depends on parameters", "torch.where"), marks=pytest.mark.slow),
        pytest.param("mask", ("depends on parameters", "torch.where"), marks=pytest.mark.slow),
        ("convert", ("read from a tensor", "torch.where")),
        ("foreign", ("no parameter, buffer or input", "register_buffer")),
        ("wrong", ("shapes cannot be multiplied", "ordinary training step")),
    ],
)
def test_what_cannot_be_captured_is_explained(name, fragments, caplog):
    """The error names the operation, the line of the user's code, and a remedy."""
    (text, *_), number = inspect.getsourcelines(EXPLAINED[name])
    model, loss_fn, inputs = row_step(nn.Linear(4, 4), by=EXPLAINED[name])
    with caplog.at_level(logging.DEBUG), pytest.raises(CaptureError) as caught:
        capture(model, loss_fn, inputs, name="net")
    message = str(caught.value)
    assert message.startswith("net: ")
    for fragment in (*fragments, f"{__file__}:{number} ({text.strip()})"):
        assert fragment in message
    assert "Traceback" not in caplog.text
    assert not any(m._forward_hooks for m in model.modules())


LAYER, ROWS = nn.Linear(4, 4), tuple(torch.ones(2, 3, 4))
COMPLEX = nn.Linear(4, 4, dtype=torch.complex64)
SPARSE = nn.Sequential(nn.Embedding(5, 4, sparse=True))


@pytest.mark.parametrize(
    ("step", "fragment"),
    [
        ((LAYER, torch.sub, ROWS), r"one element, got shapes \[\(3, 4\)\]"),
        ((row_step, None, (torch.ones(1),)), "expected a torch.nn.Module, got a function"),
        ((LAYER, None, ()), "expected inputs"),
        ((nn.ReLU(), functional.mse_loss, ROWS), "nothing to train"),
        ((LAYER, torch.sub, torch.ones(3, 4)), r"tuple such as .*, got a Tensor"),
        ((LAYER, lambda *_: 3.0, ROWS), "a tensor, got a float"),
        ((LAYER, 3, ROWS), "loss_fn: expected a function or None"),
        ((LAYER, None, ROWS), "without a loss_fn, the model gets all"),
        ((LAYER, torch.sub, ROWS[:1]), "the last is the target"),
        ((LAYER, torch.sub, (ROWS[0].numpy(), 1)), "ndarray of numpy"),
        ((nn.LazyLinear(4), torch.sub, ROWS), "call the model once on inputs"),
        ((SPARSE, functional.mse_loss, (torch.tensor([0, 1]), torch.ones(2, 4))),
         "in module '0' makes a sparse tensor, .*sparse=False"),
        ((LAYER, torch.sub, (object(), 1)), "expected a tensor, got a object"),
        ((LAYER, torch.sub, (torch.eye(4).to_sparse(), 1)),
         "expected a dense tensor, got torch.sparse_coo"),
        ((COMPLEX, lambda y, t: (y - t).sum(), (torch.ones(3, 4) + 0j, 1)),
         "a loss that is a real number"),
        (row_step(nn.Linear(4, 4), by=lambda p, x: (torch.ops.aten._print(""), p[0](x))[1]),
         "has an operation with an effect .*leave it out"),
        (row_step(nn.Linear(4, 4), by=unusual), "with Unusual: no; try one"),
        ((LAYER, lambda _, y: (y * y).mean(), ROWS), "depends on no parameter"),
    ],
)  # fmt: skip
def test_steps_that_train_nothing_are_refused(step, fragment):
    """A loss that is no number, no module, no inputs, no trained parameter: each has an error."""
    with pytest.raises(CaptureError, match=fragment):
        capture(*step)


def test_other_devices_are_refused():
    """Only the processor runs steps."""
    inputs = torch.randn(2, 3, 4, device="meta")
    with pytest.raises(InputError, match="on meta"):
        compile_keep_all(nn.Linear(4, 4, device="meta"), functional.mse_loss, tuple(inputs))


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (torch.tensor([0, 1, 9]), "IndexError: Target 9 is out of bounds"),
        (torch.tensor([0, 1, 2], dtype=torch.int32), "RuntimeError: expected target dtype"),
    ],
)
def test_operations_that_fail_on_the_inputs_are_named(target, kind):
    """Errors that fake tensors do not show are reported in a sentence, too."""
    own = nn.Sequential(nn.Linear(4, 4)), nn.functional.cross_entropy, (torch.randn(3, 4), target)
    words = rf"Sequential: capture stopped with {kind}.*; try one"
    with pytest.raises(CaptureError, match=words):
        trace(*own)


MODES = (
    {"mode": "nearest"}, {"mode": "nearest-exact"}, {"mode": "bilinear"},
    {"mode": "bilinear", "align_corners": True}, {"mode": "bilinear", "antialias": True},
    {"mode": "bicubic"}, {"mode": "area"},
)  # fmt: skip


def through(work, *parts):
    """Return a step of images of 4 channels, 6 x 6, to images twice as large."""
    return image_step(FunctionModule(work, *parts), size=12)


@pytest.mark.parametrize(
    "mode", mark_seeds_except(MODES, MODES[2:3]), ids=lambda mode: "-".join(map(str, mode.values()))
)
@pytest.mark.parametrize("channels_last", mark_seeds_except([False, True], [True]))
def test_upsampling_is_that_of_eager(mode, channels_last):
    """Whatever the mode and the layout; the operator itself is in the graph."""

    def up(parts, x):
        y = parts[0](x)
        if channels_last:
            y = y.contiguous(memory_format=torch.channels_last)
        return parts[1](functional.interpolate(y, scale_factor=2.0, **mode))

    check_replay(through(up, nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)))


def double(parts, x):
    """Double the size."""
    return functional.interpolate(parts[0](x), scale_factor=2)


def test_what_was_there_is_there_afterwards():
    """Also after a failed capture: other users of PyTorch's compiler find its kernels.

    Random operations run on zeros without moving the generator; generators are not moved.
    """
    operator, key = torch.ops.aten.gru.input, torch._C.DispatchKey.Autograd
    before = operator.py_kernels[key]

    def fails():
        with native_operators():
            assert key not in operator.py_kernels
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert operator.py_kernels[key] is before
    graph = capture(*through(double, nn.Conv2d(4, 4, 1))).graph_module.graph
    assert any("upsample_nearest2d." in str(node.target) for node in graph.nodes)
    assert operator.py_kernels[key] is before
    own = torch.Generator().manual_seed(1)
    states = torch.get_rng_state(), own.get_state()
    with make_fake_mode(KnownValues(), uses_onednn=True):
        torch.rand_like(torch.empty(3, 4))
        torch.rand(3, 4, generator=own)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(own.get_state(), states[1])


def within_fork(parts, x):
    """Seed, and put the state back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        noise = torch.randn(3, 4)
    return parts[0](x) + noise


@pytest.mark.parametrize(
    "forward",
    [
        lambda p, x: (torch.manual_seed(3), p[0](x) + torch.randn(3, 4))[1],
        *mark_seeds_except(
            [
                lambda p, x: (torch.default_generator.manual_seed(3), p[0](x) + torch.randn(3, 4))[
                    1
                ],
                lambda p, x: (torch.seed(), p[0](x) + torch.randn(3, 4))[1],
            ],
            (),
        ),
        within_fork,
    ],
)
def test_seeding_is_refused(forward):
    """The error names the line; the generator can be seeded afterwards, and is as it was.

    Draws of another generator cannot be repeated either: the error names the operation.
    """
    step = row_step(nn.Linear(4, 4), by=forward)
    generator, state = torch.default_generator, torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"is seeded at .*test_joint.py:\d+ .*seed.*outside"):
        capture(*step)
    assert torch.default_generator is torch.random.default_generator is generator
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.manual_seed(1) is generator
    own = torch.Generator()
    step = row_step(nn.Linear(4, 4), by=lambda p, x: p[0](x) + torch.randn(3, 4, generator=own))
    with pytest.raises(
        CaptureError, match=r"takes a Generator, .*test_joint.py:\d+ .*; leave it out"
    ):
        capture(*step)


def test_all_parameters_and_buffers_are_found():
    """In the order of the paths; nothing is stored between two calls."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    paths = sorted(named, reverse=True)
    found = Lookup(paths)(model)
    assert all(tensor is named[path] for tensor, path in zip(found, paths, strict=True))
    model.alone = nn.Parameter(torch.zeros(1))
    assert Lookup(["alone"])(model)[0] is model.alone
    lookup = Lookup(["0.weight"])
    assert lookup(model)[0] is model[0].weight
    model[0] = nn.Linear(2, 2)
    assert lookup(model)[0] is model[0].weight
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert lookup(model)[0] is model[0].weight


# -- checkpoints of the user -----------------------------------------------------------------------
class Counted(nn.BatchNorm1d):
    """A batch norm that counts its calls."""

    def __init__(self):
        super().__init__(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        """Count, and normalize."""
        self.calls += 1
        return super().forward(x)


def inside(norm, *, reentrant):
    """Return a step with a norm and a dropout inside of a checkpoint, between two layers."""
    torch.manual_seed(1)
    layers = (nn.Linear(4, 4), nn.Dropout(0.5), norm, nn.ReLU(inplace=True))
    return row_step(
        nn.Linear(4, 4),
        nn.Sequential(*layers),
        nn.Linear(4, 4),
        by=lambda p, x: p[2](checkpoint(p[1], p[0](x), use_reentrant=reentrant)),
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("momentum", mark_seeds_except([0.1, 0.3], [0.3]))
def test_batch_norm_inside_of_a_checkpoint_is_updated_as_in_eager(momentum, reentrant):
    """Eager updates it again when it recomputes the part; the step does so, too."""
    own = inside(nn.BatchNorm1d(4, momentum=momentum), reentrant=reentrant)
    step = compile_keep_all(*own)
    for _ in range(2):
        assert find_differences(step, *own) == []
    assert int(own[0].parts[1][2].num_batches_tracked) == 4


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_without_trained_inputs_train_nothing():
    """As in eager: no parameter inside gets a gradient.

    Other changes that eager makes twice inside of a checkpoint, and a step once, are refused.
    """
    own = row_step(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        by=lambda p, x: p[0](x) + checkpoint(p[1], x, use_reentrant=True),
    )
    step = compile_keep_all(*own)
    assert find_differences(step, *own) == []
    assert own[0].parts[1].weight.grad is None
    with pytest.raises(CaptureError, match=r"attribute inside .*calls \+= 1\); leave the checkp"):
        compile_keep_all(*inside(Counted(), reentrant=False))


# -- layouts of real kernels -----------------------------------------------------------------------
def mistaken(joint):
    """Return the operations whose outputs have another layout than the capture states."""
    found = []

    def execute(node, arguments, keywords):
        value = execute_kernel(node, arguments, keywords)
        pairs = zip(tensors_in(node.meta.get("val", value)), tensors_in(value), strict=True)
        if any(one.stride() != other.stride() for one, other in pairs):
            found.append(node.name)
        return value

    replay(joint, execute)
    return found


def check(own):
    """Assert that a capture has real strides and that its replay has eager's bits."""
    assert mistaken(check_replay(own).joint) == []


def tokens(x):
    """Go to tokens and back."""
    return (
        x.flatten(2)
        .transpose(1, 2)
        .reshape(len(x), -1, x.shape[1])
        .transpose(1, 2)
        .reshape(x.shape)
    )


def attention(x):
    """Attend among the pixels."""
    heads = x.flatten(2).transpose(1, 2).unflatten(2, (2, -1)).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(heads, heads, heads)
    return mixed.transpose(1, 2).flatten(2).transpose(1, 2).reshape(x.shape)


def assigned(x):
    """Assign parts in place."""
    y = x.clone()
    y[:, 1] = x[:, 0] * 2
    y[:, :, 1:3].mul_(0.5)
    return y


LAYOUTS = (
    lambda x: x.contiguous(memory_format=torch.channels_last),
    lambda x: x.contiguous(),
    lambda x: x.transpose(2, 3),
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    lambda x: x.reshape(len(x), -1).reshape(x.shape),
    lambda x: x[:, :, ::2].repeat_interleave(2, 2),
    lambda x: x.contiguous().as_strided(x.shape, (144, 1, 24, 4)),
    lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    lambda x: torch.einsum("bchw->bwhc", x).permute(0, 3, 2, 1),
    lambda x: x + x.mean((2, 3), keepdim=True).expand_as(x),
    lambda x: (x * 1).add_(x.transpose(2, 3)),
    lambda x: torch.empty_like(x, memory_format=torch.channels_last).copy_(x),
    lambda x: x.double().contiguous(memory_format=torch.channels_last).float(),
    lambda x: functional.interpolate(functional.max_pool2d(x, 2), scale_factor=2),
    lambda x: functional.interpolate(functional.avg_pool2d(x, 2), scale_factor=2, mode="bilinear"),
    tokens,
    attention,
    assigned,
)
"""What changes how images of 4 channels, 6 x 6, lie in memory."""

PARTS = (
    lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm2d(4), lambda: nn.LayerNorm([4, 6, 6]),
    lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: nn.ConvTranspose2d(4, 4, 3, padding=1),
    lambda: nn.Linear(6, 6), lambda: nn.Dropout(0.3),
)  # fmt: skip
"""What is computed with them."""

LOSSES = (
    functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss,
    functional.soft_margin_loss, functional.binary_cross_entropy_with_logits,
    lambda y, t: functional.cross_entropy(y, t[:, 0].abs().long() % 4),
    lambda y, t: functional.kl_div(functional.log_softmax(y, 1), t.softmax(1)),
)  # fmt: skip


class Mixed(nn.Module):
    """A convolution, and layers between changes of layout."""

    def __init__(self, draw):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.parts = nn.ModuleList(draw.choice(PARTS)() for _ in range(3))
        self.changes = [draw.choice(LAYOUTS) for _ in self.parts]
        self.residual = draw.random() < 0.5

    def forward(self, x):
        """Return the images."""
        y = start = self.first(x)
        for part, change in zip(self.parts, self.changes, strict=True):
            y = part(change(y))
        return y + start if self.residual else y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("seed", mark_seeds_except(range(30), range(2)))
def test_any_mix_of_layouts_is_captured_as_eager_runs_it(seed):
    """Views, copies, layers and losses drawn at random: strides are real, results equal."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    torch.manual_seed(seed)
    x, t = (
        torch.randn(2, width, 6, 6).to(
            memory_format=draw.choice([torch.channels_last, torch.contiguous_format])
        )
        for width in (3, 4)
    )
    check((Mixed(draw), draw.choice(LOSSES), (x, t)))


def normalized_tokens(parts, r):
    """Normalize pixels, mix channels, and add the images."""
    b, c, h, w = r.shape
    y = parts[1](parts[0](r.view(b, c, h * w)).transpose(1, 2))
    return y.transpose(1, 2).reshape(b, c, h, w) + r


def up(parts, x):
    """Double the size of images in channels-last, whose gradient is in channels-last too."""
    y = parts[0](x)
    y = parts[1](y.contiguous(memory_format=torch.channels_last)) + y
    return parts[2](functional.interpolate(y, scale_factor=2.0, mode="nearest"))


def drawn(parts, x):
    """Draw where all weights are zero while strides are found out."""
    return parts[0](x).gather(1, torch.multinomial(x.abs() + 1, 2))


CONVOLUTIONS = ((8, 8, 3, 1, 1), (8, 8, 1), (8, 3, 3))
FOUND = {
    # The gradient of the loss is contiguous, whatever layout is predicted for it.
    "a view of a gradient": lambda: (
        FunctionModule(normalized_tokens, nn.GroupNorm(2, 8), nn.Linear(8, 8)), functional.mse_loss,
        (torch.randn(2, 8, 6, 6), torch.randn(2, 8, 6, 6)),
    ),
    "a bias gradient summed in another order": lambda: (
        FunctionModule(up, *(nn.Conv2d(*sizes) for sizes in CONVOLUTIONS)), functional.mse_loss,
        (torch.randn(4, 8, 16, 16), torch.randn(4, 3, 30, 30)),
    ),
    "fails on zeros": lambda: (
        FunctionModule(drawn, nn.Linear(4, 4)), functional.mse_loss,
        (torch.ones(3, 4), torch.ones(3, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_layouts_that_were_wrong_once(name):
    """Strides are real, and results are eager's."""
    torch.manual_seed(3)
    check(FOUND[name]())
