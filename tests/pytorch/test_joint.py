"""Capture: what comes out, what stays as it was, and what is refused."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.rotation import quick  # noqa: E402
from kit.traced_models import (  # noqa: E402
    STEPS,
    Through,
    checkpointed,
    images,
    recurrent,
    residual,
    rows,
)
from kit.traced_steps import run_eager, run_units  # noqa: E402
from poetmodel.torch import CaptureError, capture, trace  # noqa: E402
from poetmodel.torch.capturing.signature import InputKind, Lookup, OutputKind  # noqa: E402
from poetmodel.torch.capturing.surroundings import native_operators  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

nn = torch.nn
pytestmark = pytest.mark.torch


def test_roles_name_parameters_buffers_and_inputs() -> None:
    """Every placeholder and every output has its role, named below the user's module."""
    joint = capture(*residual())
    assert [a.name for a in joint.of(InputKind.PARAMETER)] == [
        "0.weight", "0.bias", "1.conv.weight", "1.bn.weight", "1.bn.bias", "4.weight", "4.bias",
    ]  # fmt: skip
    assert [a.name for a in joint.of(InputKind.BUFFER)] == [
        "1.bn.running_mean", "1.bn.running_var", "1.bn.num_batches_tracked",
    ]  # fmt: skip
    assert [(a.name, a.position) for a in joint.of(InputKind.USER_INPUT)] == [
        ("inputs[0]", 0),
        ("inputs[1]", 1),
    ]
    assert len(joint.of(InputKind.TANGENT)) == 1
    named = [result.name for result in joint.results]
    assert named.count("loss") == 1
    gradients = [r.target for r in joint.results if r.kind is OutputKind.GRADIENT]
    assert gradients == list(joint.of(InputKind.PARAMETER))
    mutated = [r.target for r in joint.results if r.kind is OutputKind.MUTATION]
    assert mutated == list(joint.of(InputKind.BUFFER))


def test_values_are_the_users_own_tensors() -> None:
    """An argument stands for the parameter itself, so that a step sees what an optimizer did."""
    model, loss_fn, inputs = residual()
    joint = capture(model, loss_fn, inputs)
    first = joint.of(InputKind.PARAMETER)[0]
    assert joint.value(first) is model[0].weight
    assert joint.value(joint.of(InputKind.USER_INPUT)[0]) is inputs[0]
    others = joint.flat_inputs((inputs[0] + 1, inputs[1]))
    assert joint.value(joint.of(InputKind.USER_INPUT)[0], others) is others[0]
    assert torch.equal(joint.value(joint.of(InputKind.TANGENT)[0]), torch.ones(()))


