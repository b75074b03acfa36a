"""The machine: executes a program with clocks of core and bus, and tracks the content of RAM.

The simulators of schedules and plans use the machine to find violated rules. Its rules share no
code with formulations and solvers, and only `Homes` with the planner.
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
"""Position before the first instruction, of resident state."""


class Content(StrEnum):
    """Kinds of content of RAM."""

    OUTPUT = "output"
    """A copy of a tensor: computed, recomputed, paged in, or resident."""
    WORKSPACE = "workspace"
    """Workspace of a node during its computation."""


class Origin(StrEnum):
    """Origin of a copy or workspace in RAM."""

    COMPUTED = "computed"
    """First computation of its node."""
    RECOMPUTED = "recomputed"
    """Recomputation of its node."""
    PAGED_IN = "paged in"
    """Page-in, such as the first read of state."""
    RESIDENT = "resident"
    """Resident state, in RAM before the program."""


@dataclass(slots=True, kw_only=True)
class Stay:
    """One copy of a tensor, or one workspace, from the instruction that makes it to its end.

    The stay occupies RAM during all instructions from `begin` to `end`, and after each of them
    except the last.
    """

    content: Content
    """Whether the stay is a copy or a workspace."""
    index: int
    """Index of a tensor, or of a node for a workspace."""
    origin: Origin
    """Origin of the copy; for a workspace, that of the outputs of its computation."""
    bytes: int
    """Size [B]."""
    begin: int
    """Position of the instruction that makes the stay; `BEFORE` for resident state."""
    end: int
    """Position of the instruction that ends the stay; the length of the program if none does.

    The instruction is a free, or the computation of the next copy; for a workspace, its own
    computation."""
    reads: tuple[int, ...] = ()
    """Positions of the computations that read the copy, in order."""
    paged_out: bool = False
    """Whether the copy was paged out."""
    replaced_by: int | None = None
    """The replacement that was written over the copy; None if it is no replaced state."""
    overwritten_at: int | None = None
    """Position of the computation whose output overwrites the copy in place; None without one."""
    overwritten_bytes: int = 0
    """Bytes that this output overwrites, which count for the output from then on [B]."""
    in_place_of: int | None = None
    """The tensor that this copy overwrites in place; None if it overwrites none."""

    def first_free_position(self, program: Program) -> int:
        """Return the first position of the program at which the stay's addresses can be reused."""
        is_freed = self.end == len(program) or program[self.end].op == Op.FREE
        return self.end if is_freed else self.end + 1


class InstructionRecord(NamedTuple):
    """Times and RAM of one instruction."""

    issued_s: float
    """The core's clock when the instruction is issued [s]; RAM changes at this time."""
    start_s: float
    """Start of the computation or transfer, on the bus for a ``dma`` transfer [s]."""
    end_s: float
    """End of the computation or transfer [s]; from start to end of a wait, the core stalls."""
    peak_bytes: int
    """Maximum RAM during the instruction, including workspace and old copies [B]."""
    ram_bytes: int
    """RAM in use after the instruction [B]."""
    in_place: tuple[int, ...] = ()
    """The inputs that a computation overwrites with its outputs, ascending."""


class Fault(NamedTuple):
    """A rule that a program violates."""

    message: str
    """Message for users."""
    position: int
    """Position of the instruction; the length of the program for violations at its end."""
    missing_input: int | None = None
    """The input of a computation that is not in RAM; None for other violations."""


