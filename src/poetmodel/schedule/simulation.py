"""The simulator: executes a schedule step by step and returns metrics and violations.

Only the simulator decides whether a schedule is valid. It uses no code of formulations and solvers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from poetmodel.device.ram import RamUse, ram_use
from poetmodel.problem import DeadlineCounts
from poetmodel.problem.totals import CONSTANT, Count, Key, Total
from poetmodel.schedule.compilation import compile_schedule
from poetmodel.schedule.homes import Homes
from poetmodel.schedule.instructions import Op
from poetmodel.schedule.machine import Content, Machine
from poetmodel.schedule.step_work import StepWork
from poetmodel.units import brief, format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from poetmodel.device import Costs, Device
    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.schedule.relations import Pair, Schedule


class MemoryPoint(NamedTuple):
    """RAM in use at one step that computes or transfers."""

    stage: int
    """Stage of the step."""
    node: int
    """Node of the step."""
    ram_bytes: int
    """Maximum during the step, including workspace [B]."""


class CostParameters(NamedTuple):
    """Parameters from which energy and time of a schedule are recomputed exactly."""

    work: StepWork
    """Computations and transfers, with the costs of single ones."""
    idle_power_w: float
    """Power drawn during the counted time [W]."""
    counts_transfers: bool
    """Whether the counted time includes transfers."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of simulating a schedule; with violations, metrics are unreliable."""

    violations: tuple[str, ...]
    """Messages of violated rules; empty for a valid schedule.

    Invalid entries and missing inputs hide other faults of `Machine`."""
    curve: tuple[MemoryPoint, ...]
    """RAM at every step that computes or transfers, in execution order."""
    peak: MemoryPoint
    """The highest point of the curve (the first, if several are equal); zeros without a curve."""
    peak_tensors: tuple[int, ...]
    """Tensors in RAM at the step of the peak, including its outputs, ascending.

    Replacements of state are not listed: they are written over their state tensors."""
    peak_use: RamUse
    """RAM in use at the peak, by kind; the sum is the peak."""
    aux_used_bytes: int
    """Size of all tensors ever paged out, and of state that is not resident [B].

    Samples that start on storage do not count; replacements share the storage of their state."""
    written_bytes: int
    """Bytes paged out, once per page-out that is no write of a commit, plus bytes that commits
    write [B]."""
    read_bytes: int
    """Bytes paged in, once per page-in, including first reads of state on storage [B]."""
    recomputations: Mapping[int, int] = field(default_factory=dict)
    """Number of recomputations of each node that has any."""
    page_ins: Mapping[int, int] = field(default_factory=dict)
    """Number of page-ins of each tensor that has any, including first reads of state."""
    page_outs: Mapping[int, int] = field(default_factory=dict)
    """Number of page-outs of each tensor that has any."""
    stage_entries: frozenset[tuple[str, int, int]] = field(default=frozenset(), repr=False)
    """Recomputations and page-ins of the schedule: (`Count`, stage, node or tensor).

    First reads of state are not included."""
    committed_bytes: int = 0
    """Average bytes that commits write per training step, rounded up [B].

    The same for every schedule; included in `written_bytes`."""
    resident: frozenset[int] = frozenset()
    """State whose home is RAM."""
    compute_s: float | None = None
    """Compute time [s]; None without costs."""
    transfer_s: float | None = None
    """Transfer time, including commits [s]; None without costs."""
    time_s: float | None = None
    """Time that the deadline counts [s]; None without costs."""
    energy_j: float | None = None
    """Energy of the training step, including commits and idle power over the counted time [J].

    None without costs."""
    baseline_energy_j: float | None = None
    """Energy of a single pass, commits and idle power included [J]; None without costs."""
    overhead_j: float | None = None
    """Energy beyond the baseline, summed separately so that small values retain their digits [J].

    The energy of recomputations and of transfers except commits, and idle power over `overtime_s`.
    None without costs."""
    overtime_s: float | None = None
    """Counted time beyond a single pass [s]; None without costs.

    Summed separately over recomputations and counted transfers except commits. With `planned_s`,
    the difference between `planned_s` and the counted time of a single pass, at least 0."""
    recompute_s: float | None = None
    """Compute time beyond a single pass, summed separately [s]; None without costs."""
    planned_s: float | None = None
    """Makespan of a plan with overlapping transfers [s].

    None without a plan, and unless the deadline counts ``overlap``."""
    planned_ram_bytes: int | None = None
    """RAM of the plan if RAM is minimized [B]; else None.

    Early page-ins may raise the RAM of the plan above the peak."""
    cost_parameters: CostParameters | None = field(default=None, repr=False, compare=False)
    """Costs from which `total` recomputes sums exactly; None without costs."""
    steps_until_worn: float | None = None
    """Number of training steps until storage is worn, with ideal wear levelling.

    None without a device that has storage, if the device states no endurance or size, or if no
    bytes are written."""

    def __repr__(self) -> str:
        faults = f"{len(self.violations)} violations" if self.violations else "valid"
        energy = "" if self.energy_j is None else f"energy {format_joules(self.energy_j)}"
        makespan = "" if self.makespan_s is None else format_seconds(self.makespan_s)
        peak = f"peak RAM {format_bytes(self.peak_ram_bytes)}"
        return brief(self, faults, energy, peak, makespan)

    @property
    def peak_ram_bytes(self) -> int:
        """Maximum RAM use [B]."""
        return self.peak.ram_bytes

    @property
    def needed_ram_bytes(self) -> int:
        """RAM that a problem can minimize [B]: `planned_ram_bytes`, or the peak if that is None."""
        plan_bytes = self.planned_ram_bytes
        return self.peak_ram_bytes if plan_bytes is None else plan_bytes

    @property
    def paged_bytes(self) -> int:
        """Bytes that page-outs write, without the bytes that commits write [B]."""
        return self.written_bytes - self.committed_bytes

    @property
    def makespan_s(self) -> float | None:
        """Time from first to last action [s]; None without costs.

        `planned_s`, the makespan of a plan, unless that is None; else compute plus transfer time.
        """
        if self.planned_s is not None:
            return self.planned_s
        if self.compute_s is None or self.transfer_s is None:
            return None
        return self.compute_s + self.transfer_s

    def total(
        self, graph: Graph, terms: Iterable[tuple[str, float]], *, only_excess: bool = False
    ) -> float:
        """Return the sum of (key, coefficient) terms, with keys of `poetmodel.problem.totals`.

        With `only_excess`, each term counts only its excess over a single pass with all state in
        RAM, and the constant counts 0. Large terms may cancel out, so terms are added exactly. The
        sum is rounded once, at the end, or returned as an int if all values and coefficients are
        integers. Without costs, energies and times are 0. Raises `KeyError` for a key that names no
        total, node or tensor.
        """
        value, is_integer = Fraction(0), True
        for key, coefficient in terms:
            kind, stage, name = Key.parse(key)
            if stage is not None:
                index = graph.node_index if kind == Count.RECOMPUTATIONS else graph.tensor_index
                term_value: Fraction | float = int((kind, stage, index[name]) in self.stage_entries)
            elif kind == Count.RECOMPUTATIONS:
                term_value = self.recomputations.get(graph.node_index[name], 0)
            elif kind in (Count.PAGE_INS, Count.PAGE_OUTS):
                counts = self.page_ins if kind == Count.PAGE_INS else self.page_outs
                term_value = counts.get(graph.tensor_index[name], 0)
            elif kind == Count.RESIDENT:
                is_resident = graph.tensor_index[name] in self.resident
                term_value = is_resident - only_excess  # In a single pass, all state is in RAM.
            else:
                term_value = self._total_value(key, only_excess=only_excess)
            is_integer = is_integer and isinstance(coefficient, int) and isinstance(term_value, int)
            value += Fraction(coefficient) * Fraction(term_value)
        return int(value) if is_integer else float(value)

    def _total_value(self, key: str, *, only_excess: bool) -> Fraction | float:
        """Return a total, or its excess over a single pass; the constant is 1 or 0."""
        if key == CONSTANT:
            return 0 if only_excess else 1
        if key == Total.BYTES_READ:
            return self.read_bytes
        if key == Total.BYTES_WRITTEN:
            return self.paged_bytes if only_excess else self.written_bytes
        excess = self._excess_over_pass[key]
        if only_excess or self.cost_parameters is None:
            return excess
        if key == Total.TRANSFER:
            return excess + Fraction(self.cost_parameters.work.commit_cost.time_s)
        if key == Total.ENERGY:
            return excess + Fraction(self.baseline_energy_j or 0.0)
        return excess + Fraction(self.cost_parameters.work.pass_cost.time_s)

    @cached_property
    def _excess_over_pass(self) -> dict[str, Fraction | float]:
        """Energy, compute and transfer time beyond a single pass, by `Total`: exact [J, s, s]."""
        parameters = self.cost_parameters
        table = None if parameters is None else parameters.work.table
        if parameters is None or table is None:
            return dict.fromkeys((Total.ENERGY, Total.COMPUTE, Total.TRANSFER), 0.0)
        work, idle_power_w, counts_transfers = parameters
        compute_s = _exact_weighted_sum((self.recomputations, table.compute_time_s))
        energy_j = _exact_weighted_sum((self.recomputations, table.compute_energy_j))
        transfer_s = Fraction(0)
        if table.has_storage:
            transfer_counts = self.page_ins, work.uncommitted_page_outs
            times_s = table.page_in_time_s, table.page_out_time_s
            energies_j = table.page_in_energy_j, table.page_out_energy_j
            transfer_s = _exact_weighted_sum(*zip(transfer_counts, times_s, strict=True))
            energy_j += _exact_weighted_sum(*zip(transfer_counts, energies_j, strict=True))
        counted_s = compute_s + (transfer_s if counts_transfers else 0)
        if self.planned_s is not None:
            counted_s = Fraction(self.overtime_s or 0.0)
        return {
            Total.ENERGY: energy_j + Fraction(idle_power_w) * counted_s,
            Total.COMPUTE: compute_s,
            Total.TRANSFER: transfer_s,
        }

    @cached_property
    def valid(self) -> bool:
        """Whether there are no violations."""
        return not self.violations


