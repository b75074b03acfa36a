"""RAM in use at the peak of a schedule, by kind."""

from dataclasses import astuple, replace

import pytest

from kit.closed_form import simulated_bluntly
from kit.instances import random_schedule, random_step, seeded
from kit.rotation import parts
from kit.worked import state, update
from poetmodel.device import Costs, Device
from poetmodel.graph import Graph, Node, Phase, Tensor, operation
from poetmodel.schedule import Schedule, simulate

STEPS = 700
FLASH = Device.load("nano33ble")


def with_gradients(rng, graph):
    """Return the graph with some of its nodes in the backward pass."""
    nodes = (
        replace(node, phase=Phase.BACKWARD)
        if node.phase == Phase.FORWARD and rng.random() < 0.5
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


@pytest.mark.parametrize("mapped", [False, True])
@parts(3)
def test_kinds_are_those_of_a_second_simulator(part, *, mapped):
    """For random training steps, schedules and homes each kind at the peak is the same sum."""
    compared = 0
    for seed in part.of(range(STEPS)):
        rng = seeded(f"peak-use/{mapped}/{seed}")
        graph = with_gradients(rng, random_step(rng, (3, 9)))
        schedule = random_schedule(rng, graph, mapped=mapped)
        if schedule is None:
            continue
        costs = Costs.estimate(graph, FLASH) if mapped else None
        found = simulate(graph, costs, schedule)
        assert found.valid
        blunt = simulated_bluntly(graph, schedule, mapped=mapped)
        assert astuple(found.peak_use) == tuple(blunt.kinds[found.peak[:2]].values()), seed
        assert found.peak_use.total_bytes == found.peak_ram_bytes
        compared += 1
    assert compared > part.share(STEPS // 2)


def test_a_step_has_all_four_kinds():
    """By hand: 100 B of resident state, 8 of `y`, 3 of `dx`, 20 of workspace.

    `dw` (6 B) takes nothing of its own: it is written over `y`, whose last use this is. `a` is kept
    and made again: 2 * 7 B of activations beside 4 of the step before.
    """
    nodes = (
        state("w", 100),
        operation("x", output_bytes=10),
        operation("y", output_bytes=8, inputs=("x", "w")),
        Node(
            name="dw",
            op="backward",
            phase=Phase.BACKWARD,
            inputs=("y",),
            outputs=(Tensor(name="dw", bytes=6), Tensor(name="dx", bytes=3)),
            workspace_bytes=20,
            in_place=(("dw", "y"),),
        ),
        update("u", "dw", w=100),
    )
    schedule = Schedule(
        R=tuple((t, t) for t in range(5)), S_RAM=((2, 1), (3, 2), (4, 3)), resident=(0,)
    )
    found = simulate(Graph(name="step", nodes=nodes), None, schedule)
    assert found.valid
    assert found.peak == (3, 3, 100 + 8 + (6 - 6) + 3 + 20)
    assert astuple(found.peak_use) == (100, 8, 3, 20)
    nodes = (operation("a", output_bytes=7), operation("b", output_bytes=4, inputs=("a",)))
    graph = Graph(name="pair", nodes=nodes)
    found = simulate(graph, None, Schedule(R=((0, 0), (1, 0), (1, 1)), S_RAM=((1, 0),)))
    assert found.valid
    assert found.peak == (1, 0, 14)
    assert astuple(found.peak_use) == (0, 14, 0, 0)