def test_capture_leaves_everything_as_it_was() -> None:
    """State, gradients, mode, hooks and random state are untouched."""
    model, loss_fn, inputs = residual()
    model[2].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    capture(model, loss_fn, inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [module.training for module in model] == [True, True, False, True, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_inputs_nested_otherwise_are_refused() -> None:
    """A step called with other nesting than at the capture is told so."""
    joint = capture(*STEPS["nested inputs"]())
    with pytest.raises(CaptureError, match=r"nested as \(\{'a': \*.*, got \(\*, \*\)"):
        joint.flat_inputs((torch.randn(3, 4), torch.randn(3, 4)))
    with pytest.raises(CaptureError, match=r"expected 2 inputs \(the target last\), got 1"):
        joint.flat_inputs((torch.randn(3, 4),))


def branch(parts: Any, x: Any) -> Any:
    """Branch on a value."""
    y = parts[0](x)
    return y if y.sum() > 0 else -y


def item(parts: Any, x: Any) -> Any:
    """Read a value."""
    return parts[0](x) * parts[0](x).sum().item()


def mask(parts: Any, x: Any) -> Any:
    """Select by a mask."""
    y = parts[0](x)
    return y[y > 0].sum() * y


def convert(parts: Any, x: Any) -> Any:
    """Convert to NumPy."""
    return parts[0](x) * float(x.numpy().sum())


class Unusual(Exception):  # noqa: N818 - of a user
    """An exception of a user's own."""


def unusual(_: Any, __: Any) -> Any:
    """Raise it."""
    raise Unusual("no")


SCALE = torch.ones(4)


def foreign(parts: Any, x: Any) -> Any:
    """Change a tensor of the module's file."""
    return parts[0](x) * SCALE.mul_(2)


def wrong(parts: Any, x: Any) -> Any:
    """Multiply what does not fit."""
    return parts[0](x[:, :2])


@pytest.mark.parametrize(
    ("function", "line", "fragments"),
    [
        (branch, "if y.sum() > 0", ("_local_scalar_dense", "torch.where")),
        pytest.param(
            item, ".item()", ("_local_scalar_dense", "outside of the step"), marks=pytest.mark.slow
        ),
        (mask, "y[y > 0]", ("aten.nonzero", "masked_fill")),
        (convert, "x.numpy()", (".numpy()", "torch operations")),
        (foreign, "* SCALE.mul_(2)", ("no parameter, buffer or input", "register_buffer")),
        (wrong, "x[:, :2]", ("must have same reduction dim", "ordinary training step")),
    ],
)
def test_what_cannot_be_captured_is_explained(
    function: Any, line: str, fragments: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The error names the operation, the line of the user's code, and what to do."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = (k for k, text in enumerate(lines) if line in text)
    model, loss_fn, inputs = rows(nn.Linear(4, 4), by=function)
    with caplog.at_level(logging.DEBUG), pytest.raises(CaptureError) as caught:
        capture(model, loss_fn, inputs, name="net")
    message = str(caught.value)
    assert message.startswith("net: ")
    assert f"{__file__}:{first + offset} ({lines[offset].strip()})" in message
    for fragment in fragments:
        assert fragment in message
    assert "Traceback" not in caplog.text
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("step", "fragment"),
    [
        (lambda: (nn.Linear(4, 4), torch.sub, rows()[2]), r"one element, got shapes \[\(3, 4\)\]"),
        (lambda: (rows, None, (torch.ones(1),)), "expected a torch.nn.Module, got a function"),
        (lambda: (nn.Linear(4, 4), None, ()), "expected inputs"),
        (lambda: (nn.ReLU(), nn.functional.mse_loss, rows()[2]), "nothing to train"),
        (lambda: (nn.Linear(4, 4), torch.sub, torch.ones(3, 4)), r"tuple such as .*, got a Tensor"),
        (lambda: (nn.Linear(4, 4), lambda *_: 3.0, rows()[2]), "a tensor, got a float"),
        (lambda: (nn.Linear(4, 4), 3, rows()[2]), "loss_fn: expected a function or None"),
        (lambda: (nn.Linear(4, 4), None, rows()[2]), "without a loss_fn, the model gets all"),
        (lambda: (nn.Linear(4, 4), torch.sub, rows()[2][:1]), "all but the last one"),
        (lambda: (nn.Linear(4, 4), torch.sub, (rows()[2][0].numpy(), 1)), "ndarray of numpy"),
        (lambda: (nn.LazyLinear(4), torch.sub, rows()[2]), "call the model once on inputs"),
        (
            lambda: (
                nn.Sequential(nn.Embedding(5, 4, sparse=True)),
                nn.functional.mse_loss,
                (torch.tensor([0, 1]), torch.randn(2, 4)),
            ),
            "in module '0' makes a sparse tensor, .*sparse=False",
        ),
        (lambda: (nn.Linear(4, 4), torch.sub, (object(), 1)), "expected a tensor, got a object"),
        (
            lambda: (nn.Linear(4, 4), torch.sub, (torch.eye(4).to_sparse(), 1)),
            "expected a dense tensor, got torch.sparse_coo",
        ),
        (
            lambda: (
                nn.Linear(4, 4, dtype=torch.complex64),
                lambda y, t: (y - t).sum(),
                (torch.randn(3, 4) + 0j, 1),
            ),
            "a loss that is a real number",
        ),
        (
            lambda: rows(nn.Linear(4, 4), by=lambda p, x: (torch.ops.aten._print(""), p[0](x))[1]),
            "does more than compute .*leave it out",
        ),
        (lambda: rows(nn.Linear(4, 4), by=unusual), "with Unusual: no; try one"),
        (
            lambda: (nn.Linear(4, 4), lambda _, y: (y * y).mean(), rows()[2]),
            "depends on no parameter",
        ),
    ],
)
def test_steps_that_train_nothing_are_refused(step: Any, fragment: str) -> None:
    """A loss that is no number, no module, no inputs, or nothing to train: said so."""
    with pytest.raises(CaptureError, match=fragment):
        capture(*step())


def test_captures_without_gradients_are_refused() -> None:
    """The loss would depend on no parameter, and the reason is around the capture."""
    with torch.no_grad(), pytest.raises(CaptureError, match=r"gradients are off \(torch\.no_grad"):
        capture(*rows(nn.Linear(4, 4)))


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (torch.tensor([0, 1, 9]), "IndexError: Target 9 is out of bounds"),
        (torch.tensor([0, 1, 2], dtype=torch.int32), "RuntimeError: expected target dtype"),
    ],
)
def test_operations_that_fail_on_the_inputs_are_named(target: Any, kind: str) -> None:
    """What fake tensors cannot show is told in a sentence too."""
    own = nn.Sequential(nn.Linear(4, 4)), nn.functional.cross_entropy, (torch.randn(3, 4), target)
    words = rf"Sequential: aten\.nll_loss.* fails on the example inputs with {kind}.*; try one"
    with pytest.raises(CaptureError, match=words):
        trace(*own)


