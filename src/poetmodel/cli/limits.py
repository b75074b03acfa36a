"""``poetmodel limits``: the minimum RAM, deadline and energy of a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from poetmodel.cli import options
from poetmodel.cli.failures import print_warnings
from poetmodel.cli.inputs import (
    extra_ram_bytes,
    read_given_step,
    read_graph,
    warn_about_kernels,
)
from poetmodel.cli.output import fact_table, live_line
from poetmodel.cli.reply import Reply
from poetmodel.problem import Limits, Problem, Quantity
from poetmodel.report.presenter import Fact, ValueFormatter, format_items, format_percent, text_fact
from poetmodel.solver.request import SearchOptions
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.lowered.step import LoweredStep
    from poetmodel.solver.sensitivity import Limit

MAX_NAMED_TENSORS: Final = 3
"""Maximum number of tensors at a peak in the table; JSON contains all."""

MIN_SHOWN_GAP: Final = 1e-6
"""Smallest gap that is shown as a number."""

LIMIT_NAMES: Final = {
    "keep_all": "RAM, keep-all",
    "recompute": "RAM, recomputing",
    "page": "RAM, paging",
    "both": "RAM, recomputing and paging",
    "stated": "RAM, all limits",
    "block": "RAM, exported C",
    "time": "deadline",
    "energy": "energy",
}
"""Names of limits in the table.

The keys are those of JSON. ``both``: minimum RAM if tensors may be recomputed and paged.
``stated``: minimum RAM within the given deadline, energy budget and user-defined constraints.
``block``: minimum RAM of exported C, whose tensors are aligned.
"""


KERNEL_SUFFIXES: Final = {
    "pytorch": " (PyTorch's kernels)",
    "exported": " (kernels of exported C)",
}
"""Suffixes of the title of the table, by the origin of the graph's kernels."""


@options.command("poetmodel limits mlp --device mkr1000 --ram 70%")
def limits(
    source: options.GraphOptions,
    costing: options.CostOptions,
    limits: Annotated[Limits, options.without("minimize")],
    own: options.ConstraintOptions,
    search: Annotated[SearchOptions, options.without("method", "formulation")],
    output: options.OutputOptions,
) -> Reply:
    """Find the smallest RAM, the smallest deadline and the smallest energy.

    Deadline and energy are within all other limits. RAM is found without deadline, energy budget
    and user-defined constraints and, if any of the three is given, also within them. All are within
    the storage limit.
    """
    from poetmodel.case.tiles import resolve_sizes
    from poetmodel.plan.alignment import device_alignment
    from poetmodel.result import Status
    from poetmodel.solver.sensitivity import search_limits

    case, hints = resolve_sizes(source.case(costing, limits=limits, own=own))
    print_warnings(hints, kind="hint")
    step = read_given_step(source, case)
    graph = read_graph(source) if step is None else step.graph
    problem = case.state_problem(graph)
    warn_about_kernels(graph, problem.costs.device)
    with live_line(enabled=not output.json, activity="finding limits"):
        found_limits = search_limits(
            problem,
            search,
            alignment=None if step is None else device_alignment(problem.costs.device),
        )
    extra_bytes = None if step is None else extra_ram_bytes(step, commit=limits.commit is not None)
    min_ram_tiling = None if step is None or case.tile else _min_ram_tiles(step, problem)
    evaluation_bytes = None if step is None else _evaluation_bytes(step, problem)
    device_rams = [
        limit.result.device_ram for limit in found_limits if limit.result.device_ram is not None
    ]
    kernel_suffix = KERNEL_SUFFIXES.get(graph.kernels or "", "")
    facts = _limit_facts(problem, found_limits, extra_bytes, min_ram_tiling, evaluation_bytes)
    is_open = any(limit.result.status == Status.FEASIBLE for limit in found_limits)
    return Reply(
        document=limit_values(
            problem,
            found_limits,
            extra_bytes=extra_bytes,
            min_ram_tiling=min_ram_tiling,
            evaluation_bytes=evaluation_bytes,
        ),
        text=(
            fact_table(f"Limits of {graph.name}{kernel_suffix}", facts),
            *(("", "A longer --time-limit may close the remaining gaps.") if is_open else ()),
        ),
        # Warn if even the schedule that needs the least RAM exceeds the device.
        device_rams=sorted(device_rams, key=lambda device_ram: device_ram.needed_bytes)[:1],
    )


