"""Which runs the figures consist of."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest

from poetmodel.baselines import method_names
from poetmodel.bench.figures import FIGURES, Figure, Part, figure
from poetmodel.errors import InputError

if TYPE_CHECKING:
    from poetmodel.bench import Run


@cache
def cells_of(name: str) -> tuple[Run, ...]:
    """Return all runs of a figure, made once."""
    return figure(name).runs()


@pytest.mark.slow
@pytest.mark.parametrize("entry", FIGURES.values(), ids=lambda entry: entry.name)
def test_quick_run_is_a_smaller_one(entry: Figure) -> None:
    """It has fewer runs, none twice, one seed, shorter limits, and no problem of its own."""
    every, quick = cells_of(entry.name), entry.runs(quick=True)
    assert 0 < len(quick) < len(every)
    assert len({run.key for run in every}) == len(every)
    problems = {(run.model, run.device, run.ram, run.method) for run in every}
    if entry.name == "figure3":  # one budget more, as VGG-16 needs more than 40 %
        problems |= {
            (run.model, run.device, "45%", run.method) for run in every if run.ram == "50%"
        }
    assert {(run.model, run.device, run.ram, run.method) for run in quick} <= problems
    assert {run.settings.seed for run in quick} == {0}
    assert {run.settings.time_limit_s for run in quick} == {entry.quick_limit_s}
    assert entry.quick_limit_s < max(run.settings.time_limit_s for run in every)
    limited = entry.runs(quick=True, time_limit_s=7.0)
    assert {run.settings.time_limit_s for run in limited} == {7.0}


@pytest.mark.parametrize("entry", FIGURES.values(), ids=lambda entry: entry.name)
def test_published_graphs_and_true_ones(entry: Figure) -> None:
    """Each figure is made on the graphs of the published code and on those of the zoo."""
    models = {run.model.startswith("paper/") for run in cells_of(entry.name)}
    assert models == {True, False}


def test_figure3_has_every_method_on_every_network_and_device() -> None:
    """Three networks, twice, on four devices by all methods."""
    runs = cells_of("figure3")
    assert {run.method for run in runs} == set(method_names())
    assert len({(run.model, run.device) for run in runs}) == 6 * 4
    assert len({(run.model, run.device, run.method) for run in runs}) == 24 * len(method_names())


def test_solvers_are_crossed_with_formulations_and_limits() -> None:
    """Three solvers, two formulations, two limits and three seeds; each starts cold."""
    runs = [run for run in cells_of("solvers") if run.model == "paper/linear" and run.ram == "50%"]
    assert len(runs) == 3 * 2 * 2 * 3
    assert {run.settings.time_limit_s for run in runs} == {10.0, 60.0}
    assert not figure("solvers").warm


def test_formulations_are_for_methods_that_solve() -> None:
    """A method without a solver has no run of a formulation."""
    part = Part(
        models=("mlp",),
        devices=("rpi4b",),
        ram=("75%",),
        quick_ram=(),
        methods=("optimal", "dtr"),
        formulations=(None, "compact"),
    )
    entry = Figure(name="x", title="", paper="", parts=(part,), limit_s=2.0, quick_limit_s=1.0)
    found = [(run.method, run.formulation) for run in entry.runs()]
    assert found == [("optimal", None), ("dtr", None), ("optimal", "compact")]
    assert entry.runs(quick=True) == ()


def test_unknown_figure() -> None:
    """The message names the figures there are."""
    with pytest.raises(InputError, match="figure2, figure3, figure4, figure5, table3, solvers"):
        figure("figure6")
