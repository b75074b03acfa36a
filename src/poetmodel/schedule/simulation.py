"""The simulator: executes a schedule step by step and reports figures and violations.

Nothing else decides whether a schedule is valid. The simulator shares no code with the
formulations and the solvers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from copy import copy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from poetmodel.clock import check_time_limit
from poetmodel.device.room import RamUse, ram_use
from poetmodel.problem import DeadlineCounts
from poetmodel.problem.totals import CONSTANT, Count, Total
from poetmodel.schedule.homes import Homes
from poetmodel.schedule.relations import RELATIONS
from poetmodel.units import brief, format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from poetmodel.device import Costs
    from poetmodel.device.costs import CostTable
    from poetmodel.graph import Graph
    from poetmodel.problem.totals import Terms
    from poetmodel.schedule.relations import Pair, Schedule


class MemoryPoint(NamedTuple):
    """RAM in use at one step that executes something."""

    stage: int
    node: int
    """Step of the stage."""
    ram_bytes: int
    """Highest use during the step, workspace included [B]."""


class Rates(NamedTuple):
    """What the energy and the time of a schedule are made of."""

    table: CostTable
    """Costs of one computation or transfer each."""
    idle_power_w: float
    """Drawn during the time that counts [W]."""
    counts_transfers: bool
    """Whether transfers take time that counts."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of simulating a schedule; with violations, the figures mean little."""

    violations: tuple[str, ...]
    """Every broken rule, in words."""
    curve: tuple[MemoryPoint, ...]
    """RAM at every executed step, in order."""
    peak: MemoryPoint
    """The highest point of the curve (the first, where several tie)."""
    peak_tensors: tuple[int, ...]
    """Tensors in RAM at the peak, the step's own outputs included, ascending."""
    peak_use: RamUse
    """RAM in use at the peak, by kind; together that of the peak."""
    aux_used_bytes: int
    """All tensors ever paged out, and state that is not resident, together [B].

    Samples that start on storage do not count, and replacements take the room of what they replace.
    """
    written_bytes: int
    """Bytes paged out, each time counted [B]."""
    read_bytes: int
    """Bytes paged in, each time counted, the first reads of state on storage included [B]."""
    recomputations: Mapping[int, int] = field(default_factory=dict)
    """How often each node is computed beyond the first time, where it is."""
    page_ins: Mapping[int, int] = field(default_factory=dict)
    """How often each tensor is paged in, where it is; the first read of state included."""
    page_outs: Mapping[int, int] = field(default_factory=dict)
    """How often each tensor is paged out, where it is."""
    resident: frozenset[int] = frozenset()
    """State that has its home in RAM."""
    compute_s: float | None = None
    """Compute time [s]; None without costs."""
    transfer_s: float | None = None
    """Transfer time [s]; None without costs."""
    time_s: float | None = None
    """Time that the deadline counts [s]; None without costs."""
    energy_j: float | None = None
    """Energy of the step, idle power over the counted time included [J]; None without costs."""
    baseline_energy_j: float | None = None
    """Energy of a single pass [J]; None without costs."""
    overhead_j: float | None = None
    """Energy beyond the baseline, added up by itself so that small ones keep their digits [J]."""
    overtime_s: float | None = None
    """Counted time beyond a single pass, added up by itself likewise [s]."""
    recompute_s: float | None = None
    """Compute time beyond a single pass, added up by itself likewise [s]."""
    planned_s: float | None = None
    """Makespan of a plan whose transfers run beside the computing, where one was given [s]."""
    rates: Rates | None = field(default=None, repr=False, compare=False)
    """What each computation and transfer costs; None without costs."""
    steps_until_worn: float | None = None
    """How many training steps the storage endures, with ideal wear levelling.

    None where the device does not state its endurance or size, or nothing is written.
    """

    def __repr__(self) -> str:
        faults = f"{len(self.violations)} violations" if self.violations else "valid"
        energy = "" if self.energy_j is None else f"energy {format_joules(self.energy_j)}"
        makespan = "" if self.makespan_s is None else format_seconds(self.makespan_s)
        peak = f"peak RAM {format_bytes(self.peak_ram_bytes)}"
        return brief(self, faults, energy, peak, makespan)

    @property
    def peak_ram_bytes(self) -> int:
        """Highest RAM use [B]."""
        return self.peak.ram_bytes

    @property
    def makespan_s(self) -> float | None:
        """Time from begin to end [s]; None without costs.

        That of the plan, where there is one; else compute plus transfer time, one after the other.
        """
        if self.planned_s is not None:
            return self.planned_s
        if self.compute_s is None or self.transfer_s is None:
            return None
        return self.compute_s + self.transfer_s

    def total(self, graph: Graph, terms: Terms, *, extra: bool = False) -> float:
        """Return a sum of totals, by the keys of `poetmodel.problem.totals`.

        With `extra` that beyond a single pass, without the constant. Large parts may cancel out, so
        it is added up exactly, and rounded at the end where it is not whole.
        """
        value, whole = Fraction(0), True
        for key, coefficient in terms:
            kind, _, name = key.partition(":")
            if kind == Count.RECOMPUTATIONS:
                amount: Fraction | float = self.recomputations.get(graph.node_index[name], 0)
            elif kind in (Count.PAGE_INS, Count.PAGE_OUTS):
                counted = self.page_ins if kind == Count.PAGE_INS else self.page_outs
                amount = counted.get(graph.tensor_index[name], 0)
            elif kind == Count.RESIDENT:
                home = graph.tensor_index[name] in self.resident
                amount = home - extra  # a single pass has all state in RAM
            else:
                amount = self._figure(key, extra=extra)
            whole = whole and isinstance(coefficient, int) and isinstance(amount, int)
            value += Fraction(coefficient) * Fraction(amount)
        return int(value) if whole else float(value)

    def _figure(self, key: str, *, extra: bool) -> Fraction | float:
        """Return what a key other than a count stands for."""
        if key == CONSTANT:
            return 0 if extra else 1
        if key in (Total.BYTES_WRITTEN, Total.BYTES_READ):
            return self.written_bytes if key == Total.BYTES_WRITTEN else self.read_bytes
        beyond = self._beyond_a_pass[key]
        if extra or self.rates is None or key == Total.TRANSFER:
            return beyond
        if key == Total.ENERGY:
            return beyond + Fraction(self.baseline_energy_j or 0.0)
        return beyond + Fraction(sum(self.rates.table.compute_time_s))

    @cached_property
    def _beyond_a_pass(self) -> dict[str, Fraction | float]:
        """Energy, compute and transfer time beyond a single pass, exactly [J, s, s]."""
        if self.rates is None:
            return dict.fromkeys((Total.ENERGY, Total.COMPUTE, Total.TRANSFER), 0.0)
        table, rates = self.rates.table, self.rates
        compute_s = _exactly((self.recomputations, table.compute_time_s))
        energy_j = _exactly((self.recomputations, table.compute_energy_j))
        transfer_s = Fraction(0)
        if table.has_storage:
            moved = self.page_ins, self.page_outs
            times_s = table.page_in_time_s, table.page_out_time_s
            energies_j = table.page_in_energy_j, table.page_out_energy_j
            transfer_s = _exactly(*zip(moved, times_s, strict=True))
            energy_j += _exactly(*zip(moved, energies_j, strict=True))
        counted_s = compute_s + (transfer_s if rates.counts_transfers else 0)
        if self.planned_s is not None:
            counted_s = Fraction(self.overtime_s or 0.0)
        return {
            Total.ENERGY: energy_j + Fraction(rates.idle_power_w) * counted_s,
            Total.COMPUTE: compute_s,
            Total.TRANSFER: transfer_s,
        }

    @cached_property
    def valid(self) -> bool:
        """Whether there is no violation."""
        return not self.violations