class Machine:
    """Executes a program: clocks of core and bus, content of RAM and storage, transfers.

    With ``dma``, a transfer is pending until a ``wait``, and the core computes meanwhile. With
    `steps`, the step of each instruction of a compiled schedule, a computation overwrites an input
    in place only if its own step frees it. Without a `table`, instructions take no time.
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
        """Clocks of core and bus, and total time of stalls [s]."""
        self.ram: dict[int, Stay] = {}
        """The copy of each tensor in RAM; a replacement of stored state has the state's copy, or a
        new one if the state has none."""
        self.ram_bytes = homes.ram_bytes
        """RAM in use after the last executed instruction, without workspaces [B]."""
        self.storage = set(homes.stored)
        """Content of storage."""
        self.state_access = StateAccess()
        self.transfer_ends_s: dict[int, float] = {}
        """End of the last transfer of each tensor [s]."""
        self.pending_transfers: dict[int, Op] = {}
        """DMA transfers without a wait so far, by tensor."""
        self.last_first_computed = -1
        """Last node in graph order that was computed so far, first reads excluded; -1 at first."""
        self.counts: dict[Op, Counter[int]] = {
            op: Counter() for op in (Op.COMPUTE, Op.PAGE_IN, Op.PAGE_OUT)
        }
        """Number of executed computations and transfers, by kind and index.

        A first read of state is both, a ``compute`` and a page-in.
        """
        self.position = BEFORE
        """Position of the current instruction."""
        self.records: list[InstructionRecord] = []
        """Times and RAM of the instructions so far, in order; skipped ones take no time."""
        self.copies: list[Stay] = []
        """All copies and workspaces, in the order in which they are made.

        Omits replacements of state that has no copy in RAM.
        """
        self.faults: list[Fault] = []

    def execute(self) -> None:
        """Make the copies of resident state, then execute all instructions in order.

        Skips instructions that state forbids or with unknown indices; executes all others even if
        they violate rules. Each violation is a fault.
        """
        for i in sorted(self.homes.resident):
            self._add_copy(i, Origin.RESIDENT)
        execute_op = {
            Op.COMPUTE: self._compute,
            Op.PAGE_IN: self._page_in,
            Op.PAGE_OUT: self._page_out,
            Op.WAIT: self._wait,
            Op.FREE: self._free,
        }
        n_nodes, n_tensors = len(self.graph.nodes), len(self.homes.sizes)
        has_state = bool(self.graph.state_tensors)
        records = self.records
        for position, (op, index) in enumerate(self.program):
            self.position = position
            if not position % CHUNK:
                check_time_limit()
            fault = ""
            if not 0 <= index < (n_nodes if op == Op.COMPUTE else n_tensors):
                fault = "the graph has no such index"
            elif has_state and op != Op.COMPUTE:
                fault = self.homes.instruction_fault(op, index, self.state_access)
            if fault:
                self._add_fault(op, index, fault)
                records.append(self._core_record(self.core_s, self.ram_bytes))
            else:
                records.append(execute_op[op](index))
        self._check_end()

    def _core_record(
        self, issued_s: float, peak_bytes: int, in_place: tuple[int, ...] = ()
    ) -> InstructionRecord:
        """Return the record of an instruction of the core, which ends now."""
        return InstructionRecord(
            issued_s, issued_s, self.core_s, peak_bytes, self.ram_bytes, in_place
        )

    # -- instructions: the method of each `Op` executes one and returns its record

    def _compute(self, k: int) -> InstructionRecord:
        """Compute a node, even if it is invalid."""
        homes, position, n_computations = self.homes, self.position, self.counts[Op.COMPUTE]
        n_computations[k] += 1
        if k in homes.first_reads:
            return self._read_state_first(k, homes.first_reads[k])
        is_first = n_computations[k] == 1
        self._check_order(k, is_first=is_first)
        self._read_inputs(k)
        for i in homes.new_outputs[k] if self.pending_transfers else ():
            if i in self.pending_transfers:
                transfer_op = self.pending_transfers[i]
                self._add_fault(
                    Op.COMPUTE, k, f"overwrites {self._tensor_label(i)} during its {transfer_op}"
                )
        pairs = self.graph.in_place_of[k]
        overwritten = homes.overwritten_bytes(k, self._tensors_freed_next()) if pairs else {}
        for i, size in overwritten.items():
            self.ram[i].overwritten_at, self.ram[i].overwritten_bytes = position, size
            self.ram_bytes -= size
        peak_bytes = self.ram_bytes + homes.step_bytes[k]
        self._make_outputs(k, Origin.COMPUTED if is_first else Origin.RECOMPUTED)
        for output, source in pairs:
            if source in overwritten and output in homes.new_outputs[k]:
                self.ram[output].in_place_of = source
        start_s = self.core_s
        if self.table is not None:
            self.core_s += self.table.compute_time_s[k]
        return self._core_record(start_s, peak_bytes, tuple(sorted(overwritten)))

    def _make_outputs(self, k: int, origin: Origin) -> None:
        """Add a node's new outputs to RAM and its workspace to `copies`; replace state."""
        new_outputs, workspace_bytes = (
            self.homes.new_outputs[k],
            self.graph.nodes[k].workspace_bytes,
        )
        for i in new_outputs:
            if i in self.ram:  # Old and new copy are in RAM together until here.
                self._remove_copy(i)
            self._add_copy(i, origin)
            self.ram_bytes += self.homes.sizes[i]
        if workspace_bytes:
            self.copies.append(
                Stay(
                    content=Content.WORKSPACE,
                    index=k,
                    origin=origin,
                    bytes=workspace_bytes,
                    begin=self.position,
                    end=self.position,
                )
            )
        if len(new_outputs) != len(self.graph.outputs_of[k]):
            self._replace_state(k)

    def _read_state_first(self, k: int, i: int) -> InstructionRecord:
        """Page in state `i` by the ``compute`` of its node `k`, and register the state as read."""
        if self.counts[Op.COMPUTE][k] > 1:
            self._add_fault(Op.COMPUTE, k, "must not be computed again")
        self.state_access.read.add(i)
        return self._page_into_ram(i)

    def _tensors_freed_next(self) -> set[int]:
        """Return the tensors in RAM that the frees directly after this instruction free.

        With `steps`, only frees of the same step count. Omits resident state and tensors with
        pending transfers, whose frees are faults.
        """
        program, steps, position = self.program, self.steps, self.position + 1
        freed_tensors = set()
        while position < len(program) and program[position].op == Op.FREE:
            if steps is not None and steps[position] != steps[self.position]:
                break
            freed_tensors.add(program[position].index)
            position += 1
        return (freed_tensors & self.ram.keys()).difference(
            self.homes.resident, self.pending_transfers
        )

    def _replace_state(self, k: int) -> None:
        """Register that node `k` replaces state.

        If the home of the state is storage, its copy in RAM becomes the replacement's; if it has no
        copy in RAM, the replacement gets a new one.
        """
        for new in self.graph.outputs_of[k]:
            old = self.graph.state_of.get(new)
            if old is None:
                continue
            self.state_access.replaced.setdefault(old, k)
            copy = self.ram.get(old)
            if copy is not None:
                copy.replaced_by = new
            if old not in self.homes.on_storage:
                continue
            if copy is None:  # The state is read in place, or was freed.
                copy = self._make_copy(new, Origin.COMPUTED)
                self.ram_bytes += copy.bytes
            else:
                del self.ram[old]
            self.ram[new] = copy

    def _check_order(self, k: int, *, is_first: bool) -> None:
        """Add a fault if `k` must not be recomputed, or is first computed after a later node."""
        if not is_first:
            if not self.graph.nodes[k].recomputable:
                self._add_fault(Op.COMPUTE, k, "must not be computed again")
            return
        if k < self.last_first_computed:
            later_node = self.graph.nodes[self.last_first_computed].name
            self._add_fault(
                Op.COMPUTE, k, f"is first computed after {later_node!r}, which follows it"
            )
        else:
            self.last_first_computed = k

    def _read_inputs(self, k: int) -> None:
        """Register this instruction as a reader of the inputs of node `k`; add faults."""
        homes, position = self.homes, (self.position,)
        for i in self.graph.inputs_of[k]:
            fault, copy = "", self.ram.get(i)
            if copy is not None:
                copy.reads += position
            is_missing = copy is None and i not in homes.unmoved_state
            if i in self.state_access.replaced:
                fault = homes.read_fault(i, self.state_access)
            elif is_missing:
                fault = f"needs {self._tensor_label(i)} in RAM"
            elif self.pending_transfers and self.pending_transfers.get(i) == Op.PAGE_IN:
                fault = f"reads {self._tensor_label(i)} before its page_in is done"
            if fault:
                self._add_fault(Op.COMPUTE, k, fault, i if is_missing else None)

    def _page_in(self, i: int) -> InstructionRecord:
        """Start a page-in, even if it is invalid."""
        if i not in self.storage:
            self._add_fault(Op.PAGE_IN, i, "is not on storage")
        if i in self.ram:
            self._add_fault(Op.PAGE_IN, i, "is in RAM already")
        return self._page_into_ram(i)

    def _page_into_ram(self, i: int) -> InstructionRecord:
        """Count and start a page-in; add a copy and its RAM if `i` is not in RAM."""
        self.counts[Op.PAGE_IN][i] += 1
        if i not in self.ram:
            self._add_copy(i, Origin.PAGED_IN)
            self.ram_bytes += self.homes.sizes[i]
        return self._execute_transfer(Op.PAGE_IN, i)

    def _page_out(self, i: int) -> InstructionRecord:
        """Start a page-out, even if it is invalid."""
        self.counts[Op.PAGE_OUT][i] += 1
        if i not in self.ram:
            self._add_fault(Op.PAGE_OUT, i, "is not in RAM")
        else:
            self.ram[i].paged_out = True
            if i in self.pending_transfers:
                self._add_fault(
                    Op.PAGE_OUT, i, f"is still under way: its {self.pending_transfers[i]}"
                )
        self.storage.add(i)
        if i in self.graph.state_of:
            self.state_access.written.add(i)
        return self._execute_transfer(Op.PAGE_OUT, i)

    def _execute_transfer(self, op: Op, i: int) -> InstructionRecord:
        """Start a transfer of tensor `i` when core and bus are free."""
        issued_s, time_s = self.core_s, 0.0
        if self.table is not None and not self.table.has_storage:
            self._add_fault(op, i, "is paged, but the costs have no auxiliary storage")
        elif self.table is not None:
            is_page_in = op == Op.PAGE_IN
            time_s = (self.table.page_in_time_s if is_page_in else self.table.page_out_time_s)[i]
        start_s = max(self.bus_s, issued_s)
        self.bus_s = self.transfer_ends_s[i] = start_s + time_s
        if self.is_dma:
            self.pending_transfers[i] = op
        else:
            self.core_s = self.bus_s
        return InstructionRecord(issued_s, start_s, self.bus_s, self.ram_bytes, self.ram_bytes)

    def _wait(self, i: int) -> InstructionRecord:
        """Stall the core until a tensor's last transfer is complete."""
        start_s = self.core_s
        if i in self.transfer_ends_s:
            self.core_s = max(start_s, self.transfer_ends_s[i])
            self.stall_s += self.core_s - start_s
        else:
            self._add_fault(Op.WAIT, i, "was never moved")
        self.pending_transfers.pop(i, None)
        return self._core_record(start_s, self.ram_bytes)

    def _free(self, i: int) -> InstructionRecord:
        """Free a tensor, even during its transfer, which is a fault."""
        peak_bytes = self.ram_bytes
        if i in self.pending_transfers:
            self._add_fault(Op.FREE, i, f"is still under way: its {self.pending_transfers[i]}")
        if i in self.ram:
            self._remove_copy(i)
        else:
            self._add_fault(Op.FREE, i, "is not in RAM")
        return self._core_record(self.core_s, peak_bytes)

    # -- copies ------------------------------------------------------------------------------

    def _make_copy(self, i: int, origin: Origin) -> Stay:
        """Return a new copy of a tensor, not yet in `ram` and `copies`."""
        return Stay(
            content=Content.OUTPUT,
            index=i,
            origin=origin,
            bytes=self.homes.sizes[i],
            begin=self.position,
            end=len(self.program),
        )

    def _add_copy(self, i: int, origin: Origin) -> None:
        """Add a new copy to `ram` and `copies`; the caller counts its size in `ram_bytes`."""
        self.ram[i] = copy = self._make_copy(i, origin)
        self.copies.append(copy)

    def _remove_copy(self, i: int) -> None:
        """Remove the copy of a tensor from RAM, and its bytes from `ram_bytes`; store its end."""
        copy = self.ram.pop(i)
        copy.end = self.position
        self.ram_bytes -= copy.bytes - copy.overwritten_bytes

    # -- faults ------------------------------------------------------------------------------

    def _check_end(self) -> None:
        """Add faults: uncomputed nodes, tensors that are still in RAM, missing write-backs."""
        messages = [
            f"node {node.name!r} is never computed"
            for k, node in enumerate(self.graph.nodes)
            if not self.counts[Op.COMPUTE][k]
        ]
        messages += [
            f"{self._tensor_label(i)} is still in RAM at the end"
            for i in sorted(self.ram.keys() - self.homes.resident)
            if self.graph.users_of[i]
        ]
        for i in self.homes.missing_write_backs(self.state_access):
            old = self._tensor_label(self.graph.state_of[i])
            messages.append(
                f"{self._tensor_label(i)} is never paged out: it replaces {old}, which is not "
                "resident"
            )
        self.faults += [Fault(message, len(self.program)) for message in messages]

    def _add_fault(
        self, op: Op, index: int, description: str, missing_input: int | None = None
    ) -> None:
        """Add a fault of this instruction, with `description`, and the input that is not in RAM."""
        is_compute, label = op == Op.COMPUTE, ""
        if is_compute and 0 <= index < len(self.graph.nodes):
            label = f"node {self.graph.nodes[index].name!r} "
        elif not is_compute and 0 <= index < len(self.graph.tensors):
            label = f"{self._tensor_label(index)} "
        message = f"instruction {self.position}, {op} {index}: {label}{description}"
        self.faults.append(Fault(message, self.position, missing_input))

    def _tensor_label(self, i: int) -> str:
        return f"tensor {self.graph.tensors[i].name!r}"