def test_modules_are_not_copied() -> None:
    """The captured module holds the user's module itself, and a loss with parameters too."""
    model = Through(lambda p, x: p[0](x), nn.Linear(4, 4))
    loss = nn.CrossEntropyLoss(weight=torch.ones(4))
    joint = capture(model, loss, (torch.randn(3, 4), torch.tensor([0, 1, 2])))
    assert joint.module.get_submodule("model") is model
    assert [a.name for a in joint.of(InputKind.BUFFER)] == ["loss.weight"]
    assert joint.value(joint.of(InputKind.BUFFER)[0]) is loss.weight


functional = nn.functional

MODES: tuple[dict[str, Any], ...] = (
    {"mode": "nearest"},
    {"mode": "nearest-exact"},
    {"mode": "bilinear"},
    {"mode": "bilinear", "align_corners": True},
    {"mode": "bilinear", "antialias": True},
    {"mode": "bicubic"},
    {"mode": "area"},
)


def through(work: Callable[..., Any], *parts: nn.Module) -> Any:
    """Return a step of images of 4 channels, 6 x 6, to images twice as large."""
    return images(Through(work, *parts), size=12)


def equal(own: Any) -> bool:
    """Return whether a replayed capture has all bits of eager."""
    state = torch.get_rng_state()
    expected = run_eager(*own)
    torch.set_rng_state(state)
    found = run_units(trace(*own, measure_workspace=False))
    return all(torch.equal(value, found[key]) for key, value in expected.items())


@pytest.mark.parametrize(
    "mode", quick(MODES, MODES[2:3]), ids=lambda mode: "-".join(map(str, mode.values()))
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_upsampling_is_that_of_eager(mode: dict[str, Any], channels_last: bool) -> None:
    """Whatever the mode and the layout; the operator itself is in the graph."""

    def up(parts: Any, x: Any) -> Any:
        y = parts[0](x)
        if channels_last:
            y = y.contiguous(memory_format=torch.channels_last)
        return parts[1](functional.interpolate(y, scale_factor=2.0, **mode))

    torch.manual_seed(1)
    assert equal(through(up, nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        lambda: nn.GRU(4, 4, batch_first=True),
        lambda: nn.GRU(4, 2, 3, dropout=0.3, bidirectional=True),
        lambda: nn.RNN(4, 4, 2, dropout=0.3),
        lambda: nn.RNN(4, 4, nonlinearity="relu"),
    ],
)
def test_recurrent_layers_are_those_of_eager(cell: Any) -> None:
    """GRU and RNN of several layers, directions and with dropout give all bits."""
    for seed in range(3):
        torch.manual_seed(seed)
        assert equal(recurrent(cell()))


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (functional.multi_margin_loss, [0, 1, 3]),
        (functional.multilabel_margin_loss, [[0, 2, -1, 0], [1, -1, 0, 0], [3, 0, 1, -1]]),
    ],
)
def test_margin_losses_are_those_of_eager(loss_fn: Any, target: Any) -> None:
    """PyTorch's decompositions of these give other values."""
    torch.manual_seed(1)
    assert equal((nn.Linear(4, 4), loss_fn, (torch.randn(3, 4), torch.tensor(target))))


