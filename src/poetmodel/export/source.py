"""``pm.h``, ``pm_step.c`` and ``pm_weights.c``: a step's interface, tables, program and values."""

from __future__ import annotations

import json
import re
from collections import Counter
from hashlib import sha256
from itertools import accumulate
from textwrap import fill
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.device.generation import PADDING_BYTES, RECORD_BYTES, SEAL_BYTES
from poetmodel.export.deployment import gradient_slot, input_bytes, output_bytes
from poetmodel.export.emitter import ProgramSource, comment, elements
from poetmodel.lowered.kernels import RANDOM, SOURCES
from poetmodel.lowered.step import DataType
from poetmodel.plan import Op
from poetmodel.plan.arena import check_arena
from poetmodel.schedule.machine import BEFORE, Content

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from poetmodel.export.deployment import Deployment
    from poetmodel.lowered.step import LoweredStep, NamedTensor, Weights

_TYPE_NAMES: Final = {
    DataType.REAL: "PM_IS_REAL",
    DataType.INT32: "PM_IS_INT32",
    DataType.UINT8: "PM_IS_UINT8",
    DataType.INT8: "PM_IS_INT8",
}
_SLOTS: Final = "(PM_PAGE_SLOTS + PM_GENERATIONS * PM_STATE_SLOTS)"
_STORAGE_NUMBERS: Final = ("STATE_BYTES",)
"""What the header defines beside that state could be called like."""
_GUARD: Final = "STATE_H"
"""The guard of ``pm_state.h``, which no state may be called like."""
_HOMES: Final = {
    "ram": "PM_RAM",
    "storage": "PM_STORAGE",
    "mapped": "PM_MAPPED_STORAGE",
    "flash": "PM_FLASH",
}


