"""Extend methods for graphs without state to graphs with state.

`schedule_with_homes` assigns homes to the state tensors: all in RAM, all on storage, or some in
RAM. The method then schedules a graph without state, with the same numbers of
nodes and tensors: the bytes of state in RAM are subtracted from the budget, and state on storage is
treated like samples on storage.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from poetmodel.baselines.engine import select_best_schedule
from poetmodel.baselines.registry import METHODS, StateHomes
from poetmodel.device import Costs
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, Phase
from poetmodel.problem import USER_OBJECTIVE, Problem, Quantity
from poetmodel.problem.working_graph import make_working_graph
from poetmodel.schedule import GraphIdentity, Schedule, with_immediate_page_outs
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import Concatenate, ParamSpec

    P = ParamSpec("P")
    Scheduler = Callable[Concatenate[Problem, P], Schedule]


N_SKIP_ATTEMPTS: Final = 3
"""Attempts to fill RAM after the bisection; each takes as long as the method."""


def use_homes_of(name: str) -> Callable[[Scheduler[P]], Scheduler[P]]:
    """Return the decorator that extends a method to graphs with state by its `METHODS` entry."""
    return use_homes(METHODS[name].state_homes, forward_only=METHODS[name].forward_only)


def use_homes(
    homes: StateHomes, *, forward_only: bool = False
) -> Callable[[Scheduler[P]], Scheduler[P]]:
    """Return the decorator that extends a method to graphs with state by `schedule_with_homes`."""

    def extend(method: Scheduler[P]) -> Scheduler[P]:
        @wraps(method)
        def schedule(problem: Problem, /, *options: P.args, **keywords: P.kwargs) -> Schedule:
            def variant(stateless: Problem) -> Schedule:
                return method(stateless, *options, **keywords)

            return schedule_with_homes(homes, problem, (variant,), forward_only=forward_only)

        return schedule

    return extend


def schedule_with_homes(
    homes: StateHomes,
    problem: Problem,
    variants: Sequence[Callable[..., Schedule]],
    *,
    forward_only: bool = False,
    may_overwrite: bool = False,
) -> Schedule:
    """Return the best schedule of `variants`, which get problems without state.

    Each may be called several times. With `may_overwrite`, all are repeated with the keyword
    ``overwrites=True`` if none succeeds: an in-place operator may then overwrite an input that is
    read later. At first they may not, because they would keep more state in RAM, at a higher cost.
    See `_schedule_with_best_homes` for `StateHomes.EITHER`, and `Method` for `forward_only`.
    """
    schedule_variants = partial(_schedule_variants, homes, problem, forward_only=forward_only)
    try:
        return schedule_variants(variants)
    except MethodNotApplicableError as error:
        if not may_overwrite or not any(problem.graph.shared_bytes_of):
            raise
        try:
            return schedule_variants([partial(variant, overwrites=True) for variant in variants])
        except MethodNotApplicableError:
            raise error from None


def _schedule_variants(
    homes: StateHomes,
    problem: Problem,
    variants: Sequence[Callable[[Problem], Schedule]],
    *,
    forward_only: bool,
) -> Schedule:
    placed_variants = [
        partial(_schedule_with_resident_state, problem, variant, forward_only=forward_only)
        for variant in variants
    ]
    if homes == StateHomes.EITHER:
        return _schedule_with_best_homes(problem, placed_variants)
    resident = problem.graph.state_tensors if homes == StateHomes.RAM else ()
    attempts = [partial(variant, resident) for variant in placed_variants]
    return attempts[0]() if len(attempts) == 1 else select_best_schedule(problem, attempts)


def _schedule_with_best_homes(
    problem: Problem, variants: Sequence[Callable[[tuple[int, ...]], Schedule]]
) -> Schedule:
    """Return the best schedule of `variants`, over several sets of state in RAM, which they get.

    Each is tried with all state in RAM, and with all on storage. If only the second has a schedule,
    RAM is filled in the orders of `_fill_orders`.
    """
    orders = _fill_orders(problem)
    extremes = dict.fromkeys((orders[0], ()))
    feasible: set[tuple[int, frozenset[int]]] = set()
    """(index of the variant, state tensors in RAM) of the attempts that have a schedule."""

    def schedule_with(variant_index: int, resident: tuple[int, ...]) -> Schedule:
        schedule = variants[variant_index](resident)
        feasible.add((variant_index, frozenset(resident)))
        return schedule

    def list_attempts() -> Iterator[Callable[[], Schedule]]:
        """Yield functions that attempt a schedule; call each one before requesting the next."""
        for resident in extremes:
            yield from (partial(schedule_with, index, resident) for index in range(len(variants)))
        # A bisection, and a few attempts without tensors that do not fit.
        max_attempts = len(orders[0]).bit_length() + N_SKIP_ATTEMPTS
        for order in orders:
            for index in reversed(range(len(variants))):
                found = {resident for variant_index, resident in feasible if variant_index == index}
                if frozenset() in found and frozenset(order) not in found:
                    is_feasible = partial(lambda i, fill: (i, fill) in feasible, index)
                    for resident in islice(_fill_ram(order, is_feasible), max_attempts):
                        yield partial(schedule_with, index, resident)

    return select_best_schedule(problem, list_attempts())


def _fill_ram(
    order: Sequence[int], is_feasible: Callable[[frozenset[int]], bool]
) -> Iterator[tuple[int, ...]]:
    """Yield sets of state tensors to attempt; after each attempt, ask `is_feasible` about the set.

    Bisects for the longest prefix of `order` that fits, skips the next tensor, and repeats.
    """
    resident: tuple[int, ...] = ()
    rest = tuple(order)
    while rest:
        n_fitting, n_excessive = 0, len(rest)
        while n_excessive - n_fitting > 1:
            middle = (n_fitting + n_excessive) // 2
            yield resident + rest[:middle]
            if is_feasible(frozenset(resident + rest[:middle])):
                n_fitting = middle
            else:
                n_excessive = middle
        resident, rest = resident + rest[:n_fitting], rest[n_excessive:]
        if rest:
            yield resident + rest
            if is_feasible(frozenset(resident + rest)):
                return


def _fill_orders(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Return state tensors by transfer energy per byte, and by size, both descending."""
    graph, coefficients = problem.graph, problem.energy.coefficients

    def energy_per_byte(i: int) -> float:
        reads = 0 if problem.reads_in_place else len(graph.users_of[i])
        writes = i in graph.replacement_of
        transfers_j = reads * coefficients.page_in[i] + writes * coefficients.page_out[i]
        return transfers_j / max(1, graph.tensor_bytes[i])

    return (
        tuple(sorted(graph.state_tensors, key=lambda i: (-energy_per_byte(i), i))),
        tuple(sorted(graph.state_tensors, key=lambda i: (-graph.tensor_bytes[i], i))),
    )


