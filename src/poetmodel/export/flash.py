"""Flash usage of an exported step: code, constants, initial state, and storage in flash.

The size of code is an estimate from a table: bytes of each kernel, of the C library members that
it needs, and of each element of the generated program (call, argument, loop, ...). The table is
fitted by ``bench/mcu/code_sizes.py`` to GCC for a Cortex-M4 with ``-O2``, as in the Makefile. The
application is not counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device import StorageMode
from poetmodel.export.storage import Program
from poetmodel.plan import Arena, Instruction, Op, Plan
from poetmodel.plan.arena import CopyOffset
from poetmodel.schedule.machine import BEFORE, Content

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.export.source import Source
    from poetmodel.export.storage import StorageLayout
    from poetmodel.lowered.step import LoweredStep

TABLE_FILE: Final = "code_sizes.json"
"""File of the table of code sizes, in the folder of this module."""
_CALL_PATTERN: Final = re.compile(r"\bpm_\w+\(")
_N_REGISTER_ARGUMENTS: Final = 4
"""Number of arguments, reals excluded, that calls pass in registers."""
_MIN_LONG_NUMBER: Final = 256
"""Smallest absolute value of an integer that counts as a long number: it exceeds 8 bits."""
_ARGUMENT_PATTERNS: Final = (
    (re.compile(r"PM_(REALS|INTS|BYTES|INT8S|ADDRESS)\("), "address"),
    (re.compile(r"PM_CONSTANT_|pm_list_"), "constant"),
    (re.compile(r"-?(PM_C\(|PM_INFINITY)|lr\b"), "real"),
    (re.compile(r"-?\d+$"), "number"),
)
"""(pattern, table key) of each kind of argument; the first match counts, else ``other``."""


@cache
def load_code_sizes() -> dict[str, Any]:
    """Load the code sizes of kernels, C library members and program elements [B]."""
    text = (files("poetmodel.export") / TABLE_FILE).read_text(encoding="utf-8")
    sizes: dict[str, Any] = json.loads(text)
    return sizes


def program_sizes(source: Source) -> dict[str, int]:
    """Return the flash usage of a step without storage: code, constants, first weights [B]."""
    graph, buffers = source.step.graph, source.step.buffers
    state_names = {
        graph.tensors[i].name for i in graph.state_tensors
    } & source.weights.offsets.keys()
    state_bytes = sum(buffers[name].bytes for name in state_names)
    return {
        "code": code_bytes(source),
        "constants": table_bytes(source) + len(source.weights.data) - state_bytes,
        "first weights": state_bytes,
    }


def make_smallest_program(step: LoweredStep) -> Program:
    """Return a program that uses the least flash of all programs of a step.

    All state is in RAM, every node is computed once, no tensor is paged. The program is for sizes
    only, because its tensors overlap.
    """
    graph = step.graph
    instructions = tuple(Instruction(Op.COMPUTE, k) for k in range(len(graph.nodes)))
    plan = Plan(program=instructions, mode=StorageMode.BLOCKING, resident=graph.state_tensors)
    return Program(kind="step", step=step, plan=plan, arena=make_zero_arena(step, plan))


def make_zero_arena(step: LoweredStep, plan: Plan) -> Arena:
    """Return an arena of 0 B, with offset 0 for all copies of a plan's tensors and all workspaces.

    It is for the size of the program only: outputs in place need no copy statement, and other
    tensors overlap.
    """
    graph = step.graph
    contents = [(BEFORE, Content.OUTPUT, i) for i in plan.resident or ()]
    for position, (op, index) in enumerate(plan.program):
        if op == Op.COMPUTE:
            contents += [(position, Content.OUTPUT, i) for i in graph.outputs_of[index]]
            contents.append((position, Content.WORKSPACE, index))
        elif op == Op.PAGE_IN:
            contents.append((position, Content.OUTPUT, index))
    offsets = tuple(CopyOffset(*content, 0) for content in contents)
    return Arena(bytes=0, lower_bound_bytes=0, offsets=offsets)


def code_bytes(source: Source) -> int:
    """Return the estimated code size of a step on a Cortex-M4 [B].

    The sum of the program, the used features of the runtime, the kernels and the members of the C
    library. A kernel that the table lacks has the size of its entry ``other``.
    """
    sizes = load_code_sizes()
    kernels = [sizes["kernels"].get(name, sizes["other"]) for name in source.kernels]
    members = {member for kernel in (*kernels, sizes["runtime"]) for member in kernel["library"]}
    program_bytes = sum(
        count * sizes["program"].get(element, 0.0)
        for element, count in count_elements(source.layout, source.statements).items()
    )
    library_bytes = sum(sizes["library"][member] for member in members)
    total_bytes: float = program_bytes + library_bytes + sum(kernel["bytes"] for kernel in kernels)
    return round(total_bytes)


def count_elements(layout: StorageLayout, statements: Iterable[str]) -> Counter[str]:
    """Count the elements and the runtime features of a program, by key of the table of sizes."""
    counts = Counter({"runtime": 1})
    counts["slots"] += layout.uses_storage
    counts["mapped"] += bool(layout.slots) and layout.plan.memory_mapped
    counts["commit"] += layout.commit
    counts["replay"] += layout.replay is not None
    counts["best"] += layout.stores_best
    counts["migration"] += layout.migration is not None
    counts["checksum"] += layout.commit and layout.options.checksum
    counts["gradients"] += bool(layout.step.gradients)
    counts["infer"] += len(layout.forward_passes)
    for line in statements:
        counts["updates"] |= "pm_mapped_next(" in line
        counts["node"] += line.startswith("PM_SLICE(")
        counts["driver"] += line.count("PM_TRY")
        counts["loop"] += line.count("for (") + line.count("while (")
        counts["test"] += line.count("if (")
        for call in _CALL_PATTERN.finditer(line):
            counts["call"] += 1
            stack_arguments = -_N_REGISTER_ARGUMENTS
            for argument in _split_arguments(line, call.end()):
                argument_kind = next(
                    (
                        argument_kind
                        for pattern, argument_kind in _ARGUMENT_PATTERNS
                        if pattern.match(argument)
                    ),
                    "other",
                )
                is_long = argument_kind == "number" and abs(int(argument)) >= _MIN_LONG_NUMBER
                counts["long number" if is_long else argument_kind] += 1
                stack_arguments += argument_kind != "real"
            counts["stacked"] += max(0, stack_arguments)
    return counts


def _split_arguments(line: str, begin: int) -> list[str]:
    """Return the stripped, nonempty arguments of a call; `begin` follows its opening bracket."""
    depth, arguments = 0, [""]
    for character in line[begin:]:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            break
        if character == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += character
    return [argument.strip() for argument in arguments if argument.strip()]


_ENTRY_BYTES: Final = {
    "buffer": 20,
    "piece": 12,
    "state": 16,
    "gradient": 32,
    "slot": 4,
    "number": 4,
}
"""Size of one entry of tables of ``pm_step.c``, and of one number of a list [B].

See ``pm_state.h``. An entry of state or gradients includes its entry of the table of sizes."""


def table_bytes(source: Source) -> int:
    """Return the size of the tables and lists of a step [B]."""
    step = source.step
    pieces = [ref for tensor in step.states for ref in tensor.pieces]
    counts = {
        "buffer": len({ref.buffer for ref in pieces}),
        "piece": len(pieces),
        "state": len(step.states),
        "gradient": len(step.gradients),
        "slot": len(source.layout.slots),
        "number": sum(map(len, source.lists)),
    }
    return sum(_ENTRY_BYTES[table] * count for table, count in counts.items())
