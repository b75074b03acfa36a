"""The machine: executes a program with two clocks, and says what is in RAM when.

Schedules and plans are judged by it alone. It shares no code with the planner, the formulations and
the solvers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.clock import CHUNK, check_time_limit
from poetmodel.device import CostTable, StorageMode
from poetmodel.schedule.homes import Homes, StateAccess
from poetmodel.schedule.instructions import Op, Program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.schedule.relations import Pair

BEFORE: Final = -1
"""The position of what is in RAM before the program: resident state."""


class Content(StrEnum):
    """Occupant of RAM."""

    OUTPUT = "output"
    """A copy of a tensor: computed, computed again, or paged in."""
    WORKSPACE = "workspace"
    """Workspace of a node while it is computed."""


class Origin(StrEnum):
    """How something came into RAM."""

    COMPUTED = "computed"
    """By the first computation of its node."""
    RECOMPUTED = "recomputed"
    """By a later one."""
    PAGED_IN = "paged in"
    """From storage; the first read of state is a page-in."""
    RESIDENT = "resident"
    """State that was there before the program."""


@dataclass(slots=True, kw_only=True)
class Stay:
    """One copy of a tensor, or one workspace, from the instruction that makes it to its end.

    It takes RAM during all instructions from `begin` to `end`, and after all of these but the last.
    """

    content: Content
    index: int
    """A tensor's number; a node's index for a workspace."""
    origin: Origin
    bytes: int
    """Its size [B]."""
    begin: int
    """The instruction that makes it; `BEFORE` for resident state."""
    end: int
    """The instruction that ends it, the length of the program where none does.

    It is a free, the computation of the next copy, or of a workspace the one that needs it.
    """
    reads: tuple[int, ...] = ()
    """The computations that read it, in order."""
    paged_out: bool = False
    """Whether it was copied to storage."""
    replaced_by: int | None = None
    """The tensor that was written over it, where it is state that was replaced."""
    given_at: int | None = None
    """The computation whose output took its memory over in place."""
    given_bytes: int = 0
    """How much of it that output took: from there on this is not its own [B]."""
    in_place_of: int | None = None
    """The tensor whose memory it took over in place."""

    def vacated(self, program: Program) -> int:
        """Return the first position of the program at which something else can lie there."""
        freed = self.end == len(program) or program[self.end].op == Op.FREE
        return self.end if freed else self.end + 1


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


class Fault(NamedTuple):
    """A rule that a program breaks."""

    message: str
    position: int
    """The instruction; the length of the program for what is wrong at its end."""
    missing: int | None = None
    """The input that a computation does not find in RAM."""


class Machine:
    """One walk through a program: both clocks, and what is in RAM, on storage and on the bus.

    Of a program that a schedule was compiled to, `steps` say to which step of that each instruction
    belongs: an input that a later step frees is not freed right after a computation.
    """

    def __init__(
        self,
        homes: Homes,
        program: Program,
        *,
        mode: StorageMode = StorageMode.BLOCKING,
        table: CostTable | None = None,
        steps: Sequence[Pair] | None = None,
    ) -> None:
        self.graph, self.homes, self.program = homes.graph, homes, program
        self.table, self.steps = table, steps
        self.is_dma = mode == StorageMode.DMA
        self.core_s = self.bus_s = self.stall_s = 0.0
        self.ram: dict[int, Stay] = {}
        """The copy of each tensor in RAM; a replacement lies in that of the state."""
        self.ram_bytes = homes.ram_bytes
        self.storage = set(homes.stored)
        """Content of storage."""
        self.done = StateAccess()
        self.done_s: dict[int, float] = {}
        self.in_flight: dict[int, Op] = {}
        self.first_computed = -1
        self.count: dict[Op, Counter[int]] = {
            op: Counter() for op in (Op.COMPUTE, Op.PAGE_IN, Op.PAGE_OUT)
        }
        self.position = BEFORE
        self.moments: list[Moment] = []
        self.copies: list[Stay] = []
        """All copies and workspaces, in the order in which the program makes them."""
        self.faults: list[Fault] = []

    def run(self) -> None:
        """Execute the program from what is there before its first instruction to its last."""
        for i in sorted(self.homes.resident):
            self._hold(i, Origin.RESIDENT)
        act = {
            Op.COMPUTE: self._compute,
            Op.PAGE_IN: self._page_in,
            Op.PAGE_OUT: self._page_out,
            Op.WAIT: self._wait,
            Op.FREE: self._free,
        }
        nodes, tensors = len(self.graph.nodes), len(self.homes.sizes)
        has_state = bool(self.graph.state_tensors)
        moments = self.moments
        for position, (op, index) in enumerate(self.program):
            self.position = position
            if not position % CHUNK:
                check_time_limit()
            issued_s, fault = self.core_s, ""
            in_place: tuple[int, ...] = ()
            if not 0 <= index < (nodes if op == Op.COMPUTE else tensors):
                fault = "the graph has no such index"
            elif has_state and op != Op.COMPUTE:
                fault = self.homes.fault(op, index, self.done)
            if fault:
                self._object(op, index, fault)
                start_s, end_s, high_bytes = issued_s, issued_s, self.ram_bytes
            else:
                start_s, end_s, high_bytes, in_place = act[op](index)
            moments.append(Moment(issued_s, start_s, end_s, high_bytes, self.ram_bytes, in_place))
        self._end()

    # -- instructions: each returns start and end [s], the highest RAM during it [B], and the inputs
    # that it writes over

    def _compute(self, k: int) -> tuple[float, float, int, tuple[int, ...]]:
        homes, position, computed = self.homes, self.position, self.count[Op.COMPUTE]
        computed[k] += 1
        if k in homes.first_reads:
            return self._first_read(k, homes.first_reads[k])
        is_first = computed[k] == 1
        self._check_order(k, is_first=is_first)
        self._read_inputs(k)
        for i in homes.new[k] if self.in_flight else ():
            if i in self.in_flight:
                word = self.in_flight[i]
                self._object(Op.COMPUTE, k, f"overwrites {self._tensor(i)} during its {word}")
        pairs = self.graph.in_place_of[k]
        taken_over = homes.shared(k, self._dying()) if pairs else {}
        for x, size in taken_over.items():
            self.ram[x].given_at, self.ram[x].given_bytes = position, size
            self.ram_bytes -= size
        high_bytes = self.ram_bytes + homes.step_bytes[k]
        self._make_outputs(k, Origin.COMPUTED if is_first else Origin.RECOMPUTED)
        for y, x in pairs:
            if x in taken_over and y in homes.new[k]:
                self.ram[y].in_place_of = x
        start = self.core_s
        if self.table is not None:
            self.core_s += self.table.compute_time_s[k]
        return start, self.core_s, high_bytes, tuple(sorted(taken_over))

    def _make_outputs(self, k: int, origin: Origin) -> None:
        new, workspace = self.homes.new[k], self.graph.nodes[k].workspace_bytes
        for i in new:
            if i in self.ram:  # an old copy is beside the new one until now
                self._drop(i)
            self._hold(i, origin)
            self.ram_bytes += self.homes.sizes[i]
        if workspace:
            self.copies.append(
                Stay(
                    content=Content.WORKSPACE,
                    index=k,
                    origin=origin,
                    bytes=workspace,
                    begin=self.position,
                    end=self.position,
                )
            )
        if len(new) != len(self.graph.outputs_of[k]):
            self._replace(k)

    def _first_read(self, k: int, i: int) -> tuple[float, float, int, tuple[int, ...]]:
        """Page state in for the first time, wherever among the computations that is."""
        if self.count[Op.COMPUTE][k] > 1:
            self._object(Op.COMPUTE, k, "must not be computed again")
        self.done.read.add(i)
        return self._arrive(i)

    def _dying(self) -> set[int]:
        """Return the tensors in RAM and at rest that are freed right after this instruction."""
        program, steps, position = self.program, self.steps, self.position + 1
        dying = set()
        while position < len(program) and program[position].op == Op.FREE:
            if steps is not None and steps[position] != steps[self.position]:
                break
            dying.add(program[position].index)
            position += 1
        return (dying & self.ram.keys()).difference(self.homes.resident, self.in_flight)

    def _replace(self, k: int) -> None:
        """Write replacements over state: what lay in RAM for one lies there for the other."""
        for new in self.graph.outputs_of[k]:
            old = self.graph.state_of.get(new)
            if old is None:
                continue
            self.done.replaced.setdefault(old, k)
            copy = self.ram.get(old)
            if copy is not None:
                copy.replaced_by = new
            if old not in self.homes.on_storage:
                continue
            if copy is None:  # its copy is on storage, or there is none
                copy = self._copy(new, Origin.COMPUTED)
                self.ram_bytes += copy.bytes
            else:
                del self.ram[old]
            self.ram[new] = copy

    def _check_order(self, k: int, *, is_first: bool) -> None:
        if not is_first:
            if not self.graph.nodes[k].recomputable:
                self._object(Op.COMPUTE, k, "must not be computed again")
            return
        if k < self.first_computed:
            before = self.graph.nodes[self.first_computed].name
            self._object(Op.COMPUTE, k, f"is first computed after {before!r}, which follows it")
        else:
            self.first_computed = k

    def _read_inputs(self, k: int) -> None:
        homes, position = self.homes, (self.position,)
        for i in self.graph.inputs_of[k]:
            fault, copy = "", self.ram.get(i)
            if copy is not None:
                copy.reads += position
            is_missing = copy is None and i not in homes.held
            if i in self.done.replaced:
                fault = homes.fault_of_reading(i, self.done)
            elif is_missing:
                fault = f"needs {self._tensor(i)} in RAM"
            elif self.in_flight and self.in_flight.get(i) == Op.PAGE_IN:
                fault = f"reads {self._tensor(i)} before its page_in is done"
            if fault:
                self._object(Op.COMPUTE, k, fault, i if is_missing else None)

    def _page_in(self, i: int) -> tuple[float, float, int, tuple[int, ...]]:
        if i not in self.storage:
            self._object(Op.PAGE_IN, i, "is not on storage")
        if i in self.ram:
            self._object(Op.PAGE_IN, i, "is in RAM already")
        return self._arrive(i)

    def _arrive(self, i: int) -> tuple[float, float, int, tuple[int, ...]]:
        self.count[Op.PAGE_IN][i] += 1
        if i not in self.ram:
            self._hold(i, Origin.PAGED_IN)
            self.ram_bytes += self.homes.sizes[i]
        return *self._transfer(Op.PAGE_IN, i), self.ram_bytes, ()

    def _page_out(self, i: int) -> tuple[float, float, int, tuple[int, ...]]:
        self.count[Op.PAGE_OUT][i] += 1
        if i not in self.ram:
            self._object(Op.PAGE_OUT, i, "is not in RAM")
        else:
            self.ram[i].paged_out = True
            if i in self.in_flight:
                self._object(Op.PAGE_OUT, i, f"is still under way: its {self.in_flight[i]}")
        self.storage.add(i)
        if i in self.graph.state_of:
            self.done.written.add(i)
        return *self._transfer(Op.PAGE_OUT, i), self.ram_bytes, ()

    def _transfer(self, op: Op, i: int) -> tuple[float, float]:
        time_s = 0.0
        if self.table is not None and not self.table.has_storage:
            self._object(op, i, "is paged, but the costs know of no auxiliary storage")
        elif self.table is not None:
            into = op == Op.PAGE_IN
            time_s = (self.table.page_in_time_s if into else self.table.page_out_time_s)[i]
        start = max(self.bus_s, self.core_s)
        self.bus_s = self.done_s[i] = start + time_s
        if self.is_dma:
            self.in_flight[i] = op
        else:
            self.core_s = self.bus_s
        return start, self.bus_s

    def _wait(self, i: int) -> tuple[float, float, int, tuple[int, ...]]:
        start = self.core_s
        if i in self.done_s:
            self.core_s = max(start, self.done_s[i])
            self.stall_s += self.core_s - start
        else:
            self._object(Op.WAIT, i, "was never moved")
        self.in_flight.pop(i, None)
        return start, self.core_s, self.ram_bytes, ()

    def _free(self, i: int) -> tuple[float, float, int, tuple[int, ...]]:
        high_bytes = self.ram_bytes
        if i in self.in_flight:
            self._object(Op.FREE, i, f"is still under way: its {self.in_flight[i]}")
        if i in self.ram:
            self._drop(i)
        else:
            self._object(Op.FREE, i, "is not in RAM")
        return self.core_s, self.core_s, high_bytes, ()

    # -- copies ------------------------------------------------------------------------------

    def _copy(self, i: int, origin: Origin) -> Stay:
        return Stay(
            content=Content.OUTPUT,
            index=i,
            origin=origin,
            bytes=self.homes.sizes[i],
            begin=self.position,
            end=len(self.program),
        )

    def _hold(self, i: int, origin: Origin) -> None:
        self.ram[i] = copy = self._copy(i, origin)
        self.copies.append(copy)

    def _drop(self, i: int) -> None:
        copy = self.ram.pop(i)
        copy.end = self.position
        self.ram_bytes -= copy.bytes - copy.given_bytes

    # -- findings ----------------------------------------------------------------------------

    def _end(self) -> None:
        messages = [
            f"node {node.name!r} is never computed"
            for k, node in enumerate(self.graph.nodes)
            if not self.count[Op.COMPUTE][k]
        ]
        messages += [
            f"{self._tensor(i)} is still in RAM at the end"
            for i in sorted(self.ram.keys() - self.homes.resident)
            if self.graph.users_of[i]
        ]
        for i in self.homes.unwritten(self.done):
            old = self._tensor(self.graph.state_of[i])
            messages.append(
                f"{self._tensor(i)} is never paged out: it replaces {old}, which is not resident"
            )
        self.faults += [Fault(message, len(self.program)) for message in messages]

    def _object(self, op: Op, index: int, what: str, missing: int | None = None) -> None:
        computes, subject = op == Op.COMPUTE, ""
        if computes and 0 <= index < len(self.graph.nodes):
            subject = f"node {self.graph.nodes[index].name!r} "
        elif not computes and 0 <= index < len(self.graph.tensors):
            subject = f"{self._tensor(index)} "
        message = f"instruction {self.position}, {op} {index}: {subject}{what}"
        self.faults.append(Fault(message, self.position, missing))

    def _tensor(self, i: int) -> str:
        return f"tensor {self.graph.tensors[i].name!r}"