class StepSource:
    """The generated files of a deployment."""

    def __init__(self, deployment: Deployment, weights: Weights) -> None:
        self.deployment = deployment
        self.step = deployment.step
        self.weights = weights
        self.program = ProgramSource(deployment, weights)
        self._body = list(self.program.lines())
        self._inference: list[str] = []
        if deployment.inference is not None:
            inference = ProgramSource(deployment, weights, deployment.inference)
            inference.lists, inference.kernels = self.program.lists, self.program.kernels
            self._inference = list(inference.lines())
        self._buffers = list(
            dict.fromkeys(ref.buffer for value in self.step.states for ref in value.pieces)
        )

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that the programs call."""
        return tuple(self.program.kernels)

    @property
    def statements(self) -> tuple[str, ...]:
        """The lines of the programs."""
        return (*self._body, *self._inference)

    @property
    def _draws(self) -> bool:
        return bool(RANDOM.intersection(self.kernels))

    def header(self) -> str:
        """Return the text of ``pm.h``."""
        step, deployment = self.step, self.deployment
        layout, pages_layout = deployment.layout, deployment.page_layout
        pages, state_slots = len(deployment.page_bytes), len(deployment.generation)
        numbers = {
            "ARENA_BYTES": (deployment.arena_bytes, "of the build for float"),
            "ALIGNMENT": (deployment.arena.alignment, "of what lies in the arena, and of it"),
            "INPUTS": (len(step.inputs), ""),
            "STATES": (len(step.states), ""),
            "GRADIENTS": (len(step.gradients), "handed out, where nothing updates"),
            "NODES": (len(step.graph.nodes), ""),
            "BUFFERS": (len(self._buffers), "of state"),
            "PAGE_SLOTS": (f"{pages}u", "on storage, in blocks of their own"),
            "STATE_SLOTS": (
                f"{state_slots + 2 * bool(state_slots)}u",
                "of a generation, its record and its seal too",
            ),
            "SLOTS": (_SLOTS if state_slots else f"{pages}u", "all of them"),
            "WEIGHT_REALS": (self.weights.reals, ""),
            "INPUT_BYTES": (input_bytes(step), "of all inputs"),
            "OUTPUTS": (output_bytes(step) // 4, "elements that pm_infer writes"),
            "MAPPED": (int(deployment.plan.memory_mapped), "whether the core reads storage"),
            "COMMIT": (int(deployment.commit), "whether state has generations on storage"),
            "VOLATILE": (int(deployment.saves), "whether those are in flash, as storage forgets"),
            "COMMIT_EVERY": (f"{deployment.commit_every}u", "steps"),
            "STATE_SUMS": (
                int(deployment.commit and deployment.checksum),
                "whether with checksums",
            ),
            "WRITES_EARLY": (
                int(self.program.writes_early),
                "whether a step writes state to storage before its end",
            ),
            "RANDOM": (int(self._draws), "whether it draws random numbers"),
            **(
                {"ACCUMULATE": (step.accumulate, "batches are one update")}
                if step.accumulate > 1
                else {}
            ),
            "STEP_ID": (f"0x{deployment.identity[:8]}u", "what it computes"),
            "LAYOUT_ID": (f"0x{self._layout_id}u", "the order of its state on storage"),
        }
        lines = [
            f"#define PM_{name} {value}{f' /* {note} */' if note else ''}"
            for name, (value, note) in numbers.items()
        ]
        return _HEADER.format(
            name=_one_line(step.graph.name),
            numbers="\n".join(lines),
            unit=pages_layout.write_unit_bytes,
            block=pages_layout.erase_block_bytes,
            committing=_COMMIT_BLOCKS.format(
                unit=layout.write_unit_bytes, block=layout.erase_block_bytes
            )
            if deployment.saves
            else _COMMIT_AS_PAGES,
            generations=max(1, deployment.generations),
            bytes=deployment.stored_bytes,
            record=RECORD_BYTES if deployment.generation else 0,
            seal=SEAL_BYTES if deployment.generation else 0,
            padding=PADDING_BYTES,
            instance=sha256(deployment.prefix.encode()).hexdigest()[:8],
            stored=self._stored(),
            names="\n".join(self._names({*numbers, *_STORAGE_NUMBERS, _GUARD})),
            driver=(SOURCES / "pm_driver.h").read_text(encoding="utf-8").rstrip(),
            resume=_RESUME_DECLARATION if deployment.commit else "",
            gradients=_GRADIENT_DECLARATION if step.gradients else "",
            infer="" if deployment.inference is None else _INFER_DECLARATION,
            accumulate=_ACCUMULATE_COMMENT if step.accumulate > 1 else "",
        )

    @property
    def _layout_id(self) -> str:
        """What tells one order of the state of a generation from another."""
        return sha256(json.dumps(self.deployment.generation).encode()).hexdigest()[:8]

    def _stored(self) -> str:
        """Return the definitions of what storage takes, in the units and blocks of a build."""
        pages, state = self.deployment.page_bytes, self.deployment.generation_bytes
        lines = []
        for name, wrapped, sizes in (("PAGES", "PAGE", pages), ("STATE", "TENSOR", state)):
            terms = (f"{n}u*PM_{wrapped}_BYTES({size}u)" for size, n in Counter(sizes).items())
            total = fill(" + ".join(terms) or "0u", 88).replace("\n", " \\\n    ")
            lines.append(f"#define PM_{name}_BYTES \\\n    ({total})")
        return "\n".join(lines)

    def _names(self, taken: set[str]) -> Iterator[str]:
        """Yield a constant for the index of each tensor that callers see, with what it is."""
        step = self.step
        homes = [self.home(value.pieces[0].buffer) for value in step.states]
        kinds: tuple[tuple[str, Sequence[NamedTensor], Sequence[str]], ...] = (
            ("INPUT", step.inputs, ()),
            ("STATE", step.states, homes),
            ("GRADIENT", step.gradients, ()),
        )
        for kind, values, kind_homes in kinds:
            for k, value in enumerate(values):
                name = _constant(kind, value.name, taken)
                shape = "".join(f"[{size}]" for size in value.shape)
                home = f", {kind_homes[k]}" if kind_homes else ""
                size = elements(value) * value.type.itemsize
                yield f"#define PM_{name} {k} /* {value.type.c_name}{shape}, {size} B{home} */"

    def weights_source(self) -> str:
        """Return the text of ``pm_weights.c`` with all values as words of C."""
        words = np.frombuffer(self.weights.data, "<u4")
        rows = [
            "    " + " ".join(f"0x{word:08x}u," for word in words[k : k + 8].tolist())
            for k in range(0, len(words), 8)
        ]
        return _WEIGHTS.format(words="\n".join(rows) or "    0")

    def source(self) -> str:
        """Return the text of ``pm_step.c``."""
        tables = "\n\n".join(self._tables())  # they have lists too
        lists = [
            f"static const int32_t {name}[] = {{{', '.join(map(str, values)) or '0'}}};"
            for values, name in self.program.lists.items()
        ]
        body = list(self._body)
        if self.deployment.commit:
            body.append("PM_TRY_TORN(pm_save_step());")
        if self._draws:
            body.append(f"pm_random_step{' = pm_steps' if self.deployment.commit else '++'};")
        infer = ""
        if self.deployment.inference is not None:
            inside = [*_inputs(self.deployment.inference.step, "inputs"), *self._inference]
            infer = _INFER.format(body=_indented(inside))
        return _SOURCE.format(
            random="\nuint32_t pm_random_step;" if self._draws else "",
            map="\n".join(self._map()),
            name=_one_line(self.step.graph.name),
            tables=tables,
            lists="\n".join(lists),
            inputs=_indented(_inputs(self.step, "pm_progress.inputs")),
            body=_indented(map(_indented_once, body)),
            infer=infer,
        )

    def _map(self) -> Iterator[str]:
        """Yield where in the arena each copy of a tensor and each workspace is, from when to when.

        The nodes are those that run while it is there, `-` stands for the time between steps.
        """
        graph, plan, arena = self.step.graph, self.deployment.plan, self.deployment.arena
        nodes = [str(k) if op == Op.COMPUTE else "" for op, k in plan.program]
        named = ["-", *nodes, "-"]  # from BEFORE on
        last = list(accumulate(named, _last_named))
        first = list(accumulate(reversed(named), _last_named))[::-1]
        for block in sorted(
            check_arena(graph, plan, arena).rectangles,
            key=lambda block: (block.offset, block.begin),
        ):
            if not block.bytes:
                continue
            what = (
                f"[{graph.nodes[block.index].name}]"
                if block.content == Content.WORKSPACE
                else graph.tensors[block.index].name
            )
            begin = first[block.begin - BEFORE]
            until = last[block.end - 1 - BEFORE] if block.end < len(plan.program) else "-"
            yield f"   {block.offset:8} {block.bytes:8} {begin:>5} {until:>5}  {_one_line(what)}"

    # -- tables ------------------------------------------------------------------------------------

    def _tables(self) -> Iterator[str]:
        slots = self.deployment.page_bytes
        if self.deployment.generation:
            slots = (*slots, RECORD_BYTES, *self.deployment.generation_bytes, SEAL_BYTES)
        yield _table("const uint32_t pm_slot_bytes[]", map(str, slots), empty="0")
        yield _table("const pm_buffer_t pm_buffers[]", map(self._buffer, self._buffers))
        pieces: list[str] = []
        states = [self._tensor(value, pieces) for value in self.step.states]
        yield _table("const pm_piece_t pm_pieces[]", pieces)
        yield _table("const pm_pieces_t pm_state_pieces[]", states)
        kinds = {"inputs": self.step.inputs, "states": self.step.states}
        for kind, values in (kinds | {"gradients": self.step.gradients}).items():
            yield _table(f"const pm_tensor_t pm_{kind}_info[]", map(_info, values))
        if self.deployment.saves:
            saved = (str(self._buffers.index(name)) for name in self.deployment.generation)
            yield _table("const uint32_t pm_saved[]", saved)
        yield from self._gradients()

    def _buffer(self, name: str) -> str:
        buffer = self.step.buffers[name]
        home = self.home(name)
        slots = self.deployment.slots
        slot = str(slots.index(name)) if name in slots else "PM_NO_SLOT"
        address = self.program.room.get(name, 0)
        kind = _TYPE_NAMES[buffer.type]
        numbers = (
            f"{buffer.elements}, {self.weights.offsets.get(name, 'PM_ZEROS')}, {address}, {slot}"
        )
        return f"{{{numbers}, {_HOMES[home]}, {kind}}}"

    def home(self, name: str) -> str:
        """Return the home of a buffer of state: ram, storage, mapped, or flash."""
        graph, plan = self.step.graph, self.deployment.plan
        if name not in graph.tensor_index:
            return "flash"
        if graph.tensor_index[name] in (plan.resident or ()):
            return "ram"
        return "mapped" if plan.memory_mapped else "storage"

    def _tensor(self, value: NamedTensor, pieces: list[str]) -> str:
        first, left = len(pieces), elements(value)
        for ref in value.pieces:
            here = min(left, self.step.buffers[ref.buffer].elements - ref.offset)
            pieces.append(f"{{{self._buffers.index(ref.buffer)}, {ref.offset}, {here}}}")
            left -= here
        return f"{{{first}, {len(value.pieces)}}}"

    def _gradients(self) -> Iterator[str]:
        slots = self.deployment.slots
        rows = []
        for value in self.step.gradients:
            (piece,) = value.pieces
            whole = self.step.buffers[piece.buffer].elements
            slot = slots.index(gradient_slot(value))
            order = "0, 0, 0"
            if value.strides is not None:
                shape = self.program.lists.setdefault(
                    value.shape, f"pm_list_{len(self.program.lists)}"
                )
                strides = self.program.lists.setdefault(
                    value.strides, f"pm_list_{len(self.program.lists)}"
                )
                order = f"{len(value.shape)}, {shape}, {strides}"
            rows.append(f"{{{slot}, {whole}, {piece.offset}, {order}}}")
        if rows:
            yield _table("const pm_gradient_t pm_gradients[]", rows)


def _inputs(step: LoweredStep, array: str) -> Iterator[str]:
    """Yield the pointers to what a caller hands over."""
    for k, value in enumerate(step.inputs):
        yield f"const {value.type.c_name} *const x{k} = {array}[{k}];"
    yield from (f"(void)x{k};" for k in range(len(step.inputs)))
    if not step.inputs:
        yield f"(void){array};"


def _indented_once(line: str) -> str:
    return line if line.startswith("PM_SLICE(") else f"    {line}"


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _info(value: NamedTensor) -> str:
    integer_bytes = 0 if value.type is DataType.REAL else value.type.itemsize
    return f"{{{elements(value)}, {integer_bytes}}}"


def _table(declaration: str, rows: Iterable[str], *, empty: str = "{0}") -> str:
    lines: Sequence[str] = list(rows)
    inside = "".join(f"    {row},\n" for row in lines or (empty,))
    return f"{declaration} = {{\n{inside}}};"


def _last_named(earlier: str, node: str) -> str:
    return node or earlier


def _constant(kind: str, name: str, taken: set[str]) -> str:
    """Return the name of a constant for a tensor, which no other has."""
    words = re.sub(r"\W+|_+", " ", name.encode("ascii", "replace").decode()).split()
    if kind == "INPUT" and len(words) > 1 and words[0] == "inputs":
        del words[0]
    first = constant = "_".join([kind, *words]).upper()
    again = 1
    while constant in taken:
        again += 1
        constant = f"{first}_{again}"
    taken.add(constant)
    return constant


def _one_line(text: str) -> str:
    return " ".join(comment(text).split())


_HEADER: Final = """\
/* A training step of {name}. Generated by poetmodel. */
#ifndef PM_H
#define PM_H

