"""Template values of ``pm.h``, ``pm_step.c`` and ``pm_weights.c``: tables, program, weights."""

from __future__ import annotations

import re
from collections import Counter
from itertools import accumulate, chain
from textwrap import fill
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.device.generation import RECORD_BYTES, SEAL_BYTES, WRITE_PADDING_BYTES
from poetmodel.export.emitter import ProgramSource, comment_text
from poetmodel.export.options import WeightsFormat
from poetmodel.export.reserves import input_bytes, output_bytes
from poetmodel.export.storage import gradient_slot_name
from poetmodel.export.templates import read_template
from poetmodel.lowered.calls import DataType
from poetmodel.lowered.kernels import find_kernel
from poetmodel.lowered.step import Weights
from poetmodel.plan import Op
from poetmodel.plan.arena_check import check_arena
from poetmodel.schedule.machine import BEFORE, Content

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from poetmodel.export.migration import MigratedPiece
    from poetmodel.export.storage import StorageLayout
    from poetmodel.export.templates import TemplateValues
    from poetmodel.lowered.calls import NamedTensor
    from poetmodel.lowered.step import LoweredStep

_DEFINED_MACRO: Final = re.compile(r"^#define PM_(\w+)", re.MULTILINE)
_HOME_MACROS: Final = {
    "ram": "PM_RAM",
    "storage": "PM_STORAGE",
    "mapped": "PM_MAPPED_STORAGE",
    "flash": "PM_FLASH",
}


