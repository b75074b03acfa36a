"""How long it takes to state a problem: the Pyomo model, and its compiled form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

import poetmodel as pm
from cases import Case
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


def state(case: Case, formulation: str, stages: str) -> StandardForm:
    """Build and compile the model of a case."""
    return compile_model(pm.build(case.problem(), formulation, stages=stages))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_build(
    benchmark: Any, model: str, method: str, keep: Callable[..., None], *, smoke: bool
) -> None:
    """Building and compiling one model."""
    if smoke and model != MODELS[0]:
        pytest.skip("a smoke run takes one graph")
    case = Case(
        group="build",
        model="paper/linear" if smoke else model,
        device="paper-m4",
        ram="50%",
        deadline_counts="compute",
    )
    benchmark.group = f"build {case.model}"
    arguments = (case, *METHODS[method])
    form = benchmark.pedantic(state, args=arguments, rounds=1 if smoke else ROUNDS, iterations=1)
    facts = {"columns": form.n_columns, "rows": form.n_rows, "nonzeros": int(form.matrix.nnz)}
    benchmark.extra_info.update(facts)
    keep(
        "build",
        f"{case.model} | {method}",
        seconds=benchmark.stats.stats.median,
        rounds=ROUNDS,
        **facts,
    )
    assert form.n_columns > 0