#include <stddef.h>
#include <stdint.h>

/* A file of the application, in quotes, for all sources too. It may define PM_ARENA_SECTION, the
   section of the arena in quotes; PM_ARENA_EXTERN, where pm_use_arena gives it; PM_NODE(node), a
   hook before each node. */
#ifdef PM_CONFIG
#include PM_CONFIG
#endif

#ifdef __cplusplus
extern "C" {{
#endif

{numbers}

/* Which copy of the step this is, by the prefix of its names: state of another copy is not resumed.
   Copies of one prefix, in programs that use the same storage, need numbers of their own. */
#ifndef PM_INSTANCE_ID
#define PM_INSTANCE_ID 0x{instance}u
#endif

/* Storage: all of it; what it programs at a time; what it erases at a time, where every page and
   every generation begins; how many generations of committed state take turns, at least two. The
   defaults are those of the device. */
#if !defined PM_STORAGE_UNIT && !defined PM_STORAGE_BLOCK && !defined PM_GENERATIONS && \\
    !defined PM_CHECKSUM
#define PM_STORED_BYTES {bytes}u
#endif
#ifndef PM_STORAGE_UNIT
#define PM_STORAGE_UNIT {unit}u
#endif
#ifndef PM_STORAGE_BLOCK
#define PM_STORAGE_BLOCK {block}u
#endif
#ifndef PM_GENERATIONS
#define PM_GENERATIONS {generations}u
#endif
{committing}
#define PM_UNIT (PM_COMMIT_UNIT > 4u ? PM_COMMIT_UNIT : 4u)
#define PM_IN_UNITS(bytes) (((bytes) + PM_UNIT - 1u) / PM_UNIT * PM_UNIT)
#define PM_IN_BLOCKS(bytes) \\
    (((bytes) + PM_STORAGE_BLOCK - 1u) / PM_STORAGE_BLOCK * PM_STORAGE_BLOCK)
#define PM_TENSOR_BYTES(bytes) (PM_IN_UNITS(bytes) + PM_STATE_SUMS * PM_IN_UNITS(4u))
#ifdef PM_CHECKSUM
#define PM_PAGE_BYTES(bytes) PM_IN_BLOCKS((bytes) + 3u + PM_STORAGE_UNIT)
#else
#define PM_PAGE_BYTES(bytes) PM_IN_BLOCKS(bytes)
#endif
{stored}
/* Where an erase block has room for several generations they share it, each in pages of 256 bytes
   of its own; there are two blocks at least, and that of the whole generation is not erased. */
#define PM_GENERATION_BYTES (PM_IN_UNITS({record}u) + PM_STATE_BYTES + PM_IN_UNITS({seal}u))
#define PM_PITCH_STEP ((255u + PM_UNIT) / PM_UNIT * PM_UNIT)
#define PM_PITCH \\
    ((PM_GENERATION_BYTES + {padding}u * PM_STATE_SLOTS + PM_PITCH_STEP) / PM_PITCH_STEP * \\
     PM_PITCH_STEP)
#define PM_SHARE \\
    (PM_COMMIT_BLOCK / PM_PITCH < PM_GENERATIONS / 2u ? PM_COMMIT_BLOCK / PM_PITCH \\
                                                      : PM_GENERATIONS / 2u)
#define PM_BLOCK_GENERATIONS (PM_SHARE < 2u ? 1u : PM_SHARE / 2u * 2u)
#define PM_COMMITTED_BYTES \\
    (PM_BLOCK_GENERATIONS > 1u \\
         ? (PM_GENERATIONS + PM_BLOCK_GENERATIONS - 1u) / PM_BLOCK_GENERATIONS * PM_COMMIT_BLOCK \\
         : PM_GENERATIONS * ((PM_GENERATION_BYTES + PM_COMMIT_BLOCK - 1u) / PM_COMMIT_BLOCK * \\
                             PM_COMMIT_BLOCK))
#ifndef PM_STORED_BYTES
#define PM_STORED_BYTES (PM_PAGES_BYTES + (PM_VOLATILE ? 0u : PM_COMMITTED_BYTES))
#endif

/* The tensors that callers see, by their numbers; sizes are of the build for float. */
{names}

{driver}

#ifdef PM_ARENA_EXTERN
/* Before all else: the memory for the arena, aligned to PM_ALIGNMENT, at least PM_ARENA_BYTES long
   (twice that for double). It stays the step's. */
int pm_use_arena(void *arena, size_t bytes);
#endif

/* 0, or an error number; state is then as it was exported. With commits this starts anew over all
   that storage has, state of other programs too. */
int pm_init(void);

/* One training step: `inputs` in the order of manifest.json, reals as pm_real, integers int32_t,
   bytes uint8_t or int8_t.
   `lr` is the learning rate of the optimizer's first group of trained parameters; that of each
   other group stays the same multiple of it as when this was exported.{accumulate}
   With PM_TORN some state is new already; with any other error all state is as before: with
   PM_ERROR_NUMBER the loss of this batch is not finite.
   PM_ERROR_STATE: begin with pm_init or pm_resume, also after PM_TORN. */
int pm_step(const void *const inputs[PM_INPUTS], pm_real lr, pm_real *loss);

/* The same in slices, with the same bits. Begin; run some nodes at a time as long as that returns
   PM_MORE; 0 is the end, anything else an error as of pm_step. The arrays of the inputs stay as
   they are until then, and state is neither read nor written. */
int pm_step_begin(const void *const inputs[PM_INPUTS], pm_real lr);
int pm_step_some(uint32_t nodes);
pm_real pm_loss(void); /* of the last step, unless that is not finite */

/* Wherever the home of a state tensor is; in the order of manifest.json. */
int pm_read_state(int index, pm_real *to);
int pm_write_state(int index, const pm_real *from);
{resume}{gradients}{infer}
#ifdef __cplusplus
}}
#endif

