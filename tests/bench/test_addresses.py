"""The measurement of addresses: what it compares, and what the page says of its record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import addresses
from poetmodel.device import Costs, Device
from poetmodel.graph import zoo
from poetmodel.planner import make_plan
from poetmodel.schedule import checkpoint_all
from result_pages.addresses import block

if TYPE_CHECKING:
    from kit.messages import Told


def run(network: str, arena: int, greedy: int, heap: int, **more: Any) -> dict[str, Any]:
    """Return a record of a block whose lower bound is 100 B."""
    return {
        "recorded": "2026-11-22T10:00:00+00:00",
        "cell": {"group": "zoo", "network": network, "ram": "35%", "mode": "dma"},
        "lower_bound_bytes": 100,
        "arena_bytes": arena,
        "greedy_bytes": greedy,
        "in_order_bytes": heap,
        "nodes": 50,
        "offsets": 70,
        **more,
    }


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


def test_the_page_has_medians_and_worst_cases(told: Told) -> None:
    """By way and group; the goals are held against the figures of all plans."""
    records = [run("a", 100, 104, 110), run("b", 100, 100, 120), run("c", 102, 110, 150, cpu_s=2.5)]
    told(block(records, "x-addresses.jsonl"))
    told(block([*records, run("d", 103, 103, 103)], "x-addresses.jsonl"), "missed")