def simulate(
    graph: Graph,
    costs: Costs | None,
    schedule: Schedule,
    *,
    deadline_counts: str | None = None,
    makespan_s: float | None = None,
) -> Simulation:
    """Simulate a schedule; return its metrics and violations.

    Parameters
    ----------
    graph : Graph
        The training graph.
    costs : Costs or None
        For time, energy, commits and memory-mapped storage; None for memory and validity only.
    schedule : Schedule
        The relations.
    deadline_counts : {'compute', 'serial', 'overlap'}, optional
        The time that counts, for `Simulation.time_s` and idle power. Default: ``overlap`` for a
        device whose storage has DMA, else ``serial``.
    makespan_s : float, optional
        For ``overlap``, the makespan of a checked plan of the schedule [s]; otherwise ignored.
        Default: compute plus transfer time, the makespan of a plan without overlap.

    Returns
    -------
    Simulation
        Peak, curve, storage, times, energy and violations. `planned_ram_bytes` is None.

    Raises
    ------
    CostError
        If the costs do not match the graph.
    TooLargeError
        If spans with invalid entries have more than `MAX_PAIRS` pairs.
    TimeLimitError
        If a time limit of the calling context passes.

    Notes
    -----
    The time of a simulation is proportional to the number of spans, of transfers, and of inputs of
    computations, not to the square of the graph: only steps that execute instructions are visited.
    """
    device = None if costs is None else costs.device
    is_mapped = device is not None and device.is_memory_mapped
    homes = Homes.from_resident(graph, schedule.resident, is_mapped=is_mapped)
    program, steps, faults = compile_schedule(homes, schedule)
    machine = Machine(homes, program, steps=steps)
    machine.execute()
    violations = _collect_violations(machine, steps, faults)
    if costs is not None and costs.pages is None:
        if schedule.M_in or schedule.M_out:
            violations.append("tensors are paged, but the costs have no auxiliary storage")
        if homes.on_storage:
            violations.append("state is not resident, but the costs have no auxiliary storage")
    curve = _make_curve(machine, steps)
    peak = max(curve, key=attrgetter("ram_bytes"), default=MemoryPoint(0, 0, 0))
    peak_tensors, peak_use = _find_peak_content(machine, steps, peak)
    sizes = graph.tensor_bytes
    work = StepWork(
        table=None if costs is None else costs.table(graph),
        computations=_count_items(schedule.R, len(graph.nodes)),
        page_ins=_count_items(schedule.M_in, len(sizes)),
        page_outs=_count_items(schedule.M_out, len(sizes)),
    )
    work.page_ins.update(homes.first_reads.values())
    commit = None if work.table is None else work.table.commit
    return Simulation(
        violations=tuple(violations),
        curve=curve,
        peak=peak,
        peak_tensors=peak_tensors,
        peak_use=peak_use,
        **work.traffic(homes)._asdict(),
        committed_bytes=work.committed_bytes,
        recomputations=Counter(k for t, k in schedule.R if 0 <= k < t),
        page_ins=work.page_ins,
        page_outs=work.page_outs,
        stage_entries=frozenset(
            (
                *((Count.RECOMPUTATIONS, t, k) for t, k in schedule.R if k < t),
                *((Count.PAGE_INS, t, i) for t, i in schedule.M_in),
            )
        ),
        resident=homes.resident,
        steps_until_worn=(
            None
            if device is None
            else device.steps_until_worn(
                ((sizes[i], count) for i, count in work.uncommitted_page_outs.items()),
                committed_blocks=0 if commit is None else commit.worn_blocks,
            )
        ),
        **_time_and_energy_metrics(work, device, deadline_counts, makespan_s),
    )


