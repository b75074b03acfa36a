"""How methods that know activations only schedule a graph with state.

Such a method has one rule for the homes of all state: all in RAM, or all on storage. What is left
to schedule is a graph without state, with the same positions of nodes and tensors: state in RAM
takes its bytes off the budget, and state on storage is like samples that lie there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from poetmodel.baselines.engine import cheapest
from poetmodel.device import Costs
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, Phase
from poetmodel.problem import OWN, Problem, Quantity
from poetmodel.problem.working_graph import working_graph
from poetmodel.schedule import GraphIdentity, Schedule, paged_at_once
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Concatenate, ParamSpec

    P = ParamSpec("P")
    Scheduler = Callable[Concatenate[Problem, P], Schedule]


def all_in_ram(method: Scheduler[P]) -> Scheduler[P]:
    """Make a method take graphs with state: all state is in RAM, and the rest is scheduled."""
    return _with_homes(method, in_ram=True)


def all_on_storage(method: Scheduler[P]) -> Scheduler[P]:
    """Make a method take graphs with state: the home of all state is storage."""
    return _with_homes(method, in_ram=False)


def in_either_home(method: Scheduler[P]) -> Scheduler[P]:
    """Make a method take graphs with state: it is in RAM, or on storage, whichever is better."""

    @wraps(method)
    def schedule(problem: Problem, /, *options: P.args, **named: P.kwargs) -> Schedule:
        if not problem.graph.state_tensors:
            return method(problem, *options, **named)
        homes = (all_in_ram(method), all_on_storage(method))
        return cheapest(problem, (partial(home, problem, *options, **named) for home in homes))

    return schedule


def _with_homes(method: Scheduler[P], *, in_ram: bool) -> Scheduler[P]:
    @wraps(method)
    def schedule(problem: Problem, /, *options: P.args, **named: P.kwargs) -> Schedule:
        graph = problem.graph
        if not graph.state_tensors:
            return method(problem, *options, **named)
        plain = without_state(problem, in_ram=in_ram)
        plain_schedule = method(plain, *options, **named)
        _require_in_time(problem, plain_schedule)
        return paged_at_once(
            graph,
            R=plain_schedule.R,
            kept=plain_schedule.kept,
            M_in=plain_schedule.M_in,
            resident=graph.state_tensors if in_ram else (),
            identity=GraphIdentity.of(graph),
        )

    return schedule


def without_state(problem: Problem, *, in_ram: bool) -> Problem:
    """Return the problem that is left to a method once the homes of state are chosen."""
    graph = problem.graph
    state_bytes = graph.state_bytes
    limits: dict[str, Any] = {"ram": problem.usable_ram_bytes, "constraints": ()}
    if problem.minimize == OWN:  # own objectives and constraints may be about homes
        limits |= {"minimize": Quantity.ENERGY, "own_objective": ()}
    room = problem.aux_limit_bytes
    if in_ram:
        limits["ram"] -= state_bytes
        if limits["ram"] <= 0:
            raise MethodNotApplicableError(
                f"it keeps all state in RAM, {format_bytes(state_bytes)}, and tensors may use "
                f"{format_bytes(problem.usable_ram_bytes)}"
            )
    elif not problem.can_page:
        raise MethodNotApplicableError(
            "it keeps all state on storage, and the problem allows no paging"
        )
    elif room is not None:
        if room < state_bytes:
            raise MethodNotApplicableError(
                f"it keeps all state on storage, {format_bytes(state_bytes)}, and there is room "
                f"for {format_bytes(room)}"
            )
        limits["aux_bytes"] = room - state_bytes
    absent = in_ram or problem.reads_in_place
    plain = _in_two_passes(working_graph(graph, read_in_place=absent))
    return replace(problem.resolved(), graph=plain, costs=_costs(problem, plain), **limits)


def _in_two_passes(graph: Graph) -> Graph:
    """Return a graph in which updates before the first backward node belong to the forward pass.

    The running statistics of a batch norm are renewed there.
    """
    nodes = list(graph.nodes)
    for k, node in enumerate(nodes):
        if node.phase == Phase.BACKWARD:
            break
        if node.phase == Phase.UPDATE:
            nodes[k] = replace(node, phase=Phase.FORWARD)
    else:
        return graph
    return replace(graph, nodes=tuple(nodes))


def _costs(problem: Problem, graph: Graph) -> Costs:
    """Return the costs of a problem for its graph without state."""
    table = problem.table
    pages = [
        list(zip(times, energies, strict=True)) if table.has_storage else None
        for times, energies in (
            (table.page_in_time_s, table.page_in_energy_j),
            (table.page_out_time_s, table.page_out_energy_j),
        )
    ]
    return Costs.from_arrays(
        graph,
        compute_time_s=table.compute_time_s,
        compute_energy_j=table.compute_energy_j,
        page_in=pages[0],
        page_out=pages[1],
        device=problem.costs.device,
    )


def _require_in_time(problem: Problem, schedule: Schedule) -> None:
    """Raise unless nodes run before what they read is replaced, and state is paged in before."""
    graph = problem.graph
    late = [(t, k) for t, k in schedule.R if t > graph.last_stages[k]]
    late += [(t, graph.node_of[i]) for t, i in schedule.M_in if t > graph.last_page_in(i)]
    for t, k in late:
        raise MethodNotApplicableError(
            f"it has {graph.nodes[k].name!r} again at {graph.nodes[t].name!r}, after state "
            "that this needs was replaced"
        )
