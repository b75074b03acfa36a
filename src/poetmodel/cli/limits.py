"""``poetmodel limits``: the smallest RAM, deadline and energy for a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.cli import graphs, options
from poetmodel.cli.failures import print_room_warning
from poetmodel.cli.output import figures, percent, print_json, print_text, show
from poetmodel.graph.catalogue import InputShape
from poetmodel.problem import Quantity
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import typer

    from poetmodel.problem import Problem
    from poetmodel.solver.sensitivity import Limit

EPILOG: Final = "Example: poetmodel limits mlp --device mkr1000 --ram 70%"

NAMED_TENSORS: Final = 3
"""Most tensors at a peak that the table names; JSON has all of them."""

SMALL_GAP: Final = 1e-6
"""Smaller gaps are not written out."""

WORDS: Final = {
    "keep_all": "RAM, keep-all",
    "recompute": "RAM, recomputing",
    "page": "RAM, paging",
    "both": "RAM, both",
    "stated": "RAM, all limits",
    "time": "deadline",
    "energy": "energy",
}
"""Names of the limits in the table."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("limits", epilog=EPILOG)(limits)


def limits(  # noqa: PLR0913 - one parameter per option
    model: options.ModelArgument = None,
    *,
    graph: options.GraphOption = None,
    batch: graphs.BatchOption = None,
    image: graphs.ImageOption = None,
    sequence: graphs.SequenceOption = None,
    device: options.DeviceOption = None,
    profile: options.ProfileOption = None,
    ram: options.RamOption = None,
    aux: options.AuxOption = None,
    deadline: options.DeadlineOption = None,
    deadline_counts: options.DeadlineCountsOption = None,
    energy_budget: options.EnergyBudgetOption = None,
    no_paging: options.NoPagingOption = False,
    no_recompute: options.NoRecomputeOption = False,
    count_parameters: options.CountParametersOption = False,
    backend: options.BackendOption = options.Backend.HIGHS,
    time_limit: options.TimeLimitOption = 60.0,
    gap: options.GapOption = 1e-4,
    threads: options.ThreadsOption = 1,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,  # noqa: ARG001 - acts while it is parsed
) -> None:
    """Find the smallest RAM, the smallest deadline and the smallest energy."""
    from poetmodel.problem import Problem
    from poetmodel.solver.sensitivity import find_limits

    training_graph = graphs.read_graph(
        model, graph, InputShape(batch=batch, image=image, sequence=sequence)
    )
    costs = options.read_costs(training_graph, options.read_device(device), profile)
    problem = Problem(
        training_graph,
        costs,
        ram=ram,
        deadline=deadline,
        deadline_counts=deadline_counts,
        aux_bytes=aux,
        recompute=not no_recompute,
        paging=not no_paging,
        energy_budget=energy_budget,
        count_parameters=count_parameters,
    )
    found = find_limits(
        problem, backend=backend.value, time_limit=time_limit, gap=gap, threads=threads
    )
    _warn(found)
    if json:
        print_json(as_dict(problem, found))
        return
    from poetmodel.result import Status

    show(figures(f"Limits of {training_graph.name}", _rows(problem, found)))
    if any(limit.result.status == Status.FEASIBLE for limit in found):
        print_text("", "A longer --time-limit closes the gaps that are left.")


def _warn(found: Sequence[Limit]) -> None:
    """Warn if not even the schedule with the least RAM fits the device."""
    rooms = [limit.result.room for limit in found if limit.result.room is not None]
    if rooms:
        print_room_warning(min(rooms, key=lambda room: room.needed_bytes))


def as_dict(problem: Problem, found: Sequence[Limit]) -> dict[str, Any]:
    """Return the limits as plain values in SI units; those on RAM by name, under ``ram``."""
    from poetmodel.graph import floor

    graph = problem.graph
    least = floor(graph)
    return {
        "graph": {"name": graph.name, "sha256": graph.sha256},
        "problem": problem.to_dict(),
        "floor_bytes": least.bytes,
        "floor_node": graph.nodes[least.node].name,
        "ram": {limit.name: limit.to_dict() for limit in found if limit.quantity == Quantity.RAM},
        **{limit.name: limit.to_dict() for limit in found if limit.quantity != Quantity.RAM},
    }


def _rows(problem: Problem, found: Sequence[Limit]) -> Iterator[tuple[str, str, str]]:
    for limit in found:
        form = limit.result.problem.objective.format
        value = limit.value
        yield (
            WORDS[limit.name],
            "none" if value is None else form(value),
            f"{_proof(limit, form)}{_condition(problem, limit)}{_over(limit)}",
        )
        place = _place(limit)
        if place:
            yield "", "", place


def _proof(limit: Limit, form: Callable[[float], str]) -> str:
    from poetmodel.result import Status

    if limit.value is None:
        return limit.result.reason or "no schedule was found in time"
    if limit.proven:
        return "proven: less is infeasible"
    gap = limit.gap or 0.0
    words = percent(gap, digits=3) if gap >= SMALL_GAP else "less than 0.0001 %"
    if limit.result.status == Status.OPTIMAL:
        return f"proven within a gap of {words}"
    return f"found, gap {words}; proven: less than {form(limit.bound or 0.0)} is infeasible"


def _condition(problem: Problem, limit: Limit) -> str:
    """Return the limits that held while a quantity was minimized."""
    if limit.value is None:
        return ""
    kept = []
    if limit.quantity != Quantity.RAM:
        kept.append(f"{format_bytes(problem.ram_budget_bytes)} of RAM")
    timed = limit.quantity == Quantity.ENERGY or limit.name == "stated"
    if timed and problem.deadline_s is not None:
        kept.append(f"a deadline of {format_seconds(problem.deadline_s)}")
    budgeted = limit.quantity == Quantity.TIME or limit.name == "stated"
    if budgeted and problem.energy_budget_j is not None:
        kept.append(f"{format_joules(problem.energy_budget_j)}")
    return f"; with {' and '.join(kept)}" if kept else ""


def _over(limit: Limit) -> str:
    room = limit.result.room
    return "" if room is None or room.fits else "; does not fit the device"


def _place(limit: Limit) -> str:
    """Return the step with the peak RAM of the schedule, and the tensors in RAM there."""
    simulation, graph = limit.result.simulation, limit.result.problem.graph
    if simulation is None:
        return ""
    sizes = graph.tensor_bytes
    largest = sorted(simulation.peak_tensors, key=lambda i: -sizes[i])
    names = [f"{graph.tensors[i].name} {format_bytes(sizes[i])}" for i in largest[:NAMED_TENSORS]]
    more = len(largest) - len(names)
    if more > 0:
        names.append(f"{more} more")
    what = ", the minimum RAM" if limit.at_floor else ""
    peak = simulation.peak
    amount = "" if limit.quantity == Quantity.RAM else f", {format_bytes(peak.ram_bytes)}"
    return (
        f"peak at {graph.nodes[peak.node].name} in stage {peak.stage}{amount}{what}: "
        f"{', '.join(names)}"
    )
