"""``poetmodel plan``: makes the program that a device runs from a schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from poetmodel.cli import options
from poetmodel.cli.failures import ExitStatus, print_faults, print_room_warnings, print_warnings
from poetmodel.cli.inputs import MEASURED_COSTS, check_outputs, costs_of_file, graph_of
from poetmodel.cli.output import figures, live_line, print_json, print_text, print_written, show
from poetmodel.device import Costs, Device, StorageMode
from poetmodel.device.ram import DeviceRam
from poetmodel.errors import BudgetError, InputError, PlanError, ScheduleError, VerificationError
from poetmodel.plan.alignment import ALIGNMENT
from poetmodel.problem import DeadlineCounts, Problem
from poetmodel.problem.objective import transfer_mode
from poetmodel.report.presenter import Fact, count, escaped, metric_facts, plural, room_facts, row
from poetmodel.schedule.metrics import Display, Group
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.graph import Graph
    from poetmodel.plan import Arena, ArenaCheck, Plan, PlanCheck
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule
    from poetmodel.schedule.document import ScheduleDocument
    from poetmodel.solver import Fitted


class PlanFormat(StrEnum):
    """Values of ``--format``: a plan file, a listing, bytes for a device, or trace events."""

    JSON = "json"
    TEXT = "text"
    BINARY = "binary"
    TRACE = "trace"


@options.group
class PlanOptions:
    """The schedule, and the plan that is made of it."""

    schedule: Path = options.argument(
        options.REQUIRED, "SCHEDULE", "A schedule file, *.schedule.json."
    )
    mode: StorageMode | None = options.what(
        None,
        "--mode",
        "How transfers run. Default: the device's; else dma for an overlap schedule, else "
        "blocking.",
    )
    arena: bool = options.what(
        False,
        "--arena",
        "Give every copy of a tensor and every workspace a fixed offset in one block of RAM.",
    )
    alignment: int | None = options.what(
        None, "--alignment BYTES", "With --arena: offsets are multiples of it. Default: 16."
    )
    ram: str | None = options.limit(
        None,
        "--ram SIZE",
        "RAM budget: 256KiB, 1.5MB, or 50% of the keep-all peak. Default: the budget "
        "of the schedule.",
    )
    out: Path | None = options.output(None, "--out FILE", "Write the plan.")
    form: PlanFormat = options.output(
        PlanFormat.JSON,
        "--format",
        "json is a plan file, text a listing for people, binary a few hundred bytes for a device, "
        "trace Chrome trace events for Perfetto.",
    )
    plot: Path | None = options.output(
        None, "--plot FILE", "Draw RAM over time, core and bus: .html, .svg, .png, .pdf."
    )


@options.command("poetmodel plan mlp.json --graph mlp --format text")
def plan(
    source: options.FileGraphOptions,
    costing: options.CostOptions,
    wanted: PlanOptions,
    output: options.OutputOptions,
) -> None:
    """Make the program that a device runs, from a schedule file."""
    from poetmodel.schedule import check_identity
    from poetmodel.schedule.document import load_document

    if wanted.alignment is not None and not wanted.arena:
        raise InputError("--alignment: is about addresses; give --arena too")
    if wanted.form == PlanFormat.BINARY and wanted.out is None:
        raise InputError("--format binary: give --out FILE for the bytes")
    if wanted.form == PlanFormat.BINARY and wanted.arena:
        raise InputError("--format binary: has no addresses; give --format json with --arena")
    path = wanted.schedule
    inputs = (str(path), source.graph, costing.device, costing.profile)
    check_outputs(("--out", wanted.out), ("--plot", wanted.plot), inputs=inputs)
    document = load_document(path)
    graph = graph_of(source, document.schedule.identity, source=path).graph
    try:
        check_identity(graph, document.schedule)
        costs, notes = costs_of_file(document.device, graph, costing)
        stated = document.problem
        if stated is not None:
            costs = replace(costs, commit=stated.commit)
        budget = _budget(document, graph, costs, wanted.ram)
        mode, doubts = default_mode(
            costs.device, None if stated is None else stated.deadline_counts
        )
        print_warnings(
            [*(note + MEASURED_COSTS for note in notes), *(doubts if wanted.mode is None else ())]
        )
        with live_line(wanted=not output.json, doing="planning"):
            planned = PlanResult.of(
                graph,
                costs,
                document.schedule,
                mode=wanted.mode or mode,
                ram_budget_bytes=budget,
                aux_bytes=None if stated is None else stated.aux_bytes,
                alignment=(wanted.alignment or ALIGNMENT) if wanted.arena else None,
                may_wait=stated is None or stated.deadline_counts != "overlap",
            )
    except (ScheduleError, PlanError) as error:
        raise error.within(str(path)) from None
    if planned.violations:
        print_faults(planned.violations)
        raise typer.Exit(ExitStatus.INFEASIBLE)
    _deliver(planned, wanted, json=output.json)


def _budget(document: ScheduleDocument, graph: Graph, costs: Costs, ram: str | None) -> int | None:
    """Return the RAM for tensors: of the option, the file or the device; None without them."""
    stated = document.problem
    if ram is None and stated is None and costs.device is None:
        return None
    problem = Problem(
        graph,
        costs,
        ram=ram if ram is not None or stated is None else stated.ram_budget_bytes,
        count_parameters=stated is not None and stated.count_parameters,
    )
    if problem.usable_ram_bytes < 1:
        raise BudgetError(
            f"ram: {problem.ram_budget_bytes:,} B leave no RAM for tensors: "
            f"{graph.total_resident_bytes:,} bytes are resident"
        )
    return problem.usable_ram_bytes


def _deliver(planned: PlanResult, wanted: PlanOptions, *, json: bool) -> None:
    if wanted.out is not None:
        planned.save(wanted.out, wanted.form)
        print_written(wanted.out)
    if wanted.plot is not None:
        from poetmodel.report.drawing import draw_plan

        draw_plan(planned.graph, planned.plan, planned.check, wanted.plot)
        print_written(wanted.plot)
    if json:
        print_json(planned.plan.to_dict(planned.check, planned.arena))
    elif wanted.form in {PlanFormat.TEXT, PlanFormat.TRACE} and wanted.out is None:
        print_text(*planned.lines(wanted.form))
    else:
        facts = (*_facts(planned), *room_facts(planned.room))
        show(figures(f"Plan for {planned.graph.name}", facts))
    print_room_warnings(planned.room)


def _facts(planned: PlanResult) -> Iterator[Fact]:
    from poetmodel.plan import Op, encode
    from poetmodel.plan.listing import describe_homes

    plan, check = planned.plan, planned.check
    times = dict.fromkeys(Op, 0)
    for op, _ in plan.program:
        times[op] += 1
    counts = (
        (times[Op.COMPUTE] - len(planned.graph.nodes), "recomputation"),
        (times[Op.PAGE_OUT], "page-out"),
        (times[Op.PAGE_IN], "page-in"),
    )
    moved = ", ".join(plural(number, noun) for number, noun in counts)
    yield row("instructions", f"{len(plan.program):,}", moved)
    yield row("transfers", str(plan.mode), _MODES[plan.mode])
    budget = plan.ram_budget_bytes
    notes = {
        "stall_s": "the core waits for the bus",
        "peak_ram_bytes": "" if budget is None else f"of a budget of {format_bytes(budget)}",
    }
    shown = partial(metric_facts, Display.PLAN, check, notes=notes)
    groups = (Group.ENERGY, Group.WORK, Group.STEP, Group.MEMORY)
    yield from shown(*groups, unlisted=() if plan.mode == StorageMode.DMA else ("stall_s",))
    if planned.arena is not None:
        yield from arena_facts(planned.arena)
    yield from shown(Group.STORAGE)
    homes = describe_homes(planned.graph, plan)
    if homes:
        reads = len(plan.first_reads(planned.graph))
        first = f", {count(reads)}first reads" if reads else ""
        yield row("state", format_bytes(planned.graph.state_bytes), homes + first)
    size = f"{count(len(encode(plan, planned.graph)))}B"
    yield row("binary size", size, "with --format binary")


def arena_facts(arena: Arena) -> Iterator[Fact]:
    """Yield the figures of the addresses of a plan."""
    from poetmodel.plan.listing import describe_fragmentation

    bound = describe_fragmentation(arena)
    yield Fact("arena_bytes", arena.bytes, "arena", format_bytes, bound)
    yield Fact("arena_lower_bound_bytes", arena.lower_bound_bytes)
    yield Fact("arena_fragmentation", arena.fragmentation)
    yield Fact("arena_alignment", arena.alignment)


_MODES: Final = {
    StorageMode.BLOCKING: "the core waits for each",
    StorageMode.DMA: "one at a time, while the core computes",
}


# -- plans that commands make ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A plan, and what the verifier found."""

    graph: Graph
    device: Device | None
    plan: Plan
    check: PlanCheck
    arena: Arena | None = None
    places: ArenaCheck | None = None
    """Check of the addresses, if there are any."""

    @classmethod
    def of(
        cls,
        graph: Graph,
        costs: Costs,
        schedule: Schedule,
        *,
        mode: StorageMode,
        ram_budget_bytes: int | None,
        aux_bytes: int | None,
        alignment: int | None = None,
        may_wait: bool = False,
    ) -> PlanResult:
        """Plan a schedule, with addresses where an alignment is given, and verify both."""
        from poetmodel.planner import make_plan

        if alignment is None:
            plan = make_plan(graph, costs, schedule, mode=mode, ram_budget_bytes=ram_budget_bytes)
            return cls.checked(graph, costs, plan, None, aux_bytes=aux_bytes)
        from poetmodel.solver.fitting import plan_and_place

        plan, arena = plan_and_place(
            graph,
            costs,
            schedule,
            mode=mode,
            ram_budget_bytes=ram_budget_bytes,
            alignment=alignment,
            may_wait=may_wait,
        )
        return cls.checked(graph, costs, plan, arena, aux_bytes=aux_bytes)

    @classmethod
    def checked(
        cls,
        graph: Graph,
        costs: Costs,
        plan: Plan,
        arena: Arena | None,
        *,
        aux_bytes: int | None,
    ) -> PlanResult:
        """Verify a plan and its addresses."""
        from poetmodel.plan import check_arena, check_plan

        return cls(
            graph=graph,
            device=costs.device,
            plan=plan,
            check=check_plan(graph, costs, plan, aux_bytes=aux_bytes),
            arena=arena,
            places=None if arena is None else check_arena(graph, plan, arena),
        )

    def placed(self) -> PlanResult:
        """Return the plan as it is with addresses, if it can run."""
        if self.check.violations:
            return self
        from poetmodel.placement import place
        from poetmodel.plan import check_arena

        arena = place(self.graph, self.plan)
        return replace(self, arena=arena, places=check_arena(self.graph, self.plan, arena))

    @property
    def violations(self) -> tuple[str, ...]:
        """Whatever is wrong with the plan, or with its addresses and what to do then."""
        if self.check.violations or self.places is None or self.arena is None:
            return self.check.violations
        budget = self.plan.ram_budget_bytes
        if budget is None or self.arena.bytes <= budget:
            return self.places.violations
        return (
            f"arena: {self.arena.bytes:,} B are {format_bytes(self.arena.bytes - budget)} above "
            f"the {budget:,} B that tensors may use; 'poetmodel solve' with --plan FILE --arena "
            "finds another schedule, or give a larger --ram",
        )

    @property
    def room(self) -> DeviceRam | None:
        """RAM of the device that the plan takes, if there is a device."""
        return DeviceRam.compare(self.device, self.graph, self.check.peak_ram_bytes)

    def lines(self, form: PlanFormat) -> list[str]:
        """Return the lines of a listing for people, or of trace events."""
        from poetmodel.plan.listing import plan_listing
        from poetmodel.plan.trace import trace_events, trace_text

        if form == PlanFormat.TRACE:
            return trace_text(trace_events(self.graph, self.plan, self.check)).splitlines()
        return plan_listing(self.graph, self.plan, self.check, self.arena).splitlines()

    def save(self, path: Path, form: PlanFormat) -> None:
        """Write the plan in one of its formats."""
        from poetmodel.files import write_bytes, write_text
        from poetmodel.plan import encode

        if form == PlanFormat.BINARY:
            write_bytes(path, encode(self.plan, self.graph))
        elif form in {PlanFormat.TEXT, PlanFormat.TRACE}:
            write_text(path, "".join(f"{escaped(line)}\n" for line in self.lines(form)))
        else:
            self.plan.save(path, self.check, self.arena)


