"""Tracing: the figures of the training graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from poetmodel.device import Costs, Device  # noqa: E402
from poetmodel.graph import Graph, checkpoint_all_peak_bytes  # noqa: E402
from poetmodel.torch import trace  # noqa: E402
from traced_models import frozen, residual, rows  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

nn = torch.nn
pytestmark = pytest.mark.torch


def test_figures_of_one_layer() -> None:
    """A linear layer on 3 rows of 4, and a sum weighted by the target: every figure by hand."""
    model, _, inputs = rows(nn.Linear(4, 4))
    graph = trace(
        model, lambda y, t: (y * t).sum(), inputs, name="layer", measure_workspace=False
    ).graph
    figures = [(n.op, n.output_bytes, n.flops, n.bytes_moved, n.inputs) for n in graph.nodes]
    rows_b, weight_b, bias_b = 3 * 4 * 4, 4 * 4 * 4, 4 * 4
    assert figures == [
        # 2 * 3 * 4 * 4 FLOP; reads bias, rows and weight, writes rows.
        ("addmm", rows_b, 96, bias_b + weight_b + 2 * rows_b, ()),
        ("mul", rows_b, 12, 3 * rows_b, ("0/addmm",)),
        ("sum", 4, 12, rows_b + 4, ("loss/mul",)),
        # The gradient that arrives is one number, seen as rows.
        ("mul", rows_b, 12, 4 + 2 * rows_b, ()),
        ("mm", weight_b, 96, 2 * rows_b + weight_b, ("loss/mul#2",)),
        ("sum", bias_b, 12, rows_b + bias_b, ("loss/mul#2",)),
    ]
    assert (graph.name, graph.batch_size, graph.dtype) == ("layer", 3, "float32")
    assert graph.resident_bytes == {"parameters": 80, "gradients": 80}
    assert (graph.parameters, graph.forward_macs) == (20, 48)
    # Output gradient and weight gradient; nothing of the forward pass is kept for them.
    assert checkpoint_all_peak_bytes(graph) == rows_b + weight_b


def test_resident_bytes_of_frozen_layers_and_buffers() -> None:
    """Frozen parameters have no gradients; buffers are in memory as parameters are."""
    graph = trace(*frozen(), measure_workspace=False).graph
    assert graph.resident_bytes == {"parameters": 160, "gradients": 80}
    assert graph.parameters == 20
    step = residual()
    held = sum(t.numel() * t.element_size() for t in step[0].state_dict().values())
    trained = sum(p.numel() * 4 for p in step[0].parameters())
    traced = trace(*step, measure_workspace=False)
    assert traced.graph.resident_bytes == {"parameters": held, "gradients": trained}


def test_held_bytes_are_those_handed_out_at_the_end() -> None:
    """The loss and the new mean, deviation and counter of batch norm wait for the end."""
    assert trace(*residual(), measure_workspace=False).held_bytes == 4 + 16 + 16 + 8


def test_frozen_layers_shrink_the_graph() -> None:
    """What is not trained has no backward."""
    whole = trace(*rows(nn.Linear(4, 4), nn.Linear(4, 4)), measure_workspace=False).graph
    part = trace(*frozen(), measure_workspace=False).graph
    assert len(part.nodes) < len(whole.nodes)


def test_meta_device_needs_no_memory() -> None:
    """On the meta device the same graph comes out, and nothing is computed."""
    parts = (nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    inputs = (torch.randn(2, 4, 6, 6), torch.randn(2, 4, 4, 4))
    real, meta = (
        trace(
            nn.Sequential(*parts).to(device),
            lambda y, t: (y * t).sum(),
            tuple(tensor.to(device) for tensor in inputs),
            measure_workspace=device == "meta",
        )
        for device in ("cpu", "meta")
    )
    assert meta.graph == real.graph
    assert all(node.workspace_bytes == 0 for node in meta.graph.nodes)


def test_graph_file_and_estimates(tmp_path: Path) -> None:
    """A traced graph is saved, read, and costed for a board."""
    graph = trace(*residual()).graph
    graph.save(tmp_path / "net.graph.json")
    again = Graph.load(tmp_path / "net.graph.json")
    assert again == graph
    costs = Costs.estimate(again, Device.load("rpi4b"))
    assert all(cost.time_s > 0 for cost in costs.compute.values())
