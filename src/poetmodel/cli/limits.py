"""``poetmodel limits``: the smallest RAM, deadline and energy for a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from poetmodel.cli import options
from poetmodel.cli.failures import print_room_warnings
from poetmodel.cli.inputs import beside_bytes, given_step, in_sizes, read_costs, read_graph
from poetmodel.cli.output import figures, live_line, print_json, print_text, show
from poetmodel.problem import Problem, Quantity
from poetmodel.report.presenter import Fact, Unit, percent, plural, row
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.lowered.step import LoweredStep
    from poetmodel.solver.sensitivity import Limit

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
    "block": "RAM, exported C",
    "time": "deadline",
    "energy": "energy",
}


KERNELS_OF: Final = {
    "pytorch": " (PyTorch's kernels)",
    "exported": " (kernels of exported C)",
}
"""Sentences on graphs, by the owner of their kernels."""


@options.command("poetmodel limits mlp --device mkr1000 --ram 70%")
def limits(
    source: options.GraphOptions,
    costing: options.CostOptions,
    limits: Annotated[options.LimitOptions, options.without("minimize")],
    search: Annotated[options.SearchOptions, options.without("method", "formulation")],
    output: options.OutputOptions,
) -> None:
    """Find the smallest RAM, the smallest deadline and the smallest energy."""
    from poetmodel.plan.alignment import device_alignment
    from poetmodel.result import Status
    from poetmodel.solver.sensitivity import find_limits

    source, limits = in_sizes(source, costing, limits)
    step = given_step(source)
    graph = read_graph(source) if step is None else step.graph
    problem = limits.problem(graph, read_costs(graph, costing))
    with live_line(wanted=not output.json, doing="finding limits"):
        bounds = find_limits(
            problem,
            backend=search.backend,
            time_limit=search.time_limit,
            gap=search.gap,
            threads=search.threads,
            solver_options=search.solver_options,
            alignment=None if step is None else device_alignment(problem.costs.device),
        )
    beside = None if step is None else beside_bytes(step, commit=limits.steps_to_commit is not None)
    tiles = None if step is None or source.tile else _in_tiles(step, problem)
    evaluation = None if step is None else _evaluation_bytes(step, problem)
    rooms = [limit.result.room for limit in bounds if limit.result.room is not None]
    if rooms:  # does not even the schedule with the least RAM fit the device?
        print_room_warnings(min(rooms, key=lambda room: room.needed_bytes))
    if output.json:
        print_json(as_dict(problem, bounds, beside=beside, tiles=tiles, evaluation=evaluation))
        return
    of = KERNELS_OF.get(graph.kernels or "", "")
    facts = _facts(problem, bounds, beside, tiles, evaluation)
    show(figures(f"Limits of {graph.name}{of}", facts))
    if any(limit.result.status == Status.FEASIBLE for limit in bounds):
        print_text("", "A longer --time-limit closes the gaps that are left.")


def _in_tiles(step: LoweredStep, problem: Problem) -> tuple[int, int] | None:
    """Return the size of tiles with which no node needs much, and what one needs [B]."""
    from poetmodel.budgets import TileChoice
    from poetmodel.tiling.choice import choose_tiles, needed_bytes

    device, paging = problem.costs.device, problem.can_page
    if device is None:
        return None
    size, found = choose_tiles(step, TileChoice.AUTO, device, ram_bytes=0, paging=paging)
    return None if size is None else (size, needed_bytes(found, device, paging=paging))


def _evaluation_bytes(step: LoweredStep, problem: Problem) -> int | None:
    """Return what a node of a step's evaluation needs at most [B]; None if there is none.

    The state is on storage, as far as the device pages.
    """
    from poetmodel.lowered.step import reading_state
    from poetmodel.tiling.choice import needed_bytes

    device, paging = problem.costs.device, problem.can_page
    if step.evaluation is None or device is None:
        return None
    state = [step.graph.tensors[i].name for i in step.graph.state_tensors]
    is_paged = paging and not device.is_memory_mapped
    found = reading_state(step.evaluation, state if is_paged else ())
    needed = needed_bytes(found, device, paging=paging)
    return needed if paging else needed + step.graph.state_bytes


def as_dict(
    problem: Problem,
    limits: Sequence[Limit],
    *,
    beside: int | None = None,
    tiles: tuple[int, int] | None = None,
    evaluation: int | None = None,
) -> dict[str, Any]:
    """Return the limits as plain values in SI units; those on RAM by name, under ``ram``.

    `beside` is what exported C takes of RAM beside its tensors [B]; None where that is no question.
    `tiles` are the size of tiles with which it takes the least, and the minimum RAM then;
    `evaluation` is the minimum RAM of ``pm_evaluate``.
    """
    graph = problem.graph
    least = problem.floor
    return {
        "graph": {"name": graph.name, "sha256": graph.sha256, "kernels": graph.kernels},
        "problem": problem.to_dict(),
        "floor_bytes": least.bytes,
        "floor_node": graph.nodes[least.node].name,
        "ram": {limit.name: limit.to_dict() for limit in limits if limit.quantity == Quantity.RAM},
        **{limit.name: limit.to_dict() for limit in limits if limit.quantity != Quantity.RAM},
        **({} if beside is None else {"reserved_bytes": beside}),
        **({} if evaluation is None else {"evaluation_floor_bytes": evaluation}),
        **({} if tiles is None else {"tile_bytes": tiles[0], "tiled_floor_bytes": tiles[1]}),
    }


def _facts(
    problem: Problem,
    limits: Sequence[Limit],
    beside: int | None,
    tiles: tuple[int, int] | None,
    evaluation: int | None,
) -> Iterator[Fact]:
    if problem.graph.exactness:
        yield row("numbers", problem.graph.exactness)
    for limit in sorted(limits, key=lambda limit: limit.quantity != Quantity.RAM):
        if limit.name == "block":
            yield _exported(problem, limit, beside or 0)
            if evaluation is not None and limit.value is not None:
                yield row(
                    "RAM, --evaluate",
                    format_bytes(max(round(limit.value), evaluation) + (beside or 0)),
                    f"the larger of that and of pm_evaluate, {format_bytes(evaluation)} of tensors",
                )
            if tiles is not None:
                yield row(
                    "RAM, in tiles",
                    format_bytes(tiles[1] + (beside or 0)),
                    f"the minimum RAM with --tile {tiles[0]}B; whole, "
                    f"{format_bytes(problem.floor.bytes + (beside or 0))}",
                )
            continue
        unit, room = limit.result.problem.objective.format, limit.result.room
        over = "" if room is None or room.fits else "; does not fit the device"
        yield row(
            WORDS[limit.name],
            "none" if limit.value is None else unit(limit.value),
            f"{_proof(limit, unit)}{_condition(problem, limit)}{over}",
        )
        node_words = _place(limit)
        if node_words:
            yield row("", "", node_words)


def _exported(problem: Problem, limit: Limit, beside: int) -> Fact:
    """Return the least RAM of exported C: its tensors, and what it takes beside them."""
    from poetmodel.plan.alignment import device_alignment

    if limit.value is None:
        return row(WORDS[limit.name], "none", limit.result.reason)
    whole = round(limit.value) + beside

    def unit(size: float) -> str:
        return format_bytes(size + beside)

    note = (
        f"{_proof(limit, unit)}; --ram {whole}B of 'poetmodel export', {format_bytes(beside)} of "
        f"it for inputs, stack and runtime; tensors begin at multiples of "
        f"{device_alignment(problem.costs.device)} B"
    )
    return row(WORDS[limit.name], format_bytes(whole), note)


def _proof(limit: Limit, unit: Unit) -> str:
    from poetmodel.result import Status

    if limit.value is None:
        return limit.result.reason or "no schedule was found in time"
    if limit.proven:
        return "proven: less is infeasible"
    gap = limit.gap or 0.0
    words = percent(gap, digits=3) if gap >= SMALL_GAP else "less than 0.0001 %"
    if limit.result.status == Status.OPTIMAL:
        return f"proven within a gap of {words}"
    return f"found, gap {words}; proven: less than {unit(limit.bound or 0.0)} is infeasible"


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
    if problem.constraints and limit.result.problem.constraints:
        kept.append(plural(len(problem.constraints), "own constraint"))
    return f"; with {' and '.join(kept)}" if kept else ""


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