def _schedule_with_resident_state(
    problem: Problem,
    method: Callable[[Problem], Schedule],
    resident: Collection[int],
    *,
    forward_only: bool,
) -> Schedule:
    """Return the schedule of a method with `resident` state in RAM, other state on storage.

    The better of two graphs: in one, recomputations precede the updates of the state they need; in
    the other, nodes stay recomputable, and a late use of state is refused.
    """
    if not problem.graph.state_tensors:
        return method(problem)
    restricted_problem, unrestricted_problem = (
        remove_state(problem, resident, before_updates=before_updates)
        for before_updates in (True, False)
    )
    needs_one_graph = forward_only or restricted_problem.graph == unrestricted_problem.graph
    stateless_problems = (
        (restricted_problem,) if needs_one_graph else (restricted_problem, unrestricted_problem)
    )
    variants = (
        partial(_schedule_with_homes, problem, resident, method, stateless_problem)
        for stateless_problem in stateless_problems
    )
    return select_best_schedule(problem, variants)


def _schedule_with_homes(
    problem: Problem,
    resident: Collection[int],
    method: Callable[[Problem], Schedule],
    stateless_problem: Problem,
) -> Schedule:
    """Schedule a problem without state; return the schedule with state, or refuse late uses."""
    stateless_schedule = method(stateless_problem)
    _check_update_order(problem, stateless_schedule)
    return with_immediate_page_outs(
        problem.graph,
        R=stateless_schedule.R,
        kept=stateless_schedule.kept,
        M_in=stateless_schedule.M_in,
        resident=sorted(resident),
        identity=GraphIdentity.from_graph(problem.graph),
    )


