"""Convolutions in parts: the same results, and less memory beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from kit.eager_steps import differing  # noqa: E402
from poetmodel.torch.capturing.replay import KERNEL  # noqa: E402
from poetmodel.torch.runtime.convolutions import (  # noqa: E402
    Backward,
    Divided,
    Division,
    Forward,
    NormBackward,
    divided_units,
    in_parts,
    kernels_told,
    least_workspace,
)
from poetmodel.torch.step.trace import keep_all_bytes, least_bytes  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

nn = torch.nn
aten = torch.ops.aten
pytestmark = pytest.mark.torch

CASES: dict[str, Any] = {
    "plain": nn.Conv2d(32, 48, 3, padding=1),
    "strided": nn.Conv2d(32, 64, 3, stride=2, bias=False),
    "odd": nn.Conv2d(5, 7, 3, dilation=2),
    "line": nn.Conv1d(32, 32, 5, padding=2),
    "depthwise": nn.Conv2d(32, 64, 3, groups=32),
    "grouped": nn.Conv2d(32, 64, 1, groups=4),
    "transposed": nn.ConvTranspose2d(32, 48, 2, stride=2),
}


def operands(layer: Any) -> tuple[Any, Any, list[Any]]:
    """Return input, gradient of the output, and what else PyTorch's operators take."""
    torch.manual_seed(1)
    sizes = (6,) * (layer.weight.ndim - 2)
    x = torch.randn(4, layer.in_channels, *sizes)
    padding = layer.output_padding if layer.transposed else (0,) * len(sizes)
    how = [layer.stride, layer.padding, layer.dilation, layer.transposed, padding, layer.groups]
    with torch.no_grad():
        return x, torch.randn_like(layer(x)), [list(h) if isinstance(h, tuple) else h for h in how]


def divisions(layer: Any, kinds: Sequence[str]) -> list[Division]:
    """Return ways to divide a layer, those that its groups allow."""
    if layer.groups > 1:
        kinds = [kind for kind in ("batch", "groups") if kind in {*kinds, "groups"}]
    return [
        Division(kind=kind, count=count, groups=layer.groups, transposed=layer.transposed)
        for kind in kinds
        for count in (2, 3)
    ]


@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_convolution_are_the_whole(case: str) -> None:
    """Whatever is divided, up to the rounding of sums in another order."""
    layer = CASES[case]
    x, _, how = operands(layer)
    with torch.no_grad():
        whole = layer(x)
        for division in divisions(layer, ("batch", "out")):
            kernel = Forward((division,), torch.empty_like(whole, device="meta"))
            torch.testing.assert_close(kernel(x, layer.weight, layer.bias, *how), whole)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False], [False, True, False]])
def test_parts_of_gradients_are_the_whole(case: str, mask: list[bool]) -> None:
    """Those of the input by images or channels, those of weight and bias by channels."""
    layer = CASES[case]
    x, dy, how = operands(layer)
    arguments = (dy, x, layer.weight.detach(), [dy.shape[1]], *how, mask)
    whole = aten.convolution_backward(*arguments)
    of_input = [None, *divisions(layer, ("batch", "in"))]
    of_weight = [d for d in divisions(layer, ("out", "in")) if d.kind != "batch"]
    for k, one in enumerate(of_input):
        found = Backward((one, of_weight[k % len(of_weight)]))(*arguments)
        for part, expected, wanted in zip(found, whole, mask, strict=True):
            assert (part is not None) == wanted
            if wanted:
                torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_parts_of_the_gradients_of_a_norm_are_the_whole(*, train: bool, scaled: bool) -> None:
    """In either mode, with and without a weight."""
    torch.manual_seed(1)
    x, dy = torch.randn(4, 7, 5, 5), torch.randn(4, 7, 5, 5)
    mean, deviation = x.mean((0, 2, 3)), 1 / x.std((0, 2, 3))
    weight = torch.rand(7) if scaled else None
    arguments = (dy, x, weight, mean, deviation, mean, deviation, train, 1e-5, [True, scaled, True])
    whole = aten.native_batch_norm_backward(*arguments)
    for count in (2, 3, 7):
        found = NormBackward((Division(kind="channels", count=count),))(*arguments)
        for part, expected in zip(found, whole, strict=True):
            assert (part is None) == (expected is None)
            if part is not None:
                torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)


def test_a_kernel_with_other_bits_is_not_taken() -> None:
    """Even where it needs less memory."""
    x = torch.randn(1000)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return (x + 1) + (x + 2)

    def less(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).add_(x).add_(2)

    def same(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).add_(x + 2)

    assert least_workspace([less], whole, [x], 0) is None
    found = least_workspace([less, same], whole, [x], 0)
    assert found is not None
    assert found[0] is same
    assert least_workspace([same], whole, [x], 1 << 20) is None


def wide() -> tuple[Any, Any, tuple[Any, ...]]:
    """Return a network whose weights are larger than its images."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(16, 192, 3, padding=1), nn.ReLU(), nn.Conv2d(192, 192, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 4),
    )  # fmt: skip
    inputs = (torch.randn(4, 16, 4, 4), torch.randint(0, 4, (4,)))
    return model, nn.functional.cross_entropy, inputs


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN's workspaces")
def test_a_budget_below_whole_convolutions_is_kept() -> None:
    """Where no schedule of whole convolutions fits, one of parts runs, and is eager's."""
    own = wide()
    traced = pmt.trace(*own)
    found = divided_units(traced, budget_bytes=keep_all_bytes(traced) // 3)
    assert found
    assert [Divided.from_dict(each.to_dict()) for each in found] == found
    divided = in_parts(traced, found)
    assert sum(KERNEL in unit.node.meta for unit in divided.parts.units) == len(found)
    least = least_bytes(divided)
    assert least < least_bytes(traced)
    step = pmt.compile(*own, ram=(least + least_bytes(traced)) // 2, device="rpi4b")
    assert differing(step, *own) == []
    assert step.verify().heap_peak_bytes <= step.budget_bytes
    assert any("run in parts" in note for note in step.compiled.notes)


def test_norms_of_low_precision_are_tried() -> None:
    """With autocast, what a norm saves has the type of its weight, whatever PyTorch predicts."""

    class Cast(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).float()

    torch.manual_seed(1)
    model = Cast(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    inputs = (torch.randn(4, 3, 24, 24), torch.randn(4, 8, 24, 24))
    own = (model, nn.functional.mse_loss, inputs)
    traced = pmt.trace(*own)
    found = divided_units(traced, budget_bytes=least_bytes(traced))
    assert "NormBackward" in kernels_told(in_parts(traced, found))
    assert differing(pmt.compile(*own, ram="90%", device="rpi4b"), *own) == []


def test_gradients_that_share_their_memory_are_tried() -> None:
    """Of a mean, all are one number in memory."""
    model, _, (x, _) = wide()
    own = (model[:3], lambda y, _: y.mean(), (x, x))
    traced = pmt.trace(*own)
    assert in_parts(traced, divided_units(traced, budget_bytes=least_bytes(traced))).graph.nodes


def test_roomy_budgets_divide_nothing() -> None:
    """With room for everything, kernels are PyTorch's own."""
    own = wide()
    traced = pmt.trace(*own)
    assert divided_units(traced, budget_bytes=keep_all_bytes(traced)) == []
