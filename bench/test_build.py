"""How long it takes to state a problem: the Pyomo model, and its compiled form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

import poetmodel as pm
from cases import ALL, EVENTS, PAPER, Case, Method
from poetmodel.backends.compiler import compile_model

if TYPE_CHECKING:
    from poetmodel.backends.standard_form import StandardForm
    from records import Recorder

pytestmark = pytest.mark.usefixtures("warm")

ROUNDS: Final = 3
MODELS: Final = ("paper/vgg16-cifar", "paper/resnet18-cifar", "paper/bert")


def state(case: Case) -> StandardForm:
    """Build and compile the model of a case."""
    formulation = case.method.formulation or "compact"
    return compile_model(pm.build(case.problem(), formulation, stages=case.method.stages))


@pytest.mark.parametrize("method", [EVENTS, ALL, PAPER], ids=lambda method: method.name)
@pytest.mark.parametrize("model", MODELS)
def test_build(
    benchmark: Any, model: str, method: Method, recorder: Recorder, *, smoke: bool
) -> None:
    """Building and compiling one model."""
    if smoke and model != MODELS[0]:
        pytest.skip("a smoke run takes one graph")
    case = Case(
        group="build",
        model="paper/linear" if smoke else model,
        device="paper-m4",
        ram="50%",
        method=method,
        deadline_counts="compute",
    )
    benchmark.group = f"build {case.model}"
    form = benchmark.pedantic(state, args=(case,), rounds=1 if smoke else ROUNDS, iterations=1)
    facts = {"columns": form.n_columns, "rows": form.n_rows, "nonzeros": int(form.matrix.nnz)}
    benchmark.extra_info.update(facts)
    recorder.write(
        "build",
        f"{case.model} | {method.name}",
        seconds=benchmark.stats.stats.median,
        rounds=ROUNDS,
        **facts,
    )
    assert form.n_columns > 0
