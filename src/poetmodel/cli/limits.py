"""``poetmodel limits``: the minimum RAM, deadline and energy of a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from poetmodel.cli import options
from poetmodel.cli.failures import print_room_warnings
from poetmodel.cli.inputs import (
    extra_ram_bytes,
    read_costs,
    read_given_step,
    read_graph,
    resolve_sizes,
)
from poetmodel.cli.output import fact_table, live_line, print_json, print_text, show
from poetmodel.problem import Problem, Quantity
from poetmodel.report.presenter import Fact, Unit, format_percent, plural, text_fact
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.lowered.step import LoweredStep
    from poetmodel.solver.sensitivity import Limit

MAX_NAMED_TENSORS: Final = 3
"""Maximum number of tensors at a peak in the table; JSON contains all."""

MIN_SHOWN_GAP: Final = 1e-6
"""Gaps below this are not shown as numbers."""

LIMIT_NAMES: Final = {
    "keep_all": "RAM, keep-all",
    "recompute": "RAM, recomputing",
    "page": "RAM, paging",
    "both": "RAM, both",
    "stated": "RAM, all limits",
    "block": "RAM, exported C",
    "time": "deadline",
    "energy": "energy",
}


KERNEL_SUFFIXES: Final = {
    "pytorch": " (PyTorch's kernels)",
    "exported": " (kernels of exported C)",
}
"""Suffixes of titles of graphs, by the origin of their kernels."""


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

    source, limits = resolve_sizes(source, costing, limits)
    step = read_given_step(source)
    graph = read_graph(source) if step is None else step.graph
    problem = limits.problem(graph, read_costs(graph, costing))
    with live_line(enabled=not output.json, doing="finding limits"):
        bounds = find_limits(
            problem,
            backend=search.backend,
            time_limit=search.time_limit,
            gap=search.gap,
            threads=search.threads,
            solver_options=search.solver_options,
            alignment=None if step is None else device_alignment(problem.costs.device),
        )
    extra_bytes = (
        None if step is None else extra_ram_bytes(step, commit=limits.steps_to_commit is not None)
    )
    tiles = None if step is None or source.tile else _min_ram_tiles(step, problem)
    evaluation = None if step is None else _evaluation_bytes(step, problem)
    rooms = [limit.result.room for limit in bounds if limit.result.room is not None]
    if rooms:  # warn if not even the schedule with minimum RAM fits the device
        print_room_warnings(min(rooms, key=lambda room: room.needed_bytes))
    if output.json:
        print_json(
            limit_values(
                problem, bounds, extra_bytes=extra_bytes, tiles=tiles, evaluation=evaluation
            )
        )
        return
    kernel_suffix = KERNEL_SUFFIXES.get(graph.kernels or "", "")
    facts = _limit_facts(problem, bounds, extra_bytes, tiles, evaluation)
    show(fact_table(f"Limits of {graph.name}{kernel_suffix}", facts))
    if any(limit.result.status == Status.FEASIBLE for limit in bounds):
        print_text("", "A longer --time-limit closes the gaps that are left.")


def _min_ram_tiles(step: LoweredStep, problem: Problem) -> tuple[int, int] | None:
    """Return the tile size for which the step's minimum RAM is smallest, and this minimum RAM [B].

    None without a device, or if whole tensors need no more.
    """
    from poetmodel.budgets import TileChoice
    from poetmodel.tiling.choice import choose_tiles, needed_bytes

    device, paging = problem.costs.device, problem.can_page
    if device is None:
        return None
    size, tiled_step = choose_tiles(step, TileChoice.AUTO, device, ram_bytes=0, paging=paging)
    return None if size is None else (size, needed_bytes(tiled_step, device, paging=paging))


def _evaluation_bytes(step: LoweredStep, problem: Problem) -> int | None:
    """Return the minimum RAM of a step's evaluation [B]; None without one or without a device.

    The state is on storage if the device can page.
    """
    from poetmodel.lowered.step import with_stored_state
    from poetmodel.tiling.choice import needed_bytes

    device, paging = problem.costs.device, problem.can_page
    if step.evaluation is None or device is None:
        return None
    state = [step.graph.tensors[i].name for i in step.graph.state_tensors]
    is_paged = paging and not device.is_memory_mapped
    evaluation_step = with_stored_state(step.evaluation, state if is_paged else ())
    needed = needed_bytes(evaluation_step, device, paging=paging)
    return needed if paging else needed + step.graph.state_bytes


def limit_values(
    problem: Problem,
    limits: Sequence[Limit],
    *,
    extra_bytes: int | None = None,
    tiles: tuple[int, int] | None = None,
    evaluation: int | None = None,
) -> dict[str, Any]:
    """Return the limits as plain values in SI units; those on RAM by name, under ``ram``.

    `extra_bytes` is the RAM of exported C in addition to its tensors [B]; None for other graphs.
    `tiles` are the tile size with the smallest minimum RAM, and that RAM; `evaluation` is the
    minimum RAM of ``pm_evaluate``.
    """
    graph = problem.graph
    min_ram = problem.floor
    return {
        "graph": {"name": graph.name, "sha256": graph.sha256, "kernels": graph.kernels},
        "problem": problem.to_dict(),
        "floor_bytes": min_ram.bytes,
        "floor_node": graph.nodes[min_ram.node].name,
        "ram": {limit.name: limit.to_dict() for limit in limits if limit.quantity == Quantity.RAM},
        **{limit.name: limit.to_dict() for limit in limits if limit.quantity != Quantity.RAM},
        **({} if extra_bytes is None else {"reserved_bytes": extra_bytes}),
        **({} if evaluation is None else {"evaluation_floor_bytes": evaluation}),
        **({} if tiles is None else {"tile_bytes": tiles[0], "tiled_floor_bytes": tiles[1]}),
    }


def _limit_facts(
    problem: Problem,
    limits: Sequence[Limit],
    extra_bytes: int | None,
    tiles: tuple[int, int] | None,
    evaluation: int | None,
) -> Iterator[Fact]:
    """Yield each limit with its proof, its conditions and its peak."""
    if problem.graph.exactness:
        yield text_fact("numbers", problem.graph.exactness)
    for limit in sorted(limits, key=lambda limit: limit.quantity != Quantity.RAM):
        if limit.name == "block":
            yield _exported_fact(problem, limit, extra_bytes or 0)
            if evaluation is not None and limit.value is not None:
                yield text_fact(
                    "RAM, --evaluate",
                    format_bytes(max(round(limit.value), evaluation) + (extra_bytes or 0)),
                    f"the larger of that and of pm_evaluate, {format_bytes(evaluation)} of tensors",
                )
            if tiles is not None:
                yield text_fact(
                    "RAM, in tiles",
                    format_bytes(tiles[1] + (extra_bytes or 0)),
                    f"the minimum RAM with --tile {tiles[0]}B; whole, "
                    f"{format_bytes(problem.floor.bytes + (extra_bytes or 0))}",
                )
            continue
        unit, room = limit.result.problem.objective.format, limit.result.room
        over = "" if room is None or room.fits else "; does not fit the device"
        yield text_fact(
            LIMIT_NAMES[limit.name],
            "none" if limit.value is None else unit(limit.value),
            f"{_proof_text(limit, unit)}{_conditions_text(problem, limit)}{over}",
        )
        node_words = _peak_text(limit)
        if node_words:
            yield text_fact("", "", node_words)


def _exported_fact(problem: Problem, limit: Limit, extra_bytes: int) -> Fact:
    """Return the minimum RAM of exported C: its tensors, and the additional RAM."""
    from poetmodel.plan.alignment import device_alignment

    if limit.value is None:
        return text_fact(LIMIT_NAMES[limit.name], "none", limit.result.reason)
    total_bytes = round(limit.value) + extra_bytes

    def unit(size: float) -> str:
        return format_bytes(size + extra_bytes)

    note = (
        f"{_proof_text(limit, unit)}; --ram {total_bytes}B of 'poetmodel export', "
        f"{format_bytes(extra_bytes)} of it for inputs, stack and runtime; tensors begin at "
        f"multiples of {device_alignment(problem.costs.device)} B"
    )
    return text_fact(LIMIT_NAMES[limit.name], format_bytes(total_bytes), note)


def _proof_text(limit: Limit, unit: Unit) -> str:
    """Return how far a limit is proven, as text."""
    from poetmodel.result import Status

    if limit.value is None:
        return limit.result.reason or "no schedule was found in time"
    if limit.proven:
        return "proven: less is infeasible"
    gap = limit.gap or 0.0
    words = format_percent(gap, digits=3) if gap >= MIN_SHOWN_GAP else "less than 0.0001 %"
    if limit.result.status == Status.OPTIMAL:
        return f"proven within a gap of {words}"
    return f"found, gap {words}; proven: less than {unit(limit.bound or 0.0)} is infeasible"


def _conditions_text(problem: Problem, limit: Limit) -> str:
    """Return the limits that were met while a quantity was minimized, as text."""
    if limit.value is None:
        return ""
    conditions = []
    if limit.quantity != Quantity.RAM:
        conditions.append(f"{format_bytes(problem.ram_budget_bytes)} of RAM")
    timed = limit.quantity == Quantity.ENERGY or limit.name == "stated"
    if timed and problem.deadline_s is not None:
        conditions.append(f"a deadline of {format_seconds(problem.deadline_s)}")
    budgeted = limit.quantity == Quantity.TIME or limit.name == "stated"
    if budgeted and problem.energy_budget_j is not None:
        conditions.append(f"{format_joules(problem.energy_budget_j)}")
    if problem.constraints and limit.result.problem.constraints:
        conditions.append(plural(len(problem.constraints), "user-defined constraint"))
    return f"; with {' and '.join(conditions)}" if conditions else ""


def _peak_text(limit: Limit) -> str:
    """Return the step with the peak RAM of the schedule, and the tensors in RAM there, as text."""
    simulation, graph = limit.result.simulation, limit.result.problem.graph
    if simulation is None:
        return ""
    sizes = graph.tensor_bytes
    largest = sorted(simulation.peak_tensors, key=lambda i: -sizes[i])
    names = [
        f"{graph.tensors[i].name} {format_bytes(sizes[i])}" for i in largest[:MAX_NAMED_TENSORS]
    ]
    more = len(largest) - len(names)
    if more > 0:
        names.append(f"{more} more")
    remark = ", the minimum RAM" if limit.at_floor else ""
    peak = simulation.peak
    amount = "" if limit.quantity == Quantity.RAM else f", {format_bytes(peak.ram_bytes)}"
    return (
        f"peak at {graph.nodes[peak.node].name} in stage {peak.stage}{amount}{remark}: "
        f"{', '.join(names)}"
    )
