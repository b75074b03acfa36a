"""Workspace: what an operation allocates beside its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from poetmodel.torch.workspace import _peaks


@dataclass(frozen=True)
class Event:
    """An event of the profiler: a change of memory, or a span with a name."""

    label: str
    begin: int
    length: int = 0
    size: int = 0

    def name(self) -> str:
        """Return what it is."""
        return self.label

    def start_ns(self) -> int:
        """Return when it begins [ns]."""
        return self.begin

    def duration_ns(self) -> int:
        """Return how long it lasts [ns]."""
        return self.length

    def nbytes(self) -> int:
        """Return the change [B]."""
        return self.size


def test_peaks_count_what_happens_inside_a_unit() -> None:
    """The highest running sum inside each span counts; what is between spans does not."""
    events = [
        Event("[memory]", 5, size=1000),
        Event("poetmodel.unit.0", 10, length=10),
        Event("aten::mm", 11, length=8),
        Event("[memory]", 12, size=100),
        Event("[memory]", 13, size=300),
        Event("[memory]", 14, size=-300),
        Event("[memory]", 25, size=-1000),
        Event("poetmodel.unit.1", 30, length=10),
        Event("[memory]", 31, size=-100),
        Event("[memory]", 32, size=40),
    ]
    assert _peaks(events[::-1]) == {0: 400, 1: 0}
    assert _peaks([]) == {}


@pytest.mark.torch
def test_workspace_is_what_the_operation_frees_again(capfd: pytest.CaptureFixture[str]) -> None:
    """An operation that needs a scratch tensor of a known size is charged with just that."""
    torch = pytest.importorskip("torch")
    from poetmodel.torch import trace
    from traced_models import rows

    scratch = 1000

    def add_the_sum_of_ones(x: Any) -> Any:
        return x + torch.ones(scratch, dtype=torch.float64).sum().to(x.dtype)

    operation = torch.library.custom_op(
        "poetmodel_test::scratch",
        add_the_sum_of_ones,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    operation.register_fake(torch.empty_like)
    operation.register_autograd(lambda _, grad: grad)
    step = rows(torch.nn.Linear(4, 4), by=lambda p, x: operation(p[0](x)))
    graph = trace(*step).graph
    (node,) = (node for node in graph.nodes if node.op.endswith("scratch"))
    # At its peak it has the ones and their sum; its output comes after and fits in their place.
    assert node.workspace_bytes + node.output_bytes == (scratch + 1) * 8
    assert "USDT" not in capfd.readouterr().err
