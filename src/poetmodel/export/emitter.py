"""The C of a step: its program as straight-line calls with constant addresses."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.errors import BudgetError, InputError
from poetmodel.export.deployment import gradient_slot, pass_slot
from poetmodel.export.ranges import Indices, index_operands, trace_copies
from poetmodel.lowered.calls import (
    WORKSPACE,
    Call,
    ConvolutionSizes,
    DataType,
    Ref,
    ScaledLearningRate,
)
from poetmodel.lowered.fusing import FUSED, QUANTIZED_FUSED, QUANTIZED_UPDATES
from poetmodel.lowered.kernels import changed, parameter_names, parameters
from poetmodel.lowered.loops import call_refs
from poetmodel.plan import Op
from poetmodel.schedule.machine import BEFORE, Content

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from poetmodel.export.deployment import Deployment, ForwardPass
    from poetmodel.export.replay import Front
    from poetmodel.lowered.calls import Argument
    from poetmodel.lowered.step import Weights

_POINTER: Final = {
    DataType.REAL: "PM_REALS",
    DataType.INT32: "PM_INTS",
    DataType.UINT8: "PM_BYTES",
    DataType.INT8: "PM_INT8S",
}
"""The macros that turn an offset in the arena into a pointer."""
_CONSTANT: Final = {
    DataType.REAL: "PM_CONSTANT_REALS",
    DataType.INT32: "PM_CONSTANT_INTS",
    DataType.UINT8: "PM_CONSTANT_BYTES",
    DataType.INT8: "PM_CONSTANT_INT8S",
}
_PIECE: Final = 32
"""Elements of memory-mapped state that are updated and written at a time."""
_MANY_PIECES: Final = 4
"""So many of them are on the stack at a time; where there are more, they are half as long."""
_STACK_BESIDE_BYTES: Final = 1024
"""What the rest of a program takes of the stack while a weight's windows are there [B]: 676 were
measured on a Cortex-M4."""


class ProgramSource:
    """The body of ``pm_step``, or of a forward pass beside it: lines for each instruction.

    A forward pass begins as a step does: with all state at home, and that in RAM at the bottom of
    the arena.
    """

    def __init__(
        self, deployment: Deployment, weights: Weights, beside: ForwardPass | None = None
    ) -> None:
        self.deployment = deployment
        self.beside = beside
        program = deployment if beside is None else beside
        self.step = program.step
        self.graph = program.step.graph
        self.plan = program.plan
        self.arena = program.arena
        self.weights = weights
        self.lists: dict[tuple[int, ...], str] = {}
        """Sizes and strides that calls take, by the names of their arrays."""
        self.kernels: dict[str, None] = {}
        """The kernels that are called, in the order of their first call."""
        self._gradients = tuple(value.pieces[0] for value in self.step.gradients)
        """Where those that are handed out lie: none of them is in tiles."""
        self._slot = {name: k for k, name in enumerate(deployment.slots)}
        self._callers = {v.pieces[0].buffer: f"x{k}" for k, v in enumerate(self.step.inputs)}
        """What belongs to the caller, by the names of its pointers."""
        if self.step.output is not None:
            self._callers[self.step.output.pieces[0].buffer] = "outputs"
        trained, plan = deployment.step.graph, deployment.plan
        self._resident = {trained.tensors[i].name for i in plan.resident or ()}
        self._state = {trained.tensors[i].name for i in trained.state_tensors}
        self._mapped = self._state - self._resident if plan.memory_mapped else set()
        self._constants = weights.offsets.keys() - self._state
        self._within: list[Indices] = []
        """The indices that were found to be in their range."""
        self._old = {
            self.graph.tensors[new].name: self.graph.tensors[old].name
            for old, new in self.graph.replacement_of.items()
        }
        """Of each replacement the state tensor that it replaces."""
        self._offsets = self._placed()
        self._here = {
            trained.tensors[entry.index].name: entry.offset
            for entry in deployment.arena.offsets
            if entry.position == BEFORE
        }
        """Where in the arena the current copy of each tensor is [B]."""
        self.room = dict(self._here)
        """Where a tensor of state is, or may be put between two steps [B]."""
        self._taken: set[str] = set()
        """Inputs of the last node whose memory its outputs have taken over."""
        self._written: set[str] = set()
        """Memory-mapped state that has its new value."""
        self._workspace: int | None = None
        self._torn = False
        self._moving: dict[str, None] = {}
        """The slots whose transfer has begun and is not waited for yet."""
        self.writes_early = False
        """Whether a step writes committed state before its end."""
        self._slices = 0
        """Nodes that were computed; a step can be ended before each."""
        self._replay = deployment.replay if beside is None else None
        self._is_kept = self._replay is None
        """Whether all that a sample holds of the front was computed: what follows is behind it."""
        self._uncomputed = set(self._replay.front.outputs) if self._replay else set()
        """Outputs of the front that were not computed yet."""
        numbers = self._replay.front.inputs if self._replay else ()
        self._stored_inputs = {self.step.inputs[k].pieces[0].buffer for k in numbers}
        """Inputs that a stored sample has."""
        self._seen: Counter[int] = Counter()

    def _placed(self) -> dict[int, dict[int, int]]:
        offsets: dict[int, dict[int, int]] = {}
        self._workspaces: dict[int, int] = {}
        base = 0 if self.beside is None else self.deployment.resident_bytes
        for position, content, index, at in self.arena.offsets:
            offset = base + at
            if content == Content.WORKSPACE:
                self._workspaces[position] = offset
            else:
                offsets.setdefault(position, {})[index] = offset
        return offsets

    def lines(self) -> Iterator[str]:
        """Yield the statements of one step, or of one forward pass."""
        tensors = {tensor.name for tensor in self.graph.tensors}
        yield from self._callers_indices()
        yield from self._handed_out({ref.buffer for ref in self._gradients} - tensors)
        for position, (op, index) in enumerate(self.plan.program):
            if op == Op.COMPUTE:
                self._workspace = self._workspaces.get(position)
                self._taken = set(self._taken_over(position, index))
            for i, offset in self._offsets.get(position, {}).items():
                self._here[self.graph.tensors[i].name] = offset
            if self._replay is None:
                yield from self._instruction(op, index)
            else:
                yield from self._replayed(self._replay.front, op, index)

    def _instruction(self, op: Op, index: int) -> Iterator[str]:
        """Yield the statements of an instruction of the plan."""
        if op == Op.COMPUTE:
            yield from self._compute(index)
            return
        name = self.graph.tensors[index].name
        if op == Op.PAGE_IN:
            yield from self._page_in(name)
        elif op == Op.PAGE_OUT:
            yield from self._page_out(name)
        elif op == Op.WAIT:
            yield self._wait(self._slot_of(name))
        elif self._old.get(name, name) not in self._resident | self._mapped | self._taken:
            size = self.step.buffers[self._old.get(name, name)].bytes
            if size:
                yield f"PM_FREE({self._address_of(name)}, {size});"

    # -- stored samples ----------------------------------------------------------------------------

    def _replayed(self, front: Front, op: Op, index: int) -> Iterator[str]:
        """Yield an instruction of a step that stored samples can begin behind the front.

        PM_STORED: the step is on a stored sample. PM_KEEPS: it ends behind the front, whose outputs
        are stored. The other nodes run if neither is so.
        """
        maker = index if op == Op.COMPUTE else self.graph.node_of[index]
        lines = list(self._instruction(op, index))
        names = [tensor.name for tensor in self.graph.nodes[maker].outputs]
        kept = [name for name in names if name in front.outputs]
        if maker not in front.nodes:
            yield from lines if self._is_kept else _guarded("!PM_KEEPS", lines)
        elif op == Op.COMPUTE:
            yield from _guarded("!PM_STORED", lines)
            yield from self._loaded(kept)
            if self._seen[index] == 1:
                yield from self._stored(kept)
        elif self.graph.tensors[index].name in kept:
            yield from lines
        else:
            yield from _guarded("!PM_STORED", lines)

    def _loaded(self, names: Sequence[str]) -> Iterator[str]:
        """Yield what reads outputs of the front from a stored sample."""
        for name in names:
            read = self._try(f"pm_sample_read({self._part(name)})")
            yield f"if (PM_STORED) {read}"

    def _stored(self, names: Sequence[str]) -> Iterator[str]:
        """Yield what writes outputs of the front to a sample, and the end of that."""
        for name in names:
            write = self._try(f"pm_sample_write({self._part(name)})")
            yield f"if (PM_KEEPS) {write}"
        self._uncomputed -= set(names)
        if not self._uncomputed and not self._is_kept:
            self._is_kept = True
            waits = "".join(f"(void)pm_page_wait({slot}); " for slot in self._moving)
            yield f"if (PM_KEEPS) {{ {waits}return PM_OK; }}"

    def _part(self, name: str) -> str:
        """Return the arguments that say which part of a sample an output of the front is."""
        if self._replay is None:
            raise ValueError(name)
        number = self._replay.front.outputs.index(name)
        size = self.step.buffers[name].bytes
        return f"{number}, PM_ADDRESS({self._address_of(name)}), {size} * PM_SCALE"

    def _taken_over(self, position: int, k: int) -> Iterator[str]:
        """Yield the inputs of a node whose memory its outputs take over."""
        placed = self._offsets.get(position, {})
        for y, x in self.graph.in_place_of[k]:
            name = self.graph.tensors[x].name
            if y in placed and placed[y] == self._here.get(name):
                yield name

    # -- indices -----------------------------------------------------------------------------------

    def _callers_indices(self) -> Iterator[str]:
        """Yield what refuses the indices that a caller gives, those too that a step copies."""
        makers = {
            tensor.name: [call for call in calls if tensor.name in call.buffers]
            for node, calls in zip(self.graph.nodes, self.step.calls, strict=True)
            for tensor in node.outputs
        }
        for calls in self.step.calls:
            for indices in (indices for call in calls for indices in index_operands(call)):
                given = trace_copies(indices, makers)
                if given.ref.buffer in self._callers:
                    refused = list(self._refused(given))
                    stored = self._replay is None or given.ref.buffer in self._stored_inputs
                    yield from refused if stored else _guarded("!PM_STORED", refused)
                    self._within.append(indices)

    def _refused(self, indices: Indices) -> Iterator[str]:
        """Yield what ends the program where indices are out of their range and were not asked."""
        known = any(others.implies(indices) for others in self._within)
        if known or indices.ref.buffer in self._constants:
            return
        self._within.append(indices)
        self.kernels.setdefault("pm_within")
        numbers = f"{indices.low}, {indices.high}, {indices.ignored}"
        given = f"{self._pointer(indices.ref)}, {self._word(indices.shape)}, {numbers}"
        yield self._end_if(f"!pm_within({given})", "PM_ERROR_INPUT")

    def _end_if(self, condition: str, error: str) -> str:
        """Return the statement that ends a program on a condition, once no transfer is under way.

        The program returns PM_TORN instead of an error after the first update.
        """
        waits = "".join(f"(void)pm_page_wait({slot}); " for slot in self._moving)
        end = f"return {'PM_TORN' if self._torn else error};"
        return f"if ({condition}) {{ {waits}{end} }}" if waits else f"if ({condition}) {end}"

    # -- computing ---------------------------------------------------------------------------------

    def _compute(self, k: int) -> Iterator[str]:
        node = self.graph.nodes[k]
        self._seen[k] += 1
        if node.is_state:
            name = node.outputs[0].name
            if name not in self._resident | self._mapped:
                self.room.setdefault(name, self._here[name])
                yield from self._page_in(name)
            return
        if node.on_aux:
            for tensor in node.outputs:
                yield from self._transfer("in", tensor.name, wait=True)
            return
        yield from self._heading(k)
        replaced = {tensor.replaces for tensor in node.outputs if tensor.replaces is not None}
        yield from self._begin_generation(replaced & self._mapped)
        if replaced:
            self._torn = True
        calls = self.step.calls[k]
        for place, call in enumerate(calls):
            if not self._copies_nothing(call):
                self.kernels.setdefault(call.kernel)
                yield from self._called(node.name, calls, place, replaced)
        if self._seen[k] == 1:
            yield from self._results(k)

    def _called(
        self, node: str, calls: Sequence[Call], place: int, replaced: AbstractSet[str | None]
    ) -> Iterator[str]:
        """Yield one of a node's calls; what it writes to mapped state goes by the driver."""
        call = calls[place]
        for indices in index_operands(call):
            yield from self._refused(indices)
        refs = changed(call)
        written = {ref.buffer for ref in refs} & replaced
        if not written & self._mapped:
            yield from self._call_in_ram(calls[:place], call, replaced)
        elif any(ref.offset and ref.buffer in written & self._mapped for ref in refs):
            raise InputError(
                f"{node}: its state is a part of a larger tensor, which memory-mapped storage "
                "cannot take; give it memory of its own, such as .clone() returns, or choose a "
                "device whose storage is paged"
            )
        elif call.kernel.startswith("pm_copy"):
            yield self._copied(node, call)
        elif call.kernel == "pm_mm_sgd":
            yield from self._row_by_row(call)
        elif call.kernel in FUSED.values():
            yield from self._filter_by_filter(call)
        elif self.deployment.rotating:
            yield from self._one_by_one(calls, place, written)
        else:
            yield from self._piecewise((call,), written & self._mapped)

    def _call_in_ram(
        self, before: Sequence[Call], call: Call, replaced: AbstractSet[str | None]
    ) -> Iterator[str]:
        """Yield the lines of a call that writes to no mapped state.

        `before` are the earlier calls of its node. If they change a sum of gradients on mapped
        storage, a commit writes the new sum only after the node: an update of state in RAM reads
        pieces of the sum, which are computed again, and a copy of the sum is changed itself.
        """
        sums = [r.buffer for r in call.arguments if isinstance(r, Ref) and r.buffer in replaced]
        adding = [c for c in before if any(ref.buffer in sums for ref in changed(c))]
        if not (self.deployment.rotating and adding and self._written.intersection(sums)):
            yield self._line(call)
        elif call.kernel.startswith("pm_copy"):
            (add,) = adding
            yield from self._copy_of_new_sum(call, add, sums)
        else:
            yield from self._piecewise((*adding, call), set())

    def _copy_of_new_sum(self, copy: Call, add: Call, sums: Sequence[str]) -> Iterator[str]:
        """Yield a copy of an old sum of gradients, and the call that adds the gradient to it."""
        (to, old), (_, gradient), count = call_refs(copy), call_refs(add), add.arguments[-1]
        self._written.difference_update(sums)
        if gradient.buffer != WORKSPACE:
            yield self._line(copy)
            old = gradient
        yield self._line(replace(copy, kernel=add.kernel, arguments=(to, old, count)))
        self._written.update(sums)

    def _heading(self, k: int) -> Iterator[str]:
        """Yield what comes before the calls of a node: in a step, where a slice may end, a hook."""
        again = ", again" if self._seen[k] > 1 else ""
        mark = ""
        if self.beside is None:
            self._slices += 1
            yield f"PM_SLICE({self._slices + 1}):"
            mark = f"PM_NODE({k}); "
        yield f"{mark}/* {comment(self.graph.nodes[k].name)}{again} */"

    def _copies_nothing(self, call: Call) -> bool:
        """Return whether a call copies elements to where they lie, in place."""
        match call:
            case Call(kernel, (Ref() as to, Ref() as of, tuple() as shape)) if kernel.startswith(
                "pm_copy"
            ):
                return shape[2::3] == shape[3::3] and self._pointer(to) == self._pointer(of)
        return False

    def _line(self, call: Call) -> str:
        words = map(self._word_for, parameters(call.kernel), call.arguments)
        return self._made(call, f"{call.kernel}({', '.join(words)});")

    def _word_for(self, wanted: str, argument: Argument) -> str:
        """Return an argument as a parameter takes it: bytes with a sign by their bits too."""
        word = self._word(argument)
        if wanted != "const uint8_t *" or not isinstance(argument, Ref):
            return word
        signed = self.step.buffers[argument.buffer].type is DataType.INT8
        return f"({wanted})({word})" if signed else word

    def _made(self, call: Call, line: str) -> str:
        """Return what makes a call where it is to be made."""
        if call.where is None:
            return line
        return f"if (*{self._pointer(call.where.counter)} == {call.where.value}) {line}"

    def _copied(self, node: str, call: Call) -> str:
        """Return what writes a tensor to state that the core reads where it lies: one new value."""
        match call.arguments:
            case (Ref() as new, Ref() as value, (1, count, *steps)) if count == 1 or steps == [
                1,
                1,
            ]:
                kind = self.step.buffers[new.buffer].type.c_name
                first, size = f"{new.offset} * sizeof({kind})", f"{count} * sizeof({kind})"
                moved = f"(uint32_t)({first}), {self._pointer(value)}, (uint32_t)({size})"
                line = self._try(f"pm_page_write({self._new_slot(new.buffer)}, {moved})")
                self._written.add(new.buffer)
                return line
        raise InputError(
            f"{node}: its new value lies in another order than the state, which memory-mapped "
            "storage cannot take; make it contiguous, or choose a device whose storage is paged"
        )

    def _one_by_one(self, calls: Sequence[Call], place: int, written: set[str]) -> Iterator[str]:
        """Yield what writes the tensors of an update to the next generation, one after the other.

        Each is computed again from old values, by all calls of its node that it depends on. State
        in RAM that the call changes too is changed with the last one.
        """
        names = (ref.buffer for ref in changed(calls[place]))
        targets = [name for name in dict.fromkeys(names) if name in self._mapped - self._written]
        in_ram = written - self._mapped
        for target in targets:
            live = {target}
            needed: list[Call] = []
            for k, call in reversed([*enumerate(calls)]):
                changes = {ref.buffer for ref in changed(call)}
                if changes & live and (k <= place or changes == {target}):
                    needed.insert(0, call)
                    read = {a.buffer for a in call.arguments if isinstance(a, Ref)}
                    live |= read & self._mapped
            last = target == targets[-1]
            yield from self._piecewise(needed, {target}, set() if last else in_ram)

    def _piecewise(
        self, calls: Sequence[Call], targets: set[str], kept: AbstractSet[str] = frozenset()
    ) -> Iterator[str]:
        """Yield updates of state that the core reads where it lies, and writes by the driver.

        Only `targets` are written, if there are any; what else of such state calls change, and what
        is `kept`, they change in copies. Kernels of updates take pointers first, which all advance
        with the elements but those to buffers of one, and then the count of elements.
        """
        buffers = self.step.buffers
        refs = {a.buffer: a for c in calls for a in changed(c) if a.buffer in self._mapped | kept}
        pieces = {name: f"piece{k}" for k, name in enumerate(refs)}
        count = max(buffers[name].elements for name in targets or pieces)
        most = _PIECE if len(pieces) <= _MANY_PIECES else _PIECE // 2
        begin = "{"
        if not self.deployment.rotating and targets <= self._written:
            # The new values are there, and would be erased by being written again as they are.
            (call,) = calls
            begin, calls = self._made(call, begin), (replace(call, where=None),)
        yield begin
        for name, piece in pieces.items():
            kind = buffers[name].type.c_name
            yield f"    {kind} {piece}[{min(most, buffers[name].elements)}];"
            yield f"    const {kind} *const old_{piece} = {self._pointer(refs[name], old=True)};"
        yield f"    for (int32_t first = 0; first < {count}; first += {most}) {{"
        yield f"        const int32_t n = PM_MIN({count} - first, {most});"
        for name, piece in pieces.items():
            n, first = ("1", "") if buffers[name].elements == 1 != count else ("n", " + first")
            yield f"        memcpy({piece}, old_{piece}{first}, (size_t){n} * sizeof {piece}[0]);"
        for call in calls:
            self.kernels.setdefault(call.kernel)
            yield f"        {self._made(call, self._of_a_piece(call, count, pieces))}"
        for name, piece in pieces.items():
            if name not in targets:
                continue
            slot, size = self._new_slot(name), f"(uint32_t)sizeof {piece}[0]"
            moved = f"(uint32_t)first * {size}, {piece}, (uint32_t)n * {size}"
            yield f"        {self._try(f'pm_page_write({slot}, {moved})')}"
        yield "    }"
        yield "}"
        self._written.update(targets)

    def _of_a_piece(self, call: Call, count: int, pieces: Mapping[str, str]) -> str:
        """Return a call that takes some elements, from `first` on."""
        words: list[str] = []
        if call.kernel in (*QUANTIZED_FUSED.values(), *QUANTIZED_UPDATES):
            names = parameter_names(call.kernel)
            for name, argument in zip(names, call.arguments, strict=True):
                words.append(self._of_a_part(call.kernel, name, argument, pieces))
            return f"{call.kernel}({', '.join(words)});"
        for argument in call.arguments:
            if not isinstance(argument, Ref):
                whole = argument == count and len(words) == len(call_refs(call))
                words.append("n" if whole else self._word(argument))
            elif argument.buffer == WORKSPACE:  # the gradient, summed or clipped
                words.append(f"(const pm_real *){self._pointer(argument)} + first")
            elif argument.buffer in pieces:
                words.append(pieces[argument.buffer])
            else:
                one = self.step.buffers[argument.buffer].elements == 1
                words.append(self._pointer(argument) + ("" if one else " + first"))
        return f"{call.kernel}({', '.join(words)});"

    def _of_a_part(
        self, kernel: str, name: str, argument: Argument, pieces: Mapping[str, str]
    ) -> str:
        """Return an argument of a kernel that updates some int8 weights, from `first` on."""
        if name in ("first", "count"):
            return "first" if name == "first" else "n"
        if not isinstance(argument, Ref):
            return self._word(argument)
        advances = name in ("w", "residual") or (name == "gradient" and kernel in QUANTIZED_UPDATES)
        if not advances:
            return self._word(argument)
        if argument.buffer == WORKSPACE:
            return f"(const pm_real *){self._pointer(argument)} + first"
        return pieces.get(argument.buffer) or f"{self._pointer(argument)} + first"

    def _row_by_row(self, call: Call) -> Iterator[str]:
        """Yield the update of a mapped weight that makes its gradient: parts of each row."""
        weight, a, b, m, k, n, _, a_row, a_column, b_row, b_column, *numbers = call.arguments
        loops = (
            f"for (int32_t row = 0; row < {m}; row++) {{",
            f"for (int32_t first = 0; first < {n}; first += {_PIECE}) {{",
        )
        count = f"PM_MIN({n} - first, {_PIECE})"
        factors = f"{self._word(a)} + row * {a_row}, {self._word(b)} + first * {b_column}"
        sizes = f"1, {k}, n, n, {a_row}, {a_column}, {b_row}, {b_column}"
        words = ", ".join((factors, sizes, *map(self._word, numbers)))
        yield from self._summed(call.kernel, weight, loops, _PIECE, count, words)

    def _filter_by_filter(self, call: Call) -> Iterator[str]:
        """Yield the same of a convolution: some input channels of each output channel."""
        weight, x, dy, shape, batch, first, count, dy_step, x_step, *numbers = call.arguments
        if not isinstance(shape, tuple):
            raise TypeError(shape)
        sizes = ConvolutionSizes(*shape)
        channels = sizes.group_channels
        most = max(1, _PIECE // sizes.window)
        size = max(n for n in range(1, channels + 1) if channels % n == 0 and n <= most)
        loops = (
            f"for (int32_t o = 0; o < {count}; o++) {{",
            f"for (int32_t i = 0; i < {channels}; i += {size}) {{",
        )
        part = tuple(sizes._replace(channels=size, results=1, groups=1))
        given = (part, batch, 0, 1, dy_step, x_step, *numbers)
        channel = f"(o + {first}) / {sizes.group_results} * {channels} + i"
        inputs = f"{self._word(x)} + ({channel}) * {sizes.plane}"
        factors = f"{inputs}, {self._word(dy)} + o * {sizes.out_plane}"
        words = ", ".join((factors, *map(self._word, given)))
        elements = size * sizes.window
        yield from self._summed(call.kernel, weight, loops, elements, str(elements), words)

    def _summed(
        self, kernel: str, weight: Argument, loops: Sequence[str], most: int, count: str, words: str
    ) -> Iterator[str]:
        """Yield loops that update a mapped weight, in which a kernel takes so many elements a time.

        They are written in pieces of one size, so that each write begins where flash can begin one.
        """
        if not isinstance(weight, Ref):
            raise TypeError(weight)
        needed_bytes = _STACK_BESIDE_BYTES + DataType.REAL.itemsize * (_PIECE + most)
        if most > _PIECE and needed_bytes > self.deployment.stack_bytes:
            raise BudgetError(
                f"stack: windows of {weight.buffer} are updated on the stack, which takes up to "
                f"{needed_bytes:,} B of it; give a stack of so much"
            )
        slot = self._new_slot(weight.buffer)
        size = "(uint32_t)sizeof piece[0]"
        whole, rest = (
            self._try(
                f"pm_page_write({slot}, (uint32_t)at * {size}, piece, (uint32_t){n} * {size})"
            )
            for n in (_PIECE, "held")
        )
        yield "{"
        yield f"    pm_real piece[{_PIECE + most}];"
        yield f"    const pm_real *const old = {self._word(weight)};"
        yield "    int32_t at = 0, held = 0;"
        yield f"    {loops[0]}"
        yield f"        {loops[1]}"
        yield f"            const int32_t n = {count};"
        yield "            memcpy(piece + held, old + at + held, (size_t)n * sizeof piece[0]);"
        yield f"            {kernel}(piece + held, {words});"
        yield "            held += n;"
        yield f"            while (held >= {_PIECE}) {{"
        yield f"                {whole}"
        yield f"                at += {_PIECE};"
        yield f"                held -= {_PIECE};"
        yield f"                memmove(piece, piece + {_PIECE}, (size_t)held * sizeof piece[0]);"
        yield "            }"
        yield "        }"
        yield "    }"
        yield "    if (held > 0) {"
        yield f"        {rest}"
        yield "    }"
        yield "}"
        self._written.add(weight.buffer)

    def _word(self, argument: Argument) -> str:
        if isinstance(argument, Ref):
            return self._pointer(argument)
        if isinstance(argument, ScaledLearningRate):
            return "lr" if argument.factor == 1 else f"lr * {_real(argument.factor)}"
        if isinstance(argument, tuple):
            return self.lists.setdefault(argument, f"pm_list_{len(self.lists)}")
        return str(int(argument)) if isinstance(argument, int) else _real(argument)

    def _pointer(self, ref: Ref, *, old: bool = False) -> str:
        name = ref.buffer
        if name == WORKSPACE:
            # Its elements are of the type that the kernel takes: 4 bytes each, as PM_SCALE counts.
            return f"PM_ADDRESS({(self._workspace or 0) + 4 * ref.offset})"
        kind = self.step.buffers[name].type
        if name in self._callers:
            return _plus(self._callers[name], ref.offset)
        if name in self._mapped:
            way = "NEW" if name in self._written and not old else "OLD"
            commits = name in self.deployment.rotating
            slot = f"PM_{way}({self._slot[name]})" if commits else f"{self._slot[name]}"
            pointer = f"((const {kind.c_name} *)pm_page_address({slot}))"
            return _plus(pointer, ref.offset)
        if name in self._here or name in self._old:
            return _plus(f"{_POINTER[kind]}({self._address_of(name)})", ref.offset)
        at = self.weights.offsets[name] // kind.itemsize
        return f"{_CONSTANT[kind]}({at + ref.offset})"

    def _address_of(self, name: str) -> int:
        return self._here[self._old.get(name, name)]

    # -- transfers and results ---------------------------------------------------------------------

    def _slot_of(self, name: str) -> str:
        old = self._old.get(name)
        if old is not None:
            return self._new_slot(old)
        if name in self.deployment.rotating:
            return f"PM_OLD({self._slot[name]})"
        if self.beside is None or name in self._state:
            return str(self._slot[name])
        return str(self._slot[pass_slot(self.beside.kind, name)])

    def _new_slot(self, name: str) -> str:
        """Return where state is written to: with generations on storage, to the next of them."""
        slot = str(self._slot[name])
        return f"PM_NEW({slot})" if name in self.deployment.rotating else slot

    def _page_in(self, name: str) -> Iterator[str]:
        yield from self._transfer("in", name)

    def _page_out(self, name: str) -> Iterator[str]:
        if self._old.get(name, name) not in self._mapped:  # that is written piece by piece
            yield from self._begin_generation({self._old.get(name)})
            yield from self._transfer("out", name)

    def _begin_generation(self, written: AbstractSet[str | None]) -> Iterator[str]:
        """Yield the write of the record before the first of the tensors in the next generation."""
        if not self.writes_early and written & self.deployment.rotating:
            self.writes_early = True
            yield self._try("pm_commit_begin(1)")

    def _transfer(self, way: str, name: str, *, wait: bool = False) -> Iterator[str]:
        slot = self._slot_of(name)
        size = self.step.buffers[self._old.get(name, name)].bytes
        address = f"PM_ADDRESS({self._address_of(name)})"
        yield self._try(f"pm_page_{way}({slot}, {address}, {size} * PM_SCALE)")
        self._moving[slot] = None
        if wait or self.plan.mode == "blocking":
            yield self._wait(slot)

    def _wait(self, slot: str) -> str:
        self._moving.pop(slot, None)
        return self._try(f"pm_page_wait({slot})")

    def _results(self, k: int) -> Iterator[str]:
        """Yield the check of the loss, and what hands out the loss and gradients."""
        outputs = {tensor.name for tensor in self.graph.nodes[k].outputs}
        if self.step.loss.buffer in outputs:
            loss = f"*{self._pointer(self.step.loss)}"
            yield self._end_if(f"!pm_is_finite({loss})", "PM_ERROR_NUMBER")
            yield f"pm_progress.loss = {loss};"
        yield from self._handed_out(outputs)

    def _handed_out(self, buffers: AbstractSet[str]) -> Iterator[str]:
        """Yield what hands out gradients that lie in some buffers, as constants may."""
        for value, piece in zip(self.step.gradients, self._gradients, strict=True):
            slot = self._slot[gradient_slot(value)]
            if piece.buffer in buffers:
                size = self.step.buffers[piece.buffer].bytes
                address = self._pointer(Ref(piece.buffer))
                yield self._try(f"pm_page_out({slot}, {address}, {size} * PM_SCALE)")
                yield self._try(f"pm_page_wait({slot})")

    def _try(self, call: str) -> str:
        return f"PM_TRY_{'TORN' if self._torn else 'PAGE'}({call});"


def _guarded(condition: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield statements that run on a condition; marks of slices stay in front of it."""
    marks = [line for line in lines if line.startswith("PM_SLICE(")]
    inside = [line for line in lines if not line.startswith("PM_SLICE(")]
    yield from marks
    if inside:
        yield f"if ({condition}) {{"
        yield from (f"    {line}" for line in inside)
        yield "}"


def _plus(pointer: str, offset: int) -> str:
    return f"{pointer} + {offset}" if offset else pointer


def _real(value: float) -> str:
    if math.isnan(value):
        return "PM_C(NAN)"
    if math.isinf(value):
        return "PM_INFINITY" if value > 0 else "-PM_INFINITY"
    return f"PM_C({value!r})"


def comment(text: str) -> str:
    """Return text that may stand in a comment of C."""
    shown = text.replace("*/", "* /").replace("/*", "/ *")
    return shown.encode("ascii", "backslashreplace").decode()