def replace_makespan(
    simulation: Simulation,
    problem: Problem,
    *,
    makespan_s: float | None,
    ram_bytes: int | None = None,
) -> Simulation:
    """Return a copy of the simulation with the times and energies of a plan with this makespan.

    It is ignored unless ``overlap`` counts. `ram_bytes` is of that plan if RAM is minimized.
    """
    costs, device = simulation.cost_parameters, problem.costs.device
    metrics = (
        {}
        if costs is None
        else _time_and_energy_metrics(costs.work, device, problem.deadline_counts, makespan_s)
    )
    return replace(simulation, planned_ram_bytes=ram_bytes, **metrics)


def _collect_violations(
    machine: Machine, steps: Sequence[Pair], faults: Iterable[tuple[int, str]]
) -> list[str]:
    """Return messages of `faults` (position, message) and missing inputs, in execution order.

    Other faults of the machine count only without these, since they may follow from them.
    """
    nodes, tensors = machine.graph.nodes, machine.graph.tensors
    missing_inputs: dict[int, list[str]] = {}
    for fault in machine.faults:
        if fault.missing_input is not None:
            missing_inputs.setdefault(fault.position, []).append(
                repr(tensors[fault.missing_input].name)
            )
    violations = list(faults)
    for position, names in missing_inputs.items():
        t, k = steps[position]
        requirement = f"needs {', '.join(names)} in RAM"
        violations.append((position, f"R[{t},{k}]: node {nodes[k].name!r} {requirement}"))
    violations.sort(key=itemgetter(0))  # Stable: invalid entries precede missing inputs.
    return [message for _, message in violations] or [fault.message for fault in machine.faults]