def _min_ram_tiles(step: LoweredStep, problem: Problem) -> tuple[int, int] | None:
    """Return the tile size of least minimum RAM, and that RAM [B]; None without tiles or device."""
    from poetmodel.budgets import TileChoice
    from poetmodel.tiling.choice import choose_tiles, needed_bytes

    device, paging = problem.costs.device, problem.can_page
    if device is None:
        return None
    size, tiled_step = choose_tiles(step, TileChoice.AUTO, device, ram_bytes=0, paging=paging)
    return None if size is None else (size, needed_bytes(tiled_step, device, paging=paging))


def _evaluation_bytes(step: LoweredStep, problem: Problem) -> int | None:
    """Return the minimum RAM of ``pm_evaluate`` [B]; None without an evaluation or a device."""
    from poetmodel.lowered.step import with_stored_state
    from poetmodel.tiling.choice import needed_bytes

    device, paging = problem.costs.device, problem.can_page
    if step.evaluation is None or device is None:
        return None
    state_names = [step.graph.tensors[i].name for i in step.graph.state_tensors]
    is_paged = paging and not device.is_memory_mapped
    evaluation_step = with_stored_state(step.evaluation, state_names if is_paged else ())
    needed_ram_bytes = needed_bytes(evaluation_step, device, paging=paging)
    return needed_ram_bytes if paging else needed_ram_bytes + step.graph.state_bytes


