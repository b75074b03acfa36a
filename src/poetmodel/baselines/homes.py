"""Extend methods for graphs without state to graphs with state.

A rule assigns homes to the state tensors: all in RAM, all on storage, or some in RAM. The method
then schedules a graph without state, with the same numbers of nodes and tensors: the bytes of state
in RAM are subtracted from the budget, and state on storage is treated like samples on storage.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final

from poetmodel.baselines.engine import best_schedule
from poetmodel.device import Costs
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, Phase
from poetmodel.heuristics.execution import retry_with_overwrites
from poetmodel.problem import USER_OBJECTIVE, Problem, Quantity
from poetmodel.problem.working_graph import make_working_graph
from poetmodel.schedule import GraphIdentity, Schedule, with_immediate_page_outs
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import Concatenate, ParamSpec

    P = ParamSpec("P")
    Scheduler = Callable[Concatenate[Problem, P], Schedule]


FORWARD_ONLY: Final = "forward_only"
"""Attribute that marks a method that recomputes only forward nodes."""


def forward_only(method: Scheduler[P]) -> Scheduler[P]:
    """Mark a method that recomputes only forward nodes; it schedules one version of the graph."""
    setattr(method, FORWARD_ONLY, True)
    return method


def all_in_ram(method: Scheduler[P]) -> Scheduler[P]:
    """Extend a method to graphs with state, with all state in RAM."""

    @wraps(method)
    def schedule(problem: Problem, /, *options: P.args, **keywords: P.kwargs) -> Schedule:
        state = problem.graph.state_tensors
        return _schedule_state(problem, state, _bind_options(method, *options, **keywords))

    return schedule


def all_on_storage(method: Scheduler[P]) -> Scheduler[P]:
    """Extend a method to graphs with state, with all state on storage."""

    @wraps(method)
    def schedule(problem: Problem, /, *options: P.args, **keywords: P.kwargs) -> Schedule:
        return _schedule_state(problem, (), _bind_options(method, *options, **keywords))

    return schedule


def _bind_options(
    method: Scheduler[P], *options: P.args, **keywords: P.kwargs
) -> Callable[[Problem], Schedule]:
    """Return a function of the problem alone, with the method's options bound."""

    @wraps(method)
    def rule(problem: Problem) -> Schedule:
        return method(problem, *options, **keywords)

    return rule


def in_best_homes(method: Scheduler[P]) -> Scheduler[P]:
    """Extend a method to graphs with state, with the homes that `best_homes` finds."""

    @wraps(method)
    def schedule(problem: Problem, /, *options: P.args, **keywords: P.kwargs) -> Schedule:
        return best_homes(problem, (_bind_options(method, *options, **keywords),))

    return schedule


def best_homes(problem: Problem, rules: Sequence[Callable[[Problem], Schedule]]) -> Schedule:
    """Return the best schedule of several rules, over several assignments of homes to state.

    Each rule is tried with all state in RAM and with all state on storage. If a rule has a schedule
    only for storage, bisection finds the maximum number of tensors in RAM, in the order of
    descending transfer energy per byte.
    """
    state = _by_transfer_energy(problem)
    extreme_counts = dict.fromkeys((len(state), 0))
    feasible: set[tuple[int, int]] = set()

    def schedule_with(rule_index: int, count: int) -> Schedule:
        schedule = _with_resident(problem, state[:count], rules[rule_index])
        feasible.add((rule_index, count))
        return schedule

    def attempts() -> Iterator[Callable[[], Schedule]]:
        """Yield the attempts: both extremes for each rule, then the bisection of each rule."""
        for count in extreme_counts:
            yield from (
                partial(schedule_with, rule_index, count) for rule_index in range(len(rules))
            )
        for rule_index in reversed(range(len(rules))):
            high, low = len(state), 0
            while (
                high - low > 1
                and (rule_index, low) in feasible
                and (rule_index, high) not in feasible
            ):
                middle = (low + high) // 2
                yield partial(schedule_with, rule_index, middle)
                low, high = (middle, high) if (rule_index, middle) in feasible else (low, middle)

    def best_attempt() -> Schedule:
        feasible.clear()
        return best_schedule(problem, attempts())

    return retry_with_overwrites(problem.graph, best_attempt)


def _by_transfer_energy(problem: Problem) -> tuple[int, ...]:
    """Return the state tensors by descending transfer energy per byte."""
    graph, energy = problem.graph, problem.energy.coefficients

    def saved_j(i: int) -> float:
        reads = 0 if problem.reads_in_place else len(graph.users_of[i])
        writes = i in graph.replacement_of
        transfers_j = reads * energy.page_in[i] + writes * energy.page_out[i]
        return transfers_j / max(1, graph.tensor_bytes[i])

    return tuple(sorted(graph.state_tensors, key=lambda i: (-saved_j(i), i)))


def _schedule_state(
    problem: Problem, resident: Collection[int], method: Callable[[Problem], Schedule]
) -> Schedule:
    """Return the schedule of `_with_resident`; overwrite inputs only if there is no other one."""
    return retry_with_overwrites(problem.graph, partial(_with_resident, problem, resident, method))


