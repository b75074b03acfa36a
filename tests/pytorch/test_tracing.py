"""Tracing: training graphs, and what of them is scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from kit.networks import residual_step  # noqa: E402
from kit.traced_models import frozen, residual, rows, traced_residual  # noqa: E402
from poetmodel.device import Costs, Device  # noqa: E402
from poetmodel.graph import Graph, checkpoint_all_peak_bytes  # noqa: E402
from poetmodel.torch import compile, trace  # noqa: E402
from poetmodel.torch.step.trace import (  # noqa: E402
    KEPT_SHARES,
    RANDOM_STATE_BYTES,
    coarse_costs,
    coarsen,
    coarsened,
    floor_bytes,
    keep_all_bytes,
)

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
    assert traced_residual().held_bytes == 4 + 16 + 16 + 8


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


def test_the_smallest_tensors_are_kept() -> None:
    """As many of the smallest as fit, equal sizes alike; their sum is reserved."""
    traced = traced_residual()
    sizes = [storage.bytes for storage in traced.parts.storages]
    coarse = coarsen(traced, kept_bytes=300)
    kept = [size for size in sizes if size < coarse.threshold_bytes]
    assert 0 < sum(kept) <= 300
    following = min(size for size in sizes if size >= coarse.threshold_bytes)
    assert sum(kept) + following * sizes.count(following) > 300
    assert len(coarse.numbers) == len(sizes) - len(kept)
    assert coarse.graph.tensor_bytes == tuple(sizes[i] for i in coarse.numbers)
    # Loss and new statistics lie in kept storages; one random operation, and the step's own state.
    assert coarse.reserved_bytes == sum(kept) + 3 * RANDOM_STATE_BYTES


def test_the_graph_keeps_its_nodes_and_what_they_read() -> None:
    """Kept tensors are neither read nor made by any node; those made again are workspace."""
    traced = traced_residual()
    coarse = coarsen(traced, kept_bytes=300)
    assert [node.name for node in coarse.graph.nodes] == [n.name for n in traced.graph.nodes]
    names = {tensor.name for tensor in coarse.graph.tensors}
    for before, node in zip(traced.graph.nodes, coarse.graph.nodes, strict=True):
        assert node.inputs == tuple(name for name in before.inputs if name in names)
        assert node.workspace_bytes + node.output_bytes == before.output_bytes


def test_results_that_wait_are_reserved() -> None:
    """Where nothing is kept, copies of the loss and of new statistics are."""
    traced = traced_residual()
    whole = coarsened(traced, budget_bytes=keep_all_bytes(traced))
    assert whole.graph is traced.graph
    # A loss, mean and variance of 4 channels, and a counter of 8 bytes.
    assert whole.reserved_bytes == 4 + 16 + 16 + 8 + RANDOM_STATE_BYTES
    expected = checkpoint_all_peak_bytes(traced.graph) + whole.reserved_bytes
    assert keep_all_bytes(traced) == expected


def test_sums_of_gradients_of_one_weight_are_reserved() -> None:
    """A weight in two places has a sum that waits for the second gradient."""
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    traced = trace(*rows(first, second), measure_workspace=False)
    whole = coarsened(traced, budget_bytes=keep_all_bytes(traced))
    assert whole.reserved_bytes == 4 + 64


def test_costs_of_kept_tensors_are_left_out() -> None:
    """Costs of a coarse graph are those of the whole one."""
    traced = traced_residual()
    coarse = coarsen(traced, kept_bytes=300)
    costs = Costs.estimate(traced.graph, Device.load("rpi4b"))
    table = coarse_costs(costs, coarse.graph).table(coarse.graph)
    whole = costs.table(traced.graph)
    assert table.compute_time_s == whole.compute_time_s
    assert table.page_in_time_s == tuple(whole.page_in_time_s[i] for i in coarse.numbers)
    alone = Costs(compute=costs.compute)
    assert coarse_costs(alone, coarse.graph).pages is None


def test_less_is_kept_where_nothing_is_left_beside_it() -> None:
    """Between the floors of the finest and the usual graph a finer one is taken."""
    torch.manual_seed(1)
    traced = trace(*residual_step())
    finest = coarsen(traced, kept_bytes=0)
    budget = floor_bytes(finest)
    usual = coarsen(traced, kept_bytes=int(KEPT_SHARES[0] * budget))
    assert floor_bytes(usual) > budget
    found = coarsened(traced, budget_bytes=budget)
    assert floor_bytes(found) <= budget
    assert found.threshold_bytes < usual.threshold_bytes
    roomy = floor_bytes(usual) + 1000
    assert coarsened(traced, budget_bytes=roomy).threshold_bytes >= usual.threshold_bytes


def test_most_of_the_room_above_the_floor_is_left() -> None:
    """However small a budget is, what is kept takes a third at most of what it has beyond need."""
    torch.manual_seed(1)
    traced = trace(*residual_step())
    least = floor_bytes(coarsen(traced, kept_bytes=0))
    for room in (0, 300, 1000, 3000, 30000):
        found = coarsened(traced, budget_bytes=least + room)
        assert floor_bytes(found) - least <= room / 3


def test_below_the_floor_the_least_one_is_told() -> None:
    """Of several floors the least is the one that no budget may be below."""
    traced = traced_residual()
    found = coarsened(traced, budget_bytes=100)
    assert floor_bytes(found) == min(
        floor_bytes(coarsen(traced, kept_bytes=kept)) for kept in (0, 1)
    )


def test_room_for_everything_leaves_nothing_out() -> None:
    """At the peak of keeping everything there is nothing to decide."""
    traced = traced_residual()
    whole = coarsened(traced, budget_bytes=keep_all_bytes(traced))
    assert len(whole.numbers) == len(traced.parts.storages)
    assert whole.threshold_bytes == 0


def test_step_near_the_floor_keeps_its_budget(tmp_path: object) -> None:
    """A step a little above the floor, below which there is no plan, is within its budget."""
    torch.manual_seed(1)
    own = residual_step()
    budget = floor_bytes(coarsened(trace(*own), budget_bytes=0)) + 256
    with compile(*own, ram=budget, storage=str(tmp_path), device="rpi4b", time_limit=5) as step:
        certificate = step.verify()
    assert certificate.equal
    assert certificate.heap_peak_bytes <= budget