def simulate(
    graph: Graph,
    costs: Costs | None,
    schedule: Schedule,
    *,
    deadline_counts: str | None = None,
    makespan_s: float | None = None,
) -> Simulation:
    """Simulate a schedule and report figures and every violation.

    Parameters
    ----------
    graph : Graph
        The training graph.
    costs : Costs or None
        For time and energy; without them only memory and validity are reported.
    schedule : Schedule
        The relations.
    deadline_counts : {'compute', 'serial', 'overlap'}, optional
        Which time counts, for `Simulation.time_s` and idle power. Default: ``overlap`` for a device
        whose storage has DMA, else ``serial``.
    makespan_s : float, optional
        For ``overlap``: how long a checked plan of the schedule takes [s]. Without it compute plus
        transfer time, which a plan without any overlap takes.

    Returns
    -------
    Simulation
        Peak, curve, storage, times, energy and violations. It never raises on a bad schedule.

    Notes
    -----
    Runs in time proportional to the pairs of the schedule times the number of inputs, not to the
    square of the graph: only steps that execute something are visited.
    """
    device = None if costs is None else costs.device
    mapped = device is not None and device.is_memory_mapped
    homes = Homes.of(graph, schedule.resident, mapped=mapped)
    execution = _ScheduleExecution(graph, schedule, homes)
    execution.run()
    peak_tensors, peak_use = execution.at_peak()
    if costs is not None and costs.pages is None and (schedule.M_in or schedule.M_out):
        execution.violations.append("tensors are paged, but the costs know of no auxiliary storage")
    if costs is not None and costs.pages is None and homes.on_storage:
        execution.violations.append(
            "state is not resident, but the costs know of no auxiliary storage"
        )
    sizes = graph.tensor_bytes
    computed = _counts(schedule.R, len(graph.nodes))
    read = _counts(schedule.M_in, len(sizes))
    read.update(homes.first_reads.values())
    written = _counts(schedule.M_out, len(sizes))
    return Simulation(
        violations=tuple(execution.violations),
        curve=tuple(execution.curve),
        peak=execution.peak if execution.curve else MemoryPoint(0, 0, 0),
        peak_tensors=peak_tensors,
        peak_use=peak_use,
        aux_used_bytes=homes.storage_bytes
        + sum(sizes[i] for i in written.keys() - homes.stored - graph.state_of.keys()),
        written_bytes=sum(sizes[i] * times for i, times in written.items()),
        read_bytes=sum(sizes[i] * times for i, times in read.items()),
        recomputations=Counter(k for t, k in schedule.R if 0 <= k < t),
        page_ins=read,
        page_outs=written,
        resident=homes.resident,
        steps_until_worn=(
            None
            if device is None
            else device.steps_until_worn((sizes[i], times) for i, times in written.items())
        ),
        **_figures(graph, costs, computed, (read, written), deadline_counts, makespan_s),
    )


