"""Coarsening: what is always kept, and what that reserves."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from poetmodel.device import Costs, Device  # noqa: E402
from poetmodel.graph import checkpoint_all_peak_bytes  # noqa: E402
from poetmodel.torch import trace  # noqa: E402
from poetmodel.torch.coarsening import (  # noqa: E402
    RANDOM_STATE_BYTES,
    coarse_costs,
    coarsen,
    keep_all_bytes,
    uncoarsened,
)
from traced_models import residual, rows  # noqa: E402

pytestmark = pytest.mark.torch


def test_the_smallest_tensors_are_kept() -> None:
    """As many of the smallest as fit, equal sizes alike; their sum is reserved."""
    traced = trace(*residual(), measure_workspace=False)
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
    """Kept tensors are neither read nor made by any node; those made anew are workspace."""
    traced = trace(*residual(), measure_workspace=False)
    coarse = coarsen(traced, kept_bytes=300)
    assert [node.name for node in coarse.graph.nodes] == [n.name for n in traced.graph.nodes]
    names = {tensor.name for tensor in coarse.graph.tensors}
    for before, node in zip(traced.graph.nodes, coarse.graph.nodes, strict=True):
        assert node.inputs == tuple(name for name in before.inputs if name in names)
        assert node.workspace_bytes + node.output_bytes == before.output_bytes


def test_results_that_wait_are_reserved() -> None:
    """Where nothing is kept, copies of the loss and of new statistics are."""
    traced = trace(*residual(), measure_workspace=False)
    whole = uncoarsened(traced)
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
    assert uncoarsened(traced).reserved_bytes == 4 + 64


def test_costs_of_kept_tensors_are_left_out() -> None:
    """Costs of a coarse graph are those of the whole one."""
    traced = trace(*residual(), measure_workspace=False)
    coarse = coarsen(traced, kept_bytes=300)
    costs = Costs.estimate(traced.graph, Device.load("rpi4b"))
    table = coarse_costs(costs, coarse.graph).table(coarse.graph)
    whole = costs.table(traced.graph)
    assert table.compute_time_s == whole.compute_time_s
    assert table.page_in_time_s == tuple(whole.page_in_time_s[i] for i in coarse.numbers)
    alone = Costs(compute=costs.compute)
    assert coarse_costs(alone, coarse.graph).pages is None