def limit_values(
    problem: Problem,
    limits: Sequence[Limit],
    *,
    extra_bytes: int | None = None,
    min_ram_tiling: tuple[int, int] | None = None,
    evaluation_bytes: int | None = None,
) -> dict[str, Any]:
    """Return graph, problem, minimum RAM and limits by name as JSON values in SI units.

    `extra_bytes` is the RAM of exported C in addition to its tensors, `min_ram_tiling` tile size
    and minimum RAM of `_min_ram_tiles`, `evaluation_bytes` the minimum RAM of ``pm_evaluate`` [B].
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
        **({} if evaluation_bytes is None else {"evaluation_floor_bytes": evaluation_bytes}),
        **(
            {}
            if min_ram_tiling is None
            else {"tile_bytes": min_ram_tiling[0], "tiled_floor_bytes": min_ram_tiling[1]}
        ),
    }


def _limit_facts(
    problem: Problem,
    limits: Sequence[Limit],
    extra_bytes: int | None,
    min_ram_tiling: tuple[int, int] | None,
    evaluation_bytes: int | None,
) -> Iterator[Fact]:
    """Yield each limit with its proof and, except for exported C, the other limits of its solve."""
    if problem.graph.exactness:
        yield text_fact("numbers", problem.graph.exactness)
    for limit in sorted(limits, key=lambda limit: limit.quantity != Quantity.RAM):
        if limit.name == "block":
            yield _exported_fact(problem, limit, extra_bytes or 0)
            if evaluation_bytes is not None and limit.value is not None:
                yield text_fact(
                    "RAM, --evaluate",
                    format_bytes(max(round(limit.value), evaluation_bytes) + (extra_bytes or 0)),
                    "the maximum of the training step and pm_evaluate "
                    f"({format_bytes(evaluation_bytes)} of tensors)",
                )
            if min_ram_tiling is not None:
                yield text_fact(
                    "RAM, in tiles",
                    format_bytes(min_ram_tiling[1] + (extra_bytes or 0)),
                    f"the minimum RAM with --tile {min_ram_tiling[0]}B; without tiles "
                    f"{format_bytes(problem.floor.bytes + (extra_bytes or 0))}",
                )
            continue
        format_value, device_ram = limit.result.problem.objective.format, limit.result.device_ram
        ram_note = "" if device_ram is None or device_ram.fits else "; does not fit the device"
        yield text_fact(
            LIMIT_NAMES[limit.name],
            "none" if limit.value is None else format_value(limit.value),
            f"{_proof_text(limit, format_value)}{_conditions_text(problem, limit)}{ram_note}",
        )
        peak_text = _peak_text(limit)
        if peak_text:
            yield text_fact("", "", peak_text)


def _exported_fact(problem: Problem, limit: Limit, extra_bytes: int) -> Fact:
    """Return the minimum RAM of exported C for tables: its tensors plus `extra_bytes`."""
    from poetmodel.plan.alignment import device_alignment

    if limit.value is None:
        return text_fact(LIMIT_NAMES[limit.name], "none", limit.result.reason)
    total_bytes = round(limit.value) + extra_bytes

    def format_value(size: float) -> str:
        return format_bytes(size + extra_bytes)

    note = (
        f"{_proof_text(limit, format_value)}; --ram {total_bytes}B of 'poetmodel export', "
        f"of which {format_bytes(extra_bytes)} for inputs, stack and runtime; tensors begin at "
        f"multiples of {device_alignment(problem.costs.device)} B"
    )
    return text_fact(LIMIT_NAMES[limit.name], format_bytes(total_bytes), note)


def _proof_text(limit: Limit, format_value: ValueFormatter) -> str:
    """Format how a limit is proven: exactly, within a gap, by a bound; or why there is no value."""
    from poetmodel.result import Status

    if limit.value is None:
        return limit.result.reason or "no schedule was found in time"
    if limit.proven:
        return "proven: less is infeasible"
    gap = limit.gap or 0.0
    gap_text = format_percent(gap, digits=3) if gap >= MIN_SHOWN_GAP else "less than 0.0001 %"
    if limit.result.status == Status.OPTIMAL:
        return f"proven within a gap of {gap_text}"
    return (
        f"found, gap {gap_text}; proven: less than {format_value(limit.bound or 0.0)} is infeasible"
    )


def _conditions_text(problem: Problem, limit: Limit) -> str:
    """Return the other limits of the solve that found a limit, as text: ``; with ...``."""
    if limit.value is None:
        return ""
    conditions = []
    if limit.quantity != Quantity.RAM:
        conditions.append(f"{format_bytes(problem.ram_budget_bytes)} of RAM")
    has_deadline = limit.quantity == Quantity.ENERGY or limit.name == "stated"
    if has_deadline and problem.deadline_s is not None:
        conditions.append(f"a deadline of {format_seconds(problem.deadline_s)}")
    has_energy_budget = limit.quantity == Quantity.TIME or limit.name == "stated"
    if has_energy_budget and problem.energy_budget_j is not None:
        conditions.append(f"{format_joules(problem.energy_budget_j)}")
    if problem.constraints and limit.result.problem.constraints:
        conditions.append(format_items(len(problem.constraints), "user-defined constraint"))
    return f"; with {' and '.join(conditions)}" if conditions else ""


def _peak_text(limit: Limit) -> str:
    """Return node, stage and largest tensors of the peak of a limit's schedule; "" without one."""
    simulation, graph = limit.result.simulation, limit.result.problem.graph
    if simulation is None:
        return ""
    sizes = graph.tensor_bytes
    largest = sorted(simulation.peak_tensors, key=lambda i: -sizes[i])
    names = [
        f"{graph.tensors[i].name} {format_bytes(sizes[i])}" for i in largest[:MAX_NAMED_TENSORS]
    ]
    n_unnamed = len(largest) - len(names)
    if n_unnamed > 0:
        names.append(f"{n_unnamed} more")
    remark = ", the minimum RAM" if limit.is_at_floor else ""
    peak = simulation.peak
    ram_text = "" if limit.quantity == Quantity.RAM else f", {format_bytes(peak.ram_bytes)}"
    return (
        f"peak at {graph.nodes[peak.node].name} in stage {peak.stage}{ram_text}{remark}: "
        f"{', '.join(names)}"
    )
