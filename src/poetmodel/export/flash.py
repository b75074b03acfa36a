"""What an exported step takes of flash: code, constants, first weights, and storage there.

Code is estimated: a table has the bytes of each kernel, of what it needs of the C library, and of
what the program between them repeats, as ``bench/mcu/code_sizes.py`` finds them with GCC for a
Cortex-M4, by ``-O2`` as the Makefile has it. It is that of the step; an application comes on top.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device import StorageMode
from poetmodel.errors import FlashError
from poetmodel.export.deployment import NEARLY_FULL
from poetmodel.graph import Phase
from poetmodel.plan import Arena, Instruction, Op, Plan
from poetmodel.plan.arena import CopyOffset
from poetmodel.schedule.machine import BEFORE, Content
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from poetmodel.export.deployment import Deployment
    from poetmodel.export.source import StepSource
    from poetmodel.lowered.step import LoweredStep

TABLE: Final = "code_sizes.json"
"""The file beside this module."""
_CALL: Final = re.compile(r"\bpm_\w+\(")
_REGISTERS: Final = 4
"""Arguments but reals that are not on the stack."""
_SHORT: Final = 256
"""Whole numbers below this are a part of an instruction."""
_KINDS: Final = (
    (re.compile(r"PM_(REALS|INTS|BYTES|INT8S|ADDRESS)\("), "address"),
    (re.compile(r"PM_CONSTANT_|pm_list_"), "constant"),
    (re.compile(r"-?(PM_C\(|PM_INFINITY)|lr\b"), "real"),
    (re.compile(r"-?\d+$"), "number"),
)
"""What arguments begin with, and what the table calls them."""


@cache
def table() -> dict[str, Any]:
    """Return the bytes of kernels, of the C library, and of what programs repeat."""
    text = (files("poetmodel.export") / TABLE).read_text(encoding="utf-8")
    sizes: dict[str, Any] = json.loads(text)
    return sizes


def program_sizes(deployment: Deployment, source: StepSource) -> dict[str, int]:
    """Return what a step takes of flash beside storage [B]."""
    graph, buffers = deployment.step.graph, deployment.step.buffers
    names = {graph.tensors[i].name for i in graph.state_tensors} & source.weights.offsets.keys()
    state = sum(buffers[name].bytes for name in names)
    return {
        "code": code_bytes(deployment, source),
        "constants": table_bytes(deployment, source) + len(source.weights.data) - state,
        "first weights": state,
    }


def smallest(step: LoweredStep) -> tuple[Plan, Arena]:
    """Return a program that takes no more flash than any other of a step, with its addresses.

    All state is in RAM, every node is computed once, and nothing is paged. There is one address, so
    that no copy is made that other addresses would save. Nothing of this need fit the RAM.
    """
    graph = step.graph
    held = [(BEFORE, Content.OUTPUT, i) for i in graph.state_tensors]
    for k, outputs in enumerate(graph.outputs_of):
        held += [(k, Content.OUTPUT, i) for i in outputs]
        held.append((k, Content.WORKSPACE, k))
    program = tuple(Instruction(Op.COMPUTE, k) for k in range(len(graph.nodes)))
    plan = Plan(program=program, mode=StorageMode.BLOCKING, resident=graph.state_tensors)
    placed = tuple(CopyOffset(*content, 0) for content in held)
    return plan, Arena(bytes=0, lower_bound_bytes=0, offsets=placed)


def check_flash(deployment: Deployment, *, at_least: bool = False) -> None:
    """Raise `FlashError` where a step does not fit the flash of its device.

    Of the `smallest` program the message says that others take `at_least` as much.
    """
    sizes, device = deployment.flash_map(), deployment.device
    if device is None or device.flash is None or sizes["free"] >= 0:
        return
    missing, size = -sizes.pop("free"), device.flash.size_bytes
    parts = [f"{what} {amount:,} B" for what, amount in sizes.items() if amount]
    raise FlashError(
        f"flash: {', '.join(parts[:-1])} and {parts[-1]} are {size + missing:,} B"
        f"{' at least' if at_least else ''}, and device {device.name} has {size:,} B; "
        f"{_advice(deployment, sizes, missing)}"
    )


def _advice(deployment: Deployment, sizes: Mapping[str, int], missing: int) -> str:
    """Return what helps."""
    updates = (node for node in deployment.step.graph.nodes if node.phase == Phase.UPDATE)
    moments = any(len(node.outputs) > 1 for node in updates)
    lighter = ["take an optimizer with fewer bytes of state"] if moments else []
    if sizes["storage"] < missing:
        return " or ".join([*lighter, "take a smaller network"])
    least = []
    if deployment.commit:
        least = ["leave commit out"]
    elif deployment.device is not None and deployment.ram_bytes < deployment.device.ram_bytes:
        least = ["give more ram"]
    return (
        ", ".join([*least, *lighter] or ["take a smaller network"])
        + " or take a device whose storage is a card"
    )


def ram_warning(deployment: Deployment) -> str | None:
    """Return a sentence where a step may take more RAM than the device has."""
    device, ram_bytes = deployment.device, deployment.ram_bytes
    if device is None or ram_bytes <= device.ram_bytes:
        return None
    return (
        f"the step may take {format_bytes(ram_bytes)} of RAM, and device {device.short_name} has "
        f"{format_bytes(device.ram_bytes)}"
    )


def flash_warning(deployment: Deployment) -> str | None:
    """Return a sentence where little of the flash is left."""
    device, free = deployment.device, deployment.flash_map().get("free", 0)
    if device is None or device.flash is None:
        return None
    size = device.flash.size_bytes
    if free >= (1 - NEARLY_FULL) * size:
        return None
    return (
        f"the step takes {1 - free / size:.0%} of the flash of device {device.short_name}: "
        f"{format_bytes(free)} of {format_bytes(size)} are left to the application"
    )


# -- code ----------------------------------------------------------------------------------------


def code_bytes(deployment: Deployment, source: StepSource) -> int:
    """Return the estimated bytes of code of a step on a Cortex-M4: its own, kernels, library."""
    sizes = table()
    kernels = [sizes["kernels"].get(name, sizes["other"]) for name in source.kernels]
    needed = {member for kernel in (*kernels, sizes["runtime"]) for member in kernel["library"]}
    own = sum(
        count * sizes["program"].get(what, 0.0)
        for what, count in repeated(deployment, source.statements).items()
    )
    library = sum(sizes["library"][member] for member in needed)
    linked: float = own + library + sum(kernel["bytes"] for kernel in kernels)
    return round(linked)


def repeated(deployment: Deployment, statements: Iterable[str]) -> Counter[str]:
    """Count what a program repeats: nodes, calls, their arguments; and what its runtime has."""
    counts = Counter({"runtime": 1})
    counts["slots"] += deployment.uses_storage
    counts["mapped"] += bool(deployment.slots) and deployment.plan.memory_mapped
    counts["commit"] += deployment.commit
    counts["replay"] += deployment.replay is not None
    counts["best"] += deployment.keeps_best
    counts["migration"] += deployment.migration is not None
    counts["checksum"] += deployment.commit and deployment.checksum
    counts["gradients"] += bool(deployment.step.gradients)
    counts["infer"] += len(deployment.passes)
    for line in statements:
        counts["node"] += line.startswith("PM_SLICE(")
        counts["driver"] += line.count("PM_TRY")
        counts["loop"] += line.count("for (") + line.count("while (")
        counts["test"] += line.count("if (")
        for call in _CALL.finditer(line):
            counts["call"] += 1
            stacked = -_REGISTERS
            for argument in _arguments(line, call.end()):
                kind = next((kind for begin, kind in _KINDS if begin.match(argument)), "other")
                long = kind == "number" and abs(int(argument)) >= _SHORT
                counts["long number" if long else kind] += 1
                stacked += kind != "real"
            counts["stacked"] += max(0, stacked)
    return counts


def _arguments(line: str, begin: int) -> list[str]:
    """Return the arguments of a call, whose bracket has opened before."""
    depth, found = 0, [""]
    for letter in line[begin:]:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth < 0:
            break
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [argument.strip() for argument in found if argument.strip()]


_RECORDS: Final = {"buffer": 20, "piece": 12, "state": 16, "gradient": 32, "slot": 4, "number": 4}
"""Bytes of an entry in the tables of ``pm_step.c``: see ``pm_state.h``."""


def table_bytes(deployment: Deployment, source: StepSource) -> int:
    """Return the bytes of the tables and lists of ``pm_step.c``."""
    step = deployment.step
    pieces = [ref for value in step.states for ref in value.pieces]
    counts = {
        "buffer": len({ref.buffer for ref in pieces}),
        "piece": len(pieces),
        "state": len(step.states),
        "gradient": len(step.gradients),
        "slot": len(deployment.slots),
        "number": sum(map(len, source.program.lists)),
    }
    return sum(_RECORDS[what] * count for what, count in counts.items())
