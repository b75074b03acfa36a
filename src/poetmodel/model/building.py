"""From a problem to a model, how large it will be, and from a solved model to a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.clock import infrequent_gc
from poetmodel.errors import InputError, shown
from poetmodel.model.arrays import Model
from poetmodel.model.compact import COMPACT
from poetmodel.model.events import find_events, recomputable_nodes
from poetmodel.model.grouping import Grouping
from poetmodel.model.paper import PAPER, check_fits, one_output_each, reduction_in_words, restore
from poetmodel.model.relations import CompactRelations, TriangleRelations
from poetmodel.model.unreduced import UNREDUCED
from poetmodel.problem import Problem
from poetmodel.schedule import RELATIONS, GraphIdentity, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyomo.environ as pyo

    from poetmodel.model.formulation import Component, Formulation

FORMULATIONS: Final[Mapping[str, Formulation]] = {"compact": COMPACT, "paper": PAPER}
"""The formulations that `build` knows by name."""
TERM_S: Final = 8e-7
"""Time to build and compile one term of a memory row, on one 2 GHz core [s]."""
DECISION_S: Final = 1e-5
"""The same for a variable with the rows that it brings."""
PAPER_TERM_S: Final = 5e-6
"""The same for a term of ``paper``, all of which are in small rows."""


def build(
    problem: Problem,
    formulation: str | Formulation = "compact",
    *,
    reductions: bool = True,
    memory_rows: bool | None = None,
) -> pyo.ConcreteModel:
    """Return a Pyomo model of a problem, to be solved or extended.

    Parameters
    ----------
    problem : Problem
        What to state.
    formulation : {'compact', 'paper'} or Formulation
        ``compact`` is exact and small; ``paper`` is Algorithm 1 as published; an own `Formulation`
        (an ablation) is built over the variables of ``compact``.
    reductions : bool
        Without them ``compact`` leaves every choice of the contract open (page-outs at any stage,
        dominated recomputations, page-ins that nobody needs), for constraints that need them.
    memory_rows : bool, optional
        Whether the Pyomo model has memory rows, nearly all terms of a large model. By default it
        has, or raises where they have millions of terms. Without them it is for `poetmodel.solve`
        alone, which has them in any case; other solvers end with an error.

    Returns
    -------
    pyomo.environ.ConcreteModel
        With ``model.problem``, and ``model.R[t, k]``, ``model.S_RAM[t, i]``, ``model.S_AUX[t, i]``,
        ``model.M_in[t, i]``, ``model.M_out[t, i]`` for every entry of the triangle: a variable, or
        an expression where the formulation has decided it; ``model.resident[i]`` for every state
        tensor. ``model.exact`` says whether its bound
        holds for the problem, ``model.stated_rows`` names its constraints; others were added later.

    Raises
    ------
    ModelError
        If ``paper`` cannot state the problem.
    InputError
        For an unknown formulation.
    TooLargeError
        If memory rows have more than five million terms, and `memory_rows` does not say what to do.

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
    from poetmodel.model.view import view

    with infrequent_gc():
        model = state(problem, formulation, reductions=reductions)
        return view(model, own_components(model.formulation), memory_rows=memory_rows)


def state(
    problem: Problem,
    formulation: str | Formulation = "compact",
    *,
    reductions: bool = True,
) -> Model:
    """Return the model of a problem as arrays, see `build`; without components of one's own."""
    if not isinstance(problem, Problem):
        raise InputError(f"build takes a Problem, got {shown(problem)}")
    chosen = _choose(formulation, reductions=reductions)
    m = Model(problem, chosen, exact=chosen in (COMPACT, UNREDUCED))
    own = {component.name for component in own_components(chosen)}
    if chosen == PAPER:
        check_fits(problem)
        if reduction_in_words(problem.graph) is not None:
            m.problem = one_output_each(problem)
    if chosen in (PAPER, UNREDUCED):
        chosen.populate(m)
        m.relations = TriangleRelations(m)
        if m.problem is not problem:
            restore(m, problem)
        return m
    rows = problem.stage_limits
    m.grouping = Grouping.of_stages(len(problem.graph.nodes), len(rows))
    m.events = find_events(
        problem,
        m.grouping.group_of,
        recomputable=recomputable_nodes(problem),
        counted=rows,
    )
    chosen.populate(m, without=own)
    m.relations = CompactRelations(m)
    return m


def own_components(formulation: Formulation) -> list[Component]:
    """Return the components of a formulation that are not among those that are shipped."""
    shipped = {*COMPACT.components, *UNREDUCED.components, *PAPER.components}
    return [component for component in formulation.components if component not in shipped]


def read_schedule(m: pyo.ConcreteModel, value: Callable[[Any], bool] | None = None) -> Schedule:
    """Return the schedule that the values of a model's variables state.

    Parameters
    ----------
    m : ConcreteModel
        From `build`, solved.
    value : callable, optional
        Says whether a binary variable is 1; by default from its Pyomo value.
    """
    import pyomo.core as pyo

    def is_one(variable: Any) -> bool:
        return round(pyo.value(variable, exception=False) or 0) == 1

    variables, holds = m.variables, value or is_one
    return schedule_of(m.arrays, lambda column: holds(variables[column]))


def schedule_of(m: Model, holds: Callable[[int], bool]) -> Schedule:
    """Return the schedule that a model's columns state, given which of them hold."""
    entries: dict[str, list[tuple[int, int]]] = {name: [] for name in RELATIONS}
    for name, t, k in m.relations.chosen(holds):
        entries[name].append((t, k))
    homes = m.families.get("resident", {})
    return Schedule(
        **{name: tuple(pairs) for name, pairs in entries.items()},
        resident=tuple(i for i, column in homes.items() if column in m.fixed or holds(column)),
        identity=GraphIdentity.of(m.problem.graph),
    )


def _choose(formulation: str | Formulation, *, reductions: bool) -> Formulation:
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


def estimated_build_s(problem: Problem, formulation: str) -> float:
    """Return about how long building and compiling a model takes [s]."""
    graph = problem.graph
    n = len(graph.nodes)
    if formulation == "paper":
        edges = sum(len(inputs) for inputs in graph.inputs_of)
        return PAPER_TERM_S * (n * n * 6 + edges * n * 6)
    events = find_events(problem, range(n), recomputable=recomputable_nodes(problem))
    alive = [0] * (n + 1)
    for i, k in enumerate(graph.node_of):
        if graph.tensor_bytes[i] and events.events[i]:
            alive[k + 1] += 1
            alive[events.events[i][-1]] -= 1
    steps = [1] * n
    for k in range(n):
        pages = (events.page_in[i] for i in graph.outputs_of[k])
        for t in {*events.recompute[k], *(t for stages in pages for t in stages)}:
            steps[t] += 1
    total = crossing = 0
    for t in range(n):
        crossing += alive[t]
        total += crossing * steps[t]
    decisions = sum(map(len, (*events.events, *events.recompute, *events.page_in)))
    return TERM_S * total + DECISION_S * decisions
