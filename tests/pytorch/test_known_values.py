"""A capture reads constants, and what inputs and buffers alone decide; nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from kit.eager_steps import differing, keep_all  # noqa: E402
from kit.rotation import quick  # noqa: E402
from kit.traced_models import Through, rows  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

nn = torch.nn
functional = nn.functional
pytestmark = pytest.mark.torch


def in_place() -> float:
    """Change a constant in place, also through views."""
    table = torch.zeros(3, 3)
    table[0].fill_(3)
    table.view(-1)[4:].mul_(2).add_(1)
    table[1, 1] = 7
    return float(table.sum())


def masked() -> int:
    """Count what a mask leaves."""
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[:2, :2] = True
    mask[torch.arange(4), torch.arange(4)] = True
    return len(mask.nonzero())


CONSTANTS: dict[str, Callable[[Any], Any]] = {
    "list": lambda y: y[:, torch.arange(3).tolist()].sum(1, keepdim=True),
    "nested list": lambda y: y * sum(map(sum, torch.eye(3).tolist())),
    "item": lambda y: y * torch.arange(4).sum().item(),
    "branch": lambda y: y * 2 if torch.ones(3, 3).tril().sum() > 5 else y,
    "rates": lambda y: functional.dropout(y, [v.item() for v in torch.linspace(0, 0.3, 3)][1]),
    "literal": lambda y: y * float(torch.tensor([1.0, 2.0, 3.0])[1]),
    "sections": lambda y: torch.cat(y.split(torch.tensor([1, 3]).tolist(), 1)[::-1], 1),
    "in place": lambda y: y * in_place(),
    "mask": lambda y: y * masked(),
    "masked index": lambda y: y[:, torch.arange(4) > 1].sum(1, keepdim=True),
    "form of another": lambda y: y * torch.ones_like(y).sum().item(),
    "equal": lambda y: y if torch.equal(torch.arange(3), torch.arange(3)) else y * 2,
    "grid": lambda y: (
        y
        * torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")).max().item()
    ),
    "variances": lambda y: y * functional.gaussian_nll_loss(y, y * 0, torch.ones_like(y)),
}


@pytest.mark.parametrize(
    "kind", quick(CONSTANTS, ("list", "branch", "literal", "in place", "mask"))
)
def test_constants_can_be_read(kind: str) -> None:
    """The captured step computes what eager does."""
    torch.manual_seed(1)
    own = rows(nn.Linear(4, 4), by=lambda p, x: CONSTANTS[kind](p[0](x)) + x)
    assert differing(keep_all(*own), *own) == []


def written(x: Any) -> float:
    """Put an input into a constant."""
    table = torch.zeros(3)
    row = table[0]
    row.copy_(x[0, 0])
    return table.sum().item()


def trimmed(x: Any) -> Any:
    """Take as many columns as the longest row has positive numbers."""
    return x[:, : (x > 0).sum(1).max()]


INPUTS: dict[str, Callable[[Any, Any], Any]] = {
    "item": lambda y, x: y * x.sum().item(),
    "branch": lambda y, x: y if x.sum() > 0 else -y,
    "all": lambda y, x: y * 2 if (x < 100).all() else y,
    "literal": lambda y, x: y if torch.equal(x > 0, torch.tensor([True] * 4)) else y * 2,
    "where": lambda y, x: y * torch.where(x > 0, torch.ones(4), torch.zeros(4)).sum().item(),
    "list": lambda y, x: y[:, x.argmax(1).tolist()].sum(1, keepdim=True),
    "written": lambda y, x: y * written(x),
    "added": lambda y, x: y * torch.zeros(3, 4).add_(x).sum().item(),
    "several outputs": lambda y, x: y * x.max(1)[0].sum().item() + x.split(2, 1)[1].sum().item(),
    "not a number": lambda y, x: y if (x.sum() * float("nan")).item() > 0 else y * 2,
    "a view": lambda y, x: y * x.view(-1)[::2].unflatten(0, (2, 3))[1].sum().item(),
    "selected inputs": lambda y, x: y * x[x > 0].sum(),
    "selected results": lambda y, x: y[x > 0].sum() + y,
    "selected rows": lambda y, x: y[x.sum(1) > 0, 1:3].sum() + y,
    "masked_select": lambda y, x: y.masked_select(x > 0).mean() + y,
    "masked_select by a row": lambda y, x: y.masked_select(x[1] > 0).sum() + y,
    "nonzero": lambda y, x: y[(x[:, 0] < 9).nonzero().squeeze(1)],
    "where alone": lambda y, x: y[torch.where(x[:, 0] < 9)[0]],
    "unique": lambda y, x: y * len(torch.unique(x > 0)),
    "repeated": lambda y, x: y.repeat_interleave((x > 0).sum(1) + 1, 0).sum() + y,
    "trimmed": lambda y, x: trimmed(x).sum() * y,
}
"""What reads an input, given the result of a layer and the input."""


def transcribed(parts: Any, x: Any, lengths: Any) -> Any:
    """Return the loss of a transcription: lengths decide the shape of what it keeps."""
    logits = parts[0](x).log_softmax(-1)
    written = torch.arange(12).view(2, 6) % 3 + 1
    labels = written.masked_select(torch.arange(6) < lengths[:, None])
    return functional.ctc_loss(logits, labels, torch.full((2,), 20), lengths, zero_infinity=True)


def test_lengths_may_decide_the_shape_of_a_loss() -> None:
    """Lengths of other texts run where the longest is as long, and are refused otherwise."""
    torch.manual_seed(1)
    model = Through(transcribed, nn.Linear(4, 4))
    own = model, None, (torch.randn(20, 2, 4), torch.tensor([5, 3]))
    step = keep_all(*own)
    assert differing(step, *own) == []
    assert differing(step, model, None, (own[2][0] * 2, torch.tensor([3, 5]))) == []
    with pytest.raises(pmt.CaptureError, match=r"decides .* was 5 and is 4"):
        step(own[2][0], torch.tensor([4, 4]))


@pytest.mark.parametrize(
    "kind",
    quick(INPUTS, ("item", "branch", "written", "several outputs", "selected inputs", "nonzero")),
)
def test_inputs_can_be_read(kind: str) -> None:
    """The captured step computes what eager does, and knows what it has read."""
    torch.manual_seed(1)
    own = rows(nn.Linear(4, 4), by=lambda p, x: INPUTS[kind](p[0](x), x) + x)
    step = keep_all(*own)
    assert step.compiled.trace.joint.read.reads
    assert differing(step, *own) == []


@pytest.mark.parametrize(
    "value",
    [
        lambda p, _: p.weight.sum().item(),
        lambda p, x: (p.weight.sum() * x.sum()).item(),
        lambda p, x: len(p(x)[p(x) > 0]),
    ],
)
def test_parameters_cannot_be_read(value: Any) -> None:
    """Parameters are other ones in the next step, and so is what follows from them."""
    own = rows(nn.Linear(4, 4), by=lambda p, x: p[0](x) * value(p[0], x))
    with pytest.raises(pmt.CaptureError, match=r"depends on parameters|depends on values"):
        keep_all(*own)


DRAWN: dict[str, Callable[[Any], Any]] = {
    "item": lambda _: torch.rand(3).sum().item(),
    "in place": lambda _: torch.zeros(3).uniform_().sum().item(),
    "list": lambda _: torch.randperm(3).tolist()[0],
    "bernoulli": lambda _: torch.full((3,), 0.5).bernoulli().sum().item(),
    "branch": lambda x: 1 if torch.rand(()) > x[0, 0] else 2,
    "nonzero": lambda _: len(torch.rand(5).round().nonzero()),
    "selected inputs": lambda x: x[torch.rand(3) > 2].sum(),
    "integer": lambda _: int(torch.empty(1).uniform_(0, 3).item()),
    "like": lambda x: torch.rand_like(x).sum().item(),
}


@pytest.mark.parametrize("kind", quick(DRAWN, ("item", "branch", "nonzero")))
def test_random_numbers_cannot_be_read(kind: str) -> None:
    """Random numbers are other ones in the next step: that is what is said."""
    own = rows(nn.Linear(4, 4), by=lambda p, x: p[0](x) * DRAWN[kind](x))
    with pytest.raises(pmt.CaptureError, match=r"a random number is read at .*test_known_values"):
        keep_all(*own)


def test_captures_hold_no_values() -> None:
    """The tensors of a captured graph do not keep those that were read alive."""
    joint = pmt.capture(*rows(nn.Linear(4, 4), by=lambda p, x: p[0](x) * (x * 2).sum().item()))
    nodes = joint.graph_module.graph.nodes
    held = [
        vars(node.meta["val"]) for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)
    ]
    assert held
    assert not any("poetmodel" in key for found in held for key in found)