def _with_resident(
    problem: Problem, resident: Collection[int], method: Callable[[Problem], Schedule]
) -> Schedule:
    """Return the schedule of a method with some state in RAM and the rest on storage.

    The method schedules two graphs: one in which every recomputation precedes the updates of its
    state, and one in which all nodes stay recomputable, whose schedule is discarded if it computes
    a node too late. The better schedule is returned. A `forward_only` method schedules only the
    first one.
    """
    if not problem.graph.state_tensors:
        return method(problem)
    in_time_problem, unrestricted_problem = (
        without_state(problem, resident, in_time=in_time) for in_time in (True, False)
    )
    is_single = hasattr(method, FORWARD_ONLY) or in_time_problem.graph == unrestricted_problem.graph
    stateless_problems = (
        (in_time_problem,) if is_single else (in_time_problem, unrestricted_problem)
    )
    rules = (
        partial(_schedule_with_homes, problem, resident, method, stateless_problem)
        for stateless_problem in stateless_problems
    )
    return best_schedule(problem, rules)


def _schedule_with_homes(
    problem: Problem,
    resident: Collection[int],
    method: Callable[[Problem], Schedule],
    stateless_problem: Problem,
) -> Schedule:
    """Schedule a problem without state, and return the schedule for the graph with state."""
    stateless_schedule = method(stateless_problem)
    _require_in_time(problem, stateless_schedule)
    return with_immediate_page_outs(
        problem.graph,
        R=stateless_schedule.R,
        kept=stateless_schedule.kept,
        M_in=stateless_schedule.M_in,
        resident=sorted(resident),
        identity=GraphIdentity.from_graph(problem.graph),
    )


def without_state(problem: Problem, resident: Collection[int], *, in_time: bool = True) -> Problem:
    """Return the problem without state; `resident` state is in RAM, the rest on storage.

    With `in_time`, a node is not recomputable if a schedule could compute it again after an update
    of state that the node reads. Raises `MethodNotApplicableError` if RAM or storage is too small
    for the state.
    """
    graph = problem.graph
    in_ram_bytes = sum(graph.tensor_bytes[i] for i in resident)
    stored_bytes = graph.state_bytes - in_ram_bytes
    limits: dict[str, Any] = {
        "ram": problem.usable_ram_bytes - in_ram_bytes,
        "constraints": (),
    }
    if problem.minimize == USER_OBJECTIVE:  # user-defined objectives may depend on homes
        limits |= {"minimize": Quantity.ENERGY, "user_objective": ()}
    storage_bytes = problem.aux_limit_bytes
    if limits["ram"] <= 0:
        raise MethodNotApplicableError(
            f"it keeps {'some' if stored_bytes else 'all'} state in RAM, "
            f"{format_bytes(in_ram_bytes)}, and tensors may use "
            f"{format_bytes(problem.usable_ram_bytes)}"
        )
    if len(resident) < len(graph.state_tensors):
        home_text = f"it keeps {'some' if resident else 'all'} state on storage"
        if not problem.can_page:
            raise MethodNotApplicableError(f"{home_text}, and the problem allows no paging")
        if storage_bytes is not None:
            if storage_bytes < stored_bytes:
                raise MethodNotApplicableError(
                    f"{home_text}, {format_bytes(stored_bytes)}, and there is room for "
                    f"{format_bytes(storage_bytes)}"
                )
            limits["aux_bytes"] = storage_bytes - stored_bytes
    stateless_graph = make_working_graph(
        graph, read_in_place=problem.reads_in_place, resident=resident
    )
    if in_time:
        stateless_graph = _restrict_recomputation(stateless_graph, graph.last_stages)
    stateless_graph = _updates_in_forward(stateless_graph)
    return replace(
        problem.resolved(),
        graph=stateless_graph,
        costs=_stateless_costs(problem, stateless_graph),
        **limits,
    )


def _restrict_recomputation(graph: Graph, last_stages: Sequence[int]) -> Graph:
    """Return a graph in which no schedule can recompute a node after its last stage.

    A node stays recomputable if its outputs are read no later than its own last stage and those of
    all recomputable nodes from which it is computed, because these may have to run again. If only
    one of two nodes can stay recomputable, the earlier one does.
    """
    last_stage_of: list[int] = []
    """For each node the last stage in which it and all its ancestors may run again."""
    nodes = list(graph.nodes)
    for k, node in enumerate(graph.nodes):
        input_nodes = (graph.node_of[i] for i in graph.inputs_of[k])
        input_limits = (last_stage_of[j] for j in input_nodes if nodes[j].recomputable)
        last_stage_of.append(min(last_stages[k], *input_limits, len(nodes)))
        read = max((t for i in graph.outputs_of[k] for t in graph.users_of[i]), default=k)
        if read > last_stage_of[k] and node.recomputable:
            nodes[k] = replace(node, recomputable=False)
    return replace(graph, nodes=tuple(nodes))


def _updates_in_forward(graph: Graph) -> Graph:
    """Return a graph in which updates before the first backward node are forward nodes.

    Such updates renew the running statistics of batch norms.
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


def _stateless_costs(problem: Problem, graph: Graph) -> Costs:
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
    """Raise `MethodNotApplicableError` if a node or page-in runs after an update of its state."""
    graph = problem.graph
    late_nodes = [(t, k) for t, k in schedule.R if t > graph.last_stages[k]]
    late_nodes += [
        (t, graph.node_of[i]) for t, i in schedule.M_in if t > graph.last_page_in_stage(i)
    ]
    for t, k in late_nodes:
        raise MethodNotApplicableError(
            f"it has {graph.nodes[k].name!r} again at {graph.nodes[t].name!r}, after state "
            "that this needs was replaced"
        )
