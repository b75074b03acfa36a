"""Generate the C statements of a step: kernel calls with constant addresses, and transfers."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Final

from poetmodel.errors import BudgetError, InputError
from poetmodel.export.storage import gradient_slot_name, page_slot_name
from poetmodel.lowered.calls import (
    WORKSPACE,
    Call,
    ConvolutionSizes,
    DataType,
    Ref,
    ScaledLearningRate,
)
from poetmodel.lowered.catalogue import is_divided_by_rows, moving_parameters
from poetmodel.lowered.forms import ELEMENTWISE
from poetmodel.lowered.kernels import Parameter, find_kernel
from poetmodel.lowered.ranges import (
    Indices,
    find_index_operands,
    find_input_indices,
    find_real_inputs,
)
from poetmodel.plan import Op
from poetmodel.schedule.machine import BEFORE, Content

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from poetmodel.export.replay import Front
    from poetmodel.export.storage import Program, StorageLayout
    from poetmodel.lowered.calls import Argument
    from poetmodel.lowered.step import Weights

_CHUNK_ELEMENTS: Final = 32
"""Number of elements of memory-mapped state in a chunk: one iteration updates and writes it."""
_MAX_FULL_CHUNKS: Final = 4
"""Maximum number of chunks of `_CHUNK_ELEMENTS` on the stack; if there are more, each has half
as many elements."""
_MAX_LIST_WORDS: Final = 40
"""Maximum length of node and parameter in the name of a list, of which C compares 63 characters."""
_OTHER_STACK_BYTES: Final = 1024
"""Stack that a program uses besides the windows of a weight [B]. The measured use on a Cortex-M4
is 700."""


class IntegerLists(dict[tuple[int, ...], str]):
    """Names of the C arrays of integers, such as shape tables, by their content."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: set[str] = set()

    def register(self, values: tuple[int, ...], reader: str, meaning: str) -> str:
        """Return an array's name; a new one has reader and meaning: ``pm_list_3_relu_shape``."""
        if values not in self:
            words = re.sub(r"[^A-Za-z0-9]+", "_", f"{reader}_{meaning}").strip("_")
            name = base = f"pm_list_{words[-_MAX_LIST_WORDS:].lstrip('_')}"
            number = 2
            while name in self._taken:
                name, number = f"{base}_{number}", number + 1
            self[values] = name
            self._taken.add(name)
        return self[values]


