"""How methods that know activations only schedule a graph with state.

Such a method has a rule for the homes of state: all in RAM, all on storage, or some in RAM. What is
left to schedule is a graph without state, with the same positions of nodes and tensors: state in
RAM takes its bytes off the budget, and state on storage is like samples that lie there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final

from poetmodel.baselines.engine import cheapest
from poetmodel.device import Costs
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, Phase
from poetmodel.heuristics.execution import last_resort
from poetmodel.problem import USER_OBJECTIVE, Problem, Quantity
from poetmodel.problem.working_graph import working_graph
from poetmodel.schedule import GraphIdentity, Schedule, with_immediate_page_outs
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import Concatenate, ParamSpec

    P = ParamSpec("P")
    Scheduler = Callable[Concatenate[Problem, P], Schedule]


FORWARD_ONLY: Final = "forward_only"
"""Attribute of a method that recomputes forward nodes alone."""


def forward_only(method: Scheduler[P]) -> Scheduler[P]:
    """Mark a method that recomputes forward nodes alone: it needs one version of the graph."""
    setattr(method, FORWARD_ONLY, True)
    return method


def all_in_ram(method: Scheduler[P]) -> Scheduler[P]:
    """Make a method take graphs with state: all state is in RAM, and the rest is scheduled."""

    @wraps(method)
    def schedule(problem: Problem, /, *options: P.args, **named: P.kwargs) -> Schedule:
        state = problem.graph.state_tensors
        return _with_homes(problem, state, _bind_options(method, *options, **named))

    return schedule


def all_on_storage(method: Scheduler[P]) -> Scheduler[P]:
    """Make a method take graphs with state: the home of all state is storage."""

    @wraps(method)
    def schedule(problem: Problem, /, *options: P.args, **named: P.kwargs) -> Schedule:
        return _with_homes(problem, (), _bind_options(method, *options, **named))

    return schedule


def _bind_options(
    method: Scheduler[P], *options: P.args, **named: P.kwargs
) -> Callable[[Problem], Schedule]:
    """Return a method with its options as a function of the problem."""

    @wraps(method)
    def rule(problem: Problem) -> Schedule:
        return method(problem, *options, **named)

    return rule


def in_best_homes(method: Scheduler[P]) -> Scheduler[P]:
    """Make a method take graphs with state, in the best homes; see `best_homes`."""

    @wraps(method)
    def schedule(problem: Problem, /, *options: P.args, **named: P.kwargs) -> Schedule:
        return best_homes(problem, (_bind_options(method, *options, **named),))

    return schedule


def best_homes(problem: Problem, rules: Sequence[Callable[[Problem], Schedule]]) -> Schedule:
    """Return the best schedule of some rules with state in RAM, on storage, or in part in RAM.

    All in RAM is tried, then all on storage, with every rule. If a rule has a schedule for the
    second alone, bisection looks for the most tensors that may be in RAM, those first whose
    transfers take most energy for each byte.
    """
    state = _dearest_first(problem)
    ends = dict.fromkeys((len(state), 0))
    fitting: set[tuple[int, int]] = set()

    def keep(number: int, count: int) -> Schedule:
        schedule = _with_resident(problem, state[:count], rules[number])
        fitting.add((number, count))
        return schedule

    def attempts() -> Iterator[Callable[[], Schedule]]:
        for count in ends:
            yield from (partial(keep, number, count) for number in range(len(rules)))
        for number in reversed(range(len(rules))):
            high, low = len(state), 0
            while high - low > 1 and (number, low) in fitting and (number, high) not in fitting:
                middle = (low + high) // 2
                yield partial(keep, number, middle)
                low, high = (middle, high) if (number, middle) in fitting else (low, middle)

    def best() -> Schedule:
        fitting.clear()
        return cheapest(problem, attempts())

    return last_resort(problem.graph, best)


def _dearest_first(problem: Problem) -> tuple[int, ...]:
    """Return the state of a graph by the energy of its transfers for each byte, the most first."""
    graph, energy = problem.graph, problem.energy.coefficients

    def saved_j(i: int) -> float:
        reads = 0 if problem.reads_in_place else len(graph.users_of[i])
        writes = i in graph.replacement_of
        transfers_j = reads * energy.page_in[i] + writes * energy.page_out[i]
        return transfers_j / max(1, graph.tensor_bytes[i])

    return tuple(sorted(graph.state_tensors, key=lambda i: (-saved_j(i), i)))


def _with_homes(
    problem: Problem, resident: Collection[int], method: Callable[[Problem], Schedule]
) -> Schedule:
    """Return the schedule of `_with_resident`; inputs are overwritten where there is no other."""
    return last_resort(problem.graph, partial(_with_resident, problem, resident, method))


def _with_resident(
    problem: Problem, resident: Collection[int], method: Callable[[Problem], Schedule]
) -> Schedule:
    """Return the schedule of a method if some state is in RAM, the rest on storage.

    The method schedules two problems: one in which every recomputation is in time, and one in which
    all nodes stay recomputable, whose schedule counts unless it runs a node too late. The better
    schedule is returned. A method that is `forward_only` schedules the first one alone.
    """
    if not problem.graph.state_tensors:
        return method(problem)
    safe, free = (without_state(problem, resident, in_time=in_time) for in_time in (True, False))
    one = hasattr(method, FORWARD_ONLY) or safe.graph == free.graph
    choices = (safe,) if one else (safe, free)
    rules = (partial(_schedule_with_homes, problem, resident, method, plain) for plain in choices)
    return cheapest(problem, rules)


def _schedule_with_homes(
    problem: Problem,
    resident: Collection[int],
    method: Callable[[Problem], Schedule],
    plain: Problem,
) -> Schedule:
    """Schedule a problem without its state, and return the schedule with the homes of state."""
    found = method(plain)
    _require_in_time(problem, found)
    return with_immediate_page_outs(
        problem.graph,
        R=found.R,
        kept=found.kept,
        M_in=found.M_in,
        resident=sorted(resident),
        identity=GraphIdentity.of(problem.graph),
    )


def without_state(problem: Problem, resident: Collection[int], *, in_time: bool = True) -> Problem:
    """Return the problem that is left to a method if some state is in RAM, the rest on storage.

    If `in_time`, no node is recomputable that a schedule could run again after an update has
    replaced state that the node reads.
    """
    graph = problem.graph
    in_ram_bytes = sum(graph.tensor_bytes[i] for i in resident)
    stored_bytes = graph.state_bytes - in_ram_bytes
    limits: dict[str, Any] = {
        "ram": problem.usable_ram_bytes - in_ram_bytes,
        "constraints": (),
    }
    if problem.minimize == USER_OBJECTIVE:  # own objectives and constraints may be about homes
        limits |= {"minimize": Quantity.ENERGY, "own_objective": ()}
    room = problem.aux_limit_bytes
    if limits["ram"] <= 0:
        raise MethodNotApplicableError(
            f"it keeps {'some' if stored_bytes else 'all'} state in RAM, "
            f"{format_bytes(in_ram_bytes)}, and tensors may use "
            f"{format_bytes(problem.usable_ram_bytes)}"
        )
    if len(resident) < len(graph.state_tensors):
        what = f"it keeps {'some' if resident else 'all'} state on storage"
        if not problem.can_page:
            raise MethodNotApplicableError(f"{what}, and the problem allows no paging")
        if room is not None:
            if room < stored_bytes:
                raise MethodNotApplicableError(
                    f"{what}, {format_bytes(stored_bytes)}, and there is room for "
                    f"{format_bytes(room)}"
                )
            limits["aux_bytes"] = room - stored_bytes
    plain = working_graph(graph, read_in_place=problem.reads_in_place, resident=resident)
    if in_time:
        plain = _recomputable_in_time(plain, graph.last_stages)
    plain = _in_two_passes(plain)
    return replace(problem.resolved(), graph=plain, costs=_costs(problem, plain), **limits)


def _recomputable_in_time(graph: Graph, last_stages: Sequence[int]) -> Graph:
    """Return a graph that recomputes no node after its last stage, however it is scheduled.

    A node stays recomputable if its outputs are read no later than its own last stage, and than
    those of all recomputable nodes from which it is computed: these may have to run again for it.
    Of two nodes of which only one can stay recomputable, the one that comes first does.
    """
    latest: list[int] = []
    """For each node the last stage in which it and all that it needs may run again."""
    nodes = list(graph.nodes)
    for k, node in enumerate(graph.nodes):
        needed = (graph.node_of[i] for i in graph.inputs_of[k])
        before = (latest[j] for j in needed if nodes[j].recomputable)
        latest.append(min(last_stages[k], *before, len(nodes)))
        read = max((t for i in graph.outputs_of[k] for t in graph.users_of[i]), default=k)
        if read > latest[k] and node.recomputable:
            nodes[k] = replace(node, recomputable=False)
    return replace(graph, nodes=tuple(nodes))


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
