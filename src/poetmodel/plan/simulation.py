"""The simulator of plans: executes a program with two clocks and reports figures and violations.

It shares no code with the planner, the formulations and the solvers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from poetmodel.device import StorageMode
from poetmodel.errors import PlanError
from poetmodel.problem import RELATIVE_TOLERANCE
from poetmodel.schedule.homes import StateAccess
from poetmodel.schedule.instructions import Op
from poetmodel.units import brief, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from poetmodel.device import Costs, CostTable, Device
    from poetmodel.graph import Graph
    from poetmodel.plan.program import Plan
    from poetmodel.schedule.homes import Homes
    from poetmodel.schedule.instructions import Program


class Moment(NamedTuple):
    """When one instruction acts, and the RAM it leaves."""

    issued_s: float
    """The core's clock when the instruction comes up [s]; its RAM changes at this time."""
    start_s: float
    """When its work begins, on the bus for a ``dma`` transfer [s]."""
    end_s: float
    """When its work ends [s]; for a wait, start to end is stall."""
    high_bytes: int
    """Highest RAM use during it, workspace and old copies included [B]."""
    ram_bytes: int
    """RAM in use after it [B]."""
    in_place: tuple[int, ...] = ()
    """The inputs that a computation writes its outputs over, ascending."""


@dataclass(frozen=True, kw_only=True)
class PlanCheck:
    """The result of simulating a plan; with violations, the figures mean little."""

    violations: tuple[str, ...]
    """Every broken rule and limit, in words."""
    moments: tuple[Moment, ...] = field(repr=False)
    """One per instruction of the program; without costs all times are 0."""
    peak_ram_bytes: int
    """Highest RAM use [B]."""
    peak_position: int | None
    """The first instruction with that use; None for an empty program."""
    aux_used_bytes: int
    """All tensors ever paged out, and state that is not resident, together [B].

    Samples that start on storage do not count, and replacements take the room of what they replace.
    """
    written_bytes: int
    """Bytes paged out, each time counted [B]."""
    read_bytes: int
    """Bytes paged in, first reads of state included, each time counted [B]."""
    compute_s: float | None = None
    """Compute time [s]; None without costs."""
    transfer_s: float | None = None
    """Transfer time [s]; None without costs."""
    stall_s: float | None = None
    """Time that the core waits for the bus [s]; None without costs."""
    makespan_s: float | None = None
    """When both clocks have stopped [s]; None without costs."""
    energy_j: float | None = None
    """Energy of the step [J]: idle power is drawn over the makespan; None without costs."""

    def __repr__(self) -> str:
        faults = f"{len(self.violations)} violations: {'; '.join(self.violations)}"
        peak = f"peak RAM {format_bytes(self.peak_ram_bytes)}"
        makespan = "" if self.makespan_s is None else format_seconds(self.makespan_s)
        return brief(self, faults if self.violations else "valid", peak, makespan)

    @property
    def valid(self) -> bool:
        """Whether there is no violation."""
        return not self.violations


def check_plan(
    graph: Graph,
    costs: Costs | None,
    plan: Plan,
    *,
    ram_budget_bytes: int | None = None,
    aux_bytes: int | None = None,
) -> PlanCheck:
    """Simulate a plan and report figures and every violation.

    Parameters
    ----------
    graph : Graph
        The training graph.
    costs : Costs or None
        For times and energy; without them only memory and order are checked.
    plan : Plan
        The program.
    ram_budget_bytes : int, optional
        RAM for tensors and workspaces [B]. Default: the plan's own budget, where it has one.
    aux_bytes : int, optional
        Room for paged-out tensors [B]. Default: that of the device of the costs, where it is
        limited.

    Returns
    -------
    PlanCheck
        Times, RAM, energy and violations. It never raises on a bad program.

    Raises
    ------
    PlanError
        If the plan names another graph.

    Notes
    -----
    Each computation must find its inputs in RAM and at rest; a page-in takes its RAM at once; a
    transfer that is not waited for is under way; nothing may be freed while it is. A blocking
    program has one clock: its makespan is compute plus transfer time, added up by kind, as a
    schedule's is. A ``dma`` program runs its transfers one at a time, in program order, beside the
    computing.

    The ``compute`` of state on storage is its first read, a page-in like any other. State that is
    resident takes RAM throughout. A computation writes a replacement over what it replaces, and
    operates in place over an input at rest that is freed right after it.
    """
    check_identity(graph, plan)
    device = costs.device if costs is not None else None
    homes = plan.homes(graph)
    table = None if costs is None else costs.table(graph)
    execution = _PlanExecution(graph, table, plan, homes)
    execution.violations.extend(_faults_of_homes(plan, homes, device))
    execution.run()
    budget = plan.ram_budget_bytes if ram_budget_bytes is None else ram_budget_bytes
    room = aux_bytes if aux_bytes is not None or device is None else device.aux_bytes
    sizes = graph.tensor_bytes
    paged_out = execution.aux - execution.aux_from_start - graph.state_of.keys()
    aux_used_bytes = homes.storage_bytes + sum(sizes[i] for i in paged_out)
    execution.check_limits(budget, aux_used_bytes, room)
    idle_w = device.idle_power_w if device is not None else 0.0
    return PlanCheck(
        violations=tuple(execution.violations),
        moments=tuple(execution.moments),
        peak_ram_bytes=execution.peak_bytes,
        peak_position=execution.peak_position,
        aux_used_bytes=aux_used_bytes,
        written_bytes=sum(sizes[i] * n for i, n in execution.count[Op.PAGE_OUT].items()),
        read_bytes=sum(sizes[i] * n for i, n in execution.count[Op.PAGE_IN].items()),
        **execution.figures(idle_w),
    )


