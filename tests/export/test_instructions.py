"""Instructions of kernels, estimated from what an emulator once counted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kit.linear_steps import linear_step
from kit.small_networks import NETWORKS, captured
from kit.toy_export import needs
from poetmodel.device import Costs, Device
from poetmodel.export.board import Target, build, run
from poetmodel.export.exporting import export_step
from poetmodel.export.instructions import (
    OTHER,
    call_instructions,
    costs_on,
    counted,
    node_instructions,
    table,
)
from poetmodel.export.kernels import kernel_names
from poetmodel.export.measuring import emulated_profile
from poetmodel.export.step import Call, Ref
from poetmodel.plan import Op

if TYPE_CHECKING:
    from pathlib import Path

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


def test_boards_cost_what_their_kernels_do() -> None:
    """A Cortex-M with an FPU: instructions over the clock. Others, and transfers: by rates."""
    step, board = linear_step(), Device.load("nrf52840")
    found, estimated = costs_on(step, board), Costs.estimate(step.graph, board)
    for name, instructions in node_instructions(step).items():
        assert found.compute[name].time_s == pytest.approx(instructions / 64e6)
        assert found.compute[name].energy_j == pytest.approx(instructions / 64e6 * 0.009984)
    assert found.compute.keys() == estimated.compute.keys()
    assert found.pages == estimated.pages
    for other in (
        replace(board, core="Cortex-M4F"),
        Device.load("esp32s3"),
        Device.load("mkr1000"),
    ):
        assert costs_on(step, other).compute == Costs.estimate(step.graph, other).compute


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("tile", [None, "4KiB"])
def test_estimates_are_near_the_emulator(name: str, tile: str | None) -> None:
    """Of networks that the table was not made from: all together, and each large node."""
    needs(Target.M4)
    step = captured(name, tile)
    found, emulated = (
        node_instructions(step),
        emulated_profile(step, device="nrf52840").instructions,
    )
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
