"""Capture: roles, what stays untouched, and what cannot be captured."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from poetmodel.torch import CaptureError, capture, trace  # noqa: E402
from poetmodel.torch.roles import Purpose, Source  # noqa: E402
from traced_models import STEPS, Through, residual, rows  # noqa: E402
from traced_steps import run_eager, run_units  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.torch


def test_roles_name_parameters_buffers_and_inputs() -> None:
    """Every placeholder and every output has its role, named below the user's module."""
    joint = capture(*residual())
    assert [a.name for a in joint.of(Source.PARAMETER)] == [
        "0.weight", "0.bias", "1.conv.weight", "1.bn.weight", "1.bn.bias", "4.weight", "4.bias",
    ]  # fmt: skip
    assert [a.name for a in joint.of(Source.BUFFER)] == [
        "1.bn.running_mean", "1.bn.running_var", "1.bn.num_batches_tracked",
    ]  # fmt: skip
    assert [(a.name, a.position) for a in joint.of(Source.INPUT)] == [
        ("inputs[0]", 0),
        ("inputs[1]", 1),
    ]
    assert len(joint.of(Source.TANGENT)) == 1
    named = [result.name for result in joint.results]
    assert named.count("loss") == 1
    gradients = [r.of for r in joint.results if r.purpose is Purpose.GRADIENT]
    assert gradients == list(joint.of(Source.PARAMETER))
    mutated = [r.of for r in joint.results if r.purpose is Purpose.MUTATION]
    assert mutated == list(joint.of(Source.BUFFER))


def test_values_are_the_users_own_tensors() -> None:
    """An argument stands for the parameter itself, so that a step sees what an optimizer did."""
    model, loss_fn, inputs = residual()
    joint = capture(model, loss_fn, inputs)
    first = joint.of(Source.PARAMETER)[0]
    assert joint.value(first) is model[0].weight
    assert joint.value(joint.of(Source.INPUT)[0]) is inputs[0]
    others = joint.flat_inputs((inputs[0] + 1, inputs[1]))
    assert joint.value(joint.of(Source.INPUT)[0], others) is others[0]
    assert torch.equal(joint.value(joint.of(Source.TANGENT)[0]), torch.ones(()))


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
    return parts[0](x) * x.sum().item()


def mask(parts: Any, x: Any) -> Any:
    """Select by a mask."""
    return x[x > 0].sum() * parts[0](x)


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
    """Use a tensor of the module's file."""
    return parts[0](x) * SCALE


def wrong(parts: Any, x: Any) -> Any:
    """Multiply what does not fit."""
    return parts[0](x[:, :2])


@pytest.mark.parametrize(
    ("function", "line", "fragments"),
    [
        (branch, "if y.sum() > 0", ("_local_scalar_dense", "torch.where")),
        (item, ".item()", ("_local_scalar_dense", "outside of the step")),
        (mask, "x[x > 0]", ("aten.nonzero", "masked_fill")),
        (convert, "x.numpy()", (".numpy()", "torch operations")),
        (foreign, "* SCALE", ("no parameter, buffer or input", "register_buffer")),
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
        (
            lambda: rows(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)),
            r"in module '1' \(BatchNorm1d\) reads a tensor's value",
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
            lambda: rows(nn.Linear(4, 4), by=lambda p, x: x @ torch.linalg.inv(p[0].weight)),
            "does more than compute, .*inv_ex",
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
    assert [a.name for a in joint.of(Source.BUFFER)] == ["loss.weight"]
    assert joint.value(joint.of(Source.BUFFER)[0]) is loss.weight


def test_batch_norm_inside_of_a_checkpoint_is_updated_once() -> None:
    """Eager updates it again when it computes the part again, and ends with other statistics."""
    part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    own = rows(part, by=lambda p, x: checkpoint(p[0], x, use_reentrant=False))
    traced = trace(*own, measure_workspace=False)
    found = run_units(traced)["mutation of parts.0.1.num_batches_tracked"]
    assert (int(found), int(run_eager(*own)["mutation of parts.0.1.num_batches_tracked"])) == (1, 2)
