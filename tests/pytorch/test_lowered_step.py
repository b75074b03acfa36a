"""Steps that are lowered: what their graphs say of the kernels."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from poetmodel.torch import CaptureError  # noqa: E402
from poetmodel.torch.lowering.step import lower  # noqa: E402

pytestmark = pytest.mark.torch


def test_norms_take_over_the_memory_of_what_they_read() -> None:
    """Batch norm and its gradient may work in place, although they make more than one tensor."""
    nn = torch.nn
    layers = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    inputs = (torch.randn(1, 1, 4, 4), torch.zeros(1, dtype=torch.long))
    step = lower(nn.Sequential(*layers), nn.functional.cross_entropy, inputs)
    norms = [node for node in step.graph.nodes if "batch_norm" in node.op]
    assert len(norms) == 2
    for node in norms:
        ((made, taken),) = node.in_place
        sizes = {buffer: step.buffers[buffer].bytes for buffer in (made, taken)}
        assert sizes == {made: 32, taken: 32}
        assert taken in node.inputs


def test_values_that_are_read_cannot_be_exported() -> None:
    """A program in C has no guards: it would do what the first inputs asked for."""

    class Branching(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y * 2 if (x > 0).all() else y

    inputs = (torch.ones(1, 3), torch.zeros(1, 2))
    with pytest.raises(CaptureError, match=r"value that is read at .* \(True\) would be part of"):
        lower(Branching(3, 2), torch.nn.functional.mse_loss, inputs)
