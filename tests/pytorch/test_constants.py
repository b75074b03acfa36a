"""Constants: what depends on the code alone may be read in a capture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from eager_steps import differing  # noqa: E402
from traced_models import rows  # noqa: E402

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


@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_can_be_read(kind: str) -> None:
    """The captured step computes what eager does."""
    torch.manual_seed(1)
    own = rows(nn.Linear(4, 4), by=lambda p, x: CONSTANTS[kind](p[0](x)) + x)
    assert differing(pmt.compile(*own, ram="100%", device="rpi4b"), *own) == []


def written(x: Any) -> float:
    """Put an input into a constant."""
    table = torch.zeros(3)
    row = table[0]
    row.copy_(x[0, 0])
    return table.sum().item()


@pytest.mark.parametrize(
    "value",
    [
        lambda _, x: x.sum().item(),
        lambda _, x: (x * 0).sum().item(),
        lambda p, _: p.weight.sum().item(),
        lambda _, __: torch.rand(3).sum().item(),
        lambda _, __: torch.zeros(3).uniform_().sum().item(),
        lambda _, __: torch.randperm(3).tolist()[0],
        lambda _, __: torch.full((3,), 0.5).bernoulli().sum().item(),
        lambda _, x: written(x),
        lambda _, x: torch.zeros(3, 4).add_(x).sum().item(),
        lambda _, x: torch.where(x > 0, torch.ones(4), torch.zeros(4)).sum().item(),
    ],
)
def test_what_depends_on_more_cannot(value: Any) -> None:
    """Inputs, parameters and random numbers are other ones in the next step."""
    own = rows(nn.Linear(4, 4), by=lambda p, x: p[0](x) * value(p[0], x))
    with pytest.raises(pmt.CaptureError, match="reads a tensor's value"):
        pmt.compile(*own, ram="100%", device="rpi4b")