#endif
"""

_ACCUMULATE_COMMENT: Final = """
   Each call adds its gradients, divided by PM_ACCUMULATE, to those in the state; the one that is
   the PM_ACCUMULATE-th since the last update updates, at its learning rate."""

_COMMIT_AS_PAGES: Final = """\
#define PM_COMMIT_UNIT PM_STORAGE_UNIT
#define PM_COMMIT_BLOCK PM_STORAGE_BLOCK"""
_COMMIT_BLOCKS: Final = """\
/* The same of the flash that keeps the generations, as storage forgets them without power. */
#ifndef PM_COMMIT_UNIT
#define PM_COMMIT_UNIT {unit}u
#endif
#ifndef PM_COMMIT_BLOCK
#define PM_COMMIT_BLOCK {block}u
#endif"""

_RESUME_DECLARATION: Final = """
/* In place of pm_init after a restart: PM_OK, with the state of the last step that was committed;
   PM_RESUMED_OLDER, with the one before, as the last one is damaged; PM_ERROR_EMPTY, and that
   alone, where storage was read and has no state at all: call pm_init; PM_ERROR_OTHER where the
   state is that of another step, of another instance or of another layout; PM_ERROR_CHECKSUM where
   what it has is damaged. With any other error storage did not answer: nothing was changed, call
   again. In none of these cases storage was written. */
int pm_resume(void);

/* Between two steps: writes a generation where the last step did not (PM_COMMIT_EVERY), such as
   before power goes. Not after PM_TORN. With an error the generation before holds: call again. */
int pm_commit_now(void);
extern uint32_t pm_commits; /* 1 by pm_init, and 1 more by each step that commits, over restarts */
extern uint32_t pm_steps;   /* done since pm_init, also over restarts */
"""

