"""Build models of problems, estimate build times, and read schedules from solutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.clock import infrequent_gc
from poetmodel.errors import InputError, quote
from poetmodel.model.arrays import Model
from poetmodel.model.compact import COMPACT
from poetmodel.model.events import find_events, recomputable_nodes
from poetmodel.model.grouping import Grouping
from poetmodel.model.paper import (
    PAPER,
    check_supported,
    describe_reduction,
    map_to_original_tensors,
    merge_outputs,
)
from poetmodel.model.relations import CompactRelations, TriangleRelations
from poetmodel.model.unreduced import UNREDUCED
from poetmodel.problem import Problem
from poetmodel.schedule import RELATIONS, GraphIdentity, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyomo.environ as pyo

    from poetmodel.model.formulation import Component, Formulation

FORMULATIONS: Final[Mapping[str, Formulation]] = {"compact": COMPACT, "paper": PAPER}
"""Formulations by the name that `build` accepts."""
MEMORY_TERM_S: Final = 8e-7
"""Time to build one term of a memory row and convert it for a solver, on a 2 GHz core [s]."""
DECISION_S: Final = 1e-5
"""Time to build a variable with its rows and convert them for a solver [s]."""
PAPER_TERM_S: Final = 5e-6
"""Time to build a term of ``paper``, whose rows are all small, and convert it for a solver [s]."""


def build(
    problem: Problem,
    formulation: str | Formulation = "compact",
    *,
    reductions: bool = True,
    memory_rows: bool | None = None,
) -> pyo.ConcreteModel:
    """Build a Pyomo model of a problem, to solve or extend.

    Parameters
    ----------
    problem : Problem
        The problem.
    formulation : {'compact', 'paper'} or Formulation
        ``compact`` is exact and small; ``paper`` is Algorithm 1 as published; a user-defined
        `Formulation` (an ablation) is built over the variables of ``compact``.
    reductions : bool
        Without reductions, ``compact`` includes every valid decision (page-outs at any stage,
        dominated recomputations, page-ins that no node needs), so that constraints can use them.
        No effect on other formulations.
    memory_rows : bool, optional
        Whether the Pyomo model has memory rows, nearly all terms of a large model. Default: True,
        but raises `TooLargeError` if they have more than five million terms. A model without them
        is only for `poetmodel.solve`, which adds them; other solvers end with an error.

    Returns
    -------
    pyomo.environ.ConcreteModel
        A model with ``model.problem``, and ``model.R[t, k]``, ``model.S_RAM[t, i]``,
        ``model.S_AUX[t, i]``, ``model.M_in[t, i]``, ``model.M_out[t, i]`` for every entry of the
        triangle: a variable, or a constant expression if the model has no variable for the entry;
        ``model.resident[i]`` for every state tensor. ``model.exact`` is whether a bound of the
        model is valid for the problem. ``model.stated_rows`` has the constraints of the
        formulation; other rows are of the user.

    Raises
    ------
    ModelError
        If ``paper`` cannot state the problem, or a cost is too large for solvers beside the single
        pass or the other costs: more than about a hundred million times as large.
    InputError
        For an unknown formulation, or if `problem` is no `Problem`.
    TooLargeError
        If memory rows have more than five million terms and `memory_rows` is None.

    Examples
    --------
    >>> import poetmodel as pm
    >>> graph = pm.Graph(name="pair", nodes=(pm.operation("a", output_bytes=8),
    ...                                      pm.operation("b", output_bytes=4, inputs=("a",))))
    >>> costs = pm.Costs.from_arrays(graph, compute_time_s=[1, 1], compute_energy_j=[2, 3])
    >>> model = build(pm.Problem(graph, costs, ram=12))
    >>> sorted(model.S_RAM)
    [(1, 0)]
    """
    from poetmodel.model.view import to_pyomo

    with infrequent_gc():
        model = build_arrays(problem, formulation, reductions=reductions, has_true_costs=True)
        return to_pyomo(model, user_components(model.formulation), memory_rows=memory_rows)


def build_arrays(
    problem: Problem,
    formulation: str | Formulation = "compact",
    *,
    reductions: bool = True,
    has_true_costs: bool = False,
) -> Model:
    """Build the model of a problem as arrays; user-defined components are left out.

    Large costs are truncated unless `has_true_costs`; `build` describes `reductions`.
    """
    if not isinstance(problem, Problem):
        raise InputError(f"build takes a Problem, got {quote(problem)}")
    resolved_formulation = _find_formulation(formulation, reductions=reductions)
    m = Model(
        problem,
        resolved_formulation,
        exact=resolved_formulation in (COMPACT, UNREDUCED),
        has_true_costs=has_true_costs,
    )
    user_component_names = {component.name for component in user_components(resolved_formulation)}
    if resolved_formulation == PAPER:
        check_supported(problem)
        if describe_reduction(problem.graph) is not None:
            m.problem = merge_outputs(problem)
    if resolved_formulation in (PAPER, UNREDUCED):
        resolved_formulation.populate(m)
        m.relations = TriangleRelations(m)
        if m.problem is not problem:
            map_to_original_tensors(m, problem)
        return m
    rows = problem.stage_limits
    m.grouping = Grouping.one_group_per_stage(len(problem.graph.nodes), len(rows))
    m.events = find_events(
        problem,
        m.grouping.group_of,
        recomputable=recomputable_nodes(problem),
        counted_rows=rows,
    )
    resolved_formulation.populate(m, omitted_names=user_component_names)
    m.relations = CompactRelations(m)
    return m


def user_components(formulation: Formulation) -> list[Component]:
    """Return a formulation's user-defined components, those equal to no shipped one, in order."""
    shipped_components = {*COMPACT.components, *UNREDUCED.components, *PAPER.components}
    return [
        component for component in formulation.components if component not in shipped_components
    ]