def remove_state(
    problem: Problem, resident: Collection[int], *, before_updates: bool = True
) -> Problem:
    """Return the problem without state; `resident` state is in RAM, the rest on storage.

    State tensors become samples on storage; their bytes are subtracted from usable RAM or the
    storage limit. Limits in percent become numbers. User-defined constraints and objectives are
    dropped, because they may depend on homes. With `before_updates`, no node can be recomputed
    after an update of state that it needs.
    """
    graph = problem.graph
    in_ram_bytes = sum(graph.tensor_bytes[i] for i in resident)
    stored_bytes = graph.state_bytes - in_ram_bytes
    limits: dict[str, Any] = {
        "ram": problem.usable_ram_bytes - in_ram_bytes,
        "constraints": (),
    }
    if problem.minimize == USER_OBJECTIVE:  # a user-defined objective may depend on homes
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
                    f"{home_text}, {format_bytes(stored_bytes)}, and storage has space for "
                    f"{format_bytes(storage_bytes)}"
                )
            storage_bytes -= stored_bytes
    stateless_graph = make_working_graph(
        graph, read_in_place=problem.reads_in_place, resident=resident
    )
    if before_updates:
        stateless_graph = _restrict_recomputation(stateless_graph, graph.last_stages)
    stateless_graph = _move_updates_to_forward(stateless_graph)
    return replace(
        problem.resolved().with_limit(Quantity.WRITES, storage_bytes),
        graph=stateless_graph,
        costs=_stateless_costs(problem, stateless_graph),
        **limits,
    )


def _restrict_recomputation(graph: Graph, last_stages: Sequence[int]) -> Graph:
    """Return a graph in which no schedule can recompute a node after its stage in `last_stages`."""
    last_stage_of: list[int] = []
    """For each node the last stage in which it and its recomputable ancestors may be recomputed."""
    nodes = list(graph.nodes)
    for k, node in enumerate(graph.nodes):
        input_nodes = (graph.node_of[i] for i in graph.inputs_of[k])
        input_limits = (last_stage_of[j] for j in input_nodes if nodes[j].recomputable)
        last_stage_of.append(min(last_stages[k], *input_limits, len(nodes)))
        last_read = max((t for i in graph.outputs_of[k] for t in graph.users_of[i]), default=k)
        if last_read > last_stage_of[k] and node.recomputable:
            nodes[k] = replace(node, recomputable=False)
    return replace(graph, nodes=tuple(nodes))


def _move_updates_to_forward(graph: Graph) -> Graph:
    """Return a graph whose updates before the backward pass, of running statistics, are forward."""
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
    """Return a problem's costs for `graph`, its graph without state: indices are equal."""
    cost_table = problem.table
    transfer_costs = [
        list(zip(times, energies, strict=True)) if cost_table.has_storage else None
        for times, energies in (
            (cost_table.page_in_time_s, cost_table.page_in_energy_j),
            (cost_table.page_out_time_s, cost_table.page_out_energy_j),
        )
    ]
    return Costs.from_arrays(
        graph,
        compute_time_s=cost_table.compute_time_s,
        compute_energy_j=cost_table.compute_energy_j,
        page_in=transfer_costs[0],
        page_out=transfer_costs[1],
        device=problem.costs.device,
    )


def _check_update_order(problem: Problem, schedule: Schedule) -> None:
    """Refuse a schedule that uses state in a stage after its update."""
    graph = problem.graph
    late_nodes = [(t, k) for t, k in schedule.R if t > graph.last_stages[k]]
    late_nodes += [
        (t, graph.node_of[i]) for t, i in schedule.M_in if t > graph.last_page_in_stage(i)
    ]
    for t, k in late_nodes:
        raise MethodNotApplicableError(
            f"it computes or pages in {graph.nodes[k].name!r} at {graph.nodes[t].name!r}, after an "
            "update of state that this needs"
        )