_GRADIENT_DECLARATION: Final = """
/* A gradient of the last step; in the order of manifest.json. */
int pm_read_gradient(int index, pm_real *to);
"""

_INFER_DECLARATION: Final = """
/* The forward pass in evaluation mode, with the state as it is now, which stays so. `inputs` are
   the first ones of a step, those of the model; `outputs` gets PM_OUTPUTS elements. */
int pm_infer(const void *const inputs[], pm_real *outputs);
"""

_SOURCE: Final = """\
/* A training step of {name}, as it was planned. Generated by poetmodel.

   The arena, in the build for float: where a tensor or a workspace (in brackets) begins [bytes],
   its size, and the nodes from and to which it is there; - is the time between steps.

{map} */
#include <string.h>

#include "pm_kernels.h"
#include "pm_state.h"

#ifndef PM_ARENA_EXTERN
#ifdef PM_ARENA_SECTION
__attribute__((section(PM_ARENA_SECTION)))
#endif
_Alignas(PM_ALIGNMENT) unsigned char pm_arena[PM_ARENA_BYTES ? PM_ARENA_BYTES * PM_SCALE : 1];
#endif{random}

{lists}

{tables}

int pm_run_nodes(uint32_t nodes)
{{
{inputs}
    const pm_real lr = pm_progress.lr;
    (void)lr;
    switch (pm_progress.slice) {{
    case 1:
{body}
        break;
    default:
        return PM_ERROR_IDLE;
    }}
    return PM_OK;
}}
{infer}"""

