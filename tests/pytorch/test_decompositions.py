"""Decompositions: operators are recorded whole, and give what eager does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from poetmodel.torch import capture, trace  # noqa: E402
from poetmodel.torch.decompositions import native_operators  # noqa: E402
from traced_models import Through, images, recurrent  # noqa: E402
from traced_steps import run_eager, run_units  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

nn = torch.nn
functional = nn.functional
pytestmark = pytest.mark.torch

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


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
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
