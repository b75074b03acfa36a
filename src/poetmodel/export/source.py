"""Template words of ``pm.h``, ``pm_step.c`` and ``pm_weights.c``: tables, program, values."""

from __future__ import annotations

import json
import re
from collections import Counter
from hashlib import sha256
from itertools import accumulate, chain
from textwrap import fill
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.device.generation import PADDING_BYTES, RECORD_BYTES, SEAL_BYTES
from poetmodel.export.deployment import WeightsFormat, gradient_slot_name, input_bytes, output_bytes
from poetmodel.export.emitter import ProgramSource, comment_text
from poetmodel.export.identity import front_identity
from poetmodel.export.templates import read_template
from poetmodel.lowered.calls import DataType
from poetmodel.lowered.kernels import RANDOM
from poetmodel.plan import Op
from poetmodel.plan.arena_check import check_arena
from poetmodel.schedule.machine import BEFORE, Content

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from poetmodel.export.deployment import Deployment
    from poetmodel.export.migration import CarriedPiece
    from poetmodel.export.templates import Words
    from poetmodel.lowered.calls import NamedTensor
    from poetmodel.lowered.step import LoweredStep, Weights

_TYPE_NAMES: Final = {
    DataType.REAL: "PM_IS_REAL",
    DataType.INT32: "PM_IS_INT32",
    DataType.UINT8: "PM_IS_UINT8",
    DataType.INT8: "PM_IS_INT8",
}
_DEFINED: Final = re.compile(r"^#define PM_(\w+)", re.MULTILINE)
_HOMES: Final = {
    "ram": "PM_RAM",
    "storage": "PM_STORAGE",
    "mapped": "PM_MAPPED_STORAGE",
    "flash": "PM_FLASH",
}


