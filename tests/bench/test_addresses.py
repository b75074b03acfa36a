"""The measurement of addresses: what it compares, and at which budgets."""

from __future__ import annotations

import addresses
from poetmodel.device import Costs, Device
from poetmodel.graph import zoo
from poetmodel.planner import make_plan
from poetmodel.schedule import checkpoint_all


def test_a_plan_is_placed_in_three_ways() -> None:
    """None is below the bound, and the search is never worse than what it begins with."""
    graph = zoo.ds_cnn(state="sgd", in_place=True)
    costs = Costs.estimate(graph, Device.load("nrf52840"))
    found = addresses.measured(graph, make_plan(graph, costs, checkpoint_all(graph), mode="dma"))
    assert found["lower_bound_bytes"] <= found["arena_bytes"] <= found["greedy_bytes"]
    assert found["lower_bound_bytes"] <= found["in_order_bytes"]
    assert found["violations"] == []
    assert (found["nodes"], found["cpu_s"] > 0) == (len(graph.nodes), True)


def test_budgets_are_shares_where_these_are_possible() -> None:
    """Else a little more than the minimum RAM."""
    large, small = zoo.resnet18_cifar(), zoo.vgg16_cifar()
    board = Device.load("rpi4b")
    assert list(addresses.budgets(large, Costs.estimate(large, board))) == ["35%", "50%"]
    (near,) = addresses.budgets(small, Costs.estimate(small, board))
    assert near == int(1.05 * 786_432)