def read_schedule(m: pyo.ConcreteModel, value: Callable[[Any], bool] | None = None) -> Schedule:
    """Return the schedule of a solved model.

    Parameters
    ----------
    m : ConcreteModel
        A solved model from `build`.
    value : callable, optional
        Returns whether a binary Pyomo variable is 1. Default: by its Pyomo value, rounded; a
        variable without a value counts as 0.
    """
    import pyomo.core as pyo

    def is_pyomo_one(variable: Any) -> bool:
        return round(pyo.value(variable, exception=False) or 0) == 1

    variables, is_one = m.variables, value or is_pyomo_one
    return schedule_from_columns(m.arrays, lambda column: is_one(variables[column]))


def schedule_from_columns(m: Model, is_one: Callable[[int], bool]) -> Schedule:
    """Return the schedule of a model's solution; `Model.relations` must be set."""
    entries: dict[str, list[tuple[int, int]]] = {name: [] for name in RELATIONS}
    for name, t, k in m.relations.nonzero_entries(is_one):
        entries[name].append((t, k))
    resident_columns = m.families.get("resident", {})
    return Schedule(
        **{name: tuple(pairs) for name, pairs in entries.items()},
        resident=tuple(
            i for i, column in resident_columns.items() if column in m.fixed or is_one(column)
        ),
        identity=GraphIdentity.from_graph(m.problem.graph),
    )


def _find_formulation(formulation: str | Formulation, *, reductions: bool) -> Formulation:
    """Return a named or given formulation; ``compact`` without `reductions` is `UNREDUCED`."""
    if not isinstance(formulation, str):
        return formulation
    if formulation not in FORMULATIONS:
        hint = "; 'lazy' builds a series of models: pass the problem to solve" * (
            formulation == "lazy"
        )
        raise InputError(
            f"formulation: expected one of {', '.join(FORMULATIONS)}, got {formulation!r}{hint}"
        )
    return UNREDUCED if formulation == "compact" and not reductions else FORMULATIONS[formulation]


def estimate_build_s(problem: Problem, formulation: str) -> float:
    """Return the approximate time to build ``paper``, else ``compact``, and convert it [s]."""
    graph = problem.graph
    n = len(graph.nodes)
    if formulation == "paper":
        return PAPER_TERM_S * (n * n * 6 + graph.n_edges * n * 6)
    events = find_events(problem, range(n), recomputable=recomputable_nodes(problem))
    live_change = [0] * (n + 1)
    for i, k in enumerate(graph.node_of):
        if graph.tensor_bytes[i] and events.event_groups[i]:
            live_change[k + 1] += 1
            live_change[events.event_groups[i][-1]] -= 1
    n_steps = [1] * n
    for k in range(n):
        page_in_stages = (events.page_in_groups[i] for i in graph.outputs_of[k])
        for t in {*events.recompute_groups[k], *(t for stages in page_in_stages for t in stages)}:
            n_steps[t] += 1
    n_terms = n_live_tensors = 0
    for t in range(n):
        n_live_tensors += live_change[t]
        n_terms += n_live_tensors * n_steps[t]
    n_decisions = sum(
        map(len, (*events.event_groups, *events.recompute_groups, *events.page_in_groups))
    )
    return MEMORY_TERM_S * n_terms + DECISION_S * n_decisions