def check_identity(graph: Graph, plan: Plan) -> None:
    """Raise `PlanError` if the plan names another graph than this one."""
    if plan.identity is not None:
        plan.identity.check(graph, made="plan", error=PlanError)


def false_claims(check: PlanCheck, stated: Mapping[str, float | None]) -> Iterator[str]:
    """Yield every figure of a plan file that the simulation contradicts."""
    for key, claim in stated.items():
        value: float | None = getattr(check, key)
        if claim is None or value is None:
            continue
        slack = 0.0 if key == "peak_ram_bytes" else RELATIVE_TOLERANCE * abs(value)
        if abs(claim - value) > slack:
            yield f"{key}: the file says {claim!r}, the simulation gives {value!r}"


def _faults_of_homes(plan: Plan, homes: Homes, device: Device | None) -> Iterator[str]:
    yield from homes.unknown
    if device is not None and homes.on_storage and homes.mapped != device.is_memory_mapped:
        yield (
            "memory_mapped: the plan reads state on storage "
            f"{'where it lies' if plan.memory_mapped else 'into RAM'}, and the storage of "
            f"{device.key or device.name} is {'not ' if plan.memory_mapped else ''}memory-mapped"
        )


class _PlanExecution:
    """The state of one simulation: both clocks, and what is in RAM, on storage and on the bus."""

    def __init__(self, graph: Graph, table: CostTable | None, plan: Plan, homes: Homes) -> None:
        self.graph = graph
        self.homes = homes
        self.state = StateAccess()
        self.program: Program = plan.program
        self.sizes = homes.sizes
        self.table = table
        self.dma = plan.mode == StorageMode.DMA
        self.core_s = self.bus_s = self.stall_s = 0.0
        self.ram: set[int] = set()
        self.ram_bytes = homes.ram_bytes
        self.aux_from_start = homes.stored
        self.aux = set(self.aux_from_start)
        self.taken_over: dict[int, int] = {}
        """How much of an input an output has taken over in place, until that is freed [B]."""
        self.done_s: dict[int, float] = {}
        self.in_flight: dict[int, Op] = {}
        self.first_computed = -1
        self.count: dict[Op, Counter[int]] = {op: Counter() for op in Op}
        self.position = 0
        self.peak_bytes = 0
        self.peak_position: int | None = None
        self.moments: list[Moment] = []
        self.violations: list[str] = []

    def run(self) -> None:
        """Execute the program from its first instruction to its last."""
        act = {
            Op.COMPUTE: self._compute,
            Op.PAGE_IN: self._page_in,
            Op.PAGE_OUT: self._page_out,
            Op.WAIT: self._wait,
            Op.FREE: self._free,
        }
        known = {op: range(len(self.sizes)) for op in Op}
        known[Op.COMPUTE] = range(len(self.graph.nodes))
        program = self.program
        for self.position, (op, index) in enumerate(program):
            issued_s = self.core_s
            fault = "the graph has no such index" if index not in known[op] else ""
            if not fault and op != Op.COMPUTE:
                fault = self.homes.fault(op, index, self.state)
            if fault:
                self._violate(op, index, fault)
                start_s, end_s, high_bytes = issued_s, issued_s, self.ram_bytes
            else:
                self.count[op][index] += 1
                start_s, end_s, high_bytes = act[op](index)
            if high_bytes > self.peak_bytes or self.peak_position is None:
                self.peak_bytes, self.peak_position = high_bytes, self.position
            in_place = tuple(sorted(self.taken_over)) if op == Op.COMPUTE else ()
            self.moments.append(
                Moment(issued_s, start_s, end_s, high_bytes, self.ram_bytes, in_place)
            )
        self._end()

    # -- instructions: each returns start, end [s] and the highest RAM during it [B] -------------

    def _compute(self, k: int) -> tuple[float, float, int]:
        if k in self.homes.first_reads:
            return self._first_read(k, self.homes.first_reads[k])
        self._check_order(k)
        self._check_inputs(k)
        outputs = self.homes.new[k]
        for i in outputs:
            if i in self.in_flight:
                word = self.in_flight[i]
                self._violate(Op.COMPUTE, k, f"overwrites {self._tensor(i)} during its {word}")
        self.taken_over = self._in_place(k)
        self.ram_bytes -= sum(self.taken_over.values())
        made_bytes = sum(self.sizes[i] for i in outputs)
        high = self.ram_bytes + made_bytes + self.graph.nodes[k].workspace_bytes
        for i in outputs:
            self._take(i)
        for i in self.graph.outputs_of[k]:
            if i in self.graph.state_of:
                self._replace(k, self.graph.state_of[i], i)
        start = self.core_s
        self.core_s += self.table.compute_time_s[k] if self.table is not None else 0.0
        return start, self.core_s, high

    def _first_read(self, k: int, i: int) -> tuple[float, float, int]:
        """Page state in for the first time, wherever among the computations that is."""
        self.taken_over = {}
        if self.count[Op.COMPUTE][k] > 1:
            self._violate(Op.COMPUTE, k, "must not be computed again")
        self.count[Op.PAGE_IN][i] += 1
        self.state.read.add(i)
        self._take(i)
        return *self._transfer(Op.PAGE_IN, i), self.ram_bytes

    def _in_place(self, k: int) -> dict[int, int]:
        """Return the inputs that outputs are made over, each with how much of it is used [B]."""
        pairs = self.graph.in_place_of[k]
        if not pairs:
            return {}
        freed = set()
        for op, i in islice(self.program, self.position + 1, None):
            if op != Op.FREE:
                break
            freed.add(i)
        return {
            x: min(self.sizes[x], self.sizes[y])
            for y, x in pairs
            if x in freed and x in self.ram and x not in self.in_flight
        }

    def _replace(self, k: int, old: int, new: int) -> None:
        """Write a replacement over state: what lay in RAM for one lies there for the other."""
        self.state.replaced.setdefault(old, k)
        if old in self.homes.on_storage:
            if old in self.ram:
                self.ram.remove(old)
                self.ram_bytes -= self.sizes[old]
            self._take(new)

    def _check_order(self, k: int) -> None:
        if self.count[Op.COMPUTE][k] > 1:
            if not self.graph.nodes[k].recomputable:
                self._violate(Op.COMPUTE, k, "must not be computed again")
            return
        if k < self.first_computed:
            before = self.graph.nodes[self.first_computed].name
            self._violate(Op.COMPUTE, k, f"is first computed after {before!r}, which follows it")
        self.first_computed = max(k, self.first_computed)

    def _check_inputs(self, k: int) -> None:
        for i in self.graph.inputs_of[k]:
            fault = self.homes.fault_of_reading(i, self.state)
            if not fault and i not in self.homes.held:
                if i not in self.ram:
                    fault = f"needs {self._tensor(i)} in RAM"
                elif self.in_flight.get(i) == Op.PAGE_IN:
                    fault = f"reads {self._tensor(i)} before its page_in is done"
            if fault:
                self._violate(Op.COMPUTE, k, fault)

    def _page_in(self, i: int) -> tuple[float, float, int]:
        if i not in self.aux:
            self._violate(Op.PAGE_IN, i, "is not on storage")
        if i in self.ram:
            self._violate(Op.PAGE_IN, i, "is in RAM already")
        self._take(i)
        return *self._transfer(Op.PAGE_IN, i), self.ram_bytes

    def _page_out(self, i: int) -> tuple[float, float, int]:
        if i not in self.ram:
            self._violate(Op.PAGE_OUT, i, "is not in RAM")
        elif i in self.in_flight:
            self._violate(Op.PAGE_OUT, i, f"is still under way: its {self.in_flight[i]}")
        self.aux.add(i)
        self.state.written.update({i} & self.graph.state_of.keys())
        return *self._transfer(Op.PAGE_OUT, i), self.ram_bytes

    def _transfer(self, op: Op, i: int) -> tuple[float, float]:
        time_s = 0.0
        if self.table is not None and not self.table.has_storage:
            self._violate(op, i, "is paged, but the costs know of no auxiliary storage")
        elif self.table is not None:
            into = op == Op.PAGE_IN
            time_s = (self.table.page_in_time_s if into else self.table.page_out_time_s)[i]
        start = max(self.bus_s, self.core_s)
        self.bus_s = self.done_s[i] = start + time_s
        if self.dma:
            self.in_flight[i] = op
        else:
            self.core_s = self.bus_s
        return start, self.bus_s

    def _wait(self, i: int) -> tuple[float, float, int]:
        start = self.core_s
        if i in self.done_s:
            self.core_s = max(start, self.done_s[i])
            self.stall_s += self.core_s - start
        else:
            self._violate(Op.WAIT, i, "was never moved")
        self.in_flight.pop(i, None)
        return start, self.core_s, self.ram_bytes

    def _free(self, i: int) -> tuple[float, float, int]:
        high = self.ram_bytes
        if i in self.in_flight:
            self._violate(Op.FREE, i, f"is still under way: its {self.in_flight[i]}")
        if i in self.ram:
            self.ram.remove(i)
            self.ram_bytes -= self.sizes[i] - self.taken_over.pop(i, 0)
        else:
            self._violate(Op.FREE, i, "is not in RAM")
        return self.core_s, self.core_s, high

    def _take(self, i: int) -> None:
        if i not in self.ram:
            self.ram.add(i)
            self.ram_bytes += self.sizes[i]

    # -- findings ----------------------------------------------------------------------------

    def _end(self) -> None:
        for k, node in enumerate(self.graph.nodes):
            if not self.count[Op.COMPUTE][k]:
                self.violations.append(f"node {node.name!r} is never computed")
        for i in sorted(self.ram):
            if self.graph.users_of[i]:
                self.violations.append(f"{self._tensor(i)} is still in RAM at the end")
        for i in self.homes.unwritten(self.state):
            old = self._tensor(self.graph.state_of[i])
            self.violations.append(
                f"{self._tensor(i)} is never paged out: it replaces {old}, which is not resident"
            )

    def check_limits(
        self, ram_budget_bytes: int | None, aux_used_bytes: int, aux_bytes: int | None
    ) -> None:
        """Compare the peak and the storage used with what there is."""
        if ram_budget_bytes is not None and self.peak_bytes > ram_budget_bytes:
            self.violations.append(
                f"instruction {self.peak_position}: peak RAM {self.peak_bytes:,} B is "
                f"{format_bytes(self.peak_bytes - ram_budget_bytes)} above the "
                f"{ram_budget_bytes:,} B that tensors may use"
            )
        if aux_bytes is not None and aux_used_bytes > aux_bytes:
            self.violations.append(
                f"storage used {aux_used_bytes:,} B is above the limit of {aux_bytes:,} B"
            )

    def figures(self, idle_power_w: float) -> dict[str, float | None]:
        """Return times and energy, by the names of `PlanCheck`; none without costs."""
        if self.table is None:
            return {}
        compute = self.table.compute_totals(self.count[Op.COMPUTE])
        transfer = self.table.transfer_totals(self.count[Op.PAGE_IN], self.count[Op.PAGE_OUT])
        serial_s = compute.time_s + transfer.time_s
        makespan_s = max(self.core_s, self.bus_s) if self.dma else serial_s
        return {
            "compute_s": compute.time_s,
            "transfer_s": transfer.time_s,
            "stall_s": self.stall_s,
            "makespan_s": makespan_s,
            "energy_j": compute.energy_j + transfer.energy_j + idle_power_w * makespan_s,
        }

    def _violate(self, op: Op, index: int, what: str) -> None:
        if op == Op.COMPUTE and 0 <= index < len(self.graph.nodes):
            subject = f"node {self.graph.nodes[index].name!r} "
        elif op != Op.COMPUTE and 0 <= index < len(self.sizes):
            subject = f"{self._tensor(index)} "
        else:
            subject = ""
        self.violations.append(f"instruction {self.position}, {op} {index}: {subject}{what}")

    def _tensor(self, i: int) -> str:
        return f"tensor {self.graph.tensors[i].name!r}"