def default_mode(
    device: Device | None, deadline_counts: str | None
) -> tuple[StorageMode, list[str]]:
    """Return the storage mode of a device, else the one that the deadline implies, and doubts."""
    mode = transfer_mode(device, deadline_counts)
    overlap = deadline_counts == DeadlineCounts.OVERLAP
    if device is None or mode == StorageMode.DMA or not overlap:
        return mode, []
    return mode, [
        "the time of this schedule lets transfers overlap computation, but the core of "
        f"{device.short_name} waits for each transfer, and so does the plan; 'poetmodel "
        "plan --mode dma' makes one with overlap"
    ]


def save_beside(
    result: SolveResult,
    *,
    plan: Path | None,
    plot: Path | None,
    fitted: Fitted | None = None,
) -> Iterator[Path]:
    """Write the plan and the map of a solve; yield each file that was written.

    `fitted` has the plan where addresses are wanted.
    """
    problem = result.problem
    if result.schedule is None:
        return
    if plan is not None and result.violations:
        print_warnings([f"{plan} was not written: the schedule breaks a rule of execution"])
    elif plan is not None:
        mode, doubts = default_mode(problem.costs.device, problem.deadline_counts)
        print_warnings(doubts)
        if fitted is not None and fitted.plan is not None:
            planned = PlanResult.checked(
                problem.graph,
                problem.costs,
                fitted.plan,
                fitted.arena,
                aux_bytes=problem.aux_limit_bytes,
            )
        else:
            minimized = None if result.simulation is None else result.simulation.planned_ram_bytes
            planned = PlanResult.of(
                problem.graph,
                problem.costs,
                result.schedule,
                mode=mode,
                ram_budget_bytes=minimized or problem.usable_ram_bytes,
                aux_bytes=problem.aux_limit_bytes,
            )
        if planned.violations:
            raise VerificationError(planned.violations)
        planned.save(plan, PlanFormat.JSON)
        yield plan
    if plot is not None:
        from poetmodel.report.drawing import draw_stages

        draw_stages(problem.graph, result.schedule, plot)
        yield plot
