"""Instructions of kernels, estimated from what an emulator once counted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kit.linear_steps import linear_step
from kit.programs import needs
from kit.small_networks import NETWORKS, captured
from poetmodel.device import Costs, Device
from poetmodel.export.board import Target, build, run
from poetmodel.export.exporting import export_step
from poetmodel.export.instructions import (
    OTHER,
    call_instructions,
    counted,
    table,
)
from poetmodel.export.io import load_step, save_step
from poetmodel.export.kernels import kernel_names
from poetmodel.export.measuring import emulated_profile
from poetmodel.export.step import Call, Ref
from poetmodel.graph import Graph
from poetmodel.plan import Op

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.export.step import LoweredStep

SHAPE = (8, 6, 10, 16, 6, 10, 3, 3, 1, 1, 1, 1, 1, 1, 1)
"""Of a convolution from 8 to 16 channels over 6 x 10 places, with windows of 3 x 3 around each."""


def counts(kernel: str, *arguments: Any) -> dict[str, int]:
    """Return how often a call does what its kernel repeats."""
    return dict(counted(Call(kernel, arguments))[1])


def test_products_are_counted_in_blocks() -> None:
    """Of 9 rows and 10 columns 8 by 8 go in blocks of 4 x 4; 2 columns are left, and one row."""
    tensors = (Ref("y"), Ref("x"), Ref("w"))
    found = counts("pm_mm", *tensors, 9, 7, 10, 10, 7, 1, 1, 7, 0)
    assert found == {
        "call": 1,
        "4x4": 4, "4x4 step by rows": 4 * 7,
        "1x4": 2, "1x4 step by rows": 2 * 7,
        "1x1": 18, "1x1 step": 18 * 7,
    }  # fmt: skip


def test_convolutions_are_counted_in_windows() -> None:
    """Eight of ten places in a row see whole windows: two blocks of four, for four channels each.

    16 channels are four times four; all rows together see 6 * 3 - 2 rows of windows, of 8 channels.
    The places at both ends see two of three columns. The gradient of the input has half as many
    channels, and twice as many for each.
    """
    found = counts("pm_conv2d", Ref("y"), Ref("x"), Ref("w"), 0, SHAPE, 1, 0, 16, 960)
    assert found == {
        "call": 1,
        "line": 4 * 6,
        "4x4 sliding": 4 * 6 * 2,
        "4x4 sliding row": 4 * 16 * 8 * 2,
        "4x4 sliding tap": 4 * 16 * 8 * 2 * 3,
        "4x1 sliding": 4 * 6 * 2,
        "4x1 sliding row": 4 * 16 * 8 * 2,
        "4x1 sliding tap": 4 * 16 * 8 * (2 + 2),
    }
    back = counts("pm_conv2d_dx", Ref("x"), Ref("y"), Ref("w"), SHAPE, 1, 0, 16, 960, 0)
    assert back == {**found, "line": 2 * 6, "4x4 sliding": 2 * 6 * 2, "4x1 sliding": 2 * 6 * 2}


def test_dilated_pools_are_counted_by_what_they_see() -> None:
    """A window of 3 x 2 over 5 rows and 4 columns sees six elements, however far they are apart."""
    steps = (20, 20, 5, 1) * 3
    pool = (Ref("y"), Ref("p"), Ref("x"), (0, 5), (0, 4), steps, 2, 3, 1, 1, 2, 3)
    found = counts("pm_max_pool2d_places", *pool)
    assert found["seen"] == 6 * 3 * 2
    assert found["window_row"] == 6 * 3


def test_decay_has_a_price_of_its_own() -> None:
    """An update with decay takes another way than one without."""
    arguments = (Ref("w"), Ref("g"), 40, 0.1, 1.0)
    plain, decayed = (Call("pm_sgd", (*arguments, decay)) for decay in (0.0, 0.1))
    assert call_instructions(plain) < call_instructions(decayed)


def test_table_is_about_kernels() -> None:
    """Each row is one of a kernel, and costs something; what is not there costs as others do."""
    names = {name.removesuffix(", decay") for name in table()} - {OTHER}
    assert names <= kernel_names()
    assert len(names) > 0.7 * len(kernel_names())
    assert all(cost > 0 for row in table().values() for cost in row.values())
    (unknown, *_) = sorted(kernel_names() - names)
    assert unknown not in table()


def node_instructions(step: LoweredStep) -> dict[str, int]:
    """Return the instructions of the nodes that compute."""
    return {node.name: node.instructions or 0 for node in step.graph.nodes if not node.is_state}


def uncounted(graph: Graph) -> Graph:
    """Return a graph of which nobody knows the instructions."""
    return replace(graph, nodes=tuple(replace(n, instructions=None) for n in graph.nodes))


def test_boards_cost_what_their_kernels_do() -> None:
    """A Cortex-M with an FPU: instructions over the clock. Others, and transfers: by rates."""
    step, board = linear_step(), Device.load("nrf52840")
    costs, rated = (Costs.estimate(graph, board) for graph in (step.graph, uncounted(step.graph)))
    for name, instructions in node_instructions(step).items():
        assert instructions > 0
        assert costs.compute[name].time_s == pytest.approx(instructions / 64e6)
        assert costs.compute[name].energy_j == pytest.approx(instructions / 64e6 * 0.009984)
    assert costs.compute.keys() == rated.compute.keys()
    assert costs.pages == rated.pages
    for other in (
        replace(board, core="Cortex-M4F"),
        replace(board, compute=replace(board.compute, power_w=None, flops_per_j=1e9)),
        Device.load("esp32s3"),
        Device.load("mkr1000"),
    ):
        assert Costs.estimate(step.graph, other) == Costs.estimate(uncounted(step.graph), other)


def test_instructions_travel_with_the_graph(tmp_path: Path) -> None:
    """A step file, and the graph that is read of it alone, cost the same; the identity stays."""
    step = linear_step()
    save_step(step, tmp_path / "linear.step.json")
    assert load_step(tmp_path / "linear.step.json").graph == step.graph
    assert Graph.load(tmp_path / "linear.step.json") == step.graph
    assert uncounted(step.graph).sha256 == step.graph.sha256


def test_instructions_are_counted_anew_in_older_files(tmp_path: Path) -> None:
    """A file that was written without them, or with others, is read with those of its calls."""
    step = linear_step()
    for graph in (
        uncounted(step.graph),
        replace(
            step.graph,
            nodes=(
                *(replace(n, instructions=None if n.is_state else 7) for n in step.graph.nodes),
            ),
        ),
    ):
        save_step(replace(step, graph=graph), tmp_path / "old.step.json")
        assert load_step(tmp_path / "old.step.json").graph == step.graph


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("tile", [None, "4KiB"])
def test_estimates_are_near_the_emulator(name: str, tile: str | None) -> None:
    """Of networks that the table was not made from: all together, and each large node."""
    needs(Target.M4)
    step = captured(name, tile)
    found = node_instructions(step)
    emulated = emulated_profile(step, device="nrf52840").instructions
    total = sum(emulated.values())
    assert sum(found.values()) == pytest.approx(total, rel=0.03)
    large = [node for node, count in emulated.items() if count > total / 100]
    assert {node: found[node] for node in large} == pytest.approx(
        {node: emulated[node] for node in large}, rel=0.1
    )


@pytest.mark.slow
@pytest.mark.torch
def test_schedules_run_what_they_are_said_to(tmp_path: Path) -> None:
    """The emulator counts what was estimated, and by its count more RAM takes less energy."""
    needs(Target.M4)
    step, board = captured("lenet", "4KiB"), Device.load("nrf52840")
    estimated = node_instructions(step)
    energies = []
    for ram in ("60%", "56kB"):
        folder = tmp_path / ram.rstrip("%")
        made = export_step(step, folder, ram=ram, device=board, time_limit=30, gap=0.02)
        program = build(folder, Target.M4)
        batch = bytes(4 * 784 + 4)
        done = run(program, Target.M4, folder, inputs=batch, steps=1, learning_rate=0.05)
        spent = done.require_success().figures["step_instructions"]
        nodes = [step.graph.nodes[k] for op, k in made.plan.program if op == Op.COMPUTE]
        total = sum(estimated[node.name] for node in nodes if not node.is_state)
        assert spent == pytest.approx(total, rel=0.03)
        assert made.result is not None
        assert made.result.energy_j is not None
        energies.append(made.result.energy_j + (spent - total) / 64e6 * 0.009984)
    assert energies[0] < energies[1]