def _make_curve(machine: Machine, steps: Sequence[Pair]) -> tuple[MemoryPoint, ...]:
    """Return the maximum RAM of each step that computes or transfers [B], in execution order."""
    max_bytes_of_step: dict[Pair, int] = {}
    for step, (op, _), record in zip(steps, machine.program, machine.records, strict=True):
        if op != Op.FREE and record.peak_bytes > max_bytes_of_step.get(step, -1):
            max_bytes_of_step[step] = record.peak_bytes
    return tuple(MemoryPoint(t, k, ram_bytes) for (t, k), ram_bytes in max_bytes_of_step.items())


def _find_peak_content(
    machine: Machine, steps: Sequence[Pair], peak: MemoryPoint
) -> tuple[tuple[int, ...], RamUse]:
    """Return the tensors in RAM at the step of the peak, ascending, and the RAM use by kind."""
    graph, step = machine.graph, (peak.stage, peak.node)
    active_positions = [
        position
        for position, (op, _) in enumerate(machine.program)
        if steps[position] == step and op != Op.FREE
    ]
    if not active_positions:
        return (), RamUse()
    copies = [
        copy.index
        for copy in machine.copies
        if copy.content == Content.OUTPUT
        and copy.begin <= active_positions[-1]
        and copy.end >= active_positions[0]
    ]
    compute_positions = [
        position for position in active_positions if machine.program[position].op == Op.COMPUTE
    ]
    overwritten_tensors = [
        i for position in compute_positions for i in machine.records[position].in_place
    ]
    peak_use = ram_use(
        graph,
        copies,
        step=peak.node if compute_positions else None,
        dying_tensors=overwritten_tensors,
    )
    return tuple(sorted(set(copies))), peak_use


