"""How long it takes to state a problem: the Pyomo model, and its compiled form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

import poetmodel as pm
from grid import graph_of
from poetmodel.backends.compiler import compile_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.backends.standard_form import StandardForm

pytestmark = pytest.mark.usefixtures("warm")

METHODS: Final = {
    "compact, events": ("compact", "events"),
    "compact, all": ("compact", "all"),
    "paper": ("paper", "all"),
}
"""Formulations and their stages, by the names that records use."""
ROUNDS: Final = 3
MODELS: Final = ("paper/vgg16-cifar", "paper/resnet18-cifar", "paper/bert")


def state(model: str, formulation: str, stages: str) -> StandardForm:
    """Build and compile the model of a graph at half of its RAM."""
    graph = graph_of(model)
    costs = pm.Costs.estimate(graph, pm.Device.load("paper-m4"))
    problem = pm.Problem(graph, costs, ram="50%", deadline_counts="compute")
    return compile_model(pm.build(problem, formulation, stages=stages))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_build(
    benchmark: Any, model: str, method: str, keep: Callable[..., None], *, smoke: bool
) -> None:
    """Building and compiling one model."""
    if smoke and model != MODELS[0]:
        pytest.skip("a smoke run takes one graph")
    name = "paper/linear" if smoke else model
    benchmark.group = f"build {name}"
    arguments = (name, *METHODS[method])
    form = benchmark.pedantic(state, args=arguments, rounds=1 if smoke else ROUNDS, iterations=1)
    facts = {"columns": form.n_columns, "rows": form.n_rows, "nonzeros": int(form.matrix.nnz)}
    benchmark.extra_info.update(facts)
    seconds = benchmark.stats.stats.median
    keep("build", f"{name} | {method}", seconds=seconds, rounds=ROUNDS, **facts)
    assert form.n_columns > 0