def timed_anew(
    simulation: Simulation,
    graph: Graph,
    costs: Costs,
    schedule: Schedule,
    *,
    deadline_counts: str | None,
    makespan_s: float | None,
) -> Simulation:
    """Return what `simulate` would with other times, without another walk.

    Of one simulation times and energies alone depend on which time counts.
    """
    computed = _counts(schedule.R, len(graph.nodes))
    moved = Counter(simulation.page_ins), Counter(simulation.page_outs)
    figures = _figures(graph, costs, computed, moved, deadline_counts, makespan_s)
    return replace(simulation, **figures)


class _ScheduleExecution:
    """The state of one simulation: what is in RAM and on storage now."""

    def __init__(self, graph: Graph, schedule: Schedule, homes: Homes) -> None:
        self.graph = graph
        self.homes = homes
        self.sizes = [0 if i in graph.state_of else size for i, size in enumerate(homes.sizes)]
        self.inputs = homes.inputs
        self.outputs = homes.outputs
        self.node_of = graph.node_of
        self.step_bytes = homes.step_bytes
        faults = dict(homes.faults_of(schedule))
        self.violations = [
            *homes.unknown,
            *(f"{name}[{t},{i}]: {fault}" for (name, t, i), fault in faults.items()),
        ]
        self.curve: list[MemoryPoint] = []
        self.peak = MemoryPoint(0, 0, -1)
        self._peak_start: tuple[set[int], set[int]] = (set(), set())
        self.ram: set[int] = set()
        self.ram_bytes = homes.ram_bytes
        self.aux = set(homes.stored)
        self.stages: dict[str, list[list[int]]] = {}
        for name in RELATIONS:
            pairs: Sequence[Pair] = getattr(schedule, name)
            if faults and name != "R":  # what state does not allow is not executed
                pairs = [(t, i) for t, i in pairs if (name, t, i) not in faults]
            self.stages[name] = self._by_stage(name, pairs)

    def _by_stage(self, name: str, pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Return the indices of each stage; pairs that cannot be are violations."""
        nodes, of_nodes = self.graph.nodes, name == "R"
        n = len(nodes)
        made_by: Sequence[int] = range(n) if of_nodes else self.node_of
        limit, later = len(made_by), name not in ("R", "M_out")
        first = [node + later for node in made_by]
        rows: list[list[int]] = [[] for _ in range(n + 1)]
        for t, group in groupby(pairs, key=itemgetter(0)):
            check_time_limit()
            row = [k for _, k in group]
            known = not of_nodes and 0 <= t < n and min(row) >= 0 and max(row) < limit
            if known and max(map(first.__getitem__, row)) <= t:  # quick: there are millions
                rows[t].extend(row)
                continue
            for k in row:
                fault = ""
                if not (0 <= k < limit and 0 <= t < n):
                    fault = "the graph has no such stage or index"
                elif t < first[k]:
                    what = f"node {nodes[k].name!r}" if of_nodes else self._tensor(k)
                    fault = f"{what} is first made in stage {made_by[k]}"
                else:
                    rows[t].append(k)
                    if of_nodes and k < t and not nodes[k].recomputable:
                        fault = f"node {nodes[k].name!r} must not be computed again"
                if fault:
                    self.violations.append(f"{name}[{t},{k}]: {fault}")
        return rows

    def _tensor(self, i: int) -> str:
        return f"tensor {self.graph.tensors[i].name!r}"

    def run(self) -> None:
        for t in range(len(self.graph.nodes)):
            check_time_limit()
            self._begin(t)
            start = (set(self.ram), set(self.aux))
            self._steps(t)
            if self.peak.stage == t:
                self._peak_start = start

    def at_peak(self) -> tuple[tuple[int, ...], RamUse]:
        """Execute the stage of the peak again, up to its step; return the tensors and their use."""
        if not self.curve:
            return (), RamUse()
        t, k = self.peak.stage, self.peak.node
        again = copy(self)
        again.violations, again.curve = [], []
        again.ram, again.aux = map(set, self._peak_start)
        again.ram_bytes = self._bytes_of(again.ram)
        dying = again._done_with(t).get(k, ())  # noqa: SLF001 - of the same class
        again._steps(t, stop=k)  # noqa: SLF001 - of the same class
        held = tuple(sorted((again.ram | self.homes.resident) - self.graph.state_of.keys()))
        if not _contains(self.stages["R"][t], k):
            return held, ram_use(self.graph, held)
        # An old copy of an output, kept or paged in, counts beside the new one.
        old = self._peak_start[0].union(self.stages["M_in"][t]).intersection(self.outputs[k])
        return held, ram_use(self.graph, (*held, *old), step=k, dying=dying)

    def _bytes_of(self, ram: set[int]) -> int:
        """Return what some tensors and the resident state take of RAM."""
        return self.homes.ram_bytes + sum(self.sizes[i] for i in ram)

    def _begin(self, t: int) -> None:
        kept = set(self.stages["S_RAM"][t])
        for i in sorted(kept - self.ram) if kept != self.ram else ():
            self.violations.append(
                f"S_RAM[{t},{i}]: {self._tensor(i)} is not in RAM when stage {t} begins"
            )
        for i in sorted(set(self.stages["S_AUX"][t]) - self.aux):
            self.violations.append(
                f"S_AUX[{t},{i}]: {self._tensor(i)} is not on storage when stage {t} begins"
            )
        if self.ram != kept:
            # What the violations say is missing stays missing.
            self.ram &= kept
            self.ram_bytes = self._bytes_of(self.ram)

    def _steps(self, t: int, *, stop: int | None = None) -> None:
        computed = set(self.stages["R"][t])
        if t not in computed:
            self.violations.append(
                f"R[{t},{t}]: node {self.graph.nodes[t].name!r} is not computed in its own stage"
            )
        page_in = self._by_node(self.stages["M_in"][t])
        page_out = self._by_node(self.stages["M_out"][t])
        done_with = self._done_with(t)
        for k in sorted(computed | page_in.keys() | page_out.keys() | done_with.keys()):
            for i in page_in.get(k, ()):
                self._page_in(t, k, i)
            shared_bytes = 0
            if k in computed:
                if self.graph.in_place_of[k]:
                    shared_bytes = self.graph.shared_bytes(k, done_with.get(k, ()))
                self._compute(t, k, shared_bytes)
            for i in page_out.get(k, ()):
                self._page_out(t, k, i, shared_bytes)
            if k == stop:
                return
            for i in done_with.get(k, ()):
                if i in self.ram:
                    self.ram.remove(i)
                    self.ram_bytes -= self.sizes[i]

    def _by_node(self, tensors: Iterable[int]) -> dict[int, list[int]]:
        made_by: dict[int, list[int]] = {}
        for i in tensors:
            made_by.setdefault(self.node_of[i], []).append(i)
        return made_by

    def _done_with(self, t: int) -> dict[int, list[int]]:
        """Return for each step of stage `t` the tensors that may go after it.

        Of all that the stage may hold and the next one does not begin with, each at its last use,
        or at its own step where nothing in the stage uses it.
        """
        computed = self.stages["R"][t]
        held = self.ram.union(self.stages["M_in"][t])
        last_use: dict[int, int] = {}
        for k in computed:  # ascending, so that the last use stays
            held.update(self.outputs[k])
            for i in self.inputs[k]:
                last_use[i] = k
        done: dict[int, list[int]] = {}
        for i in held.difference(self.stages["S_RAM"][t + 1]):
            done.setdefault(last_use.get(i, self.node_of[i]), []).append(i)
        return done

    def _page_in(self, t: int, k: int, i: int) -> None:
        listed = self.stages["S_AUX"][t]
        if i not in self.aux or not _contains(listed, i):
            self.violations.append(
                f"M_in[{t},{i}]: {self._tensor(i)} is not on storage when stage {t} begins"
            )
        elif i in self.ram:
            self.violations.append(f"M_in[{t},{i}]: {self._tensor(i)} is in RAM already")
        else:
            self.ram.add(i)
            self.ram_bytes += self.sizes[i]
            self._record(t, k, self.ram_bytes)

    def _compute(self, t: int, k: int, shared_bytes: int) -> None:
        """Compute node `k`, whose outputs take so much over from inputs that die at its step."""
        ram = self.ram
        if not ram.issuperset(self.inputs[k]):
            tensors = self.graph.tensors
            missing = ", ".join(repr(tensors[i].name) for i in self.inputs[k] if i not in ram)
            node = self.graph.nodes[k].name
            self.violations.append(f"R[{t},{k}]: node {node!r} needs {missing} in RAM")
        self._record(t, k, self.ram_bytes + self.step_bytes[k] - shared_bytes)
        for i in self.outputs[k]:
            if i not in ram:
                ram.add(i)
                self.ram_bytes += self.sizes[i]

    def _page_out(self, t: int, k: int, i: int, shared_bytes: int) -> None:
        if i not in self.ram:
            self.violations.append(f"M_out[{t},{i}]: {self._tensor(i)} is not in RAM at step {k}")
            return
        self.aux.add(i)
        self._record(t, k, self.ram_bytes - shared_bytes)

    def _record(self, t: int, k: int, ram_bytes: int) -> None:
        point = MemoryPoint(t, k, ram_bytes)
        if ram_bytes > self.peak.ram_bytes:
            self.peak = point
        curve = self.curve
        if curve and curve[-1].node == k and curve[-1].stage == t:
            if ram_bytes > curve[-1].ram_bytes:
                curve[-1] = point
        else:
            curve.append(point)


def _contains(ordered: list[int], i: int) -> bool:
    place = bisect_left(ordered, i)
    return place < len(ordered) and ordered[place] == i


def _figures(
    graph: Graph,
    costs: Costs | None,
    computed: Counter[int],
    moved: tuple[Counter[int], Counter[int]],
    deadline_counts: str | None,
    makespan_s: float | None,
) -> dict[str, Any]:
    """Return times and energies, by the names of `Simulation`; none without costs."""
    if costs is None:
        return {}
    table, device = costs.table(graph), costs.device
    idle_w = device.idle_power_w if device is not None else 0.0
    overlaps = device is not None and device.has_dma
    counts = deadline_counts or (DeadlineCounts.OVERLAP if overlaps else DeadlineCounts.SERIAL)
    compute = table.compute_totals(computed)
    extra = table.compute_totals({k: computed[k] - 1 for k in range(len(graph.nodes))})
    transfer = table.transfer_totals(*moved)
    counted_s = 0.0 if counts == DeadlineCounts.COMPUTE else transfer.time_s
    time_s, extra_s = compute.time_s + counted_s, extra.time_s + counted_s
    pass_s = sum(table.compute_time_s)
    planned_s = makespan_s if counts == DeadlineCounts.OVERLAP else None
    if planned_s is not None:
        time_s, extra_s = planned_s, max(0.0, planned_s - pass_s)
    return {
        "compute_s": compute.time_s,
        "transfer_s": transfer.time_s,
        "time_s": time_s,
        "energy_j": compute.energy_j + transfer.energy_j + idle_w * time_s,
        "baseline_energy_j": sum(table.compute_energy_j) + idle_w * pass_s,
        "overhead_j": extra.energy_j + transfer.energy_j + idle_w * extra_s,
        "rates": Rates(table, idle_w, counts != DeadlineCounts.COMPUTE),
        "overtime_s": extra_s,
        "recompute_s": extra.time_s,
        "planned_s": planned_s,
    }


def _exactly(*columns: tuple[Mapping[int, int], Sequence[float]]) -> Fraction:
    """Return the sum of values, each counted so many times."""
    return sum(
        (
            times * Fraction(values[item])
            for counts, values in columns
            for item, times in counts.items()
        ),
        Fraction(0),
    )


def _counts(pairs: Iterable[tuple[int, int]], length: int) -> Counter[int]:
    return Counter(k for _, k in pairs if 0 <= k < length)