def double(parts: Any, x: Any) -> Any:
    """Double the size."""
    return functional.interpolate(parts[0](x), scale_factor=2)


def test_what_was_there_is_there_afterwards() -> None:
    """Also where a capture fails: whoever else uses PyTorch's compiler finds its kernels."""
    operator, key = torch.ops.aten.gru.input, torch._C.DispatchKey.Autograd
    before = operator.py_kernels[key]

    def fails() -> None:
        with native_operators():
            assert key not in operator.py_kernels
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert operator.py_kernels[key] is before
    graph = capture(*through(double, nn.Conv2d(4, 4, 1))).graph_module.graph
    assert any("upsample_nearest2d." in str(node.target) for node in graph.nodes)
    assert operator.py_kernels[key] is before


def by_function(parts: Any, x: Any) -> Any:
    """Seed."""
    torch.manual_seed(3)
    return parts[0](x) + torch.randn(3, 4)


def within_fork(parts: Any, x: Any) -> Any:
    """Seed, and put the state back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        noise = torch.randn(3, 4)
    return parts[0](x) + noise


def by_generator(parts: Any, x: Any) -> Any:
    """Seed the generator itself."""
    torch.default_generator.manual_seed(3)
    return parts[0](x) + torch.randn(3, 4)


def at_random(parts: Any, x: Any) -> Any:
    """Seed by chance."""
    torch.seed()
    return parts[0](x) + torch.randn(3, 4)


@pytest.mark.parametrize(
    "forward",
    quick((by_function, within_fork, by_generator, at_random), (by_function, by_generator)),
)
def test_seeding_is_refused(forward: Any) -> None:
    """The error names the line; the generator can be seeded afterwards, and is as it was."""
    step = rows(nn.Linear(4, 4), by=forward)
    generator, state = torch.default_generator, torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"is seeded at .*test_joint.py:\d+ .*seed.*outside"):
        capture(*step)
    assert torch.default_generator is torch.random.default_generator is generator
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.manual_seed(1) is generator


def test_states_that_are_put_back_are_no_seeds() -> None:
    """The user's own checkpoint sets states of the generator, and is captured."""
    capture(*checkpointed())


def test_own_generators_are_refused() -> None:
    """Draws of another generator cannot be repeated: the error names the operation."""
    own = torch.Generator()
    step = rows(nn.Linear(4, 4), by=lambda p, x: p[0](x) + torch.randn(3, 4, generator=own))
    with pytest.raises(CaptureError, match=r"aten.randn.generator.* random generator of its own"):
        capture(*step)


def test_all_parameters_and_buffers_are_found() -> None:
    """In the order of the paths, whatever that is; each module on the way is fetched once."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    paths = sorted(named, reverse=True)
    found = Lookup(paths)(model)
    assert [tensor is named[path] for tensor, path in zip(found, paths, strict=True)] == [
        True
    ] * len(paths)
    model.alone = nn.Parameter(torch.zeros(1))
    assert Lookup(["alone"])(model)[0] is model.alone


def test_replaced_modules_and_tensors_are_seen() -> None:
    """Nothing is remembered between two calls."""
    model = nn.Sequential(nn.Linear(2, 2))
    lookup = Lookup(["0.weight"])
    assert lookup(model)[0] is model[0].weight
    model[0] = nn.Linear(2, 2)
    assert lookup(model)[0] is model[0].weight
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert lookup(model)[0] is model[0].weight
