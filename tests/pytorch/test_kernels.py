"""Kernels in place of PyTorch's give the same bits, in less memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from poetmodel.torch.kernels import kernel_of  # noqa: E402
from poetmodel.torch.peaks import heap_peak_bytes  # noqa: E402

pytestmark = pytest.mark.torch

NATIVE = torch.ops.aten.native_dropout_backward.default


def test_other_operations_are_their_own_kernels() -> None:
    """Whatever is not in the table is called as it is."""
    assert kernel_of(torch.ops.aten.mm.default) is torch.ops.aten.mm.default
    assert kernel_of(max) is max


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "expanded"])
def test_backward_of_dropout_is_that_of_pytorch(dtype: torch.dtype, layout: str) -> None:
    """Values, type and strides are the same for every layout, infinities and NaN included."""
    torch.manual_seed(1)
    grad = torch.randn(4, 6, 5, 5).to(dtype)
    mask = torch.rand(4, 6, 5, 5) > 0.3
    grad[0, 0, 0, 0], grad[0, 0, 0, 1], grad[0, 0, 0, 2] = torch.inf, torch.nan, -0.0
    if layout == "channels_last":
        grad, mask = (t.to(memory_format=torch.channels_last) for t in (grad, mask))
    elif layout == "transposed":
        grad = grad.transpose(2, 3)
    elif layout == "expanded":
        grad = grad[:1].expand(4, 6, 5, 5)
    expected = NATIVE(grad, mask, 1 / 0.7)
    found = kernel_of(NATIVE)(grad, mask, 1 / 0.7)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert found.stride() == expected.stride()
    assert found.dtype == dtype


def test_backward_of_dropout_makes_one_tensor() -> None:
    """What it takes beside its result is a few numbers, where PyTorch takes another tensor."""
    grad, mask = torch.randn(1024), torch.rand(1024) > 0.3
    assert heap_peak_bytes(lambda: kernel_of(NATIVE)(grad, mask, 2.0)) < 4096 + 64
    assert heap_peak_bytes(lambda: NATIVE(grad, mask, 2.0)) >= 2 * 4096