class Source:
    """The generated C of the programs of an export, made once, as values for the templates."""

    def __init__(self, layout: StorageLayout) -> None:
        self.layout = layout
        self.step = layout.step
        self.weights = Weights.from_step(layout.step)
        first, *forward_passes = (
            ProgramSource(layout, self.weights, program) for program in layout.programs
        )
        self.program = first
        self._step_lines = list(first.generate_lines())
        self._pass_lines: dict[str, list[str]] = {}
        for source in forward_passes:
            source.lists, source.kernels = first.lists, first.kernels
            self._pass_lines[source.program.kind] = list(source.generate_lines())
        self._buffers = list(
            dict.fromkeys(ref.buffer for tensor in self.step.states for ref in tensor.pieces)
        )
        """Names of the buffers of state, in the order of the table of buffers."""
        self._tables = "\n\n".join(self._generate_tables())

    @property
    def lists(self) -> tuple[tuple[int, ...], ...]:
        """The arrays of integers that calls and tables read."""
        return tuple(self.program.lists)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels of the step and its forward passes; see `ProgramSource.kernels`."""
        return tuple(self.program.kernels)

    @property
    def statements(self) -> tuple[str, ...]:
        """The generated lines of the step and its forward passes."""
        return (*self._step_lines, *chain.from_iterable(self._pass_lines.values()))

    @property
    def _uses_random_numbers(self) -> bool:
        return any(find_kernel(name).is_random for name in self.kernels)

    def template_values(self) -> TemplateValues:
        """Return the template values of ``pm.h``, ``pm_step.c`` and ``pm_weights.c``."""
        return {**self._header_values(), **self._program_values(), **self._weight_values()}

    def _header_values(self) -> TemplateValues:
        """Return the template values of ``pm.h``."""
        step, layout = self.step, self.layout
        state_slots = len(layout.generation_names)
        return {
            "GRAPH": _comment_line(step.graph.name),
            "ARENA_BYTES": layout.arena_bytes,
            "ALIGNMENT": layout.arena.alignment,
            "INPUT_COUNT": len(step.inputs),
            "STATE_COUNT": len(step.states),
            "GRADIENT_COUNT": len(step.gradients),
            "NODE_COUNT": len(step.graph.nodes),
            "BUFFER_COUNT": len(self._buffers),
            "PAGE_SLOTS": len(layout.page_bytes),
            "STATE_SLOTS": state_slots + 2 * bool(state_slots),
            "WEIGHT_REALS": self.weights.real_elements,
            "INPUT_BYTES": input_bytes(step),
            "OUTPUT_ELEMENTS": output_bytes(step) // 4,
            "STATE_SUMS": layout.commit and layout.options.checksum,
            "WRITES_EARLY": self.program.writes_rotating_state,
            "EVALUATION": layout.evaluation is not None,
            "COUNTS_CORRECT": layout.counts_correct,
            "BEST": layout.stores_best,
            **self._replay_values(),
            **self._migration_values(),
            "RANDOM": self._uses_random_numbers,
            "ACCUMULATE": step.accumulate if step.accumulate > 1 else 0,
            "STEP_ID": layout.step_id,
            "SAMPLE_ID": layout.sample_id or "0",
            "LAYOUT_ID": layout.layout_id,
            "INSTANCE_ID": layout.instance_id,
            "RECORD_BYTES": RECORD_BYTES if layout.generation_names else 0,
            "SEAL_BYTES": SEAL_BYTES if layout.generation_names else 0,
            "WRITE_PADDING_BYTES": WRITE_PADDING_BYTES,
            "PAGES_TERMS": _storage_terms("PAGE", layout.page_bytes),
            "STATE_TERMS": _storage_terms("TENSOR", layout.generation_bytes),
            "TENSOR_NAMES": "\n".join(self._tensor_macros(_template_macro_names())),
            "DRIVER": read_template("pm_driver.h").rstrip(),
        }

    def _replay_values(self) -> TemplateValues:
        """Return the template values for stored samples; 0 without them."""
        replay = self.layout.replay
        if replay is None:
            names = ("REPLAY", "SAMPLE_OUTPUTS", "SAMPLE_INPUTS", "SAMPLE_INPUT_BYTES")
            return {**dict.fromkeys(names, 0), "SAMPLE_BYTES": 0}
        return {
            "REPLAY": replay.max_samples,
            "SAMPLE_OUTPUTS": len(replay.front.outputs),
            "SAMPLE_INPUTS": len(replay.front.inputs),
            "SAMPLE_INPUT_BYTES": replay.input_bytes,
            "SAMPLE_BYTES": replay.sample_bytes,
        }

    def _migration_values(self) -> TemplateValues:
        """Return the template values for the step whose state this step copies from storage."""
        migration = self.layout.migration
        if migration is None:
            return {"MIGRATES": False, "TAKES_SAMPLES": False}
        source = migration.source
        samples = source.samples
        return {
            "MIGRATES": True,
            "OLD_STEP_ID": source.step_id,
            "OLD_LAYOUT_ID": source.layout_id,
            "OLD_INSTANCE_ID": source.instance_id,
            "OLD_TENSORS": len(source.tensor_bytes),
            "OLD_PAGE_SLOTS": len(source.page_bytes),
            "OLD_STATE_SUMS": source.checksums,
            "OLD_COMMIT_UNIT": source.commit_unit,
            "OLD_COMMIT_BLOCK": source.commit_block,
            "OLD_GENERATIONS": source.generations,
            "OLD_BEST": source.best,
            "OLD_PAGES_TERMS": _storage_terms("PAGE", source.page_bytes),
            "OLD_STATE_TERMS": _storage_terms("OLD_TENSOR", source.tensor_bytes),
            "OLD_REPLAY": samples.count if samples else 0,
            "OLD_SAMPLE_BYTES": samples.sample_bytes if samples else 0,
            "TAKES_SAMPLES": migration.takes_samples,
            "MIGRATED_PIECES": len(migration.pieces),
        }

    def _tensor_macros(self, used_names: set[str]) -> Iterator[str]:
        """Yield index macros of inputs, states and gradients, from 0 each; add to `used_names`."""
        step = self.step
        homes = [self.layout.home_of(tensor.pieces[0].buffer) for tensor in step.states]
        tensors_by_kind: tuple[tuple[str, Sequence[NamedTensor], Sequence[str]], ...] = (
            ("INPUT", step.inputs, ()),
            ("STATE", step.states, homes),
            ("GRADIENT", step.gradients, ()),
        )
        for kind, tensors, tensor_homes in tensors_by_kind:
            for k, tensor in enumerate(tensors):
                name = _make_macro_name(kind, tensor.name, used_names)
                shape = "".join(f"[{size}]" for size in tensor.shape)
                home = f", {tensor_homes[k]}" if tensor_homes else ""
                size = tensor.elements * tensor.type.itemsize
                yield f"#define PM_{name} {k} /* {tensor.type.c_name}{shape}, {size} B{home} */"

    def _weight_values(self) -> TemplateValues:
        """Return the template value of the weights as 32-bit numbers in C, or 0."""
        is_binary = self.layout.options.weights is WeightsFormat.BINARY
        numbers = np.frombuffer(b"" if is_binary else self.weights.data, "<u4")
        lines = [
            "    " + " ".join(f"0x{word:08x}u," for word in numbers[k : k + 8].tolist())
            for k in range(0, len(numbers), 8)
        ]
        return {"WEIGHT_WORDS": "\n".join(lines) or "    0"}

    def _program_values(self) -> TemplateValues:
        """Return the template values of ``pm_step.c``: arena map, tables, lists and programs."""
        lists = [
            f"static const int32_t {name}[] = {{{', '.join(map(str, values)) or '0'}}};"
            for values, name in self.program.lists.items()
        ]
        pass_lines = {
            forward_pass.kind: [
                *_declare_input_pointers(forward_pass.step, "inputs"),
                *self._pass_lines[forward_pass.kind],
            ]
            for forward_pass in self.layout.forward_passes
        }
        return {
            "ARENA_MAP": "\n".join(self._describe_arena()),
            "TABLES": self._tables,
            "LISTS": "\n".join(lists),
            "STEP_INPUTS": _indent_lines(_declare_input_pointers(self.step, "pm_progress.inputs")),
            "STEP_BODY": _indent_lines(map(_indent_line, self._step_lines)),
            **{
                f"{kind.upper()}_BODY": _indent_lines(pass_lines.get(kind, ()))
                for kind in ("inference", "evaluation")
            },
        }

    def _describe_arena(self) -> Iterator[str]:
        """Yield a comment line for each copy of a tensor and each workspace of the step."""
        graph, plan, arena = self.step.graph, self.layout.plan, self.layout.arena
        nodes = [str(k) if op == Op.COMPUTE else "" for op, k in plan.program]
        node_labels = ["-", *nodes, "-"]  # the first label is that of BEFORE
        last_labels = list(accumulate(node_labels, _latest_nonempty))
        first_labels = list(accumulate(reversed(node_labels), _latest_nonempty))[::-1]
        for block in sorted(
            check_arena(graph, plan, arena).rectangles,
            key=lambda block: (block.offset, block.begin),
        ):
            if not block.bytes:
                continue
            block_name = (
                f"[{graph.nodes[block.index].name}]"
                if block.content == Content.WORKSPACE
                else graph.tensors[block.index].name
            )
            first_node = first_labels[block.begin - BEFORE]
            last_node = (
                last_labels[block.end - 1 - BEFORE] if block.end < len(plan.program) else "-"
            )
            yield (
                f"   {block.offset:8} {block.bytes:8} {first_node:>5} {last_node:>5}  "
                f"{_comment_line(block_name)}"
            )

    # -- tables ------------------------------------------------------------------------------------

    def _generate_tables(self) -> Iterator[str]:
        """Yield the C tables of slots, buffers, pieces and tensors, then of optional features.

        Adds shapes and strides of gradients that are not dense to `program.lists`.
        """
        slot_bytes = self.layout.page_bytes
        if self.layout.generation_names:
            slot_bytes = (*slot_bytes, RECORD_BYTES, *self.layout.generation_bytes, SEAL_BYTES)
        yield _define_table("const uint32_t pm_slot_bytes[]", map(str, slot_bytes), empty="0")
        yield _define_table("const pm_buffer_t pm_buffers[]", map(self._buffer_row, self._buffers))
        piece_rows: list[str] = []
        state_rows = [self._tensor_row(tensor, piece_rows) for tensor in self.step.states]
        yield _define_table("const pm_piece_t pm_pieces[]", piece_rows)
        yield _define_table("const pm_pieces_t pm_state_pieces[]", state_rows)
        tensors_by_kind = {"inputs": self.step.inputs, "states": self.step.states}
        for kind, tensors in (tensors_by_kind | {"gradients": self.step.gradients}).items():
            yield _define_table(f"const pm_tensor_t pm_{kind}_info[]", map(_make_info_row, tensors))
        if self.layout.copies_to_flash:
            saved_rows = (str(self._buffers.index(name)) for name in self.layout.generation_names)
            yield _define_table("const uint32_t pm_saved[]", saved_rows)
        replay = self.layout.replay
        if replay is not None:
            tensor_sizes = map(str, replay.tensor_bytes)
            yield _define_table("const uint32_t pm_sample_parts[]", tensor_sizes)
            input_indices = map(str, replay.front.inputs)
            yield _define_table("const uint32_t pm_sample_inputs[]", input_indices, empty="0")
        migration = self.layout.migration
        if migration is not None:
            yield _define_table(
                "const pm_migrated_t pm_migrated[]",
                map(self._migrated_row, migration.pieces),
            )
            yield _define_table(
                "const uint32_t pm_old_bytes[]", map(str, migration.source.tensor_bytes)
            )
        yield from self._gradient_table()

    def _migrated_row(self, piece: MigratedPiece) -> str:
        """Return the table row of a piece of state that is copied from the earlier step."""
        buffer = self._buffers.index(piece.buffer)
        fields = (
            buffer,
            piece.buffer_offset,
            piece.count,
            piece.tensor_index,
            piece.tensor_offset,
        )
        return f"{{{', '.join(map(str, fields))}}}"

    def _buffer_row(self, name: str) -> str:
        """Return the table row of a state buffer, with the fields of ``pm_buffer_t``."""
        buffer = self.step.buffers[name]
        home = self.layout.home_of(name)
        slots = self.layout.slots
        slot = str(slots.index(name)) if name in slots else "PM_NO_SLOT"
        address = self.program.state_offsets.get(name, 0)
        type_macro = f"PM_IS_{buffer.type.upper()}"
        fields = (
            f"{buffer.elements}, {self.weights.offsets.get(name, 'PM_ZEROS')}, {address}, {slot}"
        )
        return f"{{{fields}, {_HOME_MACROS[home]}, {type_macro}}}"

    def _tensor_row(self, tensor: NamedTensor, piece_rows: list[str]) -> str:
        """Append the rows of a state tensor's pieces to `piece_rows`; return the tensor's row."""
        first = len(piece_rows)
        piece_rows += (
            f"{{{self._buffers.index(buffer)}, {offset}, {count}}}"
            for buffer, offset, count in self.step.list_pieces(tensor)
        )
        return f"{{{first}, {len(tensor.pieces)}}}"

    def _gradient_table(self) -> Iterator[str]:
        """Yield the C table of returned gradients, if any; add shapes to `program.lists`."""
        slots = self.layout.slots
        rows = []
        for gradient in self.step.gradients:
            (piece,) = gradient.pieces
            tensor_elements = self.step.buffers[piece.buffer].elements
            slot = slots.index(gradient_slot_name(gradient))
            dimension_fields = "0, 0, 0"
            if gradient.strides is not None:
                reader = f"gradient {gradient.name}"
                shape = self.program.lists.register(gradient.shape, reader, "shape")
                strides = self.program.lists.register(gradient.strides, reader, "strides")
                dimension_fields = f"{len(gradient.shape)}, {shape}, {strides}"
            rows.append(f"{{{slot}, {tensor_elements}, {piece.offset}, {dimension_fields}}}")
        if rows:
            yield _define_table("const pm_gradient_t pm_gradients[]", rows)


def _template_macro_names() -> set[str]:
    """Return the names, without ``PM_``, of macros of ``pm.h``, ``pm_driver.h``, ``pm_state.h``."""
    texts = map(read_template, ("generated/include/pm.h", "pm_driver.h", "src/pm_state.h"))
    return {name for text in texts for name in _DEFINED_MACRO.findall(text)}


def _storage_terms(unit: str, sizes: Sequence[int]) -> str:
    """Return a C expression, broken into lines of a macro, for the storage of slots."""
    terms = (f"{count}u*PM_{unit}_BYTES({size}u)" for size, count in Counter(sizes).items())
    return fill(" + ".join(terms) or "0u", 88).replace("\n", " \\\n    ")


def _declare_input_pointers(step: LoweredStep, array: str) -> Iterator[str]:
    """Yield a C declaration of a pointer to each input, and casts against unused-name warnings."""
    for k, tensor in enumerate(step.inputs):
        yield f"const {tensor.type.c_name} *const x{k} = {array}[{k}];"
    yield from (f"(void)x{k};" for k in range(len(step.inputs)))
    if not step.inputs:
        yield f"(void){array};"


def _indent_line(line: str) -> str:
    """Indent a generated line, unless it is the mark of a slice, which is a case label."""
    return line if line.startswith("PM_SLICE(") else f"    {line}"


def _indent_lines(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _make_info_row(tensor: NamedTensor) -> str:
    """Return the row of a tensor: its elements, and bytes of an element, 0 for reals."""
    integer_bytes = 0 if tensor.type is DataType.REAL else tensor.type.itemsize
    return f"{{{tensor.elements}, {integer_bytes}}}"


def _define_table(declaration: str, rows: Iterable[str], *, empty: str = "{0}") -> str:
    """Return the C definition of a table; without rows, its only row is `empty`."""
    row_texts: Sequence[str] = list(rows)
    row_lines = "".join(f"    {row},\n" for row in row_texts or (empty,))
    return f"{declaration} = {{\n{row_lines}}};"


def _latest_nonempty(earlier_label: str, label: str) -> str:
    return label or earlier_label


def _make_macro_name(kind: str, name: str, used_names: set[str]) -> str:
    """Return a new macro name without ``PM_``: ``STATE_FC_WEIGHT``; add it to `used_names`."""
    name_parts = re.sub(r"\W+|_+", " ", name.encode("ascii", "replace").decode()).split()
    if kind == "INPUT" and len(name_parts) > 1 and name_parts[0] == "inputs":
        del name_parts[0]
    base_name = macro_name = "_".join([kind, *name_parts]).upper()
    suffix = 1
    while macro_name in used_names:
        suffix += 1
        macro_name = f"{base_name}_{suffix}"
    used_names.add(macro_name)
    return macro_name


def _comment_line(text: str) -> str:
    return " ".join(comment_text(text).split())