class ProgramSource:
    """Generates C lines of ``pm_run_nodes`` or of a forward pass: checks, then each instruction.

    Both begin with all state at its home; state in RAM is at the beginning of the arena. Generating
    the lines, which is possible once, collects the kernels and the arrays of integers.
    """

    def __init__(self, layout: StorageLayout, weights: Weights, program: Program) -> None:
        self.layout = layout
        self.program = program
        self._is_training = program is layout.programs[0]
        self.step = program.step
        self.graph = program.step.graph
        self.plan = program.plan
        self.arena = program.arena
        self.weights = weights
        self.lists = IntegerLists()
        self._reader = "inputs"
        """The node whose statements are generated, which names new lists; before it the inputs."""
        self.kernels: dict[str, None] = {}
        """The kernels of calls and range checks, in the order of their registration.

        Copies to mapped state count, too, although the driver executes them."""
        self._gradients = tuple(tensor.pieces[0] for tensor in self.step.gradients)
        """Pointers to the returned gradients, none of which is in tiles."""
        self._slot_numbers = {name: k for k, name in enumerate(layout.slots)}
        self._caller_pointers = {
            tensor.pieces[0].buffer: f"x{k}" for k, tensor in enumerate(self.step.inputs)
        }
        """C pointers to the buffers of the caller: inputs and output."""
        if self.step.output is not None:
            self._caller_pointers[self.step.output.pieces[0].buffer] = "outputs"
        training_graph = layout.step.graph
        self._resident_names = layout.resident_names
        self._state_names = {training_graph.tensors[i].name for i in training_graph.state_tensors}
        self._mapped_state = (
            self._state_names - self._resident_names if layout.plan.memory_mapped else set()
        )
        self._constant_names = weights.offsets.keys() - self._state_names
        self._checked_indices: list[Indices] = []
        """The index operands that are already checked, or implied by a check."""
        self._replaced_state = {
            self.graph.tensors[new].name: self.graph.tensors[old].name
            for old, new in self.graph.replacement_of.items()
        }
        """The replaced state tensor of each replacement."""
        self._offsets = self._find_offsets()
        self._current_offsets = {
            training_graph.tensors[entry.index].name: entry.offset
            for entry in layout.arena.offsets
            if entry.position == BEFORE
        }
        """Offset of the current or last copy of each tensor in the arena, by name [B]."""
        self.state_offsets = dict(self._current_offsets)
        """Offset at which a state tensor is, or may be loaded between two steps, by name [B]."""
        self._overwritten_names: set[str] = set()
        """Inputs of the current node that its outputs overwrite in place."""
        self._written_state: set[str] = set()
        """Memory-mapped state whose new value the lines have written."""
        self._workspace: int | None = None
        """Offset of the workspace of the current node [B]; None if the node has no workspace."""
        self._has_updated = False
        """Whether the lines include an update, so that a later error leaves old and new state
        mixed."""
        self._transfers: dict[str, None] = {}
        """C expressions of the slots of pending transfers, in the order of their start."""
        self.writes_rotating_state = False
        """Whether the lines include a write of state to the next generation."""
        self.updates_mapped_state = False
        """Whether the lines include a loop of ``pm_mapped.c``."""
        self._slice_count = 0
        """Number of generated slice labels: a sliced step can pause before each computation."""
        self._replay = layout.replay if self._is_training else None
        self._front_is_stored = self._replay is None
        """Whether the lines store all outputs of the front; True without a front."""
        self._missing_outputs = set(self._replay.front.outputs) if self._replay else set()
        """Outputs of the front that are not computed yet."""
        input_indices = self._replay.front.inputs if self._replay else ()
        self._stored_inputs = {self.step.inputs[k].pieces[0].buffer for k in input_indices}
        """Buffers of the inputs that a stored sample contains."""
        self._computation_counts: Counter[int] = Counter()
        """Number of generated computations of each node."""

    def _find_offsets(self) -> dict[int, dict[int, int]]:
        """Return the offset of each copy in the arena [B], by position, then by tensor.

        The position is that of the instruction that writes the copy, or `BEFORE`. Also sets
        `_workspaces`. Offsets of a forward pass begin behind the state in RAM.
        """
        offsets: dict[int, dict[int, int]] = {}
        self._workspaces: dict[int, int] = {}
        for position, content, index, arena_offset in self.arena.offsets:
            offset = self.program.base_bytes + arena_offset
            if content == Content.WORKSPACE:
                self._workspaces[position] = offset
            else:
                offsets.setdefault(position, {})[index] = offset
        return offsets

    def generate_lines(self) -> Iterator[str]:
        """Yield the C statements of the step or the forward pass; add to `lists` and `kernels`.

        Raises `InputError` if memory-mapped storage cannot hold a new value, `BudgetError` if the
        stack is too small for an update.
        """
        tensors = {tensor.name for tensor in self.graph.tensors}
        if self._mapped_state:
            yield self._try_call("pm_check_addresses()")
        yield from self._index_check_lines()
        yield from self._number_check_lines()
        if self._replay is not None:
            yield "if (PM_CHECKS) return PM_OK;"
        yield from self._gradient_lines({ref.buffer for ref in self._gradients} - tensors)
        for position, (op, index) in enumerate(self.plan.program):
            if op == Op.COMPUTE:
                self._workspace = self._workspaces.get(position)
                self._overwritten_names = set(self._find_overwritten_inputs(position, index))
            for i, offset in self._offsets.get(position, {}).items():
                self._current_offsets[self.graph.tensors[i].name] = offset
            if self._replay is None:
                yield from self._instruction_lines(op, index)
            else:
                yield from self._replay_lines(self._replay.front, op, index)

    def _instruction_lines(self, op: Op, index: int) -> Iterator[str]:
        """Yield the C statements of one instruction of the plan, on node or tensor `index`."""
        if op == Op.COMPUTE:
            yield from self._compute_lines(index)
            return
        name = self.graph.tensors[index].name
        if op == Op.PAGE_IN:
            yield from self._page_in_lines(name)
        elif op == Op.PAGE_OUT:
            yield from self._page_out_lines(name)
        elif op == Op.WAIT:
            yield self._wait_line(self._slot_of(name))
        elif (
            self._replaced_state.get(name, name)
            not in self._resident_names | self._mapped_state | self._overwritten_names
        ):
            size = self.step.buffers[self._replaced_state.get(name, name)].bytes
            if size:
                yield f"PM_FREE({self._address_of(name)}, {size});"

    # -- stored samples ----------------------------------------------------------------------------

    def _replay_lines(self, front: Front, op: Op, index: int) -> Iterator[str]:
        """Yield the C statements of one instruction of a step with replay.

        On a stored sample (PM_STORED), the front is skipped, and its outputs are read from the
        sample at each computation. A step that stores a sample (PM_KEEPS) writes them at their
        first computation, skips nodes outside of the front, and then returns.
        """
        producer_index = index if op == Op.COMPUTE else self.graph.node_of[index]
        lines = list(self._instruction_lines(op, index))
        names = [tensor.name for tensor in self.graph.nodes[producer_index].outputs]
        front_outputs = [name for name in names if name in front.outputs]
        if producer_index not in front.nodes:
            yield from lines if self._front_is_stored else _wrap_in_if("!PM_KEEPS", lines)
        elif op == Op.COMPUTE:
            yield from _wrap_in_if("!PM_STORED", lines)
            yield from self._sample_read_lines(front_outputs)
            if self._computation_counts[index] == 1:
                yield from self._sample_write_lines(front_outputs)
        elif self.graph.tensors[index].name in front_outputs:
            yield from lines
        else:
            yield from _wrap_in_if("!PM_STORED", lines)

    def _sample_read_lines(self, names: Sequence[str]) -> Iterator[str]:
        for name in names:
            read_call = self._try_call(f"pm_sample_read({self._sample_arguments(name)})")
            yield f"if (PM_STORED) {read_call}"

    def _sample_write_lines(self, names: Sequence[str]) -> Iterator[str]:
        """Yield the writes of front outputs `names` to a sample if PM_KEEPS; mark them as computed.

        Once all outputs of the front are computed, also yields the statement that returns.
        """
        for name in names:
            write_call = self._try_call(f"pm_sample_write({self._sample_arguments(name)})")
            yield f"if (PM_KEEPS) {write_call}"
        self._missing_outputs -= set(names)
        if not self._missing_outputs and not self._front_is_stored:
            self._front_is_stored = True
            yield f"if (PM_KEEPS) {{ {self._pending_waits()}return PM_OK; }}"

    def _sample_arguments(self, name: str) -> str:
        """Return the C arguments for an output of the front in a sample: index, address, size."""
        if self._replay is None:
            raise ValueError(name)
        output_index = self._replay.front.outputs.index(name)
        size = self.step.buffers[name].bytes
        return f"{output_index}, PM_ADDRESS({self._address_of(name)}), {size} * PM_SCALE"

    def _find_overwritten_inputs(self, position: int, k: int) -> Iterator[str]:
        """Yield inputs that node `k` overwrites; its outputs are not in `_current_offsets` yet."""
        output_offsets = self._offsets.get(position, {})
        for output_index, input_index in self.graph.in_place_of[k]:
            name = self.graph.tensors[input_index].name
            if output_index in output_offsets and output_offsets[
                output_index
            ] == self._current_offsets.get(name):
                yield name

    # -- indices -----------------------------------------------------------------------------------

    def _index_check_lines(self) -> Iterator[str]:
        """Yield the range checks of indices in inputs, also if kernels read copies of the inputs.

        Registers the indices and their copies as checked, and ``pm_within`` as a kernel.
        """
        for indices, source_indices in find_input_indices(self.step):
            checks = list(self._range_check_lines(source_indices))
            is_stored = self._replay is None or source_indices.ref.buffer in self._stored_inputs
            yield from checks if is_stored else _wrap_in_if("!PM_STORED", checks)
            self._checked_indices.append(indices)

    def _number_check_lines(self) -> Iterator[str]:
        """Yield the checks that real inputs are finite; stored samples were checked when kept."""
        for tensor in find_real_inputs(self.step):
            self.kernels.setdefault("pm_finite")
            pointer = self._caller_pointers[tensor.pieces[0].buffer]
            condition = f"!pm_finite({pointer}, {tensor.elements})"
            check = self._return_if(condition, "PM_ERROR_NUMBER")
            yield from [check] if self._replay is None else _wrap_in_if("!PM_STORED", [check])

    def _range_check_lines(self, indices: Indices) -> Iterator[str]:
        """Yield and register the range check of indices, unless they are constant or checked."""
        is_checked = any(checked.implies(indices) for checked in self._checked_indices)
        if is_checked or indices.ref.buffer in self._constant_names:
            return
        self._checked_indices.append(indices)
        self.kernels.setdefault("pm_within")
        bounds = f"{indices.low}, {indices.high}, {indices.ignored}"
        arguments = (
            f"{self._pointer(indices.ref)}, {self._argument(indices.shape, 'indices')}, {bounds}"
        )
        yield self._return_if(f"!pm_within({arguments})", "PM_ERROR_INPUT")

    def _return_if(self, condition: str, error: str) -> str:
        """Return a statement that waits for transfers and returns `error`, or PM_TORN."""
        waits = self._pending_waits()
        end = f"return {'PM_TORN' if self._has_updated else error};"
        return f"if ({condition}) {{ {waits}{end} }}" if waits else f"if ({condition}) {end}"

    # -- computing ---------------------------------------------------------------------------------

    def _compute_lines(self, k: int) -> Iterator[str]:
        """Yield the statements of one computation of node `k`: page-ins, or calls with checks.

        The loss is stored, and returned gradients paged out, after the first computation only.
        Counts the computation, and registers kernels, `state_offsets`, and whether state is
        updated.
        """
        node = self.graph.nodes[k]
        self._computation_counts[k] += 1
        if node.is_state:
            name = node.outputs[0].name
            if name not in self._resident_names | self._mapped_state:
                self.state_offsets.setdefault(name, self._current_offsets[name])
                yield from self._page_in_lines(name)
            return
        if node.on_aux:
            for tensor in node.outputs:
                yield from self._transfer_lines("in", tensor.name, wait=True)
            return
        yield from self._heading_lines(k)
        replaced_names = {tensor.replaces for tensor in node.outputs if tensor.replaces is not None}
        yield from self._begin_generation_lines(replaced_names & self._mapped_state)
        if replaced_names:
            self._has_updated = True
        calls = self.step.calls[k]
        for call_index, call in enumerate(calls):
            if not self._is_self_copy(call):
                self.kernels.setdefault(call.kernel)
                yield from self._call_lines(node.name, calls, call_index, replaced_names)
        if self._computation_counts[k] == 1:
            yield from self._result_lines(k)

    def _call_lines(
        self,
        node_name: str,
        calls: Sequence[Call],
        call_index: int,
        replaced_names: AbstractSet[str | None],
    ) -> Iterator[str]:
        """Yield checks that the indices of ``calls[call_index]`` are in range, then its statements.

        `calls` are all calls of node `node_name`, which replaces the state `replaced_names`. With
        rotating state, an update has no statement if all its new values are already written.
        """
        call = calls[call_index]
        for indices in find_index_operands(call):
            yield from self._range_check_lines(indices)
        refs = call.writes
        written_names = {ref.buffer for ref in refs} & replaced_names
        if not written_names & self._mapped_state:
            yield from self._ram_call_lines(calls[:call_index], call, replaced_names)
        elif any(ref.offset and ref.buffer in written_names & self._mapped_state for ref in refs):
            raise InputError(
                f"{node_name}: its state is a part of a larger tensor, which memory-mapped storage "
                "cannot take; give it memory of its own, such as .clone() returns, or choose a "
                "device whose storage is paged"
            )
        elif call.is_copy:
            yield self._storage_copy_line(node_name, call)
        elif is_divided_by_rows(call.kernel):
            by_rows = self._filter_update_lines if "shape" in call else self._row_update_lines
            yield from by_rows(call)
        elif self.layout.rotating_state:
            yield from self._serial_update_lines(calls, call_index, written_names)
        else:
            targets = (ref.buffer for ref in refs if ref.buffer in written_names)
            yield from self._chunk_update_lines(
                (call,), [name for name in targets if name in self._mapped_state]
            )

    def _ram_call_lines(
        self, earlier_calls: Sequence[Call], call: Call, replaced_names: AbstractSet[str | None]
    ) -> Iterator[str]:
        """Yield the statements of a call that writes no mapped state: the call itself, if possible.

        It is not if one of the node's earlier calls changes a sum of gradients that rotates on
        mapped storage: the new sum cannot be read before the commit, so it is computed again.
        """
        sum_names = [ref.buffer for ref in call.refs if ref.buffer in replaced_names]
        additions = [
            earlier_call
            for earlier_call in earlier_calls
            if any(ref.buffer in sum_names for ref in earlier_call.writes)
        ]
        if not (
            self.layout.rotating_state and additions and self._written_state.intersection(sum_names)
        ):
            yield self._call_line(call)
        elif call.is_copy:
            (add_call,) = additions
            yield from self._sum_copy_lines(call, add_call, sum_names)
        else:
            yield from self._chunk_update_lines((*additions, call), ())

    def _sum_copy_lines(
        self, copy_call: Call, add_call: Call, sum_names: Sequence[str]
    ) -> Iterator[str]:
        """Yield a copy of the old sum of gradients, and a call that adds the gradient to the copy.

        They replace only `copy_call`, which copies the new sum of `add_call`. A gradient in the
        workspace is at the destination: then one call adds the old sum. `sum_names` count as
        written afterwards.
        """
        target, source, gradient = copy_call["out"], copy_call["x"], add_call["gradient"]
        self._written_state.difference_update(sum_names)
        if gradient.buffer != WORKSPACE:
            yield self._call_line(copy_call)
            source = gradient
        addition = add_call.with_arguments(total=target, gradient=source)
        yield self._call_line(replace(addition, condition=copy_call.condition))
        self._written_state.update(sum_names)

    def _heading_lines(self, k: int) -> Iterator[str]:
        """Yield the comment of a computation; in training, also its counted label and its hook."""
        self._reader = self.graph.nodes[k].name
        suffix = ", again" if self._computation_counts[k] > 1 else ""
        hook = ""
        if self._is_training:
            self._slice_count += 1
            yield f"PM_SLICE({self._slice_count + 1}):"
            hook = f"PM_NODE({k}); "
        yield f"{hook}/* {comment_text(self.graph.nodes[k].name)}{suffix} */"

    def _is_self_copy(self, call: Call) -> bool:
        """Return whether a call copies elements onto themselves: equal C pointers and strides."""
        if not call.is_copy:
            return False
        loops = ELEMENTWISE.read(call)
        sides = {(self._pointer(call[name]), loops.strides_of(name)) for name in ("out", "x")}
        return len(sides) == 1

    def _call_line(self, call: Call) -> str:
        expressions = map(self._cast_argument, find_kernel(call.kernel).parameters, call.arguments)
        return self._conditional_line(call, f"{call.kernel}({', '.join(expressions)});")

    def _cast_argument(self, parameter: Parameter, argument: Argument) -> str:
        """Return the C expression of an argument, cast if int8 data is passed as unsigned bytes."""
        text = self._argument(argument, parameter.name)
        if parameter.type != "const uint8_t *" or not isinstance(argument, Ref):
            return text
        is_signed = self.step.buffers[argument.buffer].type is DataType.INT8
        return f"({parameter.type})({text})" if is_signed else text

    def _named_texts(self, call: Call) -> dict[str, str]:
        """Return the C of the arguments of a call, by the names of their parameters."""
        return {
            name: self._argument(argument, name) for name, argument in call.named_arguments.items()
        }

    def _conditional_line(self, call: Call, line: str) -> str:
        """Return a line of C, under the condition of its call if it has one."""
        if call.condition is None:
            return line
        return f"if (*{self._pointer(call.condition.counter)} == {call.condition.value}) {line}"

    def _storage_copy_line(self, node_name: str, call: Call) -> str:
        """Return the driver call that copies a value to mapped state; mark it as written."""
        loops = ELEMENTWISE.read(call)
        if len(loops.sizes) == 1 and (loops.sizes == (1,) or {*loops.strides} == {(1,)}):
            state_ref, value_ref, (count,) = call["out"], call["x"], loops.sizes
            type_name = self.step.buffers[state_ref.buffer].type.c_name
            first_byte, n_bytes = (
                f"{state_ref.offset} * sizeof({type_name})",
                f"{count} * sizeof({type_name})",
            )
            write_arguments = (
                f"(uint32_t)({first_byte}), {self._pointer(value_ref)}, (uint32_t)({n_bytes})"
            )
            line = self._try_call(
                f"pm_page_write({self._new_slot(state_ref.buffer)}, {write_arguments})"
            )
            self._written_state.add(state_ref.buffer)
            return line
        raise InputError(
            f"{node_name}: its new value has another order of elements than the state, which "
            "memory-mapped storage cannot take; make it contiguous, or choose a device whose "
            "storage is paged"
        )

    def _serial_update_lines(
        self, calls: Sequence[Call], call_index: int, written_names: set[str]
    ) -> Iterator[str]:
        """Yield the update of mapped state that ``calls[call_index]`` writes, tensor by tensor.

        Each tensor that is not yet written is recomputed from old values, by all `calls` of the
        node on which its new value depends, and marked as written. State in RAM among
        `written_names` is updated with the last of these tensors.
        """
        names = (ref.buffer for ref in calls[call_index].writes)
        needed_calls = {
            name: self._find_needed_calls(calls, call_index, name)
            for name in names
            if name in self._mapped_state - self._written_state
        }
        ram_names = written_names - self._mapped_state
        for group_calls, group in groupby(needed_calls, needed_calls.__getitem__):
            targets = [*group]
            is_last = targets[-1] == [*needed_calls][-1]
            copied_names = set() if is_last and len(targets) == 1 else ram_names
            final_names = sorted(copied_names) if is_last else []
            yield from self._chunk_update_lines(group_calls, targets, copied_names, final_names)

    def _find_needed_calls(
        self, calls: Sequence[Call], call_index: int, target: str
    ) -> tuple[Call, ...]:
        """Return those of a node's calls on which the new value of mapped `target` depends."""
        pending_names = {target}
        needed_calls: list[Call] = []
        for k, call in reversed([*enumerate(calls)]):
            changed_names = {ref.buffer for ref in call.writes}
            if changed_names & pending_names and (k <= call_index or changed_names == {target}):
                needed_calls.insert(0, call)
                pending_names |= {ref.buffer for ref in call.refs} & self._mapped_state
        return tuple(needed_calls)

    def _chunk_update_lines(
        self,
        calls: Sequence[Call],
        targets: Sequence[str],
        copied_names: AbstractSet[str] = frozenset(),
        final_names: Sequence[str] = (),
    ) -> Iterator[str]:
        """Yield a loop that updates memory-mapped state in chunks on the stack.

        The driver writes `targets`, which are marked as written: each in a turn of its own if
        commits rotate them. Other mapped state, and state in RAM in `copied_names`, changes in
        copies only, except that the last turn stores `final_names`.
        """
        refs = {
            ref.buffer: ref
            for call in calls
            for ref in call.writes
            if ref.buffer in self._mapped_state | copied_names
        }
        names = [*dict.fromkeys((*targets, *final_names, *refs))]
        n_elements = max(self.step.buffers[name].elements for name in targets or names)
        max_elements = _CHUNK_ELEMENTS if len(names) <= _MAX_FULL_CHUNKS else _CHUNK_ELEMENTS // 2
        chunk = min(max_elements, n_elements)
        texts = {name: f"copies + {k * chunk}" if k else "copies" for k, name in enumerate(names)}
        opening = "{"
        if not self.layout.rotating_state and self._written_state.issuperset(targets):
            # Skip the whole block if the condition is false: the targets are already written, and a
            # second write of the same values could erase their blocks once more.
            (call,) = calls
            opening, calls = self._conditional_line(call, opening), (replace(call, condition=None),)
        for call in calls:
            self.kernels.setdefault(call.kernel)
        lines = [
            self._conditional_line(call, self._call_on_chunk(call, n_elements, texts))
            for call in calls
        ]
        n_turns = max(1, len(targets)) if self.layout.rotating_state else 1
        n_written = len(targets) + len(final_names)
        yield from self._update_lines(
            [refs[name] for name in names],
            (1, n_elements, chunk, 1, chunk, n_turns, n_written),
            len(names) * chunk,
            lines,
            opening=opening,
        )
        self._written_state.update(targets)

    def _update_lines(
        self,
        refs: Sequence[Ref],
        sizes: Sequence[int],
        copied_elements: int,
        lines: Sequence[str],
        *,
        opening: str = "{",
    ) -> Iterator[str]:
        """Yield a block with an update of state by `lines`, which ``pm_mapped.c`` divides.

        `sizes` is the table of a ``pm_mapped_t`` up to the pieces, which are at `refs`.
        """
        pieces = [self.layout.state_pieces[ref] for ref in refs]
        table = self._argument((*sizes, len(pieces), *pieces), "update")
        yield opening
        yield f"    pm_real copies[{copied_elements}];"
        yield f"    pm_mapped_t update = {{.table = {table}, .copies = copies}};"
        yield "    while (pm_mapped_next(&update)) {"
        yield from (f"        {line}" for line in lines)
        yield "    }"
        yield f"    {self._return_if('update.error', 'PM_ERROR_PAGE')}"
        yield "}"
        self.updates_mapped_state = True

    def _call_on_chunk(self, call: Call, n_elements: int, copies: Mapping[str, str]) -> str:
        """Return the C of an update of a part of `n_elements`, in `copies`, by buffer."""
        texts = self._named_texts(call)
        if "first" in call:
            texts |= {"first": "update.first", "count": "update.n"}
        elif call["n"] == n_elements:
            texts["n"] = "update.n"
        moving = moving_parameters(call.kernel)
        for name, ref in call.pointers.items():
            if ref.buffer in copies:
                c_type = self.step.buffers[ref.buffer].type.c_name
                copy = copies[ref.buffer]
                texts[name] = copy if c_type == DataType.REAL.c_name else f"({c_type} *)({copy})"
            elif ref.buffer == WORKSPACE and name in moving:  # the summed or clipped gradient
                texts[name] = f"(const pm_real *){texts[name]} + update.first"
            elif name in moving and self.step.buffers[ref.buffer].elements > 1:
                texts[name] += " + update.first"
        return f"{call.kernel}({', '.join(texts.values())});"

    def _row_update_lines(self, call: Call) -> Iterator[str]:
        """Yield the update of a mapped matrix by a gradient kernel; mark it as written."""
        texts = self._named_texts(call)
        texts |= {"m": "1", "n": "update.n", "w_row": "update.n"}
        texts["a"] += f" + update.row * {call['a_row']}"
        texts["b"] += f" + update.first * {call['b_column']}"
        yield from self._window_update_lines(
            call, (call["m"], call["n"], min(call["n"], _CHUNK_ELEMENTS), 1), texts
        )

    def _filter_update_lines(self, call: Call) -> Iterator[str]:
        """Yield the update of a mapped convolution weight; mark the weight as written."""
        sizes = ConvolutionSizes(*call["shape"])
        channels = sizes.group_channels
        max_elements = max(1, _CHUNK_ELEMENTS // sizes.window)
        n_channels = max(
            divisor
            for divisor in range(1, channels + 1)
            if channels % divisor == 0 and divisor <= max_elements
        )
        piece_sizes = tuple(sizes._replace(channels=n_channels, results=1, groups=1))
        piece_call = call.with_arguments(shape=piece_sizes, first=0, count=1)
        texts = self._named_texts(piece_call)
        group = f"(update.row + {call['first']}) / {sizes.group_results}"
        texts["x"] += f" + ({group} * {channels} + update.first) * {sizes.plane}"
        texts["dy"] += f" + update.row * {sizes.out_plane}"
        yield from self._window_update_lines(
            call, (call["count"], channels, n_channels, sizes.window), texts
        )

    def _window_update_lines(
        self, call: Call, sizes: tuple[int, int, int, int], texts: Mapping[str, str]
    ) -> Iterator[str]:
        """Yield the update of a mapped weight by the C arguments `texts`; mark it as written.

        `sizes` are rows, units in each, the most of them in a call, and the elements of a unit.
        Every write has `_CHUNK_ELEMENTS` elements, so that it begins at a write unit of flash.
        """
        _, _, max_units, unit = sizes
        max_elements = max_units * unit
        weight = call["w"]
        needed_bytes = _OTHER_STACK_BYTES + DataType.REAL.itemsize * (
            _CHUNK_ELEMENTS + max_elements
        )
        if max_elements > _CHUNK_ELEMENTS and needed_bytes > self.layout.stack_bytes:
            raise BudgetError(
                f"stack: windows of {weight.buffer} are updated on the stack, which takes up to "
                f"{needed_bytes:,} B of it; give a stack of this size"
            )
        arguments = {**texts, "w": "copies + update.held"}
        yield from self._update_lines(
            [weight],
            (*sizes, _CHUNK_ELEMENTS, 1, 1),
            _CHUNK_ELEMENTS + max_elements,
            [f"{call.kernel}({', '.join(arguments.values())});"],
        )
        self._written_state.add(weight.buffer)

    def _argument(self, argument: Argument, parameter: str) -> str:
        """Return the C of an argument: a pointer, list name (added to `lists`), literal or rate."""
        if isinstance(argument, Ref):
            return self._pointer(argument)
        if isinstance(argument, ScaledLearningRate):
            return "lr" if argument.factor == 1 else f"lr * {_real_literal(argument.factor)}"
        if isinstance(argument, tuple):
            return self.lists.register(argument, self._reader, parameter)
        return str(int(argument)) if isinstance(argument, int) else _real_literal(argument)

    def _pointer(self, ref: Ref) -> str:
        """Return the C pointer to a workspace, or a buffer of caller, storage, arena or weights.

        For mapped state, it points to the new value once that is written.
        """
        name = ref.buffer
        if name == WORKSPACE:
            # An untyped address: the kernel defines the type. Offsets count elements of 4 bytes.
            return f"PM_ADDRESS({(self._workspace or 0) + 4 * ref.offset})"
        element_type = self.step.buffers[name].type
        if name in self._caller_pointers:
            return _add_offset(self._caller_pointers[name], ref.offset)
        if name in self._mapped_state:
            version = "NEW" if name in self._written_state else "OLD"
            commits = name in self.layout.rotating_state
            slot = (
                f"PM_{version}({self._slot_numbers[name]})"
                if commits
                else f"{self._slot_numbers[name]}"
            )
            pointer = f"((const {element_type.c_name} *)pm_page_address({slot}))"
            return _add_offset(pointer, ref.offset)
        if name in self._current_offsets or name in self._replaced_state:
            return _add_offset(f"PM_{element_type.macro}({self._address_of(name)})", ref.offset)
        index = self.weights.offsets[name] // element_type.itemsize
        return f"PM_CONSTANT_{element_type.macro}({index + ref.offset})"

    def _address_of(self, name: str) -> int:
        """Return the offset of a tensor in the arena; a replacement has that of its state [B]."""
        return self._current_offsets[self._replaced_state.get(name, name)]

    # -- transfers and results ---------------------------------------------------------------------

    def _slot_of(self, name: str) -> str:
        """Return the C of a tensor's slot: for replacements, that of the new state."""
        old = self._replaced_state.get(name)
        if old is not None:
            return self._new_slot(old)
        if name in self.layout.rotating_state:
            return f"PM_OLD({self._slot_numbers[name]})"
        slot_name = name if name in self._state_names else page_slot_name(self.program, name)
        return str(self._slot_numbers[slot_name])

    def _new_slot(self, name: str) -> str:
        """Return the C expression of the slot for new state, in the next generation if rotating."""
        slot = str(self._slot_numbers[name])
        return f"PM_NEW({slot})" if name in self.layout.rotating_state else slot

    def _page_in_lines(self, name: str) -> Iterator[str]:
        """Yield the page-in of a tensor, with a wait only if transfers are blocking."""
        yield from self._transfer_lines("in", name)

    def _page_out_lines(self, name: str) -> Iterator[str]:
        """Yield the page-out of a tensor; no line for the replacement of memory-mapped state."""
        # An update writes mapped state itself.
        if self._replaced_state.get(name, name) not in self._mapped_state:
            yield from self._begin_generation_lines({self._replaced_state.get(name)})
            yield from self._transfer_lines("out", name)

    def _begin_generation_lines(self, written_names: AbstractSet[str | None]) -> Iterator[str]:
        """Yield the write of the generation's record, once, before rotating state is written.

        `written_names` is the state that the next lines write. Sets `writes_rotating_state`.
        """
        if not self.writes_rotating_state and written_names & self.layout.rotating_state:
            self.writes_rotating_state = True
            yield self._try_call("pm_commit_begin(1)")

    def _transfer_lines(self, direction: str, name: str, *, wait: bool = False) -> Iterator[str]:
        """Yield a page-in (`direction` ``in``) or page-out, and its wait if `wait` or blocking."""
        slot = self._slot_of(name)
        size = self.step.buffers[self._replaced_state.get(name, name)].bytes
        address = f"PM_ADDRESS({self._address_of(name)})"
        yield self._try_call(f"pm_page_{direction}({slot}, {address}, {size} * PM_SCALE)")
        self._transfers[slot] = None
        if wait or self.plan.mode == "blocking":
            yield self._wait_line(slot)

    def _wait_line(self, slot: str) -> str:
        """Return the wait for the transfer of a slot, which is then no longer pending."""
        self._transfers.pop(slot, None)
        return self._try_call(f"pm_page_wait({slot})")

    def _result_lines(self, k: int) -> Iterator[str]:
        """Yield the check that the loss is finite, its assignment, and page-outs of gradients."""
        outputs = {tensor.name for tensor in self.graph.nodes[k].outputs}
        if self.step.loss.buffer in outputs:
            loss = f"*{self._pointer(self.step.loss)}"
            yield self._return_if(f"!pm_is_finite({loss})", "PM_ERROR_NUMBER")
            yield f"pm_progress.loss = {loss};"
        yield from self._gradient_lines(outputs)

    def _gradient_lines(self, buffers: AbstractSet[str]) -> Iterator[str]:
        """Yield page-outs, with waits, of the returned gradients whose buffer is in `buffers`."""
        for value, piece in zip(self.step.gradients, self._gradients, strict=True):
            slot = self._slot_numbers[gradient_slot_name(value)]
            if piece.buffer in buffers:
                size = self.step.buffers[piece.buffer].bytes
                address = self._pointer(Ref(piece.buffer))
                yield self._try_call(f"pm_page_out({slot}, {address}, {size} * PM_SCALE)")
                yield self._try_call(f"pm_page_wait({slot})")

    def _try_call(self, call: str) -> str:
        """Return the statement that executes a call, and returns an error if the call fails."""
        macro = f"PM_TRY_{'TORN' if self._has_updated else 'PAGE'}"
        waits = self._pending_waits()
        if not waits:
            return f"{macro}({call});"
        return f"{{ PM_ASIDE(const int error = {call}); if (error) {{ {waits}}} {macro}(error); }}"

    def _pending_waits(self) -> str:
        """Return the C statements, each with a space behind it, that wait for transfers; or ""."""
        return "".join(f"(void)pm_page_wait({slot}); " for slot in self._transfers)


def _wrap_in_if(condition: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield the slice labels among `lines`, then all other lines in an if block, if there are any.

    A label in the block would continue the step without the condition.
    """
    labels = [line for line in lines if line.startswith("PM_SLICE(")]
    statements = [line for line in lines if not line.startswith("PM_SLICE(")]
    yield from labels
    if statements:
        yield f"if ({condition}) {{"
        yield from (f"    {line}" for line in statements)
        yield "}"


def _add_offset(pointer: str, offset: int) -> str:
    return f"{pointer} + {offset}" if offset else pointer


def _real_literal(value: float) -> str:
    if math.isnan(value):
        return "PM_C(NAN)"
    if math.isinf(value):
        return "PM_INFINITY" if value > 0 else "-PM_INFINITY"
    return f"PM_C({value!r})"


def comment_text(text: str) -> str:
    """Return a text as ASCII without comment marks, for a comment in C."""
    text_without_marks = text.replace("*/", "* /").replace("/*", "/ *")
    return text_without_marks.encode("ascii", "backslashreplace").decode()
