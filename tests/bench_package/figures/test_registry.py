"""Which cells the figures consist of."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest

from poetmodel.baselines import method_names
from poetmodel.bench.figures import FIGURES, Figure, Part, figure
from poetmodel.errors import InputError

if TYPE_CHECKING:
    from poetmodel.bench import Cell


@cache
def cells_of(name: str) -> tuple[Cell, ...]:
    """Return all cells of a figure, made once."""
    return figure(name).cells()


@pytest.mark.parametrize("entry", FIGURES.values(), ids=lambda entry: entry.name)
def test_quick_run_is_a_smaller_one(entry: Figure) -> None:
    """It has fewer cells, none twice, one seed, shorter limits, and no problem of its own."""
    every, quick = cells_of(entry.name), entry.cells(quick=True)
    assert 0 < len(quick) < len(every)
    assert len({cell.key for cell in every}) == len(every)
    problems = {(cell.model, cell.device, cell.ram, cell.method) for cell in every}
    if entry.name == "figure3":  # one budget more, as VGG-16 needs more than 40 %
        problems |= {
            (cell.model, cell.device, "45%", cell.method) for cell in every if cell.ram == "50%"
        }
    assert {(cell.model, cell.device, cell.ram, cell.method) for cell in quick} <= problems
    assert {cell.settings.seed for cell in quick} == {0}
    assert {cell.settings.time_limit_s for cell in quick} == {entry.quick_limit_s}
    assert entry.quick_limit_s < max(cell.settings.time_limit_s for cell in every)
    limited = entry.cells(quick=True, time_limit_s=7.0)
    assert {cell.settings.time_limit_s for cell in limited} == {7.0}


@pytest.mark.parametrize("entry", FIGURES.values(), ids=lambda entry: entry.name)
def test_published_graphs_and_true_ones(entry: Figure) -> None:
    """Each figure is made on the graphs of the published code and on those of the zoo."""
    models = {cell.model.startswith("paper/") for cell in cells_of(entry.name)}
    assert models == {True, False}


def test_figure3_has_every_method_on_every_network_and_device() -> None:
    """Three networks, twice, on four devices by all methods."""
    cells = cells_of("figure3")
    assert {cell.method for cell in cells} == set(method_names())
    assert len({(cell.model, cell.device) for cell in cells}) == 6 * 4
    assert len({(cell.model, cell.device, cell.method) for cell in cells}) == 24 * len(
        method_names()
    )


def test_solvers_are_crossed_with_formulations_and_limits() -> None:
    """Three solvers, two formulations, two limits and three seeds; each starts cold."""
    cells = [
        cell for cell in cells_of("solvers") if cell.model == "paper/linear" and cell.ram == "50%"
    ]
    assert len(cells) == 3 * 2 * 2 * 3
    assert {cell.settings.time_limit_s for cell in cells} == {10.0, 60.0}
    assert not figure("solvers").warm


def test_formulations_are_for_methods_that_solve() -> None:
    """A method without a solver has no cell of a formulation."""
    part = Part(
        models=("mlp",),
        devices=("rpi4b",),
        ram=("75%",),
        quick_ram=(),
        methods=("optimal", "dtr"),
        formulations=(None, "compact"),
    )
    entry = Figure(name="x", title="", paper="", parts=(part,), limit_s=2.0, quick_limit_s=1.0)
    found = [(cell.method, cell.formulation) for cell in entry.cells()]
    assert found == [("optimal", None), ("dtr", None), ("optimal", "compact")]
    assert entry.cells(quick=True) == ()


def test_unknown_figure() -> None:
    """The message names the figures there are."""
    with pytest.raises(InputError, match="figure2, figure3, figure4, figure5, table3, solvers"):
        figure("figure6")