_INFER: Final = """
int pm_infer(const void *const inputs[], pm_real *outputs)
{{
    if (pm_holds != PM_HOLDS_STATE) return PM_ERROR_STATE;
    if (pm_progress.slice) return PM_ERROR_BUSY;
{body}
    return PM_OK;
}}
"""

_WEIGHTS: Final = """\
/* What state begins with, and constants: little-endian bytes in words. Generated by poetmodel. */
#include "pm_state.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "weights are little-endian"
#endif

_Alignas(16) const uint32_t pm_weights[] = {{
{words}
}};
"""

BINARY_WEIGHTS: Final = """\
/* What state begins with, and constants: the bytes of a file, which no compiler has to read. */
#include "pm_state.h"

#ifndef PM_WEIGHTS_FILE
#error "PM_WEIGHTS_FILE: define it as the path of pm_weights.bin, in quotes, as CMakeLists.txt does"
#endif

__asm__(".pushsection .rodata.pm_weights, \\"a\\"\\n"
        ".balign 16\\n"
        ".global pm_weights\\n"
        "pm_weights:\\n"
        ".incbin \\"" PM_WEIGHTS_FILE "\\"\\n"
        ".balign 16\\n"
        ".popsection\\n");
"""
"""The text of ``pm_weights.c`` that takes them from a file."""