def _time_and_energy_metrics(
    work: StepWork, device: Device | None, deadline_counts: str | None, makespan_s: float | None
) -> dict[str, Any]:
    """Return times, energies and what they count as fields of `Simulation`; {} without costs."""
    table = work.table
    if table is None:
        return {}
    idle_w = device.idle_power_w if device is not None else 0.0
    has_dma = device is not None and device.has_dma
    counted_time = deadline_counts or (DeadlineCounts.OVERLAP if has_dma else DeadlineCounts.SERIAL)
    pass_s, overtime_s = work.pass_cost.time_s, work.recompute_cost.time_s
    time_s = work.compute_cost.time_s
    if counted_time != DeadlineCounts.COMPUTE:
        time_s, overtime_s = time_s + work.transfer_s, overtime_s + work.transfer_cost.time_s
    if counted_time != DeadlineCounts.COMPUTE and table.commit is not None:
        is_serial = counted_time == DeadlineCounts.SERIAL
        pass_s += work.commit_cost.time_s if is_serial else table.commit.other_cost.time_s
    planned_s = makespan_s if counted_time == DeadlineCounts.OVERLAP else None
    if planned_s is not None:
        time_s, overtime_s = planned_s, max(0.0, planned_s - pass_s)
    overhead_cost = work.recompute_cost + work.transfer_cost
    return {
        "compute_s": work.compute_cost.time_s,
        "transfer_s": work.transfer_s,
        "time_s": time_s,
        "energy_j": work.energy_j(idle_w, time_s),
        "baseline_energy_j": (work.pass_cost + work.commit_cost).energy_j + idle_w * pass_s,
        "overhead_j": overhead_cost.energy_j + idle_w * overtime_s,
        "cost_parameters": CostParameters(work, idle_w, counted_time != DeadlineCounts.COMPUTE),
        "overtime_s": overtime_s,
        "recompute_s": work.recompute_cost.time_s,
        "planned_s": planned_s,
    }


def _exact_weighted_sum(*columns: tuple[Mapping[int, int], Sequence[float]]) -> Fraction:
    """Return the exact sum of count * value over all items of the (counts, values) `columns`."""
    return sum(
        (
            count * Fraction(values[item])
            for counts, values in columns
            for item, count in counts.items()
        ),
        Fraction(0),
    )


def _count_items(pairs: Iterable[tuple[int, int]], length: int) -> Counter[int]:
    """Count the pairs by their second index; skip indices below 0, or of `length` or more."""
    return Counter(k for _, k in pairs if 0 <= k < length)