class StepSource:
    """The generated C of a deployment, as words for the templates."""

    def __init__(self, deployment: Deployment, weights: Weights) -> None:
        """Generate the C lines of step and forward passes, with common lists and kernels."""
        self.deployment = deployment
        self.step = deployment.step
        self.weights = weights
        self.program = ProgramSource(deployment, weights)
        self._body = list(self.program.lines())
        self._pass_lines: dict[str, list[str]] = {}
        for each in deployment.forward_passes:
            source = ProgramSource(deployment, weights, each)
            source.lists, source.kernels = self.program.lists, self.program.kernels
            self._pass_lines[each.kind] = list(source.lines())
        self._buffers = list(
            dict.fromkeys(ref.buffer for value in self.step.states for ref in value.pieces)
        )

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that the step and its forward passes call."""
        return tuple(self.program.kernels)

    @property
    def statements(self) -> tuple[str, ...]:
        """The generated lines of the step and its forward passes."""
        return (*self._body, *chain.from_iterable(self._pass_lines.values()))

    @property
    def _uses_random_numbers(self) -> bool:
        return bool(RANDOM.intersection(self.kernels))

    def words(self) -> Words:
        """Return the template words of ``pm.h``, ``pm_step.c`` and ``pm_weights.c``."""
        return {**self._header_words(), **self._program_words(), **self._weight_words()}

    def _header_words(self) -> Words:
        """Return the template words of ``pm.h``."""
        step, deployment = self.step, self.deployment
        state_slots = len(deployment.generation)
        return {
            "GRAPH": _comment_line(step.graph.name),
            "ARENA_BYTES": deployment.arena_bytes,
            "ALIGNMENT": deployment.arena.alignment,
            "INPUT_COUNT": len(step.inputs),
            "STATE_COUNT": len(step.states),
            "GRADIENT_COUNT": len(step.gradients),
            "NODE_COUNT": len(step.graph.nodes),
            "BUFFER_COUNT": len(self._buffers),
            "PAGE_SLOTS": len(deployment.page_bytes),
            "STATE_SLOTS": state_slots + 2 * bool(state_slots),
            "WEIGHT_REALS": self.weights.reals,
            "INPUT_BYTES": input_bytes(step),
            "OUTPUT_ELEMENTS": output_bytes(step) // 4,
            "STATE_SUMS": deployment.commit and deployment.checksum,
            "WRITES_EARLY": self.program.writes_early,
            "EVALUATION": deployment.evaluation is not None,
            "COUNTS_CORRECT": deployment.counts_correct,
            "BEST": deployment.keeps_best,
            **self._replay_words(),
            **self._migration_words(),
            "RANDOM": self._uses_random_numbers,
            "ACCUMULATE": step.accumulate if step.accumulate > 1 else 0,
            "STEP_ID": deployment.identity[:8],
            "LAYOUT_ID": self.layout_id,
            "INSTANCE_ID": self.instance_id,
            "RECORD_BYTES": RECORD_BYTES if deployment.generation else 0,
            "SEAL_BYTES": SEAL_BYTES if deployment.generation else 0,
            "PADDING_BYTES": PADDING_BYTES,
            "PAGES_TERMS": _storage_terms("PAGE", deployment.page_bytes),
            "STATE_TERMS": _storage_terms("TENSOR", deployment.generation_bytes),
            "TENSOR_NAMES": "\n".join(self._tensor_macros(_macro_names())),
            "DRIVER": read_template("pm_driver.h").rstrip(),
        }

    def _replay_words(self) -> Words:
        """Return the template words for stored samples: 0 without replay."""
        replay = self.deployment.replay
        if replay is None:
            names = ("REPLAY", "SAMPLE_OUTPUTS", "SAMPLE_INPUTS", "SAMPLE_INPUT_BYTES")
            return {**dict.fromkeys(names, 0), "SAMPLE_BYTES": 0, "SAMPLE_ID": "0"}
        return {
            "REPLAY": replay.samples,
            "SAMPLE_OUTPUTS": len(replay.front.outputs),
            "SAMPLE_INPUTS": len(replay.front.inputs),
            "SAMPLE_INPUT_BYTES": replay.input_bytes,
            "SAMPLE_BYTES": replay.sample_bytes,
            "SAMPLE_ID": front_identity(self.step, replay.front)[:8],
        }

    def _migration_words(self) -> Words:
        """Return the template words for the step whose state this step copies from storage."""
        migration = self.deployment.migration
        if migration is None:
            return {"MIGRATES": False}
        source = migration.source
        return {
            "MIGRATES": True,
            "OLD_STEP_ID": source["step_id"],
            "OLD_LAYOUT_ID": source["layout_id"],
            "OLD_INSTANCE_ID": source["instance_id"],
            "OLD_TENSORS": len(source["tensor_bytes"]),
            "OLD_PAGE_SLOTS": source["page_slots"],
            "OLD_STATE_SUMS": source["checksums"],
            "OLD_STORED_BYTES": source["stored_bytes"],
            "OLD_COMMIT_UNIT": source["commit_unit"],
            "OLD_COMMIT_BLOCK": source["commit_block"],
            "OLD_SHARED": source["shared"],
            "MIGRATED_PIECES": len(migration.pieces),
        }

    @property
    def instance_id(self) -> str:
        """Identity of this copy of a step within a program: a hash of its prefix."""
        return sha256(self.deployment.prefix.encode()).hexdigest()[:8]

    @property
    def layout_id(self) -> str:
        """Identity of the layout of a generation: a hash of the names of its state."""
        return sha256(json.dumps(self.deployment.generation).encode()).hexdigest()[:8]

    def _tensor_macros(self, used_names: set[str]) -> Iterator[str]:
        """Yield a macro for the index of each input, state tensor and gradient, with its shape.

        Adds the names of the macros to `used_names`.
        """
        step = self.step
        homes = [self.home(value.pieces[0].buffer) for value in step.states]
        kinds: tuple[tuple[str, Sequence[NamedTensor], Sequence[str]], ...] = (
            ("INPUT", step.inputs, ()),
            ("STATE", step.states, homes),
            ("GRADIENT", step.gradients, ()),
        )
        for kind, values, kind_homes in kinds:
            for k, value in enumerate(values):
                name = _macro_name(kind, value.name, used_names)
                shape = "".join(f"[{size}]" for size in value.shape)
                home = f", {kind_homes[k]}" if kind_homes else ""
                size = value.elements * value.type.itemsize
                yield f"#define PM_{name} {k} /* {value.type.c_name}{shape}, {size} B{home} */"

    def _weight_words(self) -> Words:
        """Return all first values as 32-bit words in C, empty if they are a binary file."""
        binary = self.deployment.weights is WeightsFormat.BINARY
        words = np.frombuffer(b"" if binary else self.weights.data, "<u4")
        rows = [
            "    " + " ".join(f"0x{word:08x}u," for word in words[k : k + 8].tolist())
            for k in range(0, len(words), 8)
        ]
        return {"WEIGHT_WORDS": "\n".join(rows) or "    0"}

    def _program_words(self) -> Words:
        """Return the template words of ``pm_step.c``: arena map, tables, lists and programs."""
        tables = "\n\n".join(self._tables())  # before the lists, because tables add to these
        lists = [
            f"static const int32_t {name}[] = {{{', '.join(map(str, values)) or '0'}}};"
            for values, name in self.program.lists.items()
        ]
        pass_lines = {
            each.kind: [*_input_pointers(each.step, "inputs"), *self._pass_lines[each.kind]]
            for each in self.deployment.forward_passes
        }
        return {
            "ARENA_MAP": "\n".join(self._arena_map()),
            "TABLES": tables,
            "LISTS": "\n".join(lists),
            "STEP_INPUTS": _indent_lines(_input_pointers(self.step, "pm_progress.inputs")),
            "STEP_BODY": _indent_lines(map(_indent_line, self._body)),
            **{
                f"{kind.upper()}_BODY": _indent_lines(pass_lines.get(kind, ()))
                for kind in ("inference", "evaluation")
            },
        }

    def _arena_map(self) -> Iterator[str]:
        """Yield a comment line for each copy of a tensor and each workspace in the arena.

        A line has offset, size, and the first and last node during its lifetime; `-` is the time
        between steps.
        """
        graph, plan, arena = self.step.graph, self.deployment.plan, self.deployment.arena
        nodes = [str(k) if op == Op.COMPUTE else "" for op, k in plan.program]
        node_labels = ["-", *nodes, "-"]  # from BEFORE on
        last = list(accumulate(node_labels, _last_nonempty))
        first = list(accumulate(reversed(node_labels), _last_nonempty))[::-1]
        for block in sorted(
            check_arena(graph, plan, arena).rectangles,
            key=lambda block: (block.offset, block.begin),
        ):
            if not block.bytes:
                continue
            label = (
                f"[{graph.nodes[block.index].name}]"
                if block.content == Content.WORKSPACE
                else graph.tensors[block.index].name
            )
            begin = first[block.begin - BEFORE]
            end = last[block.end - 1 - BEFORE] if block.end < len(plan.program) else "-"
            yield f"   {block.offset:8} {block.bytes:8} {begin:>5} {end:>5}  {_comment_line(label)}"

    # -- tables ------------------------------------------------------------------------------------

    def _tables(self) -> Iterator[str]:
        """Yield the C tables of slots, buffers, state, samples, migrated state and gradients."""
        slots = self.deployment.page_bytes
        if self.deployment.generation:
            slots = (*slots, RECORD_BYTES, *self.deployment.generation_bytes, SEAL_BYTES)
        yield _table_definition("const uint32_t pm_slot_bytes[]", map(str, slots), empty="0")
        yield _table_definition(
            "const pm_buffer_t pm_buffers[]", map(self._buffer_row, self._buffers)
        )
        pieces: list[str] = []
        states = [self._tensor_row(value, pieces) for value in self.step.states]
        yield _table_definition("const pm_piece_t pm_pieces[]", pieces)
        yield _table_definition("const pm_pieces_t pm_state_pieces[]", states)
        kinds = {"inputs": self.step.inputs, "states": self.step.states}
        for kind, values in (kinds | {"gradients": self.step.gradients}).items():
            yield _table_definition(f"const pm_tensor_t pm_{kind}_info[]", map(_info_row, values))
        if self.deployment.copies_to_flash:
            saved_rows = (str(self._buffers.index(name)) for name in self.deployment.generation)
            yield _table_definition("const uint32_t pm_saved[]", saved_rows)
        replay = self.deployment.replay
        if replay is not None:
            sizes = map(str, replay.part_bytes)
            yield _table_definition("const uint32_t pm_sample_parts[]", sizes)
            numbers = map(str, replay.front.inputs)
            yield _table_definition("const uint32_t pm_sample_inputs[]", numbers, empty="0")
        migration = self.deployment.migration
        if migration is not None:
            yield _table_definition(
                "const pm_migrated_t pm_migrated[]",
                map(self._migrated_row, migration.pieces),
            )
            yield _table_definition(
                "const uint32_t pm_old_bytes[]", map(str, migration.source["tensor_bytes"])
            )
        yield from self._gradient_table()

    def _migrated_row(self, piece: CarriedPiece) -> str:
        """Return the row of a piece of state that is copied from the earlier step."""
        buffer = self._buffers.index(piece.buffer)
        numbers = (buffer, piece.first, piece.count, piece.tensor, piece.offset)
        return f"{{{', '.join(map(str, numbers))}}}"

    def _buffer_row(self, name: str) -> str:
        """Return the row of a state buffer: elements, first values, offset, slot, home, type."""
        buffer = self.step.buffers[name]
        home = self.home(name)
        slots = self.deployment.slots
        slot = str(slots.index(name)) if name in slots else "PM_NO_SLOT"
        address = self.program.state_offsets.get(name, 0)
        kind = _TYPE_NAMES[buffer.type]
        numbers = (
            f"{buffer.elements}, {self.weights.offsets.get(name, 'PM_ZEROS')}, {address}, {slot}"
        )
        return f"{{{numbers}, {_HOMES[home]}, {kind}}}"

    def home(self, name: str) -> str:
        """Return the home of a state buffer: ram, storage, mapped, or flash."""
        graph, plan = self.step.graph, self.deployment.plan
        if name not in graph.tensor_index:
            return "flash"
        if graph.tensor_index[name] in (plan.resident or ()):
            return "ram"
        return "mapped" if plan.memory_mapped else "storage"

    def _tensor_row(self, value: NamedTensor, pieces: list[str]) -> str:
        """Append the rows of the pieces of a state tensor to `pieces`, and return its own row."""
        first, remaining = len(pieces), value.elements
        for ref in value.pieces:
            count = min(remaining, self.step.buffers[ref.buffer].elements - ref.offset)
            pieces.append(f"{{{self._buffers.index(ref.buffer)}, {ref.offset}, {count}}}")
            remaining -= count
        return f"{{{first}, {len(value.pieces)}}}"

    def _gradient_table(self) -> Iterator[str]:
        """Yield the table of returned gradients, if any, and register lists of their dimensions."""
        slots = self.deployment.slots
        rows = []
        for value in self.step.gradients:
            (piece,) = value.pieces
            tensor_elements = self.step.buffers[piece.buffer].elements
            slot = slots.index(gradient_slot_name(value))
            order = "0, 0, 0"
            if value.strides is not None:
                shape = self.program.lists.setdefault(
                    value.shape, f"pm_list_{len(self.program.lists)}"
                )
                strides = self.program.lists.setdefault(
                    value.strides, f"pm_list_{len(self.program.lists)}"
                )
                order = f"{len(value.shape)}, {shape}, {strides}"
            rows.append(f"{{{slot}, {tensor_elements}, {piece.offset}, {order}}}")
        if rows:
            yield _table_definition("const pm_gradient_t pm_gradients[]", rows)


def _macro_names() -> set[str]:
    """Return the names of the macros in the templates, which macros of tensors must not have."""
    texts = map(read_template, ("generated/include/pm.h", "pm_driver.h", "src/pm_state.h"))
    return {name for text in texts for name in _DEFINED.findall(text)}


def _storage_terms(unit: str, sizes: Sequence[int]) -> str:
    """Return a C expression for the storage of slots: one macro ``PM_<unit>_BYTES`` per size."""
    terms = (f"{n}u*PM_{unit}_BYTES({size}u)" for size, n in Counter(sizes).items())
    return fill(" + ".join(terms) or "0u", 88).replace("\n", " \\\n    ")


def _input_pointers(step: LoweredStep, array: str) -> Iterator[str]:
    """Yield the declarations of a pointer to each input of the caller."""
    for k, value in enumerate(step.inputs):
        yield f"const {value.type.c_name} *const x{k} = {array}[{k}];"
    yield from (f"(void)x{k};" for k in range(len(step.inputs)))
    if not step.inputs:
        yield f"(void){array};"


def _indent_line(line: str) -> str:
    return line if line.startswith("PM_SLICE(") else f"    {line}"


def _indent_lines(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _info_row(value: NamedTensor) -> str:
    integer_bytes = 0 if value.type is DataType.REAL else value.type.itemsize
    return f"{{{value.elements}, {integer_bytes}}}"


def _table_definition(declaration: str, rows: Iterable[str], *, empty: str = "{0}") -> str:
    lines: Sequence[str] = list(rows)
    inside = "".join(f"    {row},\n" for row in lines or (empty,))
    return f"{declaration} = {{\n{inside}}};"


def _last_nonempty(earlier: str, node: str) -> str:
    return node or earlier


def _macro_name(kind: str, name: str, used_names: set[str]) -> str:
    """Return a unique macro name for a tensor, and add it to `used_names`."""
    words = re.sub(r"\W+|_+", " ", name.encode("ascii", "replace").decode()).split()
    if kind == "INPUT" and len(words) > 1 and words[0] == "inputs":
        del words[0]
    base_name = constant = "_".join([kind, *words]).upper()
    suffix = 1
    while constant in used_names:
        suffix += 1
        constant = f"{base_name}_{suffix}"
    used_names.add(constant)
    return constant


def _comment_line(text: str) -> str:
    return " ".join(comment_text(text).split())
